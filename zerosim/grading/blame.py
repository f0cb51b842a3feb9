"""A failed run, in words for the strategy's author: which rank, at which event, and a hint."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import NamedTuple

from zerosim.comm.collectives import Comm
from zerosim.comm.rank_status import ranks_text
from zerosim.device.device import Buffer
from zerosim.device.events import Alloc, Free
from zerosim.grading import pipelines
from zerosim.grading.borders import places
from zerosim.grading.hooks import told
from zerosim.grading.limits import Failure
from zerosim.grading.record import Call, Finding, Where, calls, where
from zerosim.grading.trial import Trial
from zerosim.nn import Unit
from zerosim.parallel.base import Strategy
from zerosim.tensor.flat import Flat

ALIKE = "every rank must call the same collectives in the same order, whatever it owns"
_HINTS = (
    (r"while \S+ is sharded|is sharded$", "it was freed before its last use, or never gathered. Gather it before "
     "each use (pre_forward, pre_backward), and reshard it only after the use (post_forward, post_backward)."),
    (r"expected one dimension and a multiple|has shape|cannot reshape|could not be broadcast|broadcast together",
     "a buffer has the wrong number of elements: whole buffers have flat.padded_numel, slices flat.own.size"),
    (r"lies on rank", "ranks are threads of one process: store a rank's own data in self, created in __init__, not "
     "in the class or the module"),
    (r"'Work' object", "launch_all_gather gives a Work; its wait() gives the buffer"),
    (r"grad (was unchanged when|is not what)", "change `grad` in place: the return value of all_reduce is ignored, "
     "and assigning to the name grad changes nothing. Where may a collective write?"),
    (r"waits twice", "wait for each Work only once: remove it where you store it (pop)"),
    (r"is not stored whole", "call flat.add_grad_whole(flat.take_grad()) first"),
    (r"no gradient", "every unit whose .reduces is true must leave a grad_shard before the step, on every rank"),
    (r"elements of gradient", "whole buffers have flat.padded_numel elements, slices flat.own.size"),
    (r"unexpected keyword|positional argument", "keep the arguments that the hooks have in the skeleton"),
    (r"object has no attribute '(comm|device|updater|flats|timetable|groups|layout|memory|reducer|exchange|gathered)'",
     "call super().__init__(comm, device, updater) first in your own __init__"),
    (r"NameError", "Python finds no such name in that line: is it misspelt, or an attribute (self., unit., flat.)?"),
    (r"SystemExit", "an exit ends the whole run: return from the hook instead"),
    (r"RecursionError", "a method calls itself: is a super() missing?"),
    (r"record is (not whole|graded)", "the record belongs to the grader: leave self.device.recorder alone"),
    (r"not finite|NonFinite", "a new buffer holds arbitrary values: do you read one before you write to it?"),
    (r"expected (fp32|bf16)", "send parameters as flat.shard() gives them and gradients as take_grad() gives them, "
     "in bf16"),
    (r"backward did not reach this value", "a backward function returned no gradient"),
    (r"stage \d+ of \d+: ", "a schedule returns one stage's list: for each slot from 0 to micro_batches - 1 a "
     "Forward(slot) and, somewhere after it, a Backward(slot)"),
    (r"NoneType", "a value is None: parameters before you gather them, a gradient before you take it, or the result "
     "of a function without `return`"),
)  # fmt: skip
_NO_END = {
    "stuck": "an endless loop, or a sleep, in your own code: it calls no kernel and no collective",
    "endless": "an endless loop, which keeps calling kernels or collectives",
    "late": "a solution takes a second: does yours sleep, or start a thread?",
}
_COPIES = (
    "layer norms need the same x on every rank, and in backward the same dx; otherwise their copies of a weight diverge"
)
_UPDATES = (
    "each hook calls what it should, so look at the update: every rank must start from the same reduced gradient, and "
    "owned must say which slice the rank updates"
)
_NO_NAME = "unknown name: see the tables of names that you can use"
_KNOWN = {owner.__name__: owner for owner in (Flat, Comm, Unit, Buffer, Strategy)}


def blame(trial: Trial, reference: Callable[[], Trial]) -> Finding:
    """Explain a failed trial; `reference` is a correct run of the same case."""
    failure = trial.failure
    assert failure is not None
    if failure.reason in ("deadlock", "mismatch") and trial.config.mesh.pp > 1:
        return pipelines.parted(trial, failure)
    if failure.reason in ("deadlock", "mismatch"):
        return _parted(trial, failure, reference)
    if trial.config.mesh.tp > 1 and "copies of a weight must be" in failure.text:
        return Finding(failure.text, f"{_COPIES}: {places(trial.records[0])}", None)
    if failure.reason == "ends" or "gradient" in failure.text:
        cause = next((cause for rank in _ranks(trial, failure) if (cause := told(trial, reference(), rank))), None)
        if cause is not None:
            return cause.finding._replace(words=f"{cause.finding.words}: {failure.text}")
        if failure.reason == "ends":
            return Finding(failure.text, _UPDATES, None)
    hint = _NO_END.get(failure.reason) or _hint(failure.text, failure.line)
    at = _freed(trial, failure) or _last(trial, failure.rank)
    # Live buffers do not explain a slip in a line: only a use after the end, or a hoard, is about buffers.
    kinds = ["unsharded_param"] if "is sharded" in failure.text else []
    return Finding(failure.text, hint, at if failure.reason == "endless" else at.only(*kinds))


def _ranks(trial: Trial, failure: Failure) -> list[int]:
    """Return the ranks in whose collectives to look for a cause: all of them, the failed one first."""
    return sorted(range(len(trial.records)), key=lambda rank: rank != failure.rank)


def _freed(trial: Trial, failure: Failure) -> Where | None:
    """Return where parameters were freed that were used afterwards."""
    used = re.search(r"while (\S+) is sharded", failure.text)
    size = trial.gathered_bytes.get(used[1], 0) if used else 0
    record = trial.records[failure.rank]
    allocs = (event for event in record if isinstance(event, Alloc))
    gathered = {alloc.id for alloc in allocs if alloc.nbytes == size and alloc.kind == "unsharded_param"}
    frees = [number for number, event in enumerate(record) if isinstance(event, Free) and event.id in gathered]
    return where(failure.rank, record, frees[-1]) if frees else None


def _hint(words: str, line: str) -> str:
    for pattern, hint in _HINTS:
        if re.search(pattern, words):
            return hint
    missing = re.search(r"'(\w+)' object has no attribute '(\w+)'", words)
    if missing is not None:
        owner = _KNOWN.get(missing[1])
        near = difflib.get_close_matches(missing[2], dir(owner), 2) if owner is not None else []
        return f"did you mean {' or '.join(near)}?" if near else _NO_NAME
    return "" if line else "None of your code was running here. Check what your hooks stored earlier."


def _last(trial: Trial, rank: int) -> Where:
    record = trial.records[rank]
    return where(rank, record, len(record) - 1)


class _Odd(NamedTuple):
    """The ranks whose collectives differ from the others', and each side's call there (None: no more)."""

    ranks: list[int]
    mine: Call | None
    others: list[int]
    theirs: Call | None


def _parted(trial: Trial, failure: Failure, reference: Callable[[], Trial]) -> Finding:
    """Find the first place where some ranks' collectives differ from the others'."""
    odd = _odd_ones_out(trial, reference)
    if odd is None:
        first = failure.text.split("; ")[0].split(" they meet in")[0].rstrip(":")
        return Finding(first, ALIKE, _last(trial, failure.rank).only())
    words = f"{_did(odd.ranks, odd.mine)}, where {_did(odd.others, odd.theirs)}"
    if failure.reason == "deadlock":
        waiting = odd.others if odd.theirs else odd.ranks
        words = f"deadlock: {words}; {ranks_text(waiting)} wait{'s' * (len(waiting) == 1)} for ever"
    rank = odd.ranks[0]
    at = where(rank, trial.records[rank], odd.mine.number).only() if odd.mine else _last(trial, rank).only()
    sides = f"{ranks_text(odd.ranks)} and on {ranks_text(odd.others)}"
    return Finding(words, f"{ALIKE}: look for a condition that differs on {sides}", at)


def _did(ranks: list[int], call: Call | None) -> str:
    return f"{ranks_text(ranks)} call{'s' * (len(ranks) == 1)} {call or 'nothing more'}"


def _odd_ones_out(trial: Trial, reference: Callable[[], Trial]) -> _Odd | None:
    sequences = [calls(record, control=True) for record in trial.records]
    for index in range(max(len(sequence) for sequence in sequences)):
        here: dict[int, Call | None] = {}
        for rank, sequence in enumerate(sequences):
            if index < len(sequence):
                here[rank] = sequence[index]
            elif trial.ended[rank] or (trial.failure is not None and trial.failure.reason == "deadlock"):
                here[rank] = None  # it will never come; a rank that was only stopped may still have one
        sides: dict[object, list[int]] = {}
        for rank, call in here.items():
            sides.setdefault(call.what if call else None, []).append(rank)
        if len(sides) > 1:
            right = _right(reference(), index, here, list(sides.values()))
            odd = next(ranks for ranks in sides.values() if ranks is not right)
            return _Odd(odd, here[odd[0]], right, here[right[0]])
    return None


def _right(reference: Trial, index: int, here: dict[int, Call | None], sides: list[list[int]]) -> list[int]:
    """Return the side that makes the reference's call there, even if it is one rank; else the larger side.

    A majority says little: often only two ranks have come so far when a run ends. If sides are equal and neither has
    the reference's exact call, its op and size decide, then its op.
    """
    sequence = calls(reference.records[0], control=True)
    theirs = sequence[index].what if index < len(sequence) else None

    def likeness(ranks: list[int]) -> tuple[bool, int, bool, bool]:
        call = here[ranks[0]]
        if call is None or theirs is None:
            return False, len(ranks), False, False
        mine = call.what
        return mine == theirs, len(ranks), mine[4:] == theirs[4:], mine[4] == theirs[4]

    return max(sides, key=likeness)
