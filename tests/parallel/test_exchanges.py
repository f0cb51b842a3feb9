"""Exchanges of one's own: int8 blocks with a residual as a row; and buffers that are cut over axes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from test_schedule import run_with

from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.comm.runtime import launch
from zerosim.config import RunConfig
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import fp32, uint8
from zerosim.optim.updater import Updater
from zerosim.parallel.exchange import Slices
from zerosim.parallel.reducer import AtOnce, InBuckets, OutOfBuffers, Reducer
from zerosim.parallel.stage import Stage
from zerosim.parallel.zero1 import Zero1
from zerosim.parallel.zero2 import Zero2
from zerosim.parallel.zero3 import Zero3
from zerosim.placement.partition import Whole
from zerosim.placement.rows import Row
from zerosim.tensor.flat import Flat
from zerosim.train import build_strategy
from zerosim.train.plan import plan
from zerosim.train.run import Experiment, run
from zerosim.train.world import world_of

SMALL: dict[str, Any] = dict(layers=3, hidden=16, heads=2, seq=8, vocab=256, micro_batch=1, steps=4, seed=5)
BLOCK = 32


def encode(values: Any, residual: Any, codes: Any, scales: Any) -> None:
    """Codes and a scale a block of the gradient and what was rounded away before; what is now, into the residual."""
    numel = values.size
    wanted = values.reshape(-1).astype(np.float32) + residual[:numel]
    blocks = np.pad(wanted, (0, scales.size * BLOCK - numel)).reshape(-1, BLOCK)
    scales[:] = np.abs(blocks).max(1) / 127
    steps = np.rint(np.divide(blocks, scales[:, None], out=np.zeros_like(blocks), where=scales[:, None] > 0))
    codes[:] = (steps.reshape(-1)[:numel] + 128).astype(np.uint8)
    residual[:numel] = wanted - (steps * scales[:, None]).reshape(-1)[:numel]


def decode_mean(codes: Any, scales: Any, own: Any, start: int, ranks: int) -> None:
    """The mean over ranks of what they sent of the elements from `start` on, added in rank order."""
    total = np.zeros(own.size, np.float32)
    for mine, scale in zip(codes.reshape(ranks, -1), scales.reshape(ranks, -1), strict=True):
        values = (mine.astype(np.float32) - 128) * np.repeat(scale, BLOCK)[: mine.size]
        total += values[start : start + own.size]
    own[:] = total / ranks


class Coded(NamedTuple):
    """Codes and scales in flight."""

    codes: Work[Buffer]
    scales: Work[Buffer]

    def wait(self) -> list[tuple[Buffer, Buffer]]:
        return [(self.codes.wait(), self.scales.wait())]


class Int8Blocks(Slices):
    """Every rank sends its whole gradient as codes of a byte, and adds up what it receives of its own slice."""

    joins = False
    states: ClassVar[Mapping[str, Row]] = {"residual": Row(Whole())}

    def __init__(self) -> None:
        super().__init__()
        self.residuals: dict[str, Buffer] = {}

    def place(self, flat: Flat, state: str) -> None:
        self.residuals[flat.name] = flat.device.alloc((flat.padded_numel,), fp32, Kind.OPTIM, name=state)
        flat.device.kernel(0, flat.device.backend.fill, self.residuals[flat.name].array, 0.0)

    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> Any:
        [flat], grad = flats, grads.pop()
        device, comm = flat.device, self.group_of(flat)
        codes = device.alloc((grad.numel,), uint8, Kind.COMM)
        scales = device.alloc((-(-grad.numel // BLOCK),), fp32, Kind.COMM)
        arrays = (grad.array, self.residuals[flat.name].array, codes.array, scales.array)
        device.kernel(4 * grad.numel, encode, *arrays)
        return Coded(*(comm.launch_all_gather(one, kind=Kind.COMM) for one in (codes, scales)))

    launch_in_place = launch_reduce

    def own_part(self, flat: Flat, reduced: Any) -> Buffer:
        return self._decoded(flat, reduced, flat.new_grad_shard())

    def own_window(self, flat: Flat, grad: Buffer, reduced: Any) -> Buffer:
        return self._decoded(flat, reduced, flat.own_window(grad))

    def _decoded(self, flat: Flat, reduced: Any, own: Buffer) -> Buffer:
        codes, scales = reduced
        sizes = flat.own.start, self.group_of(flat).size
        flat.device.kernel(2 * codes.numel, decode_mean, codes.array, scales.array, own.array, *sizes)
        return own


MakeReducer = Callable[[Slices, Comm, int], Reducer]
REDUCERS: Mapping[str, MakeReducer] = {
    "each": lambda exchange, comm, stage: InBuckets(exchange, 0) if stage == 1 else AtOnce(exchange),
    "late": lambda exchange, comm, stage: (
        InBuckets(exchange, 4000, late=True) if stage == 1 else AtOnce(exchange, late=True)
    ),
    "out of a buffer": lambda exchange, comm, stage: OutOfBuffers(exchange, 6000),
    "out of two that stay": lambda exchange, comm, stage: OutOfBuffers(exchange, 4500, count=2, lasting=True),
}
EXCHANGES: list[Int8Blocks] = []


def with_int8(kind: type[Stage], how: str) -> Any:
    def make(comm: Comm, device: Device, updater: Updater) -> Stage:
        exchange = Int8Blocks()
        EXCHANGES.append(exchange)
        return kind(comm, device, updater, REDUCERS[how](exchange, comm, kind.stage or 0))

    return make


@pytest.mark.quick(1)
@pytest.mark.parametrize("mesh", [{}, {"dp_replicate": 2}], ids=str)
def test_int8_blocks_give_the_same_bits_at_every_stage_whenever_they_are_reduced(mesh: dict[str, int]) -> None:
    """The residual is a row of its own: out of a buffer that is filled again it is as good as anywhere."""
    EXCHANGES.clear()
    fields = dict(**SMALL, ranks=4, precision="fp32", **mesh)
    plain = run_with(None, **fields, stage=2)
    results = {
        (kind, how): run_with(with_int8(kind, how), **fields, stage=kind.stage)
        for kind in (Zero1, Zero2, Zero3)
        for how in REDUCERS
    }
    first = results[Zero1, "each"]
    for case, result in results.items():
        assert result.losses == first.losses, case
        assert all(np.array_equal(result.weights[name], first.weights[name]) for name in first.weights), case
    assert first.losses != plain.losses
    assert np.allclose(first.losses, plain.losses, atol=2e-3)
    residuals = [exchange.residuals["h.0"].array for exchange in EXCHANGES]
    assert all(np.any(one) for one in residuals)
    states = results[Zero2, "late"].memory[0].marks["after_init"]
    padded = sum(map(results[Zero2, "late"].layout.padded, results[Zero2, "late"].layout.flats))
    assert states.by_kind["optim"] == plain.memory[0].marks["after_init"].by_kind["optim"] + 4 * padded
    by_op = {
        row.op: row.sent_bytes for row in results[Zero2, "each"].traffic[0] if (row.step, row.phase) == (0, "backward")
    }
    assert "reduce_scatter" not in by_op


def test_only_what_is_trained_has_a_residual_and_a_strategys_own_stage_makes_its_rows() -> None:
    """The run's stage is 0: what a ZeRO-3 of one's own holds and cuts is ZeRO-3's all the same."""
    EXCHANGES.clear()
    make, config = with_int8(Zero3, "each"), RunConfig(**SMALL, ranks=2, stage=0, precision="fp32", freeze="*,!h.1")
    experiment = Experiment(config, lambda config, model, *parts: make(*parts))
    kept = launch(lambda ctx: experiment.train_rank(ctx).pieces, world_of(config))
    assert [set(exchange.residuals) for exchange in EXCHANGES] == [{"h.1"}, {"h.1"}]
    assert all(2 * piece.part.size == experiment.layout.flats[piece.flat].numel for pieces in kept for piece in pieces)


def test_what_int8_blocks_round_away_comes_with_the_next_gradient() -> None:
    random, device_sum = np.random.default_rng(1), np.zeros(70)
    residual, codes, scales = np.zeros(70, np.float32), np.zeros(70, np.uint8), np.zeros(3, np.float32)
    wanted = np.zeros(70)
    for _ in range(50):
        grad = random.standard_normal(70).astype(np.float32)
        own = np.zeros(70, np.float32)
        encode(grad, residual, codes, scales)
        decode_mean(codes, scales, own, 0, 1)
        wanted, device_sum = wanted + grad, device_sum + own
    assert np.allclose(wanted, device_sum + residual, atol=1e-4)
    assert np.abs(residual).max() <= scales.max()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(reduce_bucket=3000),
        dict(reduce_bucket=3000, reduce_buffers=2),
        dict(overlap_reduction=True, bucket_bytes=None),
        dict(partition="owner"),
    ],
    ids=str,
)
def test_a_group_follows_from_a_buffers_axes(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2 x 2 ranks one unit is cut over all four, one over the copies, the others over dp_shard: as experts are."""
    axes = {"h.1": ("dp_replicate", "dp_shard"), "wte": ("dp_replicate", "dp_shard"), "h.0": ("dp_replicate",)}
    config = RunConfig(**SMALL, ranks=4, dp_replicate=2, precision="fp64", clip_norm=0.5, **options)
    plain, rows_of = run(config.replace(stage=2)), build_strategy.rows_of

    def own_axes(*args: Any) -> Any:
        of = rows_of(*args)
        return lambda flat: {
            state: replace(row, axes=axes.get(flat.unit, ("dp_shard",))) for state, row in of(flat).items()
        }

    monkeypatch.setattr(build_strategy, "rows_of", own_axes)
    results = [run(config.replace(stage=stage)) for stage in (1, 2, 3)]
    for stage, result in enumerate(results, 1):
        planned = plan(config.replace(stage=stage), every_rank=True)
        assert planned.traffic == result.traffic
        assert [one.to_dict() for one in planned.memory] == [one.to_dict() for one in result.memory]
        assert all(np.array_equal(result.weights[name], one) for name, one in results[1].weights.items())
        assert all(np.allclose(result.weights[name], one, rtol=1e-9, atol=1e-12) for name, one in plain.weights.items())
        assert result.steps[-1].grad_norm == pytest.approx(plain.steps[-1].grad_norm, rel=1e-9)
    assert results[2].traffic != plain.traffic
