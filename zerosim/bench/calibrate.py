"""Measure this machine for the clock: kernels of ranks that work alone, single collectives, and the host's share.

Nothing is fitted to a step of several ranks. One rank trains small models, and each of its kernels is timed
alone. Several such ranks do this at the same time without communicating, because they
share caches and memory. BLAS has one thread, as in a rank.

Kernels and the host are timed by their thread's CPU time: the clock gives each rank its own core, so the load of other
programs must not count. A collective includes waiting, so it is timed on the wall clock. The
fastest of several loops counts, because other programs can only add time.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

from zerosim.bench.alone import Samples, adam_rate, copies, host_seconds, kernels_of, products
from zerosim.bench.contest import Progress
from zerosim.bench.training import TIMEOUT_S, one_thread
from zerosim.comm.runtime import Context, World, launch
from zerosim.config import RunConfig
from zerosim.config.presets.hardware import Hardware, Sources
from zerosim.config.presets.machine_file import Machine, Measured
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import dtype
from zerosim.verbs import MEASURED, find_verb

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
"""The values of every process, on all processes."""
NEAR = 1.25
"""Points whose work differs by less than this factor are merged."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes to measure. `programs`: models that ranks train alone. `host`: a model with large activations, so that
    the host's caches are cold, and almost no parameters, which a single rank would send to itself. Sides of square
    products; bytes of copies and of collectives' payloads; the number of parameters in a rank's Adam step."""

    programs: tuple[RunConfig, ...]
    host: RunConfig
    sides: tuple[int, ...]
    copies: tuple[int, ...]
    payloads: tuple[int, ...]
    adam: int
    steps: int
    repeats: int


_ALONE: dict[str, Any] = {"stage": 0, "ranks": 1, "lr": 1e-4, "precision": "fp32"}
_LLAMA: dict[str, Any] = {**_ALONE, "model": "llama", "attention": "flash"}
_TINY = RunConfig(**_ALONE, layers=2, hidden=16, heads=2, seq=16, micro_batch=1, vocab=64)
FULL = Sizes(
    programs=(
        RunConfig(**_ALONE, layers=2, hidden=64, heads=2, seq=64, micro_batch=4, vocab=128),
        RunConfig(**_ALONE, layers=2, hidden=96, heads=4, seq=96, micro_batch=16, vocab=256),
        RunConfig(**_ALONE, layers=2, hidden=192, heads=3, seq=192, micro_batch=4, vocab=512),
        RunConfig(**_ALONE, layers=2, hidden=320, heads=5, seq=320, micro_batch=4, vocab=256),
        RunConfig(**_ALONE, layers=2, hidden=512, heads=8, seq=256, micro_batch=8, vocab=1024),
        RunConfig(**_LLAMA, layers=2, hidden=64, heads=2, seq=64, micro_batch=4, vocab=128),
        RunConfig(**_LLAMA, layers=2, hidden=320, heads=5, seq=320, micro_batch=4, vocab=512),
    ),
    host=RunConfig(**_ALONE, layers=4, hidden=32, heads=2, seq=128, micro_batch=32, vocab=64),
    sides=(16, 32, 64, 128, 256, 512, 1024),
    copies=(2**10, 2**14, 2**17, 2**20, 2**23, 2**26),
    payloads=(2**6, 2**12, 2**16, 2**19, 2**22, 2**25),
    adam=2**23,
    steps=5,
    repeats=5,
)
QUICK = replace(
    FULL, programs=(_TINY,), host=_TINY, sides=(16, 64, 256), copies=(2**10, 2**17, 2**22), payloads=(2**6, 2**16),
    adam=2**16, steps=2, repeats=2,
)  # fmt: skip


def measure_machine(
    sizes: Sizes,
    precision: str,
    ranks: int,
    progress: Progress,
    *,
    transport: str = "threads",
    gather: Gather | None = None,
) -> Hardware:
    """Measure this machine as a device with `ranks` working ranks. Over MPI every process calls this, with the
    session's `gather`.

    Its memory is one rank's share, and its peaks are the best measured values. No measured step is compared here.
    """
    everyone = gather or (lambda value: [value])
    here = ranks if transport == "threads" else 1
    with one_thread():
        progress("products and copies of one rank")
        multiply = partial(products, sizes.sides, precision, sizes.repeats)
        copy = partial(copies, sizes.copies, precision, sizes.repeats)
        product, memory = (_curve(_pooled(_together(here, work, everyone))) for work in (multiply, copy))
        found: Samples = {}
        for config in sizes.programs:
            config = config.replace(precision=precision)
            progress(f"kernels of one rank alone: {config.model.name}, hidden {config.model.hidden}")
            work = partial(kernels_of, config, sizes.steps, product, memory)
            found = _pooled([found, *_together(here, work, everyone)])
        host = sizes.host.replace(precision=precision)
        progress("what the host does between kernels")
        kernel_s = median(_together(here, partial(host_seconds, host, 4 * sizes.steps), everyone))
        progress("Adam of all ranks on the host, over states that caches do not hold")
        adam = sum(_together(here, partial(adam_rate, sizes.adam, sizes.repeats), everyone))
        progress(f"collectives among {ranks} ranks, {transport}")
        world = World(ranks, max_running=here, transport=transport, timeout_s=TIMEOUT_S)
        own = launch(lambda ctx: _collectives(ctx, sizes, dtype(precision).name), world)[0]
        collectives: dict[str, Samples] = everyone(own)[0]
    names = sorted({name for name, _ in found})
    machine = Machine(
        precision,
        transport,
        ranks,
        os.cpu_count() or 1,
        kernel_s,
        "not checked against measured steps of this machine",
        product,
        memory,
        {name: _curve({key: seconds for key, seconds in found.items() if key[0] == name}) for name in names},
        {verb: _curve(collectives[verb]) for verb in MEASURED},
    )
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    link = int(machine.collectives["all_gather"].best)
    name, sources = platform.node() or "this machine", Sources(*["measured"] * 4)
    best = int(product.best), int(memory.best)
    return Hardware(name, memory_bytes, *best, link, sources, machine=machine, cpu_bytes_per_s=int(adam))


def _together(here: int, work: Callable[[], T], everyone: Gather) -> list[T]:
    """Run `work` on this process's ranks at the same time, together with the ranks of other processes."""
    results: list[T] = []
    failures: list[BaseException] = []

    def one() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    everyone(None)  # all ranks begin together
    threads = [threading.Thread(target=one, name="calibrate", daemon=True) for _ in range(here)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [result for results in everyone(results) for result in results]


# -- ranks together ---------------------------------------------------------------------------------------------------
def _collectives(ctx: Context, sizes: Sizes, precision: str) -> dict[str, Samples]:
    """Time each verb alone, by bytes of payload: the least seconds per call over several loops."""
    found: dict[str, Samples] = {verb: {} for verb in MEASURED}
    for payload in sizes.payloads:
        payload = -(-payload // (8 * ctx.world_size)) * 8 * ctx.world_size
        calls = max(2, min(20, 2**21 // payload))
        for verb in MEASURED:
            buffers = [_buffer(ctx, verb, payload, precision) for _ in range(2)]
            call = _call(ctx, verb)
            loops = [_loop(ctx, call, buffers, calls) for _ in range(sizes.repeats + 1)]
            found[verb][verb, float(payload)] = [min(loops[1:])]
    return found


def _buffer(ctx: Context, verb: str, payload: int, precision: str) -> Buffer:
    numel = payload // dtype(precision).itemsize // (ctx.world_size if verb == "all_gather" else 1)
    buffer = ctx.device.alloc((numel,), dtype(precision), Kind.TEMP)
    ctx.device.backend.fill(buffer.array, 1.0)
    return buffer


def _call(ctx: Context, verb: str) -> Callable[[Buffer], object]:
    if verb == "send":
        return lambda buffer: _message(ctx, buffer)
    method: Callable[..., object] = getattr(ctx.comm, verb)
    return (lambda buffer: method(buffer, 0)) if find_verb(verb).has_root else method


def _message(ctx: Context, buffer: Buffer) -> None:
    """Send a message from the first rank to the second."""
    if ctx.rank == 0:
        ctx.comm.send(buffer, 1)
    elif ctx.rank == 1:
        ctx.comm.recv(buffer.shape, buffer.dtype, 0)


def _loop(ctx: Context, call: Callable[[Buffer], object], buffers: Sequence[Buffer], calls: int) -> float:
    """Return the seconds of a call, from one barrier to the next."""
    ctx.comm.barrier()
    began = time.perf_counter()
    for number in range(calls):
        call(buffers[number % len(buffers)])
    ctx.comm.barrier()
    ctx.device.recorder.drain()
    return (time.perf_counter() - began) / calls


# -- curves -----------------------------------------------------------------------------------------------------------
def _pooled(samples: Iterable[Samples]) -> Samples:
    found: Samples = {}
    for one in samples:
        for key, seconds in one.items():
            found.setdefault(key, []).extend(seconds)
    return found


def _curve(samples: Mapping[tuple[str, float], Sequence[float]]) -> Measured:
    """Return the medians by work, with near points merged. Points where more work took less time get their average."""
    groups: list[list[tuple[float, float]]] = []
    for (_, work), seconds in sorted(samples.items()):
        if groups and work < NEAR * groups[-1][0][0]:
            groups[-1].append((work, median(seconds)))
        else:
            groups.append([(work, median(seconds))])
    points = [tuple(sum(column) / len(group) for column in zip(*group, strict=True)) for group in groups]
    runs: list[list[float]] = []  # seconds, and the number of points with that value
    for _, seconds in points:
        runs.append([seconds, 1])
        while len(runs) > 1 and runs[-2][0] > runs[-1][0]:
            last, count = runs.pop()
            runs[-1] = [(runs[-1][0] * runs[-1][1] + last * count) / (runs[-1][1] + count), runs[-1][1] + count]
    rising = [seconds for seconds, count in runs for _ in range(int(count))]
    return Measured(tuple((work, seconds) for (work, _), seconds in zip(points, rising, strict=True)))
