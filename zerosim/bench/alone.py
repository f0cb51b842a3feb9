"""Time one rank alone: each kernel of its training, bare products and copies, and the host's work between kernels.

All times are CPU time of the working thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from statistics import median
from typing import Any, ParamSpec

from zerosim.backends.kernels import AdamStep
from zerosim.bench.training import TIMEOUT_S, initial_weights, random_tokens, train_from
from zerosim.comm.runtime import Context, assemble, make_backend
from zerosim.config import RunConfig
from zerosim.config.presets.machine_file import Measured
from zerosim.device.device import Device
from zerosim.device.recorder import Recorder
from zerosim.device.work import MATMUL, KernelWork, work_of
from zerosim.dtypes import dtype
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.traffic import CommLedger
from zerosim.optim.adam import Adam
from zerosim.train.world import world_of

P = ParamSpec("P")
Samples = dict[tuple[str, float], list[float]]
"""Seconds by kernel and work."""


class Stopwatch(Device):
    """A device that measures the CPU time of each kernel: `seen` lists the kernel's work and its seconds."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.seen: list[tuple[Sequence[KernelWork], float]] = []

    def kernel(self, flops: int, run: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> None:
        super().kernel(flops, self._timed((work_of(run.__name__, flops, args),), run), *args, **kwargs)

    def kernels(
        self, parts: Sequence[KernelWork], run: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        super().kernels(parts, self._timed(parts, run), *args, **kwargs)

    def _timed(self, parts: Sequence[KernelWork], run: Callable[P, None]) -> Callable[P, None]:
        @wraps(run)
        def timed(*args: P.args, **kwargs: P.kwargs) -> None:
            began = time.thread_time()
            run(*args, **kwargs)
            self.seen.append((parts, time.thread_time() - began))

        return timed


def _alone(config: RunConfig, steps: int, make: type[Device]) -> list[tuple[float, Any]]:
    """Train on one rank. Return each step's CPU seconds and the kernels that a Stopwatch saw. Two warm-up steps go
    first."""
    weights, tokens = initial_weights(config), random_tokens(config)
    done: list[tuple[float, Any]] = []

    def program(ctx: Context) -> None:
        training = train_from(ctx, config, weights, iter([[tokens]] * (steps + 2)))
        began = time.thread_time()
        for _ in training:
            seconds = time.thread_time() - began
            seen, ctx.device.__dict__["seen"] = ctx.device.__dict__.get("seen"), []
            done.append((seconds, seen))
            began = time.thread_time()

    def device(rank: int, backend: Any, switch: Any) -> Device:
        return make(rank, backend, recorder=Recorder((MemoryLedger(), CommLedger())), switch=switch)

    assemble(program, replace(world_of(config), timeout_s=TIMEOUT_S), device).results(TIMEOUT_S)
    return done[2:]


def kernels_of(config: RunConfig, steps: int, product: Measured, memory: Measured) -> Samples:
    """Time each kernel of a rank that trains alone. Where NumPy runs one kernel and a GPU several, divide the time
    among them in proportion to the machine's times for products and copies."""
    found: Samples = {}
    for _, seen in _alone(config, steps, Stopwatch):
        for parts, seconds in seen:
            ideal = [_ideal(part, product, memory) for part in parts]
            for part, share in zip(parts, ideal, strict=True):
                if share:
                    found.setdefault((part.name, _work(part)), []).append(seconds * share / sum(ideal))
    return found


def _work(part: KernelWork) -> int:
    flops = part.flops if part.engine == MATMUL else 0
    return flops or part.bytes_read + part.bytes_written


def _ideal(part: KernelWork, product: Measured, memory: Measured) -> float:
    nbytes = part.bytes_read + part.bytes_written
    moved = memory.seconds(nbytes) if nbytes else 0.0
    return max(moved, product.seconds(part.flops)) if part.engine == MATMUL and part.flops else moved


def host_seconds(config: RunConfig, steps: int) -> float:
    """Measure the host's seconds per kernel of a program: autograd, allocation, recording and readers (and
    the stopwatch, a few microseconds)."""
    done = _alone(config, steps, Stopwatch)
    count = sum(len(parts) for parts, _ in done[0][1])
    beside: float = median(step_s - sum(seconds for _, seconds in seen) for step_s, seen in done)
    return max(0.0, beside) / count


def products(sides: Sequence[int], precision: str, least: int) -> Samples:
    """Time square products of the backend, by operations."""
    backend, found = make_backend("numpy"), {}
    for side in sides:
        left, right, out = (_filled(backend, (side, side), precision) for _ in range(3))
        repeats = max(least, min(200, 2**24 // side**3))
        found["product", 2.0 * side**3] = [_cpu(backend.matmul, left, right, out) for _ in range(repeats)]
    return found


def copies(sizes: Sequence[int], precision: str, least: int) -> Samples:
    """Time copies of the backend, by bytes read and written."""
    backend, found = make_backend("numpy"), {}
    for nbytes in sizes:
        source, out = (_filled(backend, (nbytes // dtype(precision).itemsize,), precision) for _ in range(2))
        repeats = max(least, min(200, 2**22 // nbytes))
        found["copy", 2.0 * nbytes] = [_cpu(backend.copy, source, out) for _ in range(repeats)]
    return found


def adam_rate(numel: int, least: int) -> float:
    """Measure the bytes per second that one rank's CPU-Adam reads and writes, in a step over fp32 masters and
    states."""
    backend = make_backend("numpy")
    arrays = [_filled(backend, (numel,), "fp32") for _ in range(4)]
    hyper = AdamStep(1.0, 1e-3, 0.9, 0.999, 1e-8, 0.0, False, 1)
    work = work_of("adam", Adam.flops * numel, (*arrays, hyper))
    return (work.bytes_read + work.bytes_written) / median(_cpu(backend.adam, *arrays, hyper) for _ in range(least))


def _filled(backend: Any, shape: tuple[int, ...], precision: str) -> Any:
    array = backend.empty(shape, dtype(precision))
    backend.fill(array, 1.0)
    return array


def _cpu(run: Callable[..., None], *arrays: Any) -> float:
    began = time.thread_time()
    run(*arrays)
    return time.thread_time() - began
