"""DeepSeek's latent attention: its widths, whether queries have a latent, biases, and yarn's factor of the scores."""

from __future__ import annotations

import math

from zerosim.config.huggingface.draft import Draft
from zerosim.config.huggingface.experts import groups_of_experts
from zerosim.config.huggingface.keys import Keys, show
from zerosim.config.numbers import Latents
from zerosim.placement.families import latent


def latent_attention(keys: Keys, draft: Draft) -> Draft:
    """Read the widths and the maps."""
    low_rank = keys.value("q_lora_rank") is not None
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    kv, plain, turned, value = map(keys.whole, names)
    columns = Latents(keys.whole("q_lora_rank") if low_rank else 0, kv, plain, turned, value)
    if turned % 2:
        raise keys.fail(f"qk_rope_head_dim {turned}: expected an even number, for pairs")
    draft = draft.blocks(attention=latent(low_rank=low_rank, bias=keys.flag("attention_bias")))
    interleaved = not keys.knows("rope_interleave") or keys.flag("rope_interleave")
    decoder = draft.decoder._replace(interleaved=interleaved)
    keys.asked.update(("head_dim", "qk_head_dim", "num_key_value_heads"))  # transformers writes what follows
    return draft._replace(decoder=decoder).sized(kv_heads=draft.size("heads")).numbered(latents=columns)


def yarn_scores(keys: Keys, draft: Draft) -> Draft:
    """Read the factor of the scores: with mscale_all_dim m, 1 / sqrt(columns) times (0.1 m ln(factor) + 1)²; the factor
    of cosines and sines then divides by it, so that both together count mscale (2309.00071)."""
    given, columns = dict(draft.numbers.scaling.values), draft.numbers.latents
    assert columns is not None
    times, factor = float(given.get("mscale_all_dim") or 0.0), float(given.get("factor", 1.0))  # type: ignore[arg-type]
    if not times:
        return draft
    scale = 0.1 * times * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return draft.numbered(query_scale=(columns.plain + columns.turned) ** -0.5 * scale * scale)


def limited_groups(keys: Keys, draft: Draft) -> Draft:
    """Read DeepSeek-V2's groups of experts, which count with one of its two ways to choose; and the factor."""
    method = keys.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise keys.fail(f"topk_method {show(method)} is not modelled: expected greedy or group_limited_greedy")
    keys.asked.update(("n_group", "topk_group"))
    if method == "greedy":
        return draft.numbered(expert_scale=keys.number("routed_scaling_factor"))
    return groups_of_experts(keys, draft)
