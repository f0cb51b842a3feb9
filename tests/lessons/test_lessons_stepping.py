"""Where the notebooks stop a world, and what they read off it: batches, gradients, bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerosim
from zerosim.device.events import Launch
from zerosim.errors import InputError
from zerosim.lessons import stepping

SMALL = zerosim.RunConfig(stage=0, ranks=3, steps=1, layers=2, hidden=16, heads=2, seq=8, micro_batch=2, vocab=256)


def of_stage(stage: int, **changes: Any) -> zerosim.RunConfig:
    return SMALL.replace(stage=stage, **changes)


def test_a_rank_alone_on_its_batch_has_the_loss_that_it_had_among_others(tmp_path: Path) -> None:
    together = zerosim.run(SMALL)
    for rank, micro_batches in enumerate(stepping.rank_batches(SMALL)):
        file = tmp_path / f"{rank}.npz"
        np.savez(file, tokens=np.stack(micro_batches))
        alone = zerosim.run(SMALL.replace(ranks=1, tokens=str(file)))
        assert alone.losses[0][0] == together.losses[0][rank]


def test_batches_of_every_micro_batch_and_step() -> None:
    config = SMALL.replace(accumulate=2)
    batches = stepping.rank_batches(config, step=1)
    assert [[batch.shape for batch in own] for own in batches] == [[(2, 9)] * 2] * 3
    assert not np.array_equal(batches[0][0], stepping.rank_batches(config)[0][0])
    with pytest.raises(InputError, match="tokens"):
        stepping.rank_batches(SMALL.replace(tokens="x.npz"))


def test_ids_as_text() -> None:
    assert stepping.as_text([65, 10, 200, 66]) == "A..B"
    assert stepping.as_text(list(b"abcdef"), most=3) == "abc"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_but_the_last_rank_have_joined_where_they_meet(stage: int) -> None:
    op = "all_reduce" if stage == 0 else "reduce_scatter"
    with zerosim.debug(of_stage(stage)) as world:
        meeting = stepping.meet(world, op)
        assert (meeting.op, [rank for rank, _ in meeting.joined], meeting.missing) == (op, [0, 1], (2,))
        coming = world.ranks[2].coming
        assert coming is not None
        assert isinstance(coming.event, Launch)
        stepping.leave(world)
        assert not world.inbox
        again = stepping.meet(world, "all_gather") if stage else None
        assert again is None or again.missing == (2,)


def test_ranks_line_up_before_the_next_of_an_event() -> None:
    with zerosim.debug(of_stage(3, steps=2)) as world:
        for step in range(2):
            stepping.line_up(world, "after_step")
            comings = [rank.coming for rank in world.ranks]
            assert all(coming is not None and coming.event.scope.step == step for coming in comings)
            assert all(coming is not None and "after_step" in coming.text for coming in comings)
        with pytest.raises(InputError, match="finished"):
            stepping.line_up(world, "after_step")
    with zerosim.debug(SMALL) as world, pytest.raises(InputError, match="all_reduce"):
        stepping.line_up(world, "all_reduse")


def test_one_rank_has_nobody_to_meet() -> None:
    with zerosim.debug(SMALL.replace(ranks=1)) as world, pytest.raises(InputError, match="ranks=2"):
        stepping.meet(world, "all_reduce")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_before_and_after_the_all_reduce(precision: str) -> None:
    with zerosim.debug(SMALL.replace(precision=precision)) as world:
        stepping.meet(world, "all_reduce")
        before = stepping.gradients(world, "h.0")
        stepping.leave(world)
        after = stepping.gradients(world, "h.0")
    assert not np.array_equal(before[0], before[1])
    expected = stepping.mean_of_ranks(before, precision)
    for values in after:
        assert np.array_equal(values, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_slice_of_a_gradient_is_that_part_of_the_mean(stage: int) -> None:
    with zerosim.debug(SMALL) as world:
        stepping.meet(world, "all_reduce")
        mean = stepping.mean_of_ranks(stepping.gradients(world, "h.1"))
    with zerosim.debug(of_stage(stage)) as world:
        stepping.line_up(world, "end_of_backward")
        pieces = [stepping.gradient(world, rank, "h.1") for rank in range(3)]
    assert not any(piece.is_whole for piece in pieces)
    assert np.array_equal(np.concatenate([piece.values for piece in pieces]), mean)  # padding left out
    for piece in pieces:
        assert np.array_equal(piece.values, mean[piece.start : piece.stop])


def test_a_gradient_that_is_not_there_is_refused_in_words() -> None:
    with zerosim.debug(of_stage(3)) as world:
        stepping.meet(world, "all_gather")
        with pytest.raises(InputError, match=r"rank 1 holds no gradient of h\.0 now"):
            stepping.gradient(world, 1, "h.0")
        with pytest.raises(InputError, match="expected one of wte"):
            stepping.gradient(world, 1, "lm_head")
    with pytest.raises(InputError, match="no gradients"):
        stepping.mean_of_ranks([])


def test_the_bars_of_ranks_have_their_bytes() -> None:
    with zerosim.debug(SMALL) as world:
        stepping.meet(world, "all_reduce")
        snapshots = [rank.memory() for rank in world.ranks]
    figure = stepping.ranks_figure(snapshots, "title")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert figure._repr_png_()
    with pytest.raises(InputError, match="no ranks"):
        stepping.ranks_figure([], "title")


def test_the_most_of_a_kind_is_no_less_than_at_any_mark_and_the_peak() -> None:
    result = zerosim.run(of_stage(3), keep_events=True)
    largest = max(unit.numel for unit in result.units)
    padded = 3 * -(-largest // 3)
    assert stepping.most_live(result.events[0], "unsharded_param") == 2 * padded  # one unit at a time
    memory = result.memory[0]
    for kind in ("grad", "optim", "activation"):
        seen = [snapshot.by_kind.get(kind, 0) for snapshot in (*memory.marks.values(), memory.peak)]
        assert stepping.most_live(result.events[0], kind) >= max(seen) > 0
    assert stepping.most_live(result.events[0], "kept") == 0
