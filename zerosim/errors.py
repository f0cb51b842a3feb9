"""Every error that zerosim raises on purpose.

    ZerosimError
    |-- InputError              bad input: a flag, a file, a shape                    exit 2
    |-- OutOfMemory             a device's capacity is exceeded                       exit 3
    |-- RankFailed              a rank could not go on; carries which and where       exit 4
    |   |-- CommError           the ranks' collectives do not fit together
    |   |   |-- Mismatch        two ranks called different things in one round
    |   |   |-- Deadlock        nobody can run: each rank waits for another
    |   |   `-- LateRank        a rank neither arrives nor fails
    |   |-- NonFiniteGradient   inf or nan in a gradient, and no scaler to skip it
    |   `-- LossScaleExhausted  dynamic loss scaling would fall below its minimum
    `-- Aborted                 raised inside a rank because another one failed

Messages are one line, or one line and a table: what was seen, what was expected, what to do.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Lines of text, and spelled out (\\x1b) what would move a terminal's cursor or is in no encoding."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class ZerosimError(Exception):
    """The root of the tree; `exit_code` is what the command line returns for it."""

    exit_code = 1


class InputError(ZerosimError, ValueError):
    """Bad input: says what was wrong, what was expected and what to do.

    What is named in it comes from outside: it is made `printable`, and of more than `LONGEST` letters the middle is
    left out.
    """

    LONGEST = 2000
    exit_code = 2

    def __init__(self, message: str) -> None:
        half = self.LONGEST // 2
        text = message if len(message) <= self.LONGEST else f"{message[:half]} [...] {message[-half:]}"
        super().__init__(printable(text))


class OutOfMemory(ZerosimError):
    """A device was asked for more bytes than its capacity leaves.

    `live` holds the live bytes by kind when the request of `requested` bytes for `kind` was made;
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
        advice: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.requested = requested
        self.kind = kind
        self.capacity = capacity
        self.where = where
        self.live = live or {}
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


class Aborted(ZerosimError):
    """Raised inside a rank to end it because another rank failed or the run was interrupted."""
