"""Where the notebooks stop a world, and what they read there: gradients, collectives, bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import zerosim
from zerosim.device.events import Launch
from zerosim.errors import InputError
from zerosim.lessons import stepping
from zerosim.tensor import tensor
from zerosim.train import data

SMALL = zerosim.RunConfig(stage=0, ranks=3, steps=1, layers=2, hidden=16, heads=2, seq=8, micro_batch=2, vocab=256)


def of_stage(stage: int, **changes: Any) -> zerosim.RunConfig:
    return SMALL.replace(stage=stage, **changes)


def test_a_rank_alone_on_its_batch_has_the_loss_that_it_had_among_others(tmp_path: Path) -> None:
    """The batches are found as notebook 04 finds them."""
    together = zerosim.run(SMALL)
    text = data.read_text(SMALL.data.file, SMALL.model.seq, SMALL.model.vocab)
    batch = data.sample_batch(text, SMALL.data.seed, 0, SMALL.global_batch, SMALL.model.seq)
    for rank in range(3):
        file = tmp_path / f"{rank}.npz"
        np.savez(file, tokens=np.stack(data.micro_batches(batch, rank, 3, SMALL.data.accumulate)))
        alone = zerosim.run(SMALL.replace(ranks=1, tokens=str(file)))
        assert alone.losses[0][0] == together.losses[0][rank]


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_but_the_last_rank_have_joined_where_they_meet(stage: int) -> None:
    op = "all_reduce" if stage == 0 else "reduce_scatter"
    with zerosim.debug(of_stage(stage)) as world:
        meeting = stepping.meet(world, op)
        assert (meeting.op, [rank for rank, _ in meeting.joined], meeting.missing) == (op, [0, 1], (2,))
        coming = world.ranks[2].next_event
        assert coming is not None
        assert isinstance(coming.event, Launch)
        stepping.leave(world)
        assert not world.pending_collectives
        again = stepping.meet(world, "all_gather") if stage else None
        assert again is None or again.missing == (2,)


def test_ranks_line_up_before_the_next_of_an_event() -> None:
    with zerosim.debug(of_stage(3, steps=2)) as world:
        for step in range(2):
            stepping.line_up(world, "after_step")
            comings = [rank.next_event for rank in world.ranks]
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
    expected = tensor(sum(before) / np.float32(3), dtype=precision).numpy()
    for values in after:
        assert np.array_equal(values, expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_slice_of_a_gradient_is_that_part_of_the_mean(stage: int) -> None:
    with zerosim.debug(SMALL) as world:
        stepping.meet(world, "all_reduce")
        mean = tensor(sum(stepping.gradients(world, "h.1")) / np.float32(3), dtype="bf16").numpy()
    with zerosim.debug(of_stage(stage)) as world:
        stepping.line_up(world, "end_of_backward")
        pieces = stepping.gradients(world, "h.1")
        owned = world.ownership().of("h.1")
    assert np.array_equal(np.concatenate(pieces), mean)  # padding left out
    for piece, own in zip(pieces, owned, strict=True):
        assert np.array_equal(piece, mean[own.start : own.stop])


def test_a_gradient_that_is_not_there_is_refused_in_words() -> None:
    with zerosim.debug(of_stage(3)) as world:
        stepping.meet(world, "all_gather")
        with pytest.raises(InputError, match=r"rank 1 holds no gradient of h\.0 now"):
            stepping.gradient(world, 1, "h.0")
        with pytest.raises(InputError, match="expected one of wte"):
            stepping.gradient(world, 1, "lm_head")


@pytest.mark.quick(2)
@pytest.mark.parametrize("partition", ["slices", "owner"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_ranks_joined_adds_up_to_what_the_ledger_counted(stage: int, partition: str) -> None:
    result = zerosim.run(of_stage(stage, partition=partition, steps=2), keep_events=True)
    for rank, events in enumerate(result.events):
        for step in range(2):
            rows = stepping.joined(events, step)
            assert sum(row.sent_bytes for row in rows) == result.sent_bytes(rank, step)


def test_the_table_ends_with_the_sum() -> None:
    result = zerosim.run(of_stage(3), keep_events=True)
    console = Console(width=200, color_system=None)
    with console.capture() as shown:
        console.print(stepping.joined_table(result.events[0], 0, "title"))
    last = shown.get().strip().splitlines()[-1]
    assert last.startswith("in all")
    assert last.endswith(f"{result.sent_bytes(0, 0):,}")


def test_the_most_of_a_kind_is_no_less_than_at_any_mark_and_the_peak(defined: Any) -> None:
    most_live = defined("06", "01", "17a")["most_live"]
    result = zerosim.run(of_stage(3), keep_events=True)
    largest = max(unit.numel for unit in result.units)
    padded = 3 * -(-largest // 3)
    assert most_live(result.events[0], "unsharded_param") == 2 * padded  # one unit at a time
    memory = result.memory[0]
    for kind in ("grad", "optim", "activation"):
        seen = [snapshot.by_kind.get(kind, 0) for snapshot in (*memory.marks.values(), memory.peak)]
        assert most_live(result.events[0], kind) >= max(seen) > 0
    assert most_live(result.events[0], "kept") == 0
