"""Keys that change a family's row or its numbers: biases, the function between, dropout, multipliers.

Source: modeling_*.py of huggingface/transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from zerosim.config.huggingface.draft import Draft, Rule
from zerosim.config.huggingface.keys import Keys, show
from zerosim.config.huggingface.rope import part_of_columns
from zerosim.placement.families import biased, t5

Maps = Literal["columns", "rows", "mlp"]

_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh")
BETWEEN: Mapping[bool, Mapping[str, str]] = MappingProxyType(
    {
        False: {**dict.fromkeys(_TANH, "gelu_tanh"), "gelu": "gelu", "gelu_python": "gelu", "relu": "relu"},
        True: {**dict.fromkeys(_TANH, "geglu"), "silu": "swiglu", "swish": "swiglu"},
    }
)
"""The row's function by the file's word, of feed-forwards that are gated (True) and those that are not."""

NUMBERS: Mapping[str, tuple[str, Callable[[float], float]]] = MappingProxyType(
    {
        "query_pre_attn_scalar": ("query_scale", lambda value: value**-0.5),
        "attention_multiplier": ("query_scale", lambda value: value),
        "attn_logit_softcapping": ("attn_cap", lambda value: value),
        "final_logit_softcapping": ("logit_cap", lambda value: value),
        "logit_scale": ("logit_scale", lambda value: value),
        "logits_scaling": ("logit_scale", lambda value: 1 / value),
        "embedding_multiplier": ("embed_scale", lambda value: value),
        "residual_multiplier": ("residual_scale", lambda value: value),
    }
)
"""The number that a key gives, and how."""


def read_numbers(keys: Keys, draft: Draft) -> Draft:
    """Read the multipliers and caps that the family has; null is none."""
    for key, (name, of) in NUMBERS.items():
        if keys.knows(key) and keys.value(key) is not None:
            draft = draft.numbered(**{name: of(keys.number(key))})
    return draft


def activation(key: str, **also: str) -> Rule:
    """Return the rule that reads the function between the feed-forward's maps. `also`: words of this family alone."""

    def read(keys: Keys, draft: Draft) -> Draft:
        block, word = draft.decoder.block, keys.text(key)
        known = {**BETWEEN[block.is_gated], **also}
        if word not in known:
            raise keys.fail(f"{key} {show(word)} is not modelled: expected one of {', '.join(known)}")
        return draft.blocks(between=known[word])

    return read


def biases(key: str, *maps: Maps) -> Rule:
    """Return the rule that reads whether these maps have biases."""

    def read(keys: Keys, draft: Draft) -> Draft:
        block, has = draft.decoder.block, keys.flag(key)
        attention, mlp = block.attention, block.mlp
        decoder = biased(
            draft.decoder,
            columns=has if "columns" in maps else attention.columns.bias,
            rows=has if "rows" in maps else attention.rows.bias,
            mlp=has if "mlp" in maps else mlp.rows.bias,
        )
        return draft._replace(decoder=decoder)

    return read


def dropouts(*names: str) -> Rule:
    """Return the rule that reads the chances of dropout: one for attention's scores and both branches, or none."""

    def read(keys: Keys, draft: Draft) -> Draft:
        rates = {key: keys.chance(key) for key in names}
        listed = ", ".join(f"{key} {rate:g}" for key, rate in rates.items() if rate)
        chances = sorted({rate for rate in rates.values() if rate})
        if not draft.decoder.block.dropout:
            return draft.noted(f"{listed}: planned without dropout, which this family lacks here") if listed else draft
        if len(chances) > 1:
            raise keys.fail(f"{listed}: zerosim models one rate for all; make them equal")
        if chances and 0.0 in rates.values():
            return draft.noted(
                f"{listed}, others 0: planned without dropout; --dropout {chances[0]:g} has it everywhere"
            )
        return draft.sized(dropout=chances[0]) if chances else draft

    return read


def unless(key: str, value: object, **changes: object) -> Rule:
    """Return the rule that changes the row's block where a flag does not have the family's `value`."""

    def read(keys: Keys, draft: Draft) -> Draft:
        return draft if keys.flag(key) == value else draft.blocks(**changes)

    return read


def only(key: str, *values: object) -> Rule:
    """Return the rule that refuses any other value of a key: another model, which no row says."""

    def read(keys: Keys, draft: Draft) -> Draft:
        given = keys.value(key)
        if given is not None and given not in values:
            raise keys.fail(f"{key} {show(given)} is not modelled: expected {' or '.join(map(show, values))}")
        return draft

    return read


def unscaled_scores(keys: Keys, draft: Draft) -> Draft:
    """Leave scores as they are where scale_attn_weights is false (GPT-2's)."""
    return draft if keys.flag("scale_attn_weights") else draft.numbered(query_scale=1.0)


def rotary_columns(keys: Keys, draft: Draft) -> Draft:
    """Read the rotated columns of a head (GPT-J)."""
    return draft.numbered(rotary_part=part_of_columns(keys, draft))


def shared_by_all(keys: Keys, draft: Draft) -> Draft:
    """Read gpt_bigcode's multi_query: one head of keys and values, or as many as heads."""
    kv_heads = 1 if keys.flag("multi_query") else draft.size("heads")
    given = keys.whole("num_key_value_heads", otherwise=kv_heads)
    if given != kv_heads:
        raise keys.fail(f"num_key_value_heads {given}: multi_query means {kv_heads}")
    return draft.sized(kv_heads=kv_heads)


def token_types(keys: Keys, draft: Draft) -> Draft:
    """Read the rows of an encoder's table of token types."""
    return draft.numbered(token_types=keys.whole("type_vocab_size"))


def padded_positions(keys: Keys, draft: Draft) -> Draft:
    """Take the rows before the first position out of RoBERTa's positions: they belong to padding."""
    positions = draft.size("positions") - draft.decoder.first_position
    if positions < 1:
        raise keys.fail(f"max_position_embeddings {positions + draft.decoder.first_position}: "
                        f"{draft.decoder.first_position} of them are for padding")  # fmt: skip
    return draft.sized(positions=positions, seq=min(positions, draft.size("seq")))


def whole_embedding(keys: Keys, draft: Draft) -> Draft:
    """Refuse OPT's projections around a narrower token table."""
    hidden = draft.size("hidden")
    if keys.whole("word_embed_proj_dim", otherwise=hidden) != hidden:
        raise keys.fail(f"word_embed_proj_dim {keys.values['word_embed_proj_dim']} is not modelled: expected {hidden}")
    return draft


def falcon(keys: Keys, draft: Draft) -> Draft:
    """Read Falcon's two architectures, from which follow the heads, the norms and their places; and ALiBi, whose slopes
    it divides by sqrt(head_dim), as BLOOM does not. (transformers' eager attention adds them twice, its sdpa once.)"""
    new, parallel = keys.flag("new_decoder_architecture"), keys.flag("parallel_attn")
    heads, attention, mlp = draft.size("heads"), draft.decoder.block.attention, draft.decoder.block.mlp
    given = keys.whole("num_kv_heads", otherwise=heads)
    shared = keys.flag("multi_query") and not new
    if heads % given:
        raise keys.fail(f"num_kv_heads {given} do not divide {heads} heads")
    norms = keys.value("num_ln_in_parallel_attn")
    norms = (2 if new else 1) if norms is None else keys.whole("num_ln_in_parallel_attn")
    if norms > 2 or (norms == 2 and not new) or (new and not parallel):
        raise keys.fail(
            f"num_ln_in_parallel_attn {norms}, parallel_attn {show(parallel)}, new_decoder_architecture {show(new)}: "
            "transformers has no such model"
        )
    first, second = ("ln_attn", "ln_mlp") if norms == 2 else (attention.before, mlp.before)
    draft = draft.blocks(
        parallel=parallel,
        attention=attention._replace(before=first),
        mlp=mlp._replace(before=second if parallel else "post_attention_layernorm"),
    )
    if keys.flag("alibi"):
        draft = draft._replace(decoder=draft.decoder._replace(positions="scaled alibi"))
    return draft.sized(kv_heads=1 if shared else given)


def t5_blocks(keys: Keys, draft: Draft) -> Draft:
    """Read T5's feed-forward, the decoder's depth, its first token, and the buckets of distances."""
    word, layers = keys.text("feed_forward_proj"), draft.size("layers")
    gated, act = word.startswith("gated-"), word.removeprefix("gated-")
    known = {**BETWEEN[gated], **({"gelu": "geglu"} if gated else {})}  # T5 v1.1's gated-gelu means the approximation
    if act not in known or known[act] not in ("relu", "gelu", "gelu_tanh", "geglu"):
        raise keys.fail(f"feed_forward_proj {show(word)} is not modelled: expected relu, gelu, gelu_new or gated-gelu")
    depth = keys.whole("num_decoder_layers", otherwise=layers)
    for key, value in (("is_gated_act", gated), ("dense_act_fn", "gelu_new" if word == "gated-gelu" else act)):
        only(key, value)(keys, draft)
    buckets, largest = (keys.whole(f"relative_attention_{name}") for name in ("num_buckets", "max_distance"))
    if buckets % 4 or largest <= buckets // 2:
        raise keys.fail(
            f"relative_attention_num_buckets {buckets}, relative_attention_max_distance {largest}: expected a multiple "
            "of 4, and a distance of more than half of them"
        )
    start = keys.value("decoder_start_token_id")
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start < draft.size("vocab"):
        raise keys.fail(f"decoder_start_token_id {show(start)}: expected a token of the vocabulary")
    between: Any = known[act]
    return draft._replace(decoder=t5(between)).numbered(
        decoder_layers=0 if depth == layers else depth,
        decoder_start=start,
        bias_buckets=buckets,
        bias_largest=largest,
    )


def t5_head(keys: Keys, draft: Draft) -> Draft:
    """Read whether the logits of a tied head are scaled. transformers 5 ties every head and keeps this key beside."""
    tied, scaled = keys.flag("tie_word_embeddings"), keys.value("scale_decoder_outputs")
    if scaled is not None and keys.flag("scale_decoder_outputs") and not tied:
        raise keys.fail("scale_decoder_outputs true is not modelled: a head of its own has plain logits")
    return draft if scaled is not False else draft._replace(decoder=draft.decoder._replace(scales_head=False))


def without(*names: str) -> Rule:
    """Return the rule that names these keys in a note: they say how a framework ran the model."""

    def read(keys: Keys, draft: Draft) -> Draft:
        given = [f"{key} {show(keys.value(key))}: planned without it" for key in names if keys.value(key)]
        return draft.noted(*given)

    return read
