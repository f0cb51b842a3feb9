"""A failed run in words: which rank, at which event, the strategy's own line, and a hint.

Owns what each way to fail looks like to the one who wrote the strategy.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from typing import NamedTuple

from zerosim.comm.collectives import Comm
from zerosim.device import Buffer
from zerosim.grading.looking import Call, Where, calls, where
from zerosim.grading.trial import Failure, Trial
from zerosim.nn import Unit
from zerosim.parallel.base import Strategy
from zerosim.record import Alloc, Free
from zerosim.sharding import Flat

ALIKE = "every rank must call the same collectives in the same order, whatever it owns"
_HINTS = (
    (r"while \S+ is sharded|is sharded$", "it was freed before its last use, or never gathered: all_gather before "
     "each use (pre_forward, pre_backward), reshard only after it (post_forward, post_backward)"),
    (r"expected one dimension and a multiple|has shape|cannot reshape|could not be broadcast|broadcast together",
     "a buffer has the wrong number of elements: whole buffers have flat.padded_numel, slices flat.own.size"),
    (r"lies on rank", "ranks are threads of one process: what is a rank's own belongs in self, made in __init__, "
     "not in the class or the module"),
    (r"'Work' object", "wait=False gives a Work; its wait() gives the buffer"),
    (r"waits twice", "a Work is waited for once: take it out of where you keep it (pop)"),
    (r"is not kept whole", "call flat.add_grad_whole(flat.take_grad()) first"),
    (r"no gradient", "every unit whose .reduces is true must leave a grad_shard before the step, on every rank"),
    (r"elements of gradient", "whole buffers have flat.padded_numel elements, slices flat.own.size"),
    (r"unexpected keyword|positional argument", "keep the arguments that the points have in the skeleton"),
    (r"object has no attribute '(comm|device|updater|flats|last)'",
     "call super().__init__(comm, device, updater) first in your own __init__"),
    (r"not finite|NonFinite", "a new buffer holds anything until it is written: is one used that nothing filled?"),
    (r"expected (fp32|bf16)", "parameters travel as flat.shard() and gradients as take_grad() gives them, in bf16"),
    (r"NoneType", "something is not there: parameters before they are gathered, a gradient before it is taken, "
     "or what a function returns without `return`"),
)  # fmt: skip


class Blame(NamedTuple):
    """What happened, a hint, and where."""

    words: str
    hint: str
    where: Where


def blame(trial: Trial) -> Blame:
    """Of a failed trial."""
    failure = trial.failure
    assert failure is not None
    if failure.reason in ("deadlock", "mismatch"):
        return _parted(trial, failure)
    hint = {
        "stuck": "a loop without an end, or a sleep, in your own code: nothing that zerosim counts happens in it",
        "endless": "a loop without an end: it goes on calling kernels or collectives",
    }.get(failure.reason, "")
    words = failure.text
    if failure.shape:
        words += f" ({failure.shape})"
    return Blame(words, hint or _hint(words, failure.line), _freed(trial, failure) or _last(trial, failure.rank))


def _freed(trial: Trial, failure: Failure) -> Where | None:
    """Of parameters that were used after they were freed: where that was."""
    used = re.search(r"while (\S+) is sharded", failure.text)
    size = trial.gathered_bytes.get(used[1], 0) if used else 0
    record = trial.records[failure.rank]
    gathered = {event.id for event in record if isinstance(event, Alloc) and event.nbytes == size}
    gathered &= {event.id for event in record if isinstance(event, Alloc) and event.kind == "unsharded_param"}
    frees = [number for number, event in enumerate(record) if isinstance(event, Free) and event.id in gathered]
    return where(failure.rank, record, frees[-1]) if frees else None


def _hint(words: str, line: str) -> str:
    for pattern, hint in _HINTS:
        if re.search(pattern, words):
            return hint
    missing = re.search(r"'(\w+)' object has no attribute '(\w+)'", words)
    if missing is not None:
        known = [
            name
            for owner in (Flat, Comm, Unit, Buffer, Strategy)
            if owner.__name__ == missing[1]
            for name in dir(owner)
        ]
        near = difflib.get_close_matches(missing[2], known, 2)
        return (
            f"did you mean {' or '.join(near)}?" if near else "there is no such name: see the tables of what you have"
        )
    if line:
        return "the run ended in that line of yours; what the rank held then is listed above"
    return "no line of yours ran at that moment: look at what your points left behind for it"


def _last(trial: Trial, rank: int) -> Where:
    record = trial.records[rank]
    return where(rank, record, len(record) - 1)


class _Odd(NamedTuple):
    """The rank whose collectives part from the others', and the call of each there (None: none any more)."""

    rank: int
    mine: Call | None
    others: Call | None


def _parted(trial: Trial, failure: Failure) -> Blame:
    """Collectives that do not fit together: the first place where one rank's are not the others'."""
    odd = _odd_one_out(trial)
    first = failure.text.split("; ")[0].split(" they meet in")[0].rstrip(":")
    if odd is None:
        return Blame(first, ALIKE, _last(trial, failure.rank))
    did = f"calls {odd.mine}" if odd.mine else "calls nothing more"
    others = f"the others call {odd.others}" if odd.others else "the others call nothing more"
    words = f"rank {odd.rank} {did}, where {others}"
    if failure.reason == "deadlock":
        words = f"deadlock: {words}, and wait for it for ever"
    record = trial.records[odd.rank]
    number = odd.mine.number if odd.mine else len(record) - 1
    return Blame(
        words, f"{ALIKE}: look for a condition that rank {odd.rank} takes differently", where(odd.rank, record, number)
    )


def _odd_one_out(trial: Trial) -> _Odd | None:
    sequences = [calls(record, control=True) for record in trial.records]
    for index in range(max(len(sequence) for sequence in sequences)):
        here: dict[int, Call | None] = {}
        for rank, sequence in enumerate(sequences):
            if index < len(sequence):
                here[rank] = sequence[index]
            elif trial.ended[rank] or (trial.failure is not None and trial.failure.reason == "deadlock"):
                here[rank] = None  # it will never come; a rank that was only stopped may yet have
        kinds = Counter(call.what if call else None for call in here.values())
        if len(kinds) > 1:
            usual, _ = kinds.most_common(1)[0]
            rank = max(rank for rank, call in here.items() if (call.what if call else None) != usual)
            others = next(call for call in here.values() if (call.what if call else None) == usual)
            return _Odd(rank, here[rank], others)
    return None
