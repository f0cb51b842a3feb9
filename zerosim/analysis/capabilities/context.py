"""Context parallelism: what ranks that share rows send for their attentions."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.capabilities.tensor import heads_on_rank
from zerosim.analysis.capability import Capability, Forms, Key, Sent, Step, when
from zerosim.analysis.facts import frozen_of
from zerosim.analysis.formulas.form import symbols
from zerosim.analysis.recompute import differ, parts_again
from zerosim.config import RunConfig
from zerosim.config.parts.context import HOW, attended_columns, cut_of
from zerosim.placement.context import ContextCut

_l, _r, _y_q, _k_a = symbols("l r y_q k_a")


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    cut = _cut(config)
    if cut.ranks == 1:
        return
    back = _l if frozen_of(config) is None else _y_q
    again = _r + (_k_a if differ(config) else back if "core_attn" in parts_again(config) else 0)
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


def way(config: RunConfig) -> str:
    """Return how ranks share rows; '' if none do."""
    return config.context.how if _cut(config).ranks > 1 else ""


def other_ways(config: RunConfig) -> list[dict[str, str | None]]:
    """Return the values of other ways to share rows; the default one is not given."""
    found: list[dict[str, str | None]] = [{"context": None if how == HOW[0] else how} for how in HOW]
    return [values for values in found if way(config) and values["context"] != config.context.context]


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


def _sent(config: RunConfig) -> Iterator[str]:
    """Yield what a block sends for its attention."""
    cut, gathers = _cut(config), config.context.how == "allgather"
    if cut.around > 1:
        times, back = ("once", "once") if gathers else (f"{cut.around - 1} times", f"{cut.around} times")
        verb, returned = ("gathers", "reduces") if gathers else ("sends", "sends")
        yield f"In each forward and backward a block {verb} its keys and values {times}. In backward it also {returned}"
        yield f"their fp32 gradients {back}."
    if cut.within > 1:
        part = Fraction(cut.within - 1, cut.within)
        yield f"In each forward and backward a block exchanges {part} of q, k and v, and of the result."


def _kept(config: RunConfig) -> Iterator[str]:
    cut = _cut(config)
    if cut.ranks > 1:
        yield f"A rank has s of the {cut.ranks}s tokens of a row, and their queries read the keys of all."
    if cut.around > 1:
        yield "Attention that is merged stores no scores."


def _assumed(config: RunConfig) -> Iterator[str]:
    if (cut := _cut(config)).ranks > 1:
        yield f"context {way(config)}{' (zigzag)' if cut.zigzag else ''}"
    if (packing := config.data.packing) is not None:
        of = f"{packing.length:,} tokens" if packing.length else "whole rows, as a plan reads no tokens (--documents N)"
        yield f"documents of {of}"


def _states(config: RunConfig) -> Iterator[str]:
    yield from when(_cut(config).ranks > 1, "Model states are cut over dp_shard x cp.")


CAPABILITY = Capability(
    forms=_forms,
    notes={"about": _about, "model_states": _states, "exchanges": _sent, "activations": _kept, "assumed": _assumed},
    axes={"cp": ""},
)
