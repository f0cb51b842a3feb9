"""The exercise on best fit: a region that is handed out in pieces, and whose holes are split and merged.

An answer is first asked about small regions that fit on paper, and about a long stream of requests. Then it trains: it
hands out the memory of every device of a run, and each of its replies is checked there, too.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zerosim.device.memory import Change
from zerosim.errors import InputError, Room
from zerosim.grading.adapting import name_of
from zerosim.grading.asking import Examination, Keep, Wrong
from zerosim.grading.plain import plain, shown
from zerosim.grading.trial import Own
from zerosim.train.plan import peak_of
from zerosim.units import few

MERGE = "holes that touch are one hole: look both behind the released piece and before it"


class Stream(NamedTuple):
    """Requests of a region: a number of bytes or, below 0, the release of the n-th request's bytes."""

    capacity: int
    requests: tuple[int, ...]
    hint: str


STREAMS = (
    Stream(100, (10, 20, 70), "a new region is one hole at 0; the rest of a hole begins behind the "
        "piece that was taken"),
    Stream(100, (60, 41, 40, 1), "None where no hole is large enough; a hole of just that size is used up"),
    Stream(100, (30, 10, 15, 45, -1, -3, 12, 3, 30), "the smallest hole that is large enough, not the first"),
    Stream(100, (20, 10, 20, 50, -3, -1, 20), "among holes of the same size, the lowest"),
    Stream(100, (30, 30, 40, -2, -1, 60), MERGE),
    Stream(100, (30, 30, 40, -1, -2, 60), MERGE),
    Stream(100, (20, 20, 20, 40, -1, -3, -2, 60, -4, 40), MERGE),
)  # fmt: skip


class Book:
    """A region's live parts (size by address), and its correct replies."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.live: dict[int, int] = {}

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Size and address, in the order of the addresses."""
        ends = [0, *(address + size for address, size in sorted(self.live.items()))]
        starts = [*sorted(self.live), self.capacity]
        return [(start - end, end) for end, start in zip(ends, starts, strict=True) if start > end]

    def best(self, nbytes: int) -> int | None:
        """Return the address of the smallest hole of at least so many bytes; of equal ones the lowest."""
        return min((hole for hole in self.holes if hole[0] >= nbytes), default=(0, None))[1]

    def wrong(self, nbytes: int, came: Any) -> str:
        """Return the error in the reply to a request, '' for none."""
        right = self.best(nbytes)
        if type(came) is type(right) and came == right:
            return ""
        holes = [f"{size:,} B at {address:,}" for size, address in self.holes]
        return f"reserve({nbytes}) is {shown(came)}, expected {right}; holes: {few(holes, 6) or 'none'}"


def arena(answer: Any) -> Own:
    """Make a run whose devices' memory the given class hands out. Raises: InputError for anything else."""
    if not inspect.isclass(answer) or not all(hasattr(answer, name) for name in ("reserve", "release")):
        raise InputError(f"{name_of(answer)} is not an arena: hand in the class itself, with reserve and release")
    return Own(allocator=lambda config: _Handed(answer, 2 * peak_of(config)))


class _Handed:
    """A student's allocator. The end of a buffer cannot fail, so an error of `release` is raised at the next
    request."""

    def __init__(self, made: Callable[[int], Any], capacity: int) -> None:
        self.capacity: int | None = capacity
        self.changes: tuple[Change, ...] = ()
        self._arena, self._book = made(capacity), Book(capacity)
        self._addresses: dict[int, int] = {}
        self._raised: Exception | None = None

    def forget(self) -> None:
        """Return nothing: an arena has no events of its own."""

    def reserve(self, id: int, nbytes: int) -> int | None:
        """Reserve bytes. Raises: InputError for an address that is not the best hole's; an earlier error of
        `release`."""
        if self._raised is not None:
            raise self._raised
        if not nbytes:
            return 0
        came = plain(self._arena.reserve(nbytes))
        if words := self._book.wrong(nbytes, came):
            raise InputError(words)
        if came is None:
            return None
        self._addresses[id], self._book.live[came] = came, nbytes
        return nbytes

    def release(self, id: int) -> None:
        address = self._addresses.pop(id, None)
        if address is not None:
            del self._book.live[address]
            try:
                self._arena.release(address)
            except Exception as error:
                self._raised = error

    def room(self, nbytes: int) -> Room:
        sizes, capacity = [size for size, _ in self._book.holes], self._book.capacity
        return Room(sum(sizes), max(sizes, default=0), capacity, capacity + nbytes)


def _ask(answer: Any, stream: Any, keep: Keep) -> None:
    """Ask a stream. Each piece is a request's reply: an address, or None for a release and for no room."""
    arena, given = answer(stream.capacity), list[Any]()
    for request in stream.requests:
        if request > 0:
            given.append(keep(arena.reserve(request)))
        else:
            arena.release(given[-request - 1])
            keep(None)


def _said(stream: Stream, came: Sequence[Any]) -> list[str]:
    """Return the requests up to the first without a reply, in words."""
    said, given = [f"a region of {stream.capacity:,} B"], list[Any]()
    for number, request in enumerate(stream.requests[: len(came) + 1]):
        if request > 0:
            said.append(f"reserve({request})")
            given += came[number : number + 1]
        else:
            said.append(f"release({shown(given[-request - 1])})")
    return said


def _words(stream: Any, came: Sequence[Any]) -> str:
    return _last_of(_said(stream, came))


def _wrong(stream: Any, came: Sequence[Any]) -> Wrong | None:
    """Return the first reply that differs from best fit."""
    book, given = Book(stream.capacity), list[int | None]()
    for number, (request, address) in enumerate(zip(stream.requests, came, strict=False)):
        if request > 0 and (words := book.wrong(request, address)):
            return f"{_last_of(_said(stream, came[:number])[:-1])}: {words}", stream.hint
        _follow(book, request, given, address)
    return None


def _long_stream(seed: int) -> Stream:
    """Return 400 requests in no order, and the release of all live parts; the last takes the whole region."""
    draw, book, requests, granted = random.Random(3 + seed), Book(2000), list[int](), list[int | None]()
    while len(requests) < 400:
        live = [at for at, address in enumerate(granted) if address is not None]
        if live and draw.random() < 0.45:
            requests.append(-draw.choice(live) - 1)
        else:
            requests.append(draw.choice((1, 7, 40, 40, 160, 400)))
        _follow(book, requests[-1], granted, book.best(requests[-1]))
    requests += [-at - 1 for at, address in enumerate(granted) if address is not None]
    return Stream(book.capacity, (*requests, book.capacity), MERGE)


def _follow(book: Book, request: int, granted: list[int | None], address: int | None) -> None:
    """Enter a request's grant in the book, or the release of an earlier one."""
    if request > 0:
        granted.append(address)
        if address is not None:
            book.live[address] = request
    else:
        freed = granted[-request - 1]
        assert freed is not None  # by the streams
        del book.live[freed]
        granted[-request - 1] = None


def _last_of(said: list[str]) -> str:
    """Return the requests before, at most the last six."""
    head = said[:1] if len(said) <= 7 else [said[0], f"{len(said) - 7} requests"]
    return ", ".join([*head, *said[1:][-6:]])


EXAMINATION = Examination(lambda seed: (*STREAMS, _long_stream(seed)), _ask, _words, _wrong)
