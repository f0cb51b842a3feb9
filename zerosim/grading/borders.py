"""The checks of f and g: losses and gradients equal those of one rank that holds everything, and traffic equals the
closed form.

On t ranks sums have another order than on one, so these runs are in fp32, and equal means within its rounding. Source:
Megatron-LM (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from zerosim.analysis.formulas.parallel import tensor_parallel
from zerosim.config import RunConfig
from zerosim.device.events import Event, Launch
from zerosim.dtypes import dtype
from zerosim.grading.checks import bytes_text
from zerosim.grading.exercise import Comparison
from zerosim.grading.trial import Trial, attempt, result_of
from zerosim.grading.verdict import Check
from zerosim.placement.assemble import Piece, assemble
from zerosim.tensor.flat import Slice

ROUNDING = 1e-4
"""Largest difference that fp32 explains here, relative to the largest value of a loss or of a weight's gradient."""

VOLUME = "(8L + 4)bsh + 6bs"
"""4 all-reduces of bsh in each of L layers, one for the table, one for the head; 3 of bs in the loss: twice as many
elements."""


def elements(config: RunConfig, psi: int, tied: int) -> Fraction:
    """Return the elements sent per rank and step, times t/(t-1): an all-reduce sends twice its elements."""
    tokens = config.data.micro_batch * config.model.seq
    sizes = {"bs": tokens, "bsh": tokens * config.model.hidden, "m": config.data.accumulate}
    return tensor_parallel()["all_reduce"].elements.at(sizes, l=config.model.layers, first=1, last=1)


def losses(run: Comparison) -> Check:
    """Check forward: the loss of every step is one rank's."""
    ours, theirs = result_of(run.mine).mean_losses, result_of(_alone(run)).mean_losses
    expected = f"losses {_floats(theirs)}, as on one rank"
    passed = np.allclose(ours, theirs, rtol=ROUNDING, atol=0.0)
    return Check("losses", passed, expected, _floats(ours), hint="" if passed else places(run.mine.records[0]))


def gradients(run: Comparison) -> Check:
    """Check backward: assembled from the ranks, the first step's gradient of every weight is one rank's."""
    ours, theirs = _gradients(run.mine), _gradients(_alone(run))
    expected = f"the gradients of all {len(theirs)} weights as on one rank"
    for name in reversed(theirs):  # the order in which backward reaches them
        here, there = ours[name].astype(np.float64).ravel(), theirs[name].astype(np.float64).ravel()
        if not np.abs(here - there).max() <= ROUNDING * np.abs(there).max():  # nan is wrong, too
            times = float(here @ there / (there @ there))
            is_multiple = np.allclose(here, times * there, rtol=0.0, atol=ROUNDING * np.abs(here).max())
            words = f"is {times:.4g} times one rank's" if is_multiple else "differs"
            counted = f"that of {name}, the first wrong one in backward, {words}"
            return Check("gradients", False, expected, counted, hint=places(run.mine.records[0]))
    return Check("gradients", True, expected, f"{len(theirs)} of {len(theirs)} are")


def exchanged(run: Comparison) -> Check:
    """Check that tensor parallelism's bytes per rank and step (the mean over ranks) equal the closed form's."""
    config, (text, form) = run.case.config, run.exercise.volume
    t, itemsize = config.mesh.tp, dtype(config.precision.stored).itemsize
    wanted = form(config, 0, 0) * Fraction(t - 1, t) * itemsize
    expected = f"({text})(t-1)/t elements = {bytes_text(wanted)} B sent per rank and step as activations"
    for step in run.steps:
        sent = {"activations": Fraction(0)}
        for row in (row for rank in result_of(run.mine).traffic for row in rank):
            if row.step == step and row.axis == "tp" and row.phase in ("forward", "backward"):
                sent[row.purpose] = sent.get(row.purpose, Fraction(0)) + Fraction(row.wire_bytes, t)
        if sent != {"activations": wanted}:
            counted = ", ".join(f"{bytes_text(nbytes)} B as {purpose}" for purpose, nbytes in sent.items())
            hint = places(run.mine.records[0]) if len(sent) == 1 else "every all_reduce needs purpose='activations'"
            return Check("exchanged", False, expected, counted, hint=hint)
    return Check("exchanged", True, expected, f"{bytes_text(wanted)} B")


def places(record: Sequence[Event]) -> str:
    """Return how often block h.0 exchanges in either direction, and how often it should: where to look first."""
    launches = [event for event in record if isinstance(event, Launch) and event.axis == "tp"]
    scopes = [event.scope for event in launches if event.scope.unit == "h.0"]
    phases = [scope.phase for scope in scopes if (scope.step, scope.slot) == (0, 0)]
    ahead, back = phases.count("forward"), phases.count("backward")
    if (ahead, back) == (2, 2):
        what = "do f and g each exchange in the right direction, forward or backward, and add (op='sum')?"
        return f"h.0 exchanges twice in forward and twice in backward, which is right; {what}"
    return f"h.0 exchanges {ahead} times in forward, where g should twice, and {back} times in backward, where f should"


def _alone(run: Comparison) -> Trial:
    """Run the same case on one rank that holds the whole model."""
    return attempt(run.case.config.replace(ranks=1, tp=1))


def _gradients(trial: Trial) -> dict[str, Any]:
    """Return gradients by weight, as the first step's update reads them."""
    layout = result_of(trial).layout
    first = (update for updates in trial.updates for update in updates if update.step == 0)
    pieces = [
        Piece(one.rank, one.unit, Slice(one.start, one.start + one.size, layout.flats[one.unit].numel), one.grad)
        for one in first
    ]
    return assemble(layout, pieces)


def _floats(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
