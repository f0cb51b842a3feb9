"""The benchmark on a GPU: what it times, what it counts, what it says where something is missing. Not how fast it is.

`cupy` is the stand-in where there is no GPU; PyTorch takes part on the CPU, if it is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import pytest

from zerosim.backends.cuda import check as cuda_check
from zerosim.backends.cuda.facts import CudaFacts, Gpu
from zerosim.backends.cuda.stream import CudaStream, StreamTimer
from zerosim.backends.meta import MetaBackend
from zerosim.bench import figures, machine, pytorch, suite
from zerosim.bench.contest import Budget, Contestant, Rounds, Timing, take_turn
from zerosim.bench.products import SquareProduct
from zerosim.bench.training import TrainingRun, initial_weights, over_ranks, random_tokens
from zerosim.cli import bench
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.device.events import Kernel
from zerosim.errors import InputError
from zerosim.train.build_model import build_model
from zerosim.train.plan import plan

TINY = RunConfig(
    stage=0, layers=1, hidden=16, heads=2, seq=16, vocab=64, micro_batch=4, ranks=1, precision="fp16", lr=1e-2,
    initial_scale_power=8, backend="cuda",
)  # fmt: skip
ONCE = Budget(0.0, min_rounds=2, max_rounds=2, warm_ups=0, untimed_steps=1)
BUDGETS = suite.Budgets(ONCE, ONCE, square=32, repeats=2)
CUDA = suite.SUITES["cuda"]
LARGE = CUDA.models["124M"]
H100 = Gpu(0, "NVIDIA H100 80GB HBM3", "9.0", 85_000_000_000, 84_000_000_000)
DEVICE = {"gpu": H100.name, "gpus": 1}
needs_torch = pytest.mark.skipif(pytorch.version() is None, reason="PyTorch is not installed")


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    return initial_weights(TINY)


@pytest.fixture
def tokens() -> Any:
    return random_tokens(TINY)


@pytest.fixture
def held(weights: dict[str, Any], tokens: Any) -> Iterator[TrainingRun]:
    with TrainingRun(over_ranks(TINY), weights, tokens) as run:
        yield run


def strict(text: str) -> dict:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


# -- the whole ----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_every_figure_is_a_positive_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROWS", (4,))
    said: list[str] = []
    on_cpu = replace(CUDA, goal_from=1, torch_device="cpu")
    groups = list(suite.measure(on_cpu, {"tiny": TINY}, BUDGETS, DEVICE, said.append))
    had = [figure for group in groups for figure in group.figures]
    assert len(groups) == 4  # two precisions, one rank and four
    assert len(had) == 2 * (3 * 5 + 2 + 3)
    for figure in had:
        if figure.value is None:
            assert figure.note == "PyTorch is not installed"
            continue
        assert math.isfinite(figure.value)
        assert figure.value > 0
        assert figure.rounds == 2
        assert "NOT the same" not in figure.note
        assert (figure.goal == 1.3) == ("PyTorch" in figure.name)
    assert said
    assert len(figures.table(had).splitlines()) == len(had) + 1
    body = strict(figures.to_json(had, DEVICE, CUDA.method, [group.rounds for group in groups if group.rounds]))
    assert [group["title"] for group in body["groups"]] == [
        f"tiny {precision}, {who}" for precision in ("bf16", "fp16") for who in ("one rank", "4 ranks")
    ]
    for group in body["groups"]:
        assert group["config"]["backend"] == "cuda"
        for contestant in group["contestants"].values():
            assert len(contestant["device_s"]) == len(contestant["host_s"]) == 2


def test_the_models_are_as_large_as_they_are_called() -> None:
    for name, config in CUDA.models.items():
        model = build_model(config, Device(0, MetaBackend()))
        assert f"{model.num_parameters / 1e6:.0f}M" == name
        assert config.model.dropout == 0
    assert build_model(LARGE, Device(0, MetaBackend())).num_parameters == 124_439_808


# -- timing -------------------------------------------------------------------------------------------
def test_seconds_come_from_device_events(
    monkeypatch: pytest.MonkeyPatch, weights: dict[str, Any], tokens: Any, held: TrainingRun
) -> None:
    for timing in (held.step(), SquareProduct(16, "fp16", 1).step()):
        assert 0 < timing.device_s <= timing.host_s  # the events lie inside the host's two readings
    monkeypatch.setattr(cp.cuda, "get_elapsed_time", lambda start, stop: 7.0)
    assert held.step().device_s == SquareProduct(16, "fp16", 1).step().device_s == 0.007


def test_a_timer_stops_behind_the_work_of_its_stream() -> None:
    stream = CudaStream(0)
    timer = StreamTimer(stream)
    with stream.use():
        out = cp.empty((1 << 16,), np.float32)
        timer.start()
        out.fill(1)
    assert timer.stop() >= 0
    assert stream.cupy_stream.done
    timer.start()
    assert timer.stop() >= 0


def test_a_step_of_four_ranks_ends_when_all_have(held: TrainingRun) -> None:
    streams = list(held._streams.values())
    assert len(streams) == 4
    for _ in range(2):
        held.step()
        time.sleep(0.01)  # a real GPU's other streams still pass the event that rank 0's has passed
        assert all(stream.cupy_stream.done for stream in streams)


def test_a_turn_is_the_median_of_its_timed_steps() -> None:
    class Fake(Contestant):
        def __init__(self) -> None:
            self.steps = iter([9.0, 1.0, 5.0, 2.0])
            self.did: list[str] = []

        def step(self) -> Timing:
            self.did.append("step")
            seconds = next(self.steps)
            return Timing(seconds, 2 * seconds)

        def release(self) -> None:
            self.did.append("release")

    fake = Fake()
    assert take_turn(fake, replace(ONCE, timed_steps=3)) == Timing(2.0, 4.0)
    assert fake.did == ["step"] * 4 + ["release"]


# -- training -----------------------------------------------------------------------------------------


def test_flops_are_those_of_the_record(weights: dict[str, Any], tokens: Any) -> None:
    (events,) = plan(TINY, keep_events=True).events
    expected: dict[str, int] = {}
    for event in events:
        if isinstance(event, Kernel) and event.flops and event.scope.step == 0:
            expected[event.name] = expected.get(event.name, 0) + event.flops
    found = []
    for config in (TINY, over_ranks(TINY)):
        with TrainingRun(config, weights, tokens) as held:
            held.step()
            found.append(dict(held.flops))
    assert found[0] == expected
    products = [figures.product_flops(flops) for flops in found]
    assert products[0] == products[1]  # four ranks do one rank's products
    rows = TINY.global_batch * TINY.model.seq
    linear = 6 * rows * (12 * TINY.model.layers * TINY.model.hidden**2 + TINY.model.vocab * TINY.model.hidden)
    assert products[0] == linear + 12 * TINY.model.layers * rows * TINY.model.seq * TINY.model.hidden


def test_memory_is_given_back_between_turns(held: TrainingRun) -> None:
    held.step()
    before = [stream.memory() for stream in held._streams.values()]
    held.release()
    after = [stream.memory() for stream in held._streams.values()]
    for (used, held_bytes), (used_after, held_after) in zip(before, after, strict=True):
        assert used_after == used
        assert held_after < held_bytes


def test_a_run_that_ends_leaves_nothing(weights: dict[str, Any], tokens: Any) -> None:
    with TrainingRun(TINY, weights, tokens) as held:
        held.step()
    assert [stream.memory() for stream in held._streams.values()] == [(0, 0)]


# -- PyTorch ------------------------------------------------------------------------------------------
@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_pytorch_trains_the_same_model(precision: str, attention: str, weights: dict[str, Any], tokens: Any) -> None:
    config = TINY.replace(precision=precision, attention=attention)
    theirs = pytorch.TorchTraining(config, weights, tokens, attention, "cpu")
    for _ in range(4):
        timing = theirs.step()
        assert timing.device_s > 0
    with TrainingRun(config, weights, tokens) as ours:
        for _ in range(3):
            ours.step()
    assert theirs.losses == pytest.approx(ours.losses[0], abs=0.03 if precision == "bf16" else 0.005)
    assert theirs.losses[0] - theirs.losses[3] > 0.2  # it does learn, so that equal losses say something
    theirs.close()


def test_losses_that_differ_are_said() -> None:
    assert figures.same_losses([4.0, 3.9, 3.8], [4.0, 3.92, 3.8], 0.1) == ""
    assert "NOT the same computation" in figures.same_losses([4.0, 3.9, 3.8], [4.0, 3.9, 4.0], 0.1)


def test_a_pytorch_that_fails_ends_no_benchmark(
    monkeypatch: pytest.MonkeyPatch, weights: dict[str, Any], tokens: Any
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(pytorch, "unusable", lambda device: "")
    monkeypatch.setattr(pytorch, "TorchTraining", fail)
    on_cpu = replace(CUDA, torch_device="cpu")
    case = suite.Case(on_cpu, BUDGETS, DEVICE, print, "tiny", TINY, weights, tokens)
    found, missing = suite.torch_runs(case, {"a": "eager", "b": "flash"}, ExitStack())
    assert found == {}
    assert missing == dict.fromkeys("ab", "PyTorch failed: RuntimeError: CUDA out of memory.")


# -- figures ------------------------------------------------------------------------------------------
def test_speeds_and_shares() -> None:
    rounds = Rounds((Timing(0.5, 0.6), Timing(1.0, 1.1), Timing(0.25, 0.3)), {"linear": 300, "adam": 100})
    rounds = replace(rounds, flops={name: count * 10**12 for name, count in rounds.flops.items()})
    square = Rounds((Timing(0.5, 0.6), Timing(0.5, 0.6), Timing(0.5, 0.6)), {"matmul": 400 * 10**12})
    hardware = machine.published("NVIDIA H100 80GB HBM3")
    assert hardware is not None
    assert hardware.peak_flops == 989 * 10**12
    step = figures.step_time("m", "n", rounds)
    assert (step.value, step.low, step.high, step.seconds) == (500, 375, 750, {"device": 0.25, "host": 0.3})
    speed = figures.speed("m", "n", rounds)
    assert (speed.value, speed.note) == (800, "400 TFLOP a step, 75.0 % of it in matrix products")
    assert figures.share_of_peak("m", "n", rounds, hardware, "").value == pytest.approx(100 * 600 / 989)
    assert figures.share_of_square("m", "n", rounds, square).value == pytest.approx(100 * 600 / 800)
    assert figures.ratio("m", "n", {"a": rounds, "b": square}, "a", "b").value == 1.0
    assert figures.share_of_peak("m", "n", rounds, None, "X").value is None


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "h200-141"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4080", None),
        ("a/b", None),
        (None, None),
    ],
)
def test_a_peak_is_that_of_this_device_or_none(name: str | None, known: str | None) -> None:
    found = machine.published(name)
    assert (found.name if found else None) == known


# -- what the GPU has room for ------------------------------------------------------------------------
def test_rows_are_chosen_by_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {rows: machine.needed_bytes(LARGE.replace(micro_batch=rows), 8192) for rows in (8, 4)}
    assert needed[4] < needed[8] < H100.free_bytes

    def rows(free: int) -> int:
        monkeypatch.setattr(machine, "find_gpu", lambda index: replace(H100, free_bytes=free))
        return machine.fitting("124M", LARGE, 8192).data.micro_batch

    assert rows(needed[8]) == 8
    assert rows(needed[8] - 1) == rows(needed[4]) == 4
    with pytest.raises(InputError, match=r"124M on 4 rows needs .* are free: nvidia-smi shows") as refused:
        rows(needed[4] - 1)
    assert "\n" not in str(refused.value)


def test_bf16_is_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda index: replace(H100, name="Tesla V100", compute_capability="7.0"))
    assert machine.precision_fault("bf16") == "bf16 needs compute capability 8.0, Tesla V100 has 7.0"
    assert machine.precision_fault("fp16") == ""
    monkeypatch.setattr(machine, "ROWS", (4,))
    only = replace(CUDA, precisions=("bf16",))
    (group,) = suite.measure(only, {"tiny": TINY}, BUDGETS, DEVICE, print)
    assert group.rounds is not None
    assert [(figure.value, figure.note) for figure in group.figures] == [(None, group.rounds["note"])]
    assert strict(figures.to_json(group.figures, DEVICE, "", [group.rounds]))["figures"][0]["value"] is None


# -- the verb -----------------------------------------------------------------------------------------
def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.slow
def test_the_verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = replace(CUDA, models={"45M": TINY}, quick=BUDGETS, precisions=("fp16",))
    monkeypatch.setitem(suite.SUITES, "cuda", tiny)
    monkeypatch.setattr(machine, "ROWS", (4,))
    file = tmp_path / "figures.json"
    assert bench.main(arguments("--backend", "cuda", "--quick", "--json", str(file))) == 0
    printed = capsys.readouterr().out
    assert "TFLOP/s" in printed
    assert "Device: " in printed
    assert f"CuPy {cp.__version__}" in printed
    assert "None" not in printed
    body = strict(file.read_text("utf-8"))
    assert body["machine"]["cupy"] == cp.__version__
    assert body["method"] == CUDA.method


def test_a_machine_without_a_gpu_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_check, "basic_facts", CudaFacts)
    with pytest.raises(InputError, match=r"^--backend cuda: CuPy is not installed: pip install") as refused:
        bench.main(arguments("--backend", "cuda"))
    assert refused.value.exit_code == 2


def test_fsdp_is_not_timed_on_a_gpu() -> None:
    with pytest.raises(InputError, match="--torch-distributed with --backend cuda"):
        bench.main(arguments("--backend", "cuda", "--torch-distributed"))
