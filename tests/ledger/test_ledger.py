"""Bytes and traffic, counted while a program ran, against closed forms: integers, with `==`."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zerosim import functional as F
from zerosim.analysis import formulas
from zerosim.comm.runtime import Context, World, launch
from zerosim.config import RunConfig
from zerosim.device.device import Device, Storage
from zerosim.dtypes import dtype
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.traffic import CommLedger
from zerosim.models.model import Model, draw_flat
from zerosim.nn import Unit
from zerosim.tensor.flat import Flat
from zerosim.train import data, engine
from zerosim.train.build_model import build_model
from zerosim.train.build_strategy import build_strategy, join_by_itself
from zerosim.train.build_updater import build_updater
from zerosim.train.result import RunResult
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, vocab=32, micro_batch=1, steps=2)
COSTS = {
    "fp64": formulas.BytesPerParameter(8, 8, 16),
    "fp32": formulas.BytesPerParameter(4, 4, 8),
    "bf16": formulas.BytesPerParameter(2, 2, 12),
    "fp16": formulas.BytesPerParameter(2, 2, 12),
}


def small(tmp_path: Any, **changes: Any) -> RunResult:
    config = RunConfig(**{**SMALL, **changes})
    rng = np.random.default_rng(0)
    shape = (config.optim.steps or 1, config.global_batch, config.model.seq + 1)
    np.savez(tmp_path / "tokens.npz", tokens=rng.integers(0, config.model.vocab, size=shape, dtype=np.int64))
    return run(config.replace(tokens=str(tmp_path / "tokens.npz")))


def states_without_padding(result: RunResult) -> dict[str, int]:
    """The model states at end_of_backward, summed over ranks, without what is named padding."""
    total = {"param": 0, "grad": 0, "optim": 0}
    for memory in result.memory:
        snapshot = memory.marks["end_of_backward"]
        for kind in total:
            total[kind] += snapshot.by_kind.get(kind, 0) - snapshot.padding.get(kind, 0)
    return total


@pytest.mark.quick(6)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_states_are_the_papers(tmp_path: Any, stage: int, ranks: int) -> None:
    """Precisions take turns: each meets every stage and every number of ranks."""
    precision = list(COSTS)[(stage + min(ranks, 5)) % len(COSTS)]
    scale = {"loss_scale": 1.0} if precision == "fp16" else {}
    for partition in ("slices", "owner"):
        result = small(tmp_path, stage=stage, ranks=ranks, precision=precision, partition=partition, **scale)
        expected = formulas.model_states(stage, COSTS[precision])
        held = {"Ψ": result.num_parameters, "N": ranks}
        assert states_without_padding(result) == {kind: ranks * form.at(held) for kind, form in expected.items()}
        for memory in result.memory:  # nothing but model states is live when backward ends
            live = set(memory.marks["end_of_backward"].by_kind) - {"param", "grad", "optim"}
            assert live <= {"temp"}
            assert memory.marks["end_of_backward"].by_kind.get("temp", 0) <= 8 * (1 + len(result.units))


def test_gradients_in_another_dtype_are_kept_and_sent_in_it(tmp_path: Any) -> None:
    result = small(tmp_path, stage=2, ranks=2, grad_dtype="fp32")
    assert states_without_padding(result)["grad"] == 4 * result.num_parameters
    rows = {row.op: row for row in result.traffic[0] if row.step == 1 and row.purpose == "states"}
    assert (rows["reduce_scatter"].dtype, rows["all_gather"].dtype) == ("fp32", "bf16")
    assert rows["reduce_scatter"].payload_bytes == 4 * result.num_parameters


def by_op(result: RunResult, rank: int, step: int = 1) -> dict[str, tuple[int, int]]:
    """Sent and payload bytes of one step by operation, model states only."""
    totals: dict[str, tuple[int, int]] = {}
    for row in result.traffic[rank]:
        if row.step == step and row.purpose == "states":
            sent, payload = totals.get(row.op, (0, 0))
            totals[row.op] = (sent + row.sent_bytes, payload + row.payload_bytes)
    return totals


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_traffic_with_padding_is_counted_exactly(tmp_path: Any, stage: int) -> None:
    """N = 3 divides no unit: reduce_scatter and all_gather carry padded slices, all_reduce does not."""
    result = small(tmp_path, stage=stage, ranks=3, vocab=31, hidden=14, seq=7, bucket_bytes=None)
    sliced = [-(-unit.numel // 3) for unit in result.units]
    for rank in range(3):
        counted = {op: sent for op, (sent, _) in by_op(result, rank).items()}
        if stage == 0:
            chunks = [[min(n, (j + 1) * -(-n // 3)) - min(n, j * -(-n // 3)) for j in range(3)] for n in
                      (unit.numel for unit in result.units)]  # fmt: skip
            expected = sum(2 * (sum(c) - c[rank] + 2 * c[rank]) for c in chunks)
            assert counted == {"all_reduce": expected}
        else:
            gathers = {1: 1, 2: 1, 3: 2}[stage]
            tied = 2 * sliced[0] if stage == 3 else 0
            assert counted == {
                "reduce_scatter": 2 * 2 * sum(sliced),
                "all_gather": 2 * 2 * (gathers * sum(sliced) + tied),
            }


@pytest.mark.quick(1)
@pytest.mark.parametrize("collective", ["direct", "ring"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_owners_move_the_same_total(tmp_path: Any, stage: int, collective: str) -> None:
    """The mean over ranks is the sliced volume; an owner sends its units to all (direct) or to one (ring)."""
    ranks = 4
    result = small(tmp_path, stage=stage, ranks=ranks, partition="owner", collective=collective)
    sent = [result.sent_bytes(rank, 1) for rank in range(ranks)]
    form = formulas.volume(stage, formulas.Schedule(tied=True))
    assert sum(sent) == ranks * form.total.at(Ψ=result.num_parameters, N=ranks, w=2, g=2, VD=result.tied_numel)
    if collective == "direct":
        gathers = {1: 1, 2: 1, 3: 2}[stage]
        for rank in range(ranks):
            owned = sum(unit.numel for unit in result.units if unit.owner == rank)
            tied = 2 * result.tied_numel if stage == 3 and result.units[0].owner == rank else 0
            broadcast = (ranks - 1) * (gathers * owned + tied)
            assert sent[rank] == 2 * (broadcast + result.num_parameters - owned)
        assert min(sent) < max(sent)


def test_everything_sent_is_received(tmp_path: Any) -> None:
    for stage, partition in [(0, "slices"), (1, "owner"), (3, "slices"), (3, "owner")]:
        rows = [row for rank in small(tmp_path, stage=stage, partition=partition, ranks=3).traffic for row in rank]
        assert sum(row.sent_bytes for row in rows) == sum(row.received_bytes for row in rows) > 0


def test_norms_are_control_traffic(tmp_path: Any) -> None:
    """One fp64 per slice and unit, all-reduced; DDP needs none."""
    result = small(tmp_path, stage=2, ranks=4)
    control = [row for row in result.traffic[0] if row.purpose == "control" and row.step == 1]
    assert [(row.op, row.dtype, row.payload_bytes) for row in control] == [
        ("all_reduce", "fp64", 8 * 4 * len(result.units))
    ]
    assert not [row for row in small(tmp_path, stage=0, ranks=4).traffic[0] if row.purpose == "control"]


def test_peaks_of_the_default_model_fall_with_the_stage() -> None:
    peaks = [run(RunConfig(stage=stage, ranks=4, steps=2)).memory[0].peak for stage in range(4)]
    totals = [peak.total_bytes for peak in peaks]
    assert totals[3] < totals[2] <= totals[1] < totals[0]
    for peak in peaks:
        assert sum(peak.by_kind.values()) == sum(peak.by_unit.values()) == peak.total_bytes


# -- programs of their own ---------------------------------------------------------------------------
Hook = Callable[[Context, str, MemoryLedger], None]


def one_unit(device: Device) -> Model:
    """Embedding and head in one flat buffer: the whole model is one unit."""
    flat = Flat("only", device, dtype("bf16"), dtype("bf16"))
    table = flat.declare("table", (32, 64), std=0.02)
    head = flat.declare("head", (64, 32), std=0.02)
    return Model([Unit("only", flat, lambda ids: F.linear(F.embedding(ids.buffer, table), head))])


def train_by_hand(
    config: RunConfig, hook: Hook, model_of: Callable[[Device], Model] | None = None
) -> tuple[list[Any], list[MemoryLedger]]:
    ledgers = [MemoryLedger() for _ in range(config.mesh.ranks)]
    batches = np.random.default_rng(0).integers(
        0, config.model.vocab, size=(3, config.global_batch, config.model.seq + 1)
    )

    def program(ctx: Context) -> None:
        device = ctx.device
        model = model_of(device) if model_of else build_model(config, device, first_micro_batch=ctx.rank)
        strategy = build_strategy(config, model, ctx.comm, device, build_updater(config, 3))
        join_by_itself(strategy, model.flats)

        def see(where: str) -> None:
            device.recorder.drain()
            hook(ctx, where, ledgers[ctx.rank])

        for name in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
            setattr(strategy, name, _then(getattr(strategy, name), see, name))
        strategy.place(model.flats, lambda flat: draw_flat(flat, 0, exact_master=False))
        steps = (data.micro_batches(batch, ctx.rank, config.mesh.ranks, 1) for batch in batches)
        for _ in engine.train(model, steps, strategy, device):
            ctx.comm.barrier()
            hook(ctx, "between steps", ledgers[ctx.rank])
            ctx.comm.barrier()
        for name in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
            delattr(strategy, name)  # the wrappers made a cycle

    return launch(program, World(config.mesh.ranks), lambda rank: (ledgers[rank], CommLedger())), ledgers


def _then(point: Callable[[Unit], None], see: Callable[[str], None], name: str) -> Callable[[Unit], None]:
    def both(unit: Unit) -> None:
        point(unit)
        see(name)

    return both


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_live_bytes_are_the_arrays_really_held(stage: int, precision: str) -> None:
    """At every point of every step, on every rank, with the garbage collector off."""
    seen = 0

    def check(ctx: Context, where: str, ledger: MemoryLedger) -> None:
        nonlocal seen
        held = [s for s in gc.get_objects() if type(s) is Storage and s.device is ctx.device]
        assert sum(s.array.nbytes for s in held) == ledger.live_bytes, where
        seen += len(held)

    gc.collect()
    gc.freeze()  # what is there already is none of ours, and need not be looked through each time
    gc.disable()
    try:
        config = RunConfig(**{**SMALL, "vocab": 32}, stage=stage, ranks=2, precision=precision, dropout=0.1)
        _, ledgers = train_by_hand(config, check)
        assert [ledger.live_bytes for ledger in ledgers] == [0, 0]
    finally:
        gc.enable()
    assert seen > 100


OFFLOADS = [(2, "optimizer=host"), (3, "optimizer=host,params=host")]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("stage", "offload"), [*((stage, "") for stage in range(4)), *OFFLOADS])
def test_numpy_holds_what_the_ledger_says(stage: int, offload: str) -> None:
    """tracemalloc sees NumPy's allocations; between steps they are the ledger's, the device's and the host's, to within
    2 %."""
    config = RunConfig(layers=2, hidden=64, seq=16, stage=stage, ranks=2, offload=offload or None)
    held: dict[int, int] = {}
    gaps: list[float] = []

    def check(ctx: Context, where: str, ledger: MemoryLedger) -> None:
        if where == "between steps":
            held[ctx.rank] = ledger.live_everywhere
            if len(held) == ctx.world_size:
                domain = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
                traces = tracemalloc.take_snapshot().filter_traces([domain]).traces
                gaps.append(sum(trace.size for trace in traces) / sum(held.values()) - 1)
                held.clear()

    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)])
        assert sum(trace.size for trace in before.traces) < 10_000
        train_by_hand(config, check)
    finally:
        tracemalloc.stop()
    assert len(gaps) == 3
    assert max(abs(gap) for gap in gaps) < 0.02, gaps


def test_zero2_may_exceed_zero1_by_one_shard_of_the_largest_unit() -> None:
    """One unit: its whole gradient and its reduced slice live together for a moment in zero2; zero1 works in place."""
    peaks, ranks = {}, 4
    for stage in (1, 2):
        config = RunConfig(stage=stage, ranks=ranks, seq=4, vocab=32, micro_batch=1)
        _, ledgers = train_by_hand(config, lambda *_: None, one_unit)
        peaks[stage] = ledgers[0].peak
    whole = 2 * (32 * 64 * 2)
    assert peaks[1].by_kind["grad"] == whole
    assert peaks[2].by_kind["unsharded_grad"] == whole
    assert peaks[2].by_kind["grad"] == whole // ranks
    others = {kind: [peaks[stage].by_kind[kind] for stage in (1, 2)] for kind in ("param", "optim")}
    assert all(one == two for one, two in others.values())
    assert 0 < peaks[2].total_bytes - peaks[1].total_bytes <= whole // ranks


def test_stage_3_never_holds_the_whole_model_not_even_at_the_start() -> None:
    config = RunConfig(layers=6, hidden=32, seq=4, micro_batch=1, stage=3, ranks=4, precision="fp32")
    result = run(config.replace(steps=1))
    peak, whole = result.memory[0].peak, 4 * result.num_parameters
    params = peak.by_kind["param"] + peak.by_kind.get("unsharded_param", 0)
    assert params < whole / 2
    assert result.memory[0].marks["after_init"].total_bytes == pytest.approx(3 * whole / 4, rel=0.01)
