"""A training run that stops between its steps, so that a benchmark can let it take one step at a time.

The run is zerosim's own: `engine.train` over ranks that `launch` starts, as in `train/run.py`. But its batches come
through a gate. There every rank first meets the others in a barrier, so all have ended their step. Then it waits until
the benchmark asks for one more step. The timed interval goes from there to the next barrier: all ranks' forward,
backward, optimizer, and the reading of their events.

On GPUs an event is recorded in rank 0's stream before the gate opens, while the GPU is idle. The barrier
after the step makes every rank's stream wait for all others. So the next event in rank 0's stream
comes after the work of all ranks.
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
from zerosim.device.events import Event, Kernel
from zerosim.device.recorder import Reader
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.traffic import CommLedger
from zerosim.models.model import initial_values, load_flat
from zerosim.placement.mesh import DATA
from zerosim.train import data, engine
from zerosim.train.build import build_rank, place_rank
from zerosim.train.build_model import build_model
from zerosim.train.build_updater import build_updater
from zerosim.train.world import world_of

RANKS = 4

MICRO_BATCHES = 4
"""Microbatches for each of the two stages of a pipeline."""

TIMEOUT_S = 3600.0
"""A long limit: a run that waits at a gate for its turn is not late."""

END_S = 60.0


def over_ranks(config: RunConfig) -> RunConfig:
    """Return the configuration with the same global batch over four ranks at ZeRO-3."""
    return config.replace(stage=3, ranks=RANKS, micro_batch=config.data.micro_batch // RANKS)


def on_meshes(config: RunConfig) -> dict[str, RunConfig]:
    """Return configurations with the same global batch on two ranks: tensor parallel, and a pipeline with
    microbatches."""
    rows = config.data.micro_batch // MICRO_BATCHES
    return {
        "tp 2": config.replace(ranks=2, tp=2),
        "pp 2": config.replace(ranks=2, pp=2, accumulate=MICRO_BATCHES, micro_batch=rows),
    }


def initial_weights(config: RunConfig) -> dict[str, Any]:
    """Return zerosim's initial weights, by name."""
    model = build_model(config, Device(0, make_backend("numpy")))
    return {
        weight.name: initial_values(weight, config.data.seed) for flat in model.flats for weight in flat.spec.weights
    }


def text_tokens(config: RunConfig) -> Any:
    """Return one global batch (rows, seq + 1) of the primer, the same for every N; ids are folded into a small
    vocabulary."""
    text = data.read_text(None, config.model.seq, 256)
    return data.sample_batch(text, config.data.seed, 0, config.global_batch, config.model.seq) % config.model.vocab


def random_tokens(config: RunConfig) -> Any:
    """Return one global batch (rows, seq + 1), int64, with ids spread over the vocabulary."""
    return np.random.default_rng(config.data.seed).integers(
        0, config.model.vocab, (config.global_batch, config.model.seq + 1), np.int64
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Set BLAS to one thread, for every contestant of this process."""
    NumpyBackend()  # as in a run, before any thread starts: this decides how later threads' memory is cached
    with threadpool_limits(limits=1, user_api="blas"):
        yield


def train_from(
    ctx: Context, config: RunConfig, weights: Mapping[str, Any], batches: Iterator[list[Any]]
) -> Iterator[list[float]]:
    """Build this rank's program, place whole weights in it by name, and train. Return the losses of each step."""
    model, strategy, pipeline = build_rank(ctx, config, build_updater(config, 1))
    place_rank(ctx, model, strategy, lambda flat, group: load_flat(flat, weights, group, exact_master=False))
    return engine.train(model, batches, strategy, ctx.device, pipeline=pipeline)


def own_rows(ctx: Context, config: RunConfig, tokens: Any) -> list[Any]:
    """Cut this rank's microbatches out of a global batch."""
    mesh = config.mesh.axes
    return data.micro_batches(tokens, mesh.index(ctx.rank, *DATA), mesh.size(*DATA), config.data.accumulate)


class LastStep:
    """A reader that keeps the events of the last step and inspects only their first kernel."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def read(self, events: list[Event]) -> None:
        if any(isinstance(event, Kernel) for event in events):  # events of the run's end follow the last step
            self.events = events


class TrainingRun(Contestant):
    """A contestant: one step of `config` per `step`. Begins and ends with its `with` block.

    Entering takes the first step, which compiles a GPU's kernels. Without `record` flops are unknown.
    weights: full weights by name, fp32; tokens: (rows, seq + 1).

    Raises: a failed rank's error, on entering and in `step`.
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
                timer.stop()  # the first step's work is done, so the next step starts on an idle device
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
        """The loss of the first step's global batch, of which every data rank has an equal share."""
        steps = [losses[: self.config.data.accumulate] for losses in self.losses if losses]  # losses arrive at the end
        return sum(map(sum, steps)) / sum(map(len, steps))

    def release(self) -> None:
        for stream in self._streams.values():
            with stream.device:
                stream.pool.free_all_blocks()

    @property
    def flops(self) -> Mapping[str, int]:
        """The flops of all ranks in the last step, by kernel."""
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
        """Return the readers of a real run, whose cost belongs to recording, and the reader for flops."""
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
