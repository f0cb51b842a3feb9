"""Mixtures of experts: two numbers of ranks that cut states, tokens that travel to experts, and what plans assume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import cast

from zerosim.analysis import formulas
from zerosim.analysis.capabilities import tensor, tuning
from zerosim.analysis.capability import Asked, Capability, Forms, Key, Sent, Step, when
from zerosim.analysis.facts import frozen_of
from zerosim.analysis.formulas.form import Form, symbol
from zerosim.analysis.shares import is_apart
from zerosim.analysis.weights import has_experts, of_weights
from zerosim.config import RunConfig
from zerosim.config.parts.experts import own_tokens
from zerosim.dtypes import dtype
from zerosim.placement.block import Experts
from zerosim.placement.mesh import EXPERT_CUTS, EXPERT_STATES
from zerosim.placement.spec import is_block
from zerosim.placement.stages import number_of
from zerosim.train.result import RunResult

Cut = Mapping[str, int | None]
"""Values of the options that cut experts."""


def are_apart(config: RunConfig) -> bool:
    """Return whether experts are cut otherwise than other weights."""
    return config.model.has_experts and config.mesh.axes.is_folded


def psi_of(held: Mapping[str, int], *, is_part: bool) -> str:
    """Return the printed letter of the parameters that N ranks divide, of these letters' values: Ψ_d without experts,
    Ψ_r if a rank holds a part of the model."""
    return "Ψ_d" if "N_e" in held else "Ψ_r" if is_part else "Ψ"


def cut_words(held: Mapping[str, int]) -> list[str]:
    """Return which parameters are divided by what."""
    if "N_e" not in held:
        return []
    return [
        f"Of Ψ_r, Ψ_d = {held['Ψ']:,} are cut over N = {held['N']:,} ranks, and its experts' Ψ_e = {held['Ψ_e']:,} "
        f"over N_e = {held['N_e']:,} (edp)."
    ]


def assumes_routing(result: RunResult) -> bool:
    """Return whether the rows of each expert are known beforehand: a run's router chooses otherwise."""
    config = result.config
    return (
        config.experts.routing is not None
        or config.experts.dispatcher == "allgather"
        or config.experts.pad_to_capacity
        or not result.losses
    )


def sizes(config: RunConfig) -> dict[str, int]:
    """Return the JSON form of how experts are cut, of models that have some."""
    return {axis: config.mesh.axes.size(axis) for axis in EXPERT_CUTS} if config.model.has_experts else {}


def ways_to_cut(config: RunConfig, ranks: int, tp: int, node: int) -> Iterator[Cut]:
    """Yield values that share experts among the ranks of a pipeline stage: nobody, as many as possible of a node, as
    many as possible. Their maps stay whole."""
    yield {}
    fitting = [ep for ep in range(2, ranks + 1) if ranks % ep == 0 and config.model.divides_experts(ep)]
    inside = [ep for ep in fitting if ep <= node]
    for ep in dict.fromkeys((*inside[-1:], *fitting[-1:])):
        yield {"ep": ep, **({"etp": 1} if tp > 1 else {})}


def other_cuts(config: RunConfig) -> list[Cut]:
    """Return the values that share experts among the next fewer and the next more ranks, and that cut their maps over
    tp or leave them whole."""
    if not config.model.has_experts:
        return []
    mesh = config.mesh.axes
    ranks = mesh.edp * mesh.ep * mesh.etp
    fitting = [ep for ep in range(1, ranks + 1) if ranks % (ep * mesh.etp) == 0 and config.model.divides_experts(ep)]
    at = fitting.index(mesh.ep)
    found: list[Cut] = [{"ep": ep} for ep in (*fitting[max(0, at - 1) : at], *fitting[at + 1 : at + 2])]
    return found + [{"etp": etp} for etp in {1: mesh.tp, mesh.tp: 1}.values() if mesh.tp > 1 and etp != mesh.etp]


def more_shared(config: RunConfig) -> list[Cut]:
    """Return the values that share experts among more ranks: those of a node, then all."""
    mesh = config.mesh.axes
    ways = ways_to_cut(config, mesh.edp * mesh.ep * mesh.etp, mesh.tp, 8) if config.model.has_experts else ()
    return [way for way in ways if (way.get("ep") or 0) > mesh.ep]


def alone(config: RunConfig, tp: int) -> Cut:
    """Return the values of one microbatch on tp's ranks alone: what experts compute of it, and nothing that is sent."""
    whole = {"ep": 1, "etp": 1 if are_apart(config) and tp > 1 else None}
    return whole | dict.fromkeys(("dispatcher", "shared_expert_overlap"))


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    """Yield what tokens send to experts, and experts back."""
    if not are_apart(config):
        return
    mesh, row = config.mesh.axes, config.model.decoder.block.mlp.experts
    assert row is not None
    how = formulas.Dispatch(
        mesh.ep,
        mesh.etp,
        _part(config),
        _itemsize(config, row),
        config.experts.applied(row) != "results",
        frozen_of(config) is not None,
    )
    if config.experts.dispatcher == "allgather":
        axis = mesh.name(*EXPERT_CUTS)
        found = {(name, axis): form for name, form in formulas.gathered_tokens(how).items()}
    else:
        found = formulas.exchanged_rows(how)
    for key, form in found.items():
        yield Key("exchanged", *key), step.passes * form


def _part(config: RunConfig) -> Form:
    """Return the part of a microbatch's tokens that a rank routes, where experts are apart."""
    return (Form() + 1) / symbol("t") if tensor.divides_rows(config) else Form() + 1


def _itemsize(config: RunConfig, row: Experts) -> int:
    """Return the bytes of a router's logit."""
    stored = dtype(config.precision.stored).itemsize
    return 4 if config.experts.widens(row) and stored == 2 else stored


def kept_routes(config: RunConfig, block: int) -> Form:
    """Return the form of what a recomputed block keeps of its router."""
    model, row = config.model, config.model.decoder.block.mlp.experts
    if not config.experts.keep_router or row is None or not model.kind(block).has_experts:
        return Form()
    part = _part(config) if are_apart(config) else Form() + 1
    experts, chosen, _ = config.experts.choice_of(model)
    return formulas.kept_routes(experts, chosen, _itemsize(config, row), part)


def _divided(config: RunConfig, form: Form) -> Form:
    return formulas.over_both(form) if are_apart(config) else form


def _letters(asked: Asked) -> dict[str, int]:
    """Return the letters of dense weights and those of experts, each of their own flat buffers."""
    placed, share = asked.placed, asked.share
    config, layout, found = placed.config, placed.layout, dict[str, int]()
    if not are_apart(config):
        return {}
    for own in (False, True):
        part = share.only([name for name in share.numels if is_apart(layout, name) == own])
        values = of_weights(placed, part, padded=asked.padded) | tuning.letters(asked._replace(share=part))
        found |= {formulas.OF_EXPERTS[one] if own else one: values[one] for one in formulas.OF_EXPERTS if one in values}
    tokens = own_tokens(config.mesh, config.model, config.data)
    blocks = [number_of(unit) for unit in share.units if is_block(unit) and has_experts(config, unit)]
    rows = [config.experts.sent_of(config.model, number, tokens) for number in blocks]
    return found | {
        "k": cast(int, Fraction(sum(rows), len(rows) * tokens or 1)),
        "N_e": layout.mesh.size(*EXPERT_STATES),
    }


def _size(config: RunConfig) -> Iterator[str]:
    """Yield which parameters memory holds, and which compute uses."""
    if config.model.has_experts:
        yield (
            f"A token uses {config.model.choice} in a layer. Memory holds all of them. Flops, MFU and time count the "
            "active parameters."
        )


def _kept(config: RunConfig) -> Iterator[str]:
    """Yield what a recomputed block keeps beside its input."""
    if config.experts.keep_router:
        yield "A recomputed block also keeps its router's logits and choices. Backward does not choose again."


def _assumed(config: RunConfig) -> list[str]:
    kept = when(config.experts.keep_router, "routers' choices kept")
    return when(config.model.has_experts, f"routing {config.experts.routing or 'even'}") + kept


def _first_step(config: RunConfig) -> list[str]:
    return when(
        config.model.has_experts,
        "An untrained router sends some experts more rows than others, so real first steps take longer.",
    )


def _warned(config: RunConfig) -> Iterator[str]:
    """Yield what frameworks refuse."""
    if not config.model.has_experts:
        return
    recipe = config.parallel.recipe
    if recipe.endswith("deepspeed") and config.states_stage == 3:
        yield "DeepSpeed's own MoE layers refuse ZeRO stage 3: --stage 2, or its AutoEP"
    if recipe == "megatron" and tensor.repeats_rows(config):
        yield "Megatron-LM trains experts with tensor parallelism only under --sequence-parallel"


CAPABILITY = Capability(
    forms=_forms,
    divided=_divided,
    letters=_letters,
    notes={"size": _size, "again": _kept, "assumed": _assumed, "first_step": _first_step, "warned": _warned},
    axes={"edp": "N_e", "ep": "ep", "etp": "", "ep+etp": ""},
)
