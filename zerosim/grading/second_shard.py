"""The checks of hpZ's exercise: backward's gathers stay in the node, only the second shard is held in addition, and it
is copied once after each update."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from zerosim.device.events import Event, Kernel
from zerosim.grading.exercise import Comparison
from zerosim.grading.record import where
from zerosim.grading.trial import Trial, result_of
from zerosim.grading.verdict import Check
from zerosim.train.result import RunResult

_HELD = ("param", "unsharded_param")


def node(run: Comparison) -> Check:
    """Check that each rank's gathers of parameters in a step, by phase and axis, are the reference's."""
    mine, wanted = _gathered(run.mine), _gathered(run.reference)
    hint = ""
    if mine != wanted:
        hint = "gather each flat once per use: in forward over self.comm, in backward over self.node"
    return Check("node", mine == wanted, _words(wanted), _words(mine), hint=hint)


def held(run: Comparison) -> Check:
    """Check the bytes of parameters when backward ends: the local shard and the second one, to the byte."""
    mine, wanted = _param_bytes(result_of(run.mine)), _param_bytes(result_of(run.reference))
    config = run.case.config
    expected = f"2Ψ/{config.mesh.ranks} + 2Ψ/{config.mesh.secondary_shard} = {wanted[0]:,} B of parameters on each rank"
    wrong = next((at for at, nbytes in enumerate(mine) if nbytes != wanted[at]), 0)
    hint = "" if mine == wanted else "call reshard() after each use, and keep nothing else of the gathered buffer"
    return Check("held", mine == wanted, expected, f"{mine[wrong]:,} B", hint=hint)


def copied(run: Comparison) -> Check:
    """Check that forward copies each second shard once after an update, and never again before the next one."""
    wanted = sum(_copies(run.reference.records[0], 0).values())
    expected = f"each flat's second shard copied once after its update: {wanted:,} B in a step's forward"
    for rank, record in enumerate(run.mine.records):
        for step in run.steps:
            copies = _copies(record, step)
            if (total := sum(copies.values())) == wanted:
                continue
            sums = zip(copies, accumulate(copies.values()), strict=True)
            more = next((number for number, some in sums if some > wanted), None)
            counted, hint = f"{total:,} B on rank {rank} in step {step}", "self.copy(source, target) is counted"
            if more is None:
                return Check("copied", False, expected, counted, hint=hint)
            return Check("copied", False, expected, counted, hint=_OFTEN, where=where(rank, record, more).only())
    return Check("copied", True, expected, "it is")


_OFTEN = (
    "a flat's second shard is outdated only after its update: once it is copied, take the flat's name out of self.old"
)


def _copies(record: Sequence[Event], step: int) -> dict[int, int]:
    """Return the bytes of each copy within the device's memory in a step's forward, by the event's number."""
    events = enumerate(record)
    kernels = {number: event for number, event in events if isinstance(event, Kernel) and event.name == "copy"}
    return {at: event.bytes_written for at, event in kernels.items() if event.scope[:2] == (step, "forward")}


def _param_bytes(result: RunResult) -> list[int]:
    marks = [memory.marks["end_of_backward"].by_kind for memory in result.memory]
    return [sum(by_kind.get(kind, 0) for kind in _HELD) for by_kind in marks]


def _gathered(trial: Trial) -> dict[tuple[str, str], int]:
    """Return the bytes of the first rank's gathers in all steps, by phase and axis."""
    found: dict[tuple[str, str], int] = {}
    for row in result_of(trial).traffic[0]:
        if row.op == "all_gather" and row.purpose == "states":
            found[row.phase, row.axis] = found.get((row.phase, row.axis), 0) + row.wire_bytes
    return found


def _words(found: dict[tuple[str, str], int]) -> str:
    return ", ".join(f"{phase} {nbytes:,} B on {axis}" for (phase, axis), nbytes in found.items()) or "nothing gathered"
