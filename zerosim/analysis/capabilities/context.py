"""Context parallelism: what ranks that share rows send for their attentions."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.analysis import formulas
from zerosim.analysis.capabilities.tensor import heads_on_rank
from zerosim.analysis.capability import Capability, Forms, Key, Sent, Step, when
from zerosim.analysis.facts import frozen_of
from zerosim.analysis.formulas.form import symbols
from zerosim.analysis.recompute import parts_again
from zerosim.config import RunConfig
from zerosim.config.parts.context import attended_columns, cut_of
from zerosim.placement.context import ContextCut

_l, _r, _y_q = symbols("l r y_q")


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    cut = _cut(config)
    if cut.ranks == 1:
        return
    back = _l if frozen_of(config) is None else _y_q
    again = _r + (back if "core_attn" in parts_again(config) else 0)
    queries, keys = attended_columns(config.mesh, config.context, config.model, config.memory)
    share = heads_on_rank(config)
    by_operation = formulas.context_parallel(
        cut.around,
        cut.within,
        queries * share,
        keys * share,
        back,
        again,
        _r,
        gathers=config.context.how == "allgather",
    )
    for name, form in by_operation.items():
        yield Key("exchanged", name, "cp"), step.passes * form


def _cut(config: RunConfig) -> ContextCut:
    return cut_of(config.mesh, config.context)


def _about(config: RunConfig) -> Iterator[str]:
    """Yield how rows are cut, and how attention reads the other tokens."""
    cut, how = _cut(config), config.context.how
    if cut.ranks == 1:
        return
    parts = "an early and a late part" if cut.zigzag and cut.around > 1 else "one part"
    yield f"The tokens of every row are cut over {cut.ranks} ranks, {parts} for each."
    if cut.within > 1:
        yield f"Around attention {cut.within} ranks exchange tokens of all heads for all their tokens of some heads."
    if cut.around > 1 and how == "allgather":
        yield "Attention gathers all keys and values of a layer, and reduces their gradients in fp32."
    elif cut.around > 1:
        yield f"Keys and values go round {cut.around} ranks. Results are merged by log-sum-exp, in fp32."


def _states(config: RunConfig) -> Iterator[str]:
    yield from when(_cut(config).ranks > 1, "Model states are cut over dp_shard x cp.")


def _premises(config: RunConfig) -> Iterator[str]:
    yield from when(_cut(config).ranks > 1, "a rank has a part of every row's tokens")


def _assumed(config: RunConfig) -> Iterator[str]:
    if (packing := config.data.packing) is not None:
        of = f"{packing.length:,} tokens" if packing.length else "whole rows, as a plan reads no tokens (--documents N)"
        yield f"documents of {of}"


CAPABILITY = Capability(
    forms=_forms,
    notes={"about": _about, "model_states": _states, "premises": _premises, "assumed": _assumed},
    axes={"cp": ""},
)
