"""The whole engine on backend cuda: on a GPU where there is one, else on the stand-in, whose races are errors."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import pytest
from same import assert_same_bits

from zerosim.backends.cuda.nccl import Nccl
from zerosim.backends.kernels import Native
from zerosim.cli.main import main
from zerosim.comm.runtime import Context, World, launch
from zerosim.config import RunConfig
from zerosim.device.device import Kind
from zerosim.device.events import Event, Launch, Pool
from zerosim.dtypes import dtype
from zerosim.errors import InputError, Mismatch
from zerosim.train.result import RunResult
from zerosim.train.run import run

STANDIN: Any = getattr(cupy, "standin", None)
on_standin = pytest.mark.skipif(STANDIN is None, reason="looks into the stand-in, and a real GPU is here")

# No N below divides every unit's size, so slices are padded.
TINY: dict[str, Any] = dict(layers=2, hidden=10, heads=2, seq=5, vocab=19, steps=2, micro_batch=1, seed=3, lr=1e-2)
CLOSE = {"fp64": 1e-12, "fp32": 2e-5, "bf16": 3e-2, "fp16": 4e-3}
"""Losses of two steps: what another order of additions may do, a few units of the format's last place."""


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """train(**fields) on bytes below the little vocabulary, every event kept; each run is made once."""
    path = tmp_path_factory.mktemp("cuda") / "text"
    path.write_bytes(np.random.default_rng(5).integers(0, 19, 400, dtype=np.uint8).tobytes())

    @cache
    def trained(fields: tuple[tuple[str, Any], ...]) -> RunResult:
        return run(RunConfig(**{**TINY, "data": str(path), "backend": "cuda", **dict(fields)}), keep_events=True)

    return lambda **fields: trained(tuple(sorted(fields.items())))


def without_pools(events: list[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, Pool)]


@pytest.mark.parametrize(("ranks", "precision"), [(2, "fp16"), (3, "fp32"), (3, "bf16")])
def test_stages_have_the_same_bits(train: Any, ranks: int, precision: str) -> None:
    scale = {"loss_scale": 64.0} if precision == "fp16" else {}
    ddp = train(stage=0, ranks=ranks, precision=precision, **scale)
    for stage in (1, 2, 3):
        assert_same_bits(ddp, train(stage=stage, ranks=ranks, precision=precision, **scale))
    if precision == "bf16":
        flash = dict(ranks=ranks, precision=precision, attention="flash", batched_flash=True, layers=1)
        assert_same_bits(train(stage=0, **flash), train(stage=3, **flash))
    if precision == "fp32":
        assert_same_bits(ddp, train(stage=3, ranks=ranks, precision=precision, partition="owner"))


RUNS: list[dict[str, Any]] = [
    dict(stage=3),
    dict(stage=0, precision="bf16"),
    dict(stage=2, precision="fp16", loss_scale=64.0),
    dict(stage=3, precision="bf16-pure", rounding="stochastic"),
    dict(stage=3, precision="fp64", accumulate=2),
    dict(stage=3, dropout=0.2, recompute="selective"),
    dict(stage=2, dropout=0.2, recompute="selective:op", saves="megatron"),
    dict(stage=1, dropout=0.2, attention="flash", recompute="full", saves="megatron"),
    dict(stage=2, dropout=0.2, attention="flash", batched_flash=True, precision="bf16"),
    dict(stage=3, collective="ring", bucket_bytes=64),
    dict(stage=0, tp=2, vocab=20, recompute="full", partition_activations=True, cpu_checkpointing=True),
    dict(stage=2, recipe="deepspeed", precision="bf16"),
    dict(stage=3, recipe="fsdp2", precision="bf16"),
    dict(stage=3, model="llama", hidden=12, heads=2, kv_heads=1),
    dict(stage=0, model="bert", hidden=12, heads=2, tp=2, vocab=20, dropout=0.1),
    dict(stage=3, model="roberta", hidden=12, heads=2),
    dict(stage=3, model="t5", hidden=12, heads=2, decoder_seq_length=7, dropout=0.1, recompute="full"),
    dict(stage=0, model="t5", hidden=12, heads=2, tp=2, vocab=20, precision="bf16", saves="megatron"),
    dict(stage=3, model="llama", hidden=12, heads=2, kv_heads=1, attention="flash", batched_flash=True),
    dict(stage=1, cp=2, seq=8, attention="flash", batched_flash=True, dropout=0.1, documents="3"),
    dict(stage=3, model="mlp", clip_norm=0.1, optimizer="adamw"),
    dict(
        stage=2, model="flat", params=1001, units=3, layers=None, hidden=None, heads=None, optimizer="sgd", momentum=0.9
    ),
]


@pytest.mark.parametrize("fields", RUNS, ids=lambda fields: " ".join(map(str, fields.values())))
def test_a_run_is_numpys_in_its_record_and_near_it_in_its_losses(train: Any, fields: dict[str, Any]) -> None:
    fields = {"ranks": 2, "precision": "fp32", **fields}
    there, here = train(**fields), train(**{**fields, "batched_flash": False, "backend": "numpy"})
    for rank in range(2):
        assert without_pools(there.events[rank]) == here.events[rank]
    assert there.live_bytes_after == [0, 0]
    close = CLOSE[there.config.precision.stored]
    np.testing.assert_allclose(there.losses, here.losses, rtol=close)
    np.testing.assert_allclose(
        [step.grad_norm for step in there.steps], [step.grad_norm for step in here.steps], rtol=20 * close
    )


@pytest.mark.parametrize("fields", RUNS[:10], ids=lambda fields: " ".join(map(str, fields.values())))
def test_the_pool_agrees_with_the_ledger_to_the_byte(train: Any, fields: dict[str, Any]) -> None:
    result = train(**{"ranks": 2, "precision": "fp32", **fields})
    for memory in result.memory:
        assert len(memory.pool) >= 1 + 3 * TINY["steps"]
        assert any(row.rounding_bytes for row in memory.pool)
        assert all(row.used_bytes for row in memory.pool)
        for row in memory.pool:
            assert row.unexplained_bytes == 0, row
            assert row.held_bytes >= row.used_bytes
    assert [gpu.outside_bytes >= 0 for gpu in result.gpus]


@on_standin
@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (3, "bf16-pure")])
def test_the_host_waits_once_a_step_and_never_in_forward_or_backward(stage: int, precision: str, train: Any) -> None:
    def waits(steps: int) -> int:
        STANDIN.forget_waits()
        train(stage=stage, ranks=2, steps=steps, precision=precision, accumulate=2, clip_norm=1.0)
        return len(STANDIN.waits())

    assert waits(5) - waits(3) == 2 * 2  # two more steps, two ranks


@on_standin
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_over_several_gpus(stage: int, train: Any) -> None:
    """All-reduce; reduce-scatter and all-gather: the other stages' collectives are these."""
    one = train(stage=stage, ranks=4, precision="bf16", layers=1)
    STANDIN.set_device_count(2)
    try:
        two = train(stage=stage, ranks=4, precision="bf16", layers=1, parallel=2)
        assert_same_bits(one, two)
        assert [gpu.index for gpu in two.gpus] == [0, 1]
        ring = train(stage=stage, ranks=4, precision="bf16", layers=1, collective="ring", bucket_bytes=512)
        assert all(row.unexplained_bytes == 0 for memory in ring.memory for row in memory.pool)
    finally:
        STANDIN.set_device_count(1)


@on_standin
@pytest.mark.parametrize(("stage", "partition"), [(0, "slices"), (2, "slices"), (3, "slices"), (1, "owner")])
def test_nccl_where_every_rank_has_its_gpu(stage: int, partition: str, train: Any) -> None:
    fields = dict(stage=stage, ranks=3, precision="fp32", partition=partition, bucket_bytes=None, layers=1)
    direct = train(**fields)
    STANDIN.set_device_count(3)
    try:
        native = train(**fields, collective="native")
        with pytest.raises(InputError, match="NCCL has no 'scan': expected one of all_gather, "):
            Nccl().perform([], [Native("scan", [], [])])
    finally:
        STANDIN.set_device_count(1)
    np.testing.assert_allclose(native.losses, direct.losses, rtol=1e-6)
    ring = train(**fields, collective="ring")
    for rank in range(3):
        for row, modelled in zip(native.traffic[rank], ring.traffic[rank], strict=True):
            assert row.payload_bytes == modelled.payload_bytes
            assert (row.sent_bytes, row.received_bytes) == (None, None)
            assert row.modelled_bytes == modelled.sent_bytes


@on_standin
@pytest.mark.parametrize("case", ["even", "uneven"])
def test_nccl_turns_parts_by_sends_and_receives(case: str) -> None:
    """Bits of `direct`, what a ring sends beside them; parts that do not fit end the run before NCCL sees them."""
    sent = [[5, 5, 5]] * 3 if case == "even" else [[2, 0, 3], [1, 4, 0], [0, 0, 5]]
    received = [list(column) for column in zip(*sent, strict=True)]

    def program(ctx: Context) -> Any:
        found, r = [], ctx.rank
        for fmt in ("fp32", "bf16", "int64"):
            buffer = ctx.device.alloc((sum(sent[r]),), dtype(fmt), Kind.TEMP)
            ctx.device.backend.from_host(np.arange(sum(sent[r]), dtype=np.float32) + 100 * r, buffer.array)
            sizes = {} if case == "even" else dict(input_split_sizes=sent[r], output_split_sizes=received[r])
            out = ctx.comm.all_to_all(buffer, **sizes)  # type: ignore[arg-type]
            found.append(ctx.device.backend.to_host(out.array).tolist())
        return found, [e.wire_bytes for e in ctx.device.recorder.events if isinstance(e, Launch)]

    def unlike(ctx: Context) -> None:
        buffer = ctx.device.alloc((3,), dtype("fp32"), Kind.TEMP)
        ctx.comm.all_to_all(buffer, input_split_sizes=[1] * 3, output_split_sizes=[1, 1 + (ctx.rank == 0), 1])

    STANDIN.set_device_count(3)
    try:
        worlds = [World(3, backend="cuda", algorithm=name) for name in ("native", "direct", "ring")]
        native, direct, ring = (launch(program, world) for world in worlds)
        with pytest.raises(Mismatch, match="member 1 of the group sends 1 elements to member 0, which expects 2"):
            launch(unlike, worlds[0])
    finally:
        STANDIN.set_device_count(1)
    assert native == direct == ring


def test_native_without_a_gpu_each_is_refused(train: Any) -> None:
    gpus = cupy.cuda.runtime.getDeviceCount()
    refused = f"a GPU for each of the {gpus + 1} ranks, and this process sees {gpus}"
    with pytest.raises(InputError, match=f"{refused}|NCCL does not load"):  # CuPy's packages do not bring NCCL
        train(ranks=gpus + 1, collective="native")


@on_standin
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_run_gives_the_gpus_their_memory_back(gpus: int) -> None:
    STANDIN.set_device_count(gpus)
    try:
        before = [cupy.cuda.Device(gpu).mem_info for gpu in range(gpus)]
        run(RunConfig(**{**TINY, "vocab": 256, "steps": 1, "ranks": 2, "stage": 3, "backend": "cuda"}))
        assert [cupy.cuda.Device(gpu).mem_info for gpu in range(gpus)] == before
    finally:
        STANDIN.set_device_count(1)


@on_standin
def test_too_little_memory_is_refused_before_a_rank_starts(train: Any) -> None:
    STANDIN.set_device_bytes(100 << 20)
    try:
        with pytest.raises(InputError, match=r"4 ranks on GPU 0 .* need .* use fewer --ranks or a smaller model"):
            train(ranks=4)
    finally:
        STANDIN.set_device_bytes(64 << 30)


def test_the_command_line_verifies_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = "--layers 1 --hidden 16 --heads 2 --seq 8 --micro-batch 1 --steps 2 --ranks 2"
    small = [*sizes.split(), "--backend", "cuda"]
    figures = tmp_path / "run.json"
    assert main(["run", "--stage", "3", *small, "--verify-memory", "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert "all explained to the byte" in out
    pool = json.loads(figures.read_text("utf-8"))["ranks"][0]["memory"]["pool"]
    assert {"step", "mark", "live_bytes", "rounding_bytes", "used_bytes", "held_bytes", "unexplained_bytes"} == set(
        pool[0]
    )
    assert main(["run", "--verify-memory", "--steps", "1"]) == 2
    assert "--verify-memory" in capsys.readouterr().err


def test_a_sample_is_continued_on_the_gpu(train: Any) -> None:
    result = train(ranks=2, stage=3, precision="fp32", vocab=256, sample="ab", sample_tokens=3)
    assert result.sample == train(ranks=2, stage=3, precision="fp32", vocab=256, sample="ab", sample_tokens=3).sample


def test_stepping_on_a_gpu_is_refused() -> None:
    from zerosim.stepper import debug

    with pytest.raises(InputError, match="a GPU runs behind the program"):
        debug(RunConfig(backend="cuda"))
