"""The ring that the lesson walks is the ring that zerosim runs, and its pictures are read from the events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.comm.runtime import Context
from zerosim.device.events import Message
from zerosim.errors import InputError
from zerosim.lessons import rings
from zerosim.tensor.tensor import tensor


@pytest.fixture
def cells(defined: Any) -> dict[str, Any]:
    """Notebook 03's imports, `ring_hop` and `walk_the_ring`."""
    names: dict[str, Any] = defined("03", "01", "05", "07")
    return names


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_each_hop_sends_one_chunk_to_the_right(ranks: int, cells: dict[str, Any]) -> None:
    walk = rings.record(cells["walk_the_ring"], ranks)
    for rank, events in enumerate(walk.events):
        messages = [event for event in events if isinstance(event, Message)]
        assert [message.scope.slot for message in messages] == list(range(2 * (ranks - 1)))
        for message in messages:
            assert message.peer == (rank + 1) % ranks
            assert message.scope.unit == f"chunk {(rank - 1 - message.scope.slot) % ranks}"
            assert message.nbytes * message.count == 4


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_half_way_everybody_has_its_own_chunk_and_at_the_end_all(ranks: int, cells: dict[str, Any]) -> None:
    held = np.stack(rings.record(cells["walk_the_ring"], ranks).results)
    full = sum(10**rank for rank in range(ranks))
    assert held.shape == (ranks, 2 * ranks - 1, ranks)
    finished = held[:, ranks - 1] == full
    assert np.array_equal(finished, np.eye(ranks, dtype=bool))
    assert (held[:, -1] == full).all()


def test_the_walked_ring_gives_the_bits_and_bytes_of_zerosims_ring(cells: dict[str, Any]) -> None:
    values = np.random.default_rng(0).standard_normal((4, 4, 7)).astype(np.float32)

    def by_hand(ctx: Context) -> Any:
        chunks = tensor(values[ctx.rank], ctx.device, dtype="bf16")
        for hop in range(6):
            cells["ring_hop"](ctx, chunks, hop)
        return chunks.numpy()

    def built_in(ctx: Context) -> Any:
        chunks = tensor(values[ctx.rank], ctx.device, dtype="bf16")
        ctx.comm.all_reduce(chunks.buffer, op="sum")
        return chunks.numpy()

    walked, ring, direct = (
        rings.record(by_hand, 4),
        rings.record(built_in, 4, "ring"),
        rings.record(built_in, 4, "direct"),
    )
    assert np.array_equal(walked.results, ring.results)
    assert not np.array_equal(ring.results[0], direct.results[0])
    assert walked.sent_bytes == ring.sent_bytes == direct.sent_bytes == [2 * 3 * 7 * 2] * 4


def test_who_sent_to_whom(defined: Any) -> None:
    sent_matrix = defined("03", "01", "05", "07", "12", "14")["sent_matrix"]

    def program(ctx: Context) -> None:
        ctx.comm.all_reduce(tensor(np.ones(8), ctx.device).buffer)

    ring = sent_matrix(rings.record(program, 4, "ring"))
    direct = sent_matrix(rings.record(program, 4))
    assert np.array_equal(ring, 48 * np.roll(np.eye(4, dtype=int), 1, axis=1))
    assert np.array_equal(direct, 16 * (1 - np.eye(4, dtype=int)))

    def uneven(ctx: Context) -> None:
        ctx.comm.all_reduce(tensor(np.ones(9), ctx.device).buffer)

    with pytest.raises(AssertionError, match="N must divide the length"):
        sent_matrix(rings.record(uneven, 4))


@pytest.mark.slow
def test_the_picture_shows_what_ranks_held_and_an_arrow_per_message(cells: dict[str, Any]) -> None:
    walk = rings.record(cells["walk_the_ring"], 4)
    (axes,) = rings.ring_figure(walk, 0, 3).axes
    words = [text.get_text() for text in axes.texts]
    assert words.count("1111") == 4
    assert [word for word in words if word.startswith(("before", "after"))] == [
        *(f"before hop {hop}" for hop in range(3)),
        "after hop 2",
    ]
    arrows = [text for text in axes.texts if getattr(text, "arrow_patch", None) is not None]
    assert len(arrows) == 3 * (3 + 2)  # one of four goes round the end, in two pieces
    grids = rings.matrix_figure({"ring": np.zeros((2, 2), int)})
    assert len(grids.axes) == 1


@pytest.mark.parametrize("ranks", [1, 7])
def test_a_ring_that_cannot_be_drawn_is_refused(ranks: int) -> None:
    walk = rings.Recording([np.zeros((2 * ranks, ranks))] * ranks, [[]] * ranks)
    with pytest.raises(InputError, match=f"{ranks} ranks in a drawn ring"):
        rings.ring_figure(walk, 0, 1)


def test_hops_that_were_not_walked_are_refused() -> None:
    walk = rings.Recording([np.zeros((5, 3))] * 3, [[]] * 3)
    with pytest.raises(InputError, match="hops 3 to 9"):
        rings.ring_figure(walk, 3, 9)
    with pytest.raises(InputError, match="no matrices"):
        rings.matrix_figure({})
