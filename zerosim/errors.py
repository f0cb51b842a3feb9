"""Every error that zerosim raises on purpose, and every exit code of a command.

    ZerosimError
    |-- InputError              bad input: a flag, a file, a shape                    exit 2
    |-- OutOfMemory             a device's or a node's capacity is exceeded            exit 3
    |-- RankFailed              a rank could not go on; names the rank and the place   exit 4
    |   |-- CommError           the ranks' collectives do not fit together
    |   |   |-- Mismatch        two ranks called different operations in one round
    |   |   |-- Deadlock        no rank can run: each waits for another
    |   |   `-- LateRank        a rank neither arrives nor fails
    |   |-- PlacementError      the ranks' pieces do not make up the model
    |   |-- NonFiniteGradient   inf or nan in a gradient, and no scaler to skip it
    |   `-- LossScaleExhausted  dynamic loss scaling would fall below its minimum
    |-- OutputError             an output could not be written                         exit 5
    `-- Aborted                 raised inside a rank because another one failed

Messages are one line, or one line and a table: what was seen, what was expected, what to do.

Without an error a command ends with 0; with 1 where `check`, `compare` or `run --verify-memory` found a difference, and
where `course --check` found a notebook that does not run to its end;
with 3 where `plan`, `fit`, `compare` or `advise` found that nothing fits;
with 7 where `grade` found an answer unsolved.
Any other error is zerosim's own mistake: 6.
A command that a signal ends returns 128 plus the signal's number, as in a shell: 129 its terminal closed, 130 Ctrl-C,
141 the reader of its output closed, 143 SIGTERM.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

DIFFERENCE = 1
INTERNAL = 6
UNSOLVED = 7
HUNG_UP = 129
INTERRUPTED = 130
BROKEN_PIPE = 141


def printable(text: str) -> str:
    """Return lines of text, with control characters and unencodable letters spelled out (\\x1b)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(
    word: object, known: Iterable[str], otherwise: str, *, most: int = 1, quote: Callable[[str], str] = repr
) -> str:
    """Return "did you mean 'ranks'?" with the nearest of the known words, or `otherwise` if none is near."""
    near = difflib.get_close_matches(str(word), list(known), most)
    return f"did you mean {' or '.join(map(quote, near))}?" if near else otherwise


class ZerosimError(Exception):
    """The root of the tree; `exit_code` is the command line's exit code for it."""

    exit_code = INTERNAL


class InputError(ZerosimError, ValueError):
    """Bad input: says what was wrong, what was expected and what to do.

    Text from outside is made `printable`; beyond `LONGEST` letters its middle is
    left out.

    `field` is the flat name of the wrong field, '' for none; `beside` names the field that it contradicts.
    """

    LONGEST = 2000
    exit_code = 2

    def __init__(self, message: str, *, field: str = "", beside: str = "") -> None:
        half = self.LONGEST // 2
        text = message if len(message) <= self.LONGEST else f"{message[:half]} [...] {message[-half:]}"
        super().__init__(printable(text))
        self.field, self.beside = field, beside

    def called(self, name: str) -> InputError:
        """Return a copy whose message begins with `name` where this one begins with the field: '--tp 3 does not ...'.

        Any other message stays the same.
        """
        text = str(self)
        begins = self.field and re.match(rf"{self.field}\b", text)
        text = name + text[len(self.field) :] if begins else text
        return InputError(text, field=self.field, beside=self.beside)


def wrong(field: str, text: str, *, beside: str = "") -> InputError:
    """Return the error of one field: the field's name, then `text`, such as ' 3 does not divide ranks 4'."""
    return InputError(field + text, field=field, beside=beside)


class Room(NamedTuple):
    """An allocator's free memory at a refusal.

    free_bytes      free bytes of the capacity, usable or not
    largest_hole    the largest possible request
    reserved_bytes  bytes taken from the device, live or not
    needed_bytes    the capacity with which this request would have been granted
    remedy          a remedy, '' if this allocator knows none
    """

    free_bytes: int
    largest_hole: int
    reserved_bytes: int
    needed_bytes: int
    remedy: str = ""


class OutOfMemory(ZerosimError):
    """A device, or a node, was asked for more bytes than its capacity leaves.

    `live` holds the live bytes by kind at the request of `requested` bytes for `kind`, `by_unit` those by
    unit and kind; `room` the allocator's free memory, if the capacity alone does not explain the refusal;
    `advice`: the cheapest tried change that fits, '' if none does, None if none was tried. `memory`: the device's, or
    one of its node's, of which each rank of the node holds at most `held` bytes.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        rank: int = 0,
        requested: int = 0,
        kind: str = "",
        capacity: int = 0,
        where: str = "",
        live: dict[str, int] | None = None,
        room: Room | None = None,
        advice: str | None = None,
        memory: str = "device",
        held: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.requested = requested
        self.kind = kind
        self.capacity = capacity
        self.where = where
        self.live = live or {}
        self.by_unit: dict[tuple[str, str], int] = {}
        self.room = room
        self.advice = advice
        self.memory = memory
        self.held = dict(held or {})


class RankFailed(ZerosimError):
    """A rank could not go on. The original exception, if any, is the `__cause__`."""

    exit_code = 4

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CommError(RankFailed):
    """The ranks' collectives do not match."""


class Mismatch(CommError):
    """Two ranks joined one round with different operations, shapes or dtypes."""


class Deadlock(CommError):
    """No rank can run: each waits for a round that another one never joins."""


class LateRank(CommError):
    """A rank does nothing for longer than the world's timeout while others wait for it."""


class NonFiniteGradient(RankFailed):
    """A gradient holds inf or nan and no loss scaler is there to skip the step."""


class LossScaleExhausted(RankFailed):
    """An overflow at the minimum loss scale: there is nothing left to halve."""


class OutputError(ZerosimError):
    """A file, or stdout, could not be written completely: a full disk, a closed stream."""

    exit_code = 5


class Aborted(ZerosimError):
    """Raised inside a rank to end it because another rank failed or the run was interrupted."""


class PlacementError(RankFailed):
    """The ranks' pieces do not make up the model: a hole, or copies that differ."""


class Ended(KeyboardInterrupt):
    """A signal ended a command, or a run that has files to remove."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.exit_code = 128 + number


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ends with this error."""
    if isinstance(error, BrokenPipeError) or isinstance(error.__cause__, BrokenPipeError):
        return BROKEN_PIPE
    if isinstance(error, KeyboardInterrupt):
        return error.exit_code if isinstance(error, Ended) else INTERRUPTED
    return error.exit_code if isinstance(error, ZerosimError) else INTERNAL


def message_of(error: BaseException) -> str:
    """Return `str(error)`, or a note if the exception's `__str__` or `__repr__` raises. Raises nothing."""
    try:
        return str(error)
    except BaseException as second:  # whatever it is, report the first error
        return f"(it cannot be shown: its message raised {type(second).__name__})"


def described(error: BaseException) -> str:
    """Return 'ValueError: message'."""
    return f"{type(error).__name__}: {message_of(error)}"
