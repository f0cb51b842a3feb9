"""Every error that zerosim raises on purpose, and every code that a command ends with.

    ZerosimError
    |-- InputError              bad input: a flag, a file, a shape                    exit 2
    |-- OutOfMemory             a device's capacity is exceeded                       exit 3
    |-- RankFailed              a rank could not go on; carries which and where       exit 4
    |   |-- CommError           the ranks' collectives do not fit together
    |   |   |-- Mismatch        two ranks called different things in one round
    |   |   |-- Deadlock        nobody can run: each rank waits for another
    |   |   `-- LateRank        a rank neither arrives nor fails
    |   |-- PlacementError      what the ranks hold does not make up the model
    |   |-- NonFiniteGradient   inf or nan in a gradient, and no scaler to skip it
    |   `-- LossScaleExhausted  dynamic loss scaling would fall below its minimum
    |-- OutputError             what was asked for could not be written               exit 5
    `-- Aborted                 raised inside a rank because another one failed

Messages are one line, or one line and a table: what was seen, what was expected, what to do.

Without an error a command ends with 0; with 1 where `check`, `compare` or `run --verify-memory` found a difference;
with 3 where `plan`, `fit` or `compare` found that nothing fits; with 7 where `grade` found an answer unsolved.
An error of no kind above is zerosim's own mistake: 6.
What is ended from outside returns 128 and a signal's number, as for a shell: 129 its terminal went away, 130 Ctrl-C,
141 the reader of its output went away.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

DIFFERENCE = 1
INTERNAL = 6
UNSOLVED = 7
HUNG_UP = 129
INTERRUPTED = 130
BROKEN_PIPE = 141


def printable(text: str) -> str:
    """Lines of text, and spelled out (\\x1b) what would move a terminal's cursor or is in no encoding."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(
    word: object, known: Iterable[str], otherwise: str, *, most: int = 1, quote: Callable[[str], str] = repr
) -> str:
    """ "did you mean 'ranks'?" with the nearest of the known words or, where none is near, `otherwise`."""
    near = difflib.get_close_matches(str(word), list(known), most)
    return f"did you mean {' or '.join(map(quote, near))}?" if near else otherwise


class ZerosimError(Exception):
    """The root of the tree; `exit_code` is what the command line returns for it."""

    exit_code = INTERNAL


class InputError(ZerosimError, ValueError):
    """Bad input: says what was wrong, what was expected and what to do.

    What is named in it comes from outside: it is made `printable`, and of more than `LONGEST` letters the middle is
    left out.

    `field` is the flat name of the field that is wrong, '' for none; `beside` that of the field it does not go with.
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

        Any other message stays as it is.
        """
        text = str(self)
        begins = self.field and re.match(rf"{self.field}\b", text)
        text = name + text[len(self.field) :] if begins else text
        return InputError(text, field=self.field, beside=self.beside)


def wrong(field: str, text: str, *, beside: str = "") -> InputError:
    """Return the error of one field: the field's name, then `text`, such as ' 3 does not divide ranks 4'."""
    return InputError(field + text, field=field, beside=beside)


class Room(NamedTuple):
    """What an allocator had left when it refused.

    free_bytes      of the capacity, whether a request could have them or not
    largest_hole    the most that one request could have
    reserved_bytes  taken from the device, live or not
    needed_bytes    the capacity with which this request would have been granted
    remedy          what would help, '' for nothing that this allocator knows of
    """

    free_bytes: int
    largest_hole: int
    reserved_bytes: int
    needed_bytes: int
    remedy: str = ""


class OutOfMemory(ZerosimError):
    """A device was asked for more bytes than its capacity leaves.

    `live` holds the live bytes by kind when the request of `requested` bytes for `kind` was made, `by_unit` those by
    unit and kind; `room` what the allocator had left, where the capacity alone does not say why it refused;
    `advice`, where a run was given, the cheapest change that was tried and fits.
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


class RankFailed(ZerosimError):
    """A rank could not go on. The original exception, if any, is the `__cause__`."""

    exit_code = 4

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CommError(RankFailed):
    """The collectives that the ranks called do not fit together."""


class Mismatch(CommError):
    """Two ranks joined one round with different operations, shapes or dtypes."""


class Deadlock(CommError):
    """No rank can run: each waits for a round that another one never joins."""


class LateRank(CommError):
    """A rank does nothing for longer than the world's patience while others wait for it."""


class NonFiniteGradient(RankFailed):
    """A gradient holds inf or nan and no loss scaler is there to skip the step."""


class LossScaleExhausted(RankFailed):
    """An overflow at the minimum loss scale: there is nothing left to halve."""


class OutputError(ZerosimError):
    """A file, or stdout, took less than all of what was asked for: a full disk, a closed stream."""

    exit_code = 5


class Aborted(ZerosimError):
    """Raised inside a rank to end it because another rank failed or the run was interrupted."""


class PlacementError(RankFailed):
    """What the ranks hold does not make up the model: a hole, or copies that differ."""


def exit_code(error: BaseException) -> int:
    """What a command that ends with this error returns."""
    if isinstance(error, BrokenPipeError) or isinstance(error.__cause__, BrokenPipeError):
        return BROKEN_PIPE
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.exit_code if isinstance(error, ZerosimError) else INTERNAL


def message_of(error: BaseException) -> str:
    """`str(error)`; of an exception whose own `__str__` or `__repr__` raises, that it does. Raises nothing."""
    try:
        return str(error)
    except BaseException as second:  # whatever it is, the error that is told is the first
        return f"(it cannot be shown: its message raised {type(second).__name__})"


def described(error: BaseException) -> str:
    """'ValueError: what it says'."""
    return f"{type(error).__name__}: {message_of(error)}"
