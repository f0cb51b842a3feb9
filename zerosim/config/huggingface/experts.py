"""Rules of config.json for models with experts: how many, in which blocks, in what groups."""

from __future__ import annotations

from zerosim.config.huggingface.draft import Draft, Rule
from zerosim.config.huggingface.keys import Keys, show


def experts(
    number: str,
    width: str,
    shared: str = "",
    gate: str = "norm_topk_prob",
    *,
    chosen: str = "num_experts_per_tok",
    of_width: bool = False,
) -> Rule:
    """Return the rule that reads the experts by the family's keys: their `number` and `width`, how many are `chosen`,
    and of `shared` ones their number or, `of_width`, the width of all. `gate`: the key that says whether weights are
    divided by their sum."""

    def read(keys: Keys, draft: Draft) -> Draft:
        count, wide = keys.whole(number, *_EXPERTS), keys.whole(width)
        top_k = keys.whole(chosen, "num_experts_per_tok")
        draft = draft.sized(experts=count, top_k=top_k, expert_ffn=wide)
        if top_k > count:
            raise keys.fail(f"{chosen} {top_k}: more than the {count} experts")
        if shared:
            found = keys.whole(shared) if keys.value(shared) else 0
            if of_width and found % wide:
                raise keys.fail(f"{shared} {found} is not modelled: expected a multiple of {width} {wide}")
            draft = draft.sized(shared_experts=found // wide if of_width else found)
        share = keys.value("router_aux_loss_coef")
        for key, is_on in (("output_router_logits", share), ("router_jitter_noise", True)):
            if keys.value(key) and is_on:
                draft = draft.noted(f"{key} {show(keys.value(key))}: planned without it")
        mlp = draft.decoder.block.mlp
        assert mlp.experts is not None
        normed = keys.flag(gate) if gate else mlp.experts.normed
        return draft.blocks(mlp=mlp._replace(experts=mlp.experts._replace(normed=normed)))

    return read


_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"


def from_block(keys: Keys, draft: Draft) -> Draft:
    """Read which blocks have experts: each n-th, from one on, up to the last (ERNIE 4.5)."""
    layers, every = draft.size("layers"), keys.whole("moe_layer_interval")
    first, last = keys.value("moe_layer_start_index"), keys.value("moe_layer_end_index")
    if last not in (-1, layers - 1):
        raise keys.fail(f"moe_layer_end_index {show(last)}: no model here has it; possible is the last, {layers - 1}")
    first = keys.whole("moe_layer_start_index") if first != 0 else 0
    if not [at for at in range(first, layers) if (at + 1) % every == 0]:
        raise keys.fail("no block has experts: change moe_layer_start_index or moe_layer_interval")
    return draft.numbered(dense_first=first, experts_every=every)


def some_dense(keys: Keys, draft: Draft) -> Draft:
    """Read which blocks have no experts: the first ones, and all but each n-th."""
    layers = draft.size("layers")
    every = keys.whole("decoder_sparse_step") if keys.knows("decoder_sparse_step") else 1
    value = keys.value("mlp_only_layers") if keys.knows("mlp_only_layers") else None
    listed = keys.each("mlp_only_layers", int, len(value)) if isinstance(value, list) else []
    first = 0 if not listed else max(listed) + 1
    if sorted(set(listed)) != [*range(first)]:
        raise keys.fail(f"mlp_only_layers {show(value)}: no model here has them; possible are none and the first ones")
    if keys.knows("first_k_dense_replace") and keys.value("first_k_dense_replace"):
        first = keys.whole("first_k_dense_replace")
    if keys.knows("mlp_layer_types") and keys.value("mlp_layer_types") is not None:
        kinds = keys.each("mlp_layer_types", str, layers)
        first = kinds.count("dense")
        if kinds != ["dense"] * first + ["sparse"] * (layers - first):
            raise keys.fail("mlp_layer_types: no model here has them; possible are dense ones first, then sparse ones")
    if max(first, every) > layers or not [at for at in range(first, layers) if (at + 1) % every == 0]:
        named = "decoder_sparse_step, mlp_only_layers, first_k_dense_replace or mlp_layer_types"
        raise keys.fail(f"no block has experts: change {named}")
    return draft.numbered(dense_first=first, experts_every=every)


def groups_of_experts(keys: Keys, draft: Draft) -> Draft:
    """Read the groups of experts, and the factor of a token's weights."""
    groups, chosen, count = keys.whole("n_group"), keys.whole("topk_group"), draft.size("experts")
    if count % groups or chosen > groups:
        raise keys.fail(f"n_group {groups}, topk_group {chosen}: expected a divisor of {count} experts, and no more")
    scale = keys.number("routed_scaling_factor")
    return draft.numbered(expert_groups=groups, chosen_groups=chosen, expert_scale=scale)
