"""What kernels read and write: the table against the arrays that really change, and the figures of known kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_cases import CASES, Case

from zerosim import functional as F
from zerosim.backends.kernels import AdamStep, Coded
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.config import RunConfig
from zerosim.device.device import Device, Kind
from zerosim.device.events import Kernel, Launch
from zerosim.device.recorder import Recorder
from zerosim.device.work import BY_ROWS, FILLS, MATMUL, UPDATES, VECTOR, work_of
from zerosim.dtypes import DType, bf16, fp16, fp32
from zerosim.optim.adam import Adam
from zerosim.optim.optimizer import Step
from zerosim.tensor.tensor import tensor
from zerosim.train.result import RunResult

NOT_LISTED = {"attention", "attention_backward", "reduce", "from_host", "to_host"}


class Spy(NumpyBackend):
    """Remembers of each kernel the places of its arguments, and those whose arrays it changed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, set[int], set[int]]] = []

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:  # type: ignore[override]
        """Of values that no kernel leaves: what was freed before may hold the very results."""
        array = super().empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xAB
        return array

    def __getattribute__(self, name: str) -> Any:
        kernel = super().__getattribute__(name)
        if name not in FILLS and name not in UPDATES:
            return kernel

        def called(*args: Any, **options: Any) -> None:
            before = [arg.tobytes() if isinstance(arg, np.ndarray) else b"" for arg in args]
            kernel(*args, **options)
            changed = {i for i, arg in enumerate(args) if isinstance(arg, np.ndarray) and arg.tobytes() != before[i]}
            is_array = {i for i, arg in enumerate(args) if isinstance(arg, np.ndarray)}
            self.calls.append((name, is_array, changed))

        return called


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_table_says_which_arrays_a_kernel_fills(case: Case) -> None:
    spy = Spy()
    case.run(spy, fp32)
    for name, arrays, changed in spy.calls:
        filled = set(UPDATES.get(name, FILLS.get(name, ()))) & arrays
        if "in place" in case.name:  # one array in two places
            changed -= {0}
        assert changed == filled, name


def test_adam8bit_reads_all_and_fills_all_but_the_gradient() -> None:
    spy, arrays = Spy(), [np.full(512, 0.5, np.float32), np.ones(512, np.float32)]
    states = [Coded(np.full(512, 99, np.uint8), np.ones(2, np.float32)) for _ in range(2)]
    before = [array.tobytes() for state in states for array in state]
    hyper = AdamStep(1.0, 0.1, 0.9, 0.999, 1e-8, 0.0, True, 1)
    spy.adam8bit(*arrays, *states, hyper)
    assert spy.calls == [("adam8bit", {0, 1}, {0})]
    after = [array.tobytes() for state in states for array in state]
    assert all(a != b for a, b in zip(after, before, strict=True))
    assert UPDATES["adam8bit"] == (0, 2, 3)
    assert work_of("adam8bit", 0, (*arrays, *states, hyper))[3:5] == (512 * (4 + 4 + 2) + 16, 512 * (4 + 2) + 16)


def test_every_kernel_is_listed_or_has_a_rule_of_its_own() -> None:
    called = {case.name.split()[0] for case in CASES}
    known = {*FILLS, *UPDATES, *BY_ROWS, *NOT_LISTED}
    assert {name for name in called if hasattr(NumpyBackend, name)} <= known


def kernels(run: Callable[[Device], Any]) -> list[Kernel]:
    device = Device(0, NumpyBackend(), recorder=Recorder(keep=True))
    run(device)
    device.recorder.drain()
    return [event for event in device.recorder.history if isinstance(event, Kernel)]


def traffic(event: Kernel) -> tuple[str, str, int, int]:
    return event.name, event.engine, event.bytes_read, event.bytes_written


@pytest.mark.parametrize(("grad", "read"), [(bf16, 14), (fp16, 14), (fp32, 16)], ids=str)
def test_adam_reads_14_and_writes_12_bytes_an_element(grad: Any, read: int) -> None:
    """fp32 masters and moments; 28 in all with fp32 gradients."""

    def update(device: Device) -> None:
        weights, *moments = (device.alloc((10,), fp32, Kind.OPTIM) for _ in range(3))
        half = device.alloc((10,), grad, Kind.GRAD)
        for buffer in (weights, *moments, half):
            buffer.array[...] = 1
        states = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
        Adam().update(weights, half, states, Step(1.0, 0.1, 1), decays=False)

    assert [traffic(event) for event in kernels(update)] == [("adam", VECTOR, 10 * read, 120)]


def test_the_cast_that_publishes_moves_6_bytes_an_element() -> None:
    result = run_of(stage=3, precision="bf16")
    last = [e for e in result.events[0] if isinstance(e, Kernel) and e.scope.phase == "optimizer" and e.name == "copy"]
    numels = [unit.numel // 2 for unit in result.units]
    assert [(event.bytes_read, event.bytes_written) for event in last] == [(4 * n, 2 * n) for n in numels]


def run_of(**changes: Any) -> RunResult:
    from zerosim.train.run import run

    sizes: dict[str, Any] = dict(layers=1, hidden=16, heads=2, seq=7, micro_batch=1, steps=1, ranks=2)
    return run(RunConfig(**{**sizes, **changes}), keep_events=True)


def test_a_table_is_read_by_rows() -> None:
    def look_up(device: Device) -> None:
        table = tensor(np.zeros((100, 4)), device, dtype="bf16", requires_grad=True)
        F.embedding(tensor([[0, 1, 2]], device, dtype="int64").buffer, table)

    assert [traffic(event) for event in kernels(look_up)] == [("embedding", VECTOR, 24 + 24, 24)]
    grad, ids, table = np.zeros((3, 4), np.float16), np.zeros(3, np.int64), np.zeros((100, 4), np.float16)
    assert work_of("embedding_backward", 12, (grad, ids, table))[3:5] == (24 + 24 + 24, 800 + 24)


@pytest.mark.parametrize(("dropout", "mask"), [(0.0, 0), (0.5, 1)])
def test_eager_attention_is_several_kernels(dropout: float, mask: int) -> None:
    """2 heads of 2 columns on 3 tokens in 2 rows, one of them shared as key and value; bf16."""
    head, shared, scores = 2 * 2 * 3 * 4, 2 * 2 * 3 * 2, 2 * 2 * 2 * 3 * 3
    mask *= scores // 2  # a byte each

    def attend(device: Device) -> None:
        qkv = tensor(np.ones((2, 3, 8)), device, dtype="bf16")
        F.attention(qkv, 2, num_kv_heads=1, dropout=dropout, key=(1, 2))

    found = [traffic(event) for event in kernels(attend) if event.name != "dropout_mask"]
    assert found == [
        ("attention_scores", MATMUL, head + shared, scores),
        ("softmax", VECTOR, scores, scores),
        ("attention_values", MATMUL, scores + mask + shared, head),
    ]


@pytest.mark.parametrize("collective", ["direct", "ring"])
def test_a_collectives_sums_name_it(collective: str) -> None:
    """Every other kernel is the program's own. Of N parts N are read and one is written; a ring adds two at a time."""
    events = run_of(stage=2, collective=collective).events[1]
    launches = {event.work: event for event in events if isinstance(event, Launch)}
    sums = [event for event in events if isinstance(event, Kernel) and event.name == "reduce"]
    assert sums
    for event in sums:
        assert event.work is not None
        assert launches[event.work].op in ("reduce_scatter", "all_reduce")
        assert event.bytes_read == 2 * event.bytes_written > 0
    assert all(event.work is None for event in events if isinstance(event, Kernel) and event.name != "reduce")
