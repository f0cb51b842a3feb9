"""MiniMax-M2's own keys, which transformers 5.24 drops: they must say what its class computes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zerosim.config.huggingface.draft import Draft
from zerosim.config.huggingface.keys import Keys
from zerosim.config.huggingface.rows import only

_FULL = 1  # an attention that reads all tokens; 0 is MiniMax-01's linear one
_ALWAYS: Mapping[str, object] = MappingProxyType(
    {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
        "layernorm_full_attention_beta": 1,
        "layernorm_mlp_beta": 1,
    }
)
_NOTHING = "shared_moe_mode", "mlp_intermediate_size", "layernorm_linear_attention_beta", "mtp_transformer_layers"


def as_m2(keys: Keys, draft: Draft) -> Draft:
    """Refuse what makes another model: other norms, other routers, linear attention."""
    for key, value in _ALWAYS.items():
        draft = only(key, value)(keys, draft)
    if keys.value("attn_type_list") is not None:
        kinds = keys.each("attn_type_list", int, draft.size("layers"), at_least=True)
        if set(kinds) != {_FULL}:
            raise keys.fail("attn_type_list: linear attention is not modelled: expected 1 for each block")
    keys.asked.update((*_NOTHING, "use_mtp"))  # of experts and attention that it has not; num_mtp_modules counts
    return draft
