"""One contiguous region: its holes, and moving what lives when no hole is large enough."""

from __future__ import annotations

import random

import pytest

from zerosim.config.allocator import arena_knobs
from zerosim.device.allocators.arena import Arena
from zerosim.device.allocators.choose import make_allocator
from zerosim.device.events import Move, Segment
from zerosim.errors import InputError


def made(capacity: int, conf: str | None = None) -> Arena:
    return Arena(capacity, arena_knobs(conf))


def holed(conf: str | None) -> Arena:
    """100 bytes: 10 free, 20 live, 30 free, 20 live, 20 free."""
    arena = made(100, conf)
    for id, size in enumerate((10, 20, 30, 20)):
        arena.reserve(id, size)
    arena.release(0)
    arena.release(2)
    arena.forget()
    return arena


@pytest.mark.parametrize(("fit", "address"), [("best", 80), ("first", 30)])
def test_best_and_first_fit(fit: str, address: int) -> None:
    arena = holed(f"fit:{fit}")
    assert arena.reserve(9, 15) == 15
    assert arena.address_of(9) == address


def test_without_defragmentation_a_request_fails_with_free_bytes_left() -> None:
    arena = holed("defragment:False")
    assert arena.reserve(9, 31) is None
    room = arena.room(31)
    assert (room.free_bytes, room.largest_hole, room.reserved_bytes, room.needed_bytes) == (60, 30, 100, 101)
    assert "defragment:True" in room.remedy
    assert arena.reserve(9, 30) == 30


def test_defragmentation_moves_what_lives_to_the_start() -> None:
    arena = holed("defragment:True")
    assert arena.reserve(9, 31) == 31
    assert arena.changes == [(Move, (1, 10, 0, 20)), (Move, (3, 60, 20, 20))]
    assert [arena.address_of(id) for id in (1, 3, 9)] == [0, 20, 40]
    assert arena.reserve(10, 30) is None  # there are 29: that is no fragmentation
    assert (arena.room(30).needed_bytes, arena.room(30).remedy) == (101, "")


def test_an_arena_needs_a_size() -> None:
    assert make_allocator("arena", 7).changes == [(Segment, (0, 7))]
    with pytest.raises(InputError, match="--capacity"):
        make_allocator("arena", None)


@pytest.mark.parametrize("conf", ["fit:best", "fit:first", "fit:best,defragment:False"])
def test_random_requests_keep_what_they_wrote(conf: str) -> None:
    """Each request fills its bytes with a pattern of its own, and every move is done: none is ever overwritten."""
    draw, arena, memory = random.Random(conf), made(2000, conf), bytearray(2000)
    live: dict[int, int] = {}
    moves = refused = 0
    for id in range(1500):
        if live and draw.random() < 0.45:
            gone = draw.choice(list(live))
            arena.release(gone)
            del live[gone]
            continue
        nbytes = draw.choice((0, 1, 7, 40, 160, 400))
        free = 2000 - sum(live.values())
        granted = arena.reserve(id, nbytes)
        for event, numbers in arena.changes:
            if event is Move:
                _, source, target, size = numbers
                memory[target : target + size] = memory[source : source + size]
                moves += 1
        arena.forget()
        if granted is None:
            refused += 1
            assert nbytes > free or "defragment:False" in conf
        else:
            live[id] = nbytes
            start = arena.address_of(id)
            memory[start : start + nbytes] = bytes([id % 251]) * nbytes
        assert arena.free_bytes == 2000 - sum(live.values())
        for other, size in live.items():
            start = arena.address_of(other)
            assert memory[start : start + size] == bytes([other % 251]) * size
    assert refused
    assert (moves > 0) == ("defragment:False" not in conf)
    for id in live:
        arena.release(id)
    assert arena.room(0).largest_hole == 2000
