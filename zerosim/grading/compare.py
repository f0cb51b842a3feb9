"""Where a run's gradients and weights first differ from a reference's, and how."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.config import RunConfig
from zerosim.grading.hooks import told
from zerosim.grading.record import Finding, other_kernels, where
from zerosim.grading.trial import Trial, Update, result_of

_NORM = (
    "clipping multiplies by clip_norm / norm, where the norm covers ALL ranks' slices: is yours the same on every rank?"
)
_LATER = "gradients of earlier steps agree, so the new parameters did not reach every rank; look at publish_params"
_FROM_START = "the update takes its slice from the start of your buffer: keep only the local slice"
_FACTOR = "every element is off by the same factor: which line multiplies or divides, and by what?"
_OFTEN = "the norm counts every gradient once for each rank: sees_all_grads = True says that each rank sees all of them"


def different_weights(mine: Trial, reference: Trial) -> list[str]:
    """Return the names of the parameters whose bits differ at the end."""
    ours, theirs = result_of(mine).weights, result_of(reference).weights
    return [name for name in theirs if name not in ours or not np.array_equal(ours[name], theirs[name])]


def first_gap(mine: Trial, reference: Trial, schedule: Trial) -> Finding:
    """Return the first gradient that is not the reference's, by step, then in backward's order, then by rank.

    `schedule` is a run with the right collectives: where they differ is where to look.
    """
    whole = _assembled(reference)
    updates = [update for updates in mine.updates for update in updates]
    units = list(dict.fromkeys(update.unit for update in updates))  # the last unit's gradient is the first to go wrong
    for update in sorted(updates, key=lambda update: (update.step, -units.index(update.unit), update.rank)):
        expected, scale = whole[update.step, update.unit]
        theirs = expected[update.start : update.start + update.size]
        ours, record = update.grad[: len(theirs)], mine.records[update.rank]
        place = f"rank {update.rank}'s gradient of {update.unit} in step {update.step}"
        if not np.array_equal(ours, theirs):
            words, hint = _likeness(ours, theirs, expected, update, mine.config)
            if (cause := told(mine, schedule, update.rank, update.step)) is not None:
                other, hinted, at = cause.finding
                return Finding(f"{other}: {place} {words}", hinted or hint, at)
            kernels = other_kernels(record, schedule.records[update.rank], update.step, update.unit)
            more, number = "", update.number
            if kernels is not None:
                name, counted, wanted, number = kernels
                more = f"; its backward runs {name} {_times(counted)}, the reference's {_times(wanted)}"
            return Finding(f"{place} {words}{more}", hint, where(update.rank, record, number).only())
        if update.scale != scale:
            counts_all = np.isclose(update.scale * mine.config.mesh.ranks**0.5, scale, rtol=1e-3)
            words = f"{place} is multiplied by {update.scale:.4g}, the reference's by {scale:.4g}"
            hint = _OFTEN if counts_all and mine.config.parallel.zero_stage == 0 else _NORM
            return Finding(words, hint, where(update.rank, record, update.number).only())
    hint = "check which slice you update, and how: owned, and store_param_shard if you wrote step yourself"
    return Finding("every gradient matches the reference, but the weights do not", hint, None)


def _assembled(trial: Trial) -> dict[tuple[int, str], tuple[Any, float]]:
    """Return whole reduced gradients by (step, unit), and their factors."""
    pieces: dict[tuple[int, str], dict[int, Update]] = {}
    for updates in trial.updates:
        for update in updates:
            pieces.setdefault((update.step, update.unit), {})[update.start] = update
    whole = {}
    for key, parts in pieces.items():
        ordered = [parts[start] for start in sorted(parts)]
        whole[key] = np.concatenate([part.grad[: part.size] for part in ordered]), ordered[0].scale
    return whole


def _likeness(ours: Any, theirs: Any, whole: Any, update: Update, config: RunConfig) -> tuple[str, str]:
    """Return the wrong gradient's likeness in words, and a hint."""
    ranks = config.mesh.ranks
    if update.step > 0:
        return "differs; step 0 was right" if update.step == 1 else "differs", _LATER
    if update.grad.size > update.size and update.start:
        return f"has {update.grad.size:,} elements where its slice has {update.size:,}", _FROM_START
    if not ours.any():
        return "is zero", "it was never reduced into grad_shard"
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    ratio = float(a @ b / (b @ b)) if b.any() else 0.0
    if np.allclose(a, ratio * b, rtol=2e-2, atol=1e-2 * float(np.abs(b).max()) * abs(ratio)):
        for factor, hint in (
            (1 / ranks, "it was divided by the number of ranks twice: which call already averages?"),
            (ranks, "it was summed over ranks but not divided: which op does the collective get?"),
            (1.0, "equal except for rounding: the same numbers were added in another order, or rounded once more"),
            (2.0, "it was counted twice"),
        ):
            if abs(ratio / factor - 1) < 2e-2:
                is_rounded = "matches the reference except for rounding"
                return is_rounded if factor == 1 else f"is {ratio:.4g} times the reference's", hint
        return f"is {ratio:.3g} times the reference's", _FACTOR
    start = whole[: len(ours)]
    if update.start and len(start) == len(ours) and np.array_equal(ours, start):
        return "is the gradient of rank 0's slice", "take the slice that starts at flat.own.start"
    if config.data.accumulate > 1:
        return "differs", f"was every one of the {config.data.accumulate} microbatches added exactly once?"
    return "differs", "part of it is missing, or comes only from this rank: was it reduced over all ranks?"


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")
