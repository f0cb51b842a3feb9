"""A training run that is held between its steps, so that a benchmark can let it take one at a time.

The run is zerosim's own: `engine.train` over ranks that `launch` starts, as in `train/run.py`. Only its batches come
through a gate: every rank first meets the others in a barrier (so the step of all is over), then waits until the
benchmark asks for one step more. What is timed is the time from there to the next barrier: all ranks' forward,
backward, optimizer, and the reading of their events.

On GPUs an event is recorded in rank 0's stream before the gate opens, while the GPU has nothing to do. The barrier
behind the step makes every rank's stream wait for all others, so that the event which then goes into rank 0's stream
is behind the work of all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.bench.contest import Contestant, Timer, Timing, timed
from zerosim.bench.gate import Gate
from zerosim.comm.runtime import Context, launch, make_backend
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.device.events import Event, Kernel, Reader
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.traffic import CommLedger
from zerosim.models.model import initial_values, load_flat
from zerosim.placement.mesh import DATA
from zerosim.train import data, engine
from zerosim.train.build import build_model, build_rank, place_rank, world_of
from zerosim.train.build_updater import build_updater

RANKS = 4

MICRO_BATCHES = 4
"""Of a pipeline: each of its two stages works on as many."""

TIMEOUT_S = 3600.0
"""A run that waits for its turn at a gate is not late."""

END_S = 60.0


def over_ranks(config: RunConfig) -> RunConfig:
    """The same global batch over four ranks at stage 3."""
    return config.replace(stage=3, ranks=RANKS, micro_batch=config.data.micro_batch // RANKS)


def on_meshes(config: RunConfig) -> dict[str, RunConfig]:
    """The same global batch on two ranks: cut within each layer, and between layers into micro-batches."""
    rows = config.data.micro_batch // MICRO_BATCHES
    return {
        "tp 2": config.replace(ranks=2, tp=2),
        "pp 2": config.replace(ranks=2, pp=2, accumulate=MICRO_BATCHES, micro_batch=rows),
    }


def initial_weights(config: RunConfig) -> dict[str, Any]:
    """What zerosim begins with, by name."""
    model = build_model(config, Device(0, make_backend("numpy")))
    return {
        weight.name: initial_values(weight, config.data.seed) for flat in model.flats for weight in flat.spec.weights
    }


def text_tokens(config: RunConfig) -> Any:
    """One global batch (rows, seq + 1) of the primer, the same whatever N; ids are folded into a small vocabulary."""
    text = data.read_text(None, config.model.seq, 256)
    return data.sample_batch(text, config.data.seed, 0, config.global_batch, config.model.seq) % config.model.vocab


def random_tokens(config: RunConfig) -> Any:
    """One global batch (rows, seq + 1), int64: ids spread over the vocabulary."""
    return np.random.default_rng(config.data.seed).integers(
        0, config.model.vocab, (config.global_batch, config.model.seq + 1), np.int64
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """BLAS on one thread, for every contestant of this process."""
    NumpyBackend()  # as in a run, before any thread is there: it settles how memory is kept for those to come
    with threadpool_limits(limits=1, user_api="blas"):
        yield


def train_from(
    ctx: Context, config: RunConfig, weights: Mapping[str, Any], batches: Iterator[list[Any]]
) -> Iterator[list[float]]:
    """Build this rank's program, place whole weights in it by name, and train: the losses of each step."""
    model, strategy, pipeline = build_rank(ctx, config, build_updater(config, 1))
    place_rank(ctx, model, strategy, lambda flat, group: load_flat(flat, weights, group, exact_master=False))
    return engine.train(model, batches, strategy, ctx.device, pipeline=pipeline)


def own_rows(ctx: Context, config: RunConfig, tokens: Any) -> list[Any]:
    """Cut this rank's micro-batches out of a global batch."""
    mesh = config.mesh.axes
    return data.micro_batches(tokens, mesh.index(ctx.rank, *DATA), mesh.size(*DATA), config.data.accumulate)


class LastStep:
    """A reader that keeps the events of the last step, and reads no more of them than their first kernel."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def read(self, events: list[Event]) -> None:
        if any(isinstance(event, Kernel) for event in events):  # behind the last step comes what a run leaves
            self.events = events


class TrainingRun(Contestant):
    """A contestant: one step of `config` per `step`. Begins and ends with its `with` block.

    The first step, in which a GPU's kernels are compiled, is taken on entering; without `record` no flops are known.
    weights: full weights by name, fp32; tokens: (rows, seq + 1).

    Raises: on entering and in `step`, whatever a rank failed with.
    """

    def __init__(self, config: RunConfig, weights: Mapping[str, Any], tokens: Any, *, record: bool = True) -> None:
        self.config = config
        self.losses: list[list[float]] = [[] for _ in range(config.mesh.ranks)]
        self._weights = weights
        self._tokens = tokens
        self._record = record
        self._last = [LastStep() for _ in range(config.mesh.ranks)]
        self._streams: dict[int, Any] = {}
        self._timer: Timer | None = None
        self._gate = Gate()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="bench", daemon=True)

    def __enter__(self) -> TrainingRun:
        self._thread.start()
        try:
            self._advance()
            if self._streams:
                timer = self._timer = self._streams[0].timer()
                timer.start()
                timer.stop()  # the first step's work is done: the next one finds an idle device
            self.release()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def step(self) -> Timing:
        return timed(self._advance, self._timer)

    @property
    def first_loss(self) -> float:
        """Of the first step's global batch, which every data rank has an equal share of."""
        steps = [losses[: self.config.data.accumulate] for losses in self.losses if losses]  # they come out at the end
        return sum(map(sum, steps)) / sum(map(len, steps))

    def release(self) -> None:
        for stream in self._streams.values():
            with stream.device:
                stream.pool.free_all_blocks()

    @property
    def flops(self) -> Mapping[str, int]:
        """All ranks' flops of the last step, by kernel."""
        found: dict[str, int] = {}
        for last in self._last:
            for event in last.events:
                if isinstance(event, Kernel) and event.flops:
                    found[event.name] = found.get(event.name, 0) + event.flops
        return found

    def _advance(self) -> None:
        self._gate.open()
        if self._gate.closed:
            raise self._failure or RuntimeError("the training run has ended")

    def _end(self) -> None:
        self._gate.close()
        self._thread.join(END_S)
        self.release()

    def _run(self) -> None:
        world = replace(world_of(self.config), timeout_s=TIMEOUT_S, record=self._record)
        try:
            launch(self._program, world, self._readers)
        except BaseException as error:
            self._failure = error
        finally:
            self._gate.close()

    def _readers(self, rank: int) -> tuple[Reader, ...]:
        """Those of a real run, whose cost belongs to recording, and the one that flops are read from."""
        return (MemoryLedger(), CommLedger(), self._last[rank]) if self._record else ()

    def _program(self, ctx: Context) -> None:
        steps = train_from(ctx, self.config, self._weights, self._batches(ctx))
        if ctx.device.stream is not None:
            self._streams[ctx.rank] = ctx.device.stream
        for losses in steps:
            self.losses[ctx.rank] += losses

    def _batches(self, ctx: Context) -> Iterator[list[Any]]:
        own = own_rows(ctx, self.config, self._tokens)
        for step in count():
            ctx.comm.barrier()
            if not self._gate.arrive(step):
                return
            yield own
