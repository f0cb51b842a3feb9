"""The check of exercise 2: an all_reduce is made of its two halves.

Owns that one rule; it is read from the record, whatever the function is called or returns.
"""

from __future__ import annotations

from zerosim.grading.exercise import Check, Comparison
from zerosim.grading.looking import calls, where

HALVES = ("reduce_scatter", "all_gather")


def halves(one: Comparison) -> Check:
    """Backward launches both halves for each unit that launches any, and no other collective.

    A gradient that nothing is launched for does not change: then the run itself fails.
    """
    expected = "gradients reduced by reduce_scatter and all_gather alone, by both"
    for rank, record in enumerate(one.mine.records):
        ours = [call for call in calls(record, control=True) if call.phase == "backward"]
        other = next((call for call in ours if call.op not in HALVES), None)
        if other is not None:
            hint = f"{other.op} is what is to be written: use comm.reduce_scatter, then comm.all_gather"
            at = where(rank, record, other.number)
            return Check("halves", False, expected, f"rank {rank} calls {other}", hint=hint, where=at)
        ops: dict[tuple[int, str], list[str]] = {}
        for call in ours:
            ops.setdefault((call.what[0], call.what[2]), []).append(call.op)
        for (step, unit), names in ops.items():
            missing = [op for op in HALVES if op not in names]
            if missing:
                counted = f"rank {rank} calls no {missing[0]} in step {step}, backward of {unit}"
                return Check("halves", False, expected, counted, hint="every gradient needs both")
    return Check("halves", True, expected, "they are")
