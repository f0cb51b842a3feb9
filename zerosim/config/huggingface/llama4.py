"""Llama 4's blocks: which rotate queries and keys, the chunks of attention, queries by position, which have experts."""

from __future__ import annotations

from zerosim.config.huggingface.blocks import read_plain
from zerosim.config.huggingface.draft import Draft
from zerosim.config.huggingface.keys import Keys, show


def llama4_attention(keys: Keys, draft: Draft) -> Draft:
    """Read norms, chunks and the numbers of queries. A layer rotates q and k exactly if it has chunks."""
    listed = keys.values.get("no_rope_layers") or None  # an empty list is none
    own = Keys(keys.name, {**keys.values, "no_rope_layers": listed}, keys.defaults)
    draft, layers = read_plain(own, draft), draft.size("layers")
    keys.asked |= own.asked
    chunk = keys.whole("attention_chunk_size") if keys.value("attention_chunk_size") is not None else 0
    kinds = [
        "chunked_attention" if chunk and draft.numbers.kind(number, 0.0).rotates else "full_attention"
        for number in range(layers)
    ]
    if keys.value("layer_types") is not None and keys.each("layer_types", str, layers) != kinds:
        raise keys.fail("layer_types: no model here has them; possible are chunked_attention in blocks with rotary "
                        "positions, and full_attention in the others")  # fmt: skip
    draft = draft.numbered(chunk=chunk)
    if not keys.flag("use_qk_norm"):
        draft = draft.blocks(qk_norm="")
    every, temper = keys.whole("floor_scale"), keys.number("attn_scale")
    return draft.numbered(temper=temper, temper_every=every) if keys.flag("attn_temperature_tuning") else draft


def some_experts(keys: Keys, draft: Draft) -> Draft:
    """Read which blocks have experts: each n-th. The others' feed-forward has a width of its own."""
    layers, every = draft.size("layers"), keys.whole("interleave_moe_layer_step")
    value = keys.value("moe_layers")
    listed = keys.each("moe_layers", int, len(value)) if isinstance(value, list) else None
    if listed is not None:
        steps = {after - before for before, after in zip([-1, *listed], listed, strict=False)}
        every = steps.pop() if len(steps) == 1 else 0
    if not every or every > layers or (listed is not None and listed != [*range(every - 1, layers, every)]):
        raise keys.fail(f"moe_layers {show(value)}: no model here has them; possible is each n-th block")
    return draft.numbered(experts_every=every)


def one_shared(keys: Keys, draft: Draft) -> Draft:
    """Give a block with experts a shared one, which no key says."""
    return draft.sized(shared_experts=1)
