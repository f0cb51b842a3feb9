"""HunYuan's keys: sizes of experts that may be lists, one value for each block, and a base of rotary angles that is
stretched once for all rows."""

from __future__ import annotations

from typing import Any

from zerosim.config.huggingface.draft import Draft
from zerosim.config.huggingface.experts import experts
from zerosim.config.huggingface.keys import Keys, show
from zerosim.config.huggingface.llama4 import one_shared
from zerosim.config.huggingface.rope import read_rope
from zerosim.config.huggingface.rows import only


def hunyuan_experts(keys: Keys, draft: Draft) -> Draft:
    """Read the experts, which are as wide as the shared one beside them."""
    own = _with(keys, {name: _same(keys, name, draft.size("layers")) for name in _BY_BLOCK if name in keys.values})
    only("num_shared_expert", 1)(own, draft)
    only("moe_intermediate_size", draft.size("ffn"))(own, draft)
    draft = experts("num_experts", "intermediate_size", gate="", chosen="moe_topk")(own, draft)
    keys.asked |= own.asked
    return one_shared(keys, draft)


_BY_BLOCK = "num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"


def stretched_rope(keys: Keys, draft: Draft) -> Draft:
    """Read rotary angles. "dynamic" with an alpha means the base times alpha^(E / (E - 2)), for a head of E columns."""
    plain, alpha = dict[str, Any](), 1.0
    for name in ("rope_parameters", "rope_scaling"):
        found = keys.inner(name, {})
        if found is None or found.values.get("alpha") is None:
            continue
        if found.values.get("rope_type", found.values.get("type")) == "dynamic":
            alpha = found.number("alpha")
            plain[name] = {key: value for key, value in found.values.items() if key not in ("alpha", "type")}
            plain[name]["rope_type"] = "default"
    own, columns = _with(keys, plain), draft.size("head_dim")
    draft = read_rope(own, draft)
    keys.asked |= own.asked
    return draft.sized(rope_base=draft.sizes["rope_base"] * alpha ** (columns / (columns - 2))) if plain else draft


def _with(keys: Keys, changes: dict[str, Any]) -> Keys:
    return Keys(keys.name, {**keys.values, **changes}, keys.defaults)


def _same(keys: Keys, name: str, layers: int) -> Any:
    """Return a key's value, or the one value of its list."""
    value = keys.value(name)
    if not isinstance(value, list):
        return value
    first, *rest = keys.each(name, int, layers, at_least=True)
    if any(one != first for one in rest):
        raise keys.fail(f"{name} {show(value)}: no model here has blocks of different sizes; possible is one for all")
    return first
