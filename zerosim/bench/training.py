"""A training run that is held between its steps, so that a benchmark can let it take one at a time.

The run is zerosim's own: `engine.train` over ranks that `launch` starts, as `experiment.train_rank` does it.
Only its batches come through a gate: every rank first meets the others in a barrier (so the step of all is
over), then waits until the bench asks for one step more. What is timed is the time from there
to the next barrier: all ranks' forward, backward, optimizer, and the reading of their events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from zerosim.comm.runtime import Context, World, launch
from zerosim.config import RunConfig
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.traffic import CommLedger
from zerosim.models.model import draw_flat
from zerosim.train import data, engine
from zerosim.train.build import build_model, build_strategy, build_updater

PATIENCE_S = 3600.0
"""A run that waits for its turn at a gate is not late."""

END_S = 60.0


class Gate:
    """Where ranks stand between two steps; opened for one step at a time."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._allowed = 0
        self._arrived = -1
        self._arrived_at = 0.0
        self._closed = False

    def arrive(self, step: int) -> bool:
        """On a rank's thread, once all ranks have done `step` steps: wait for one more. False: there is none."""
        with self._change:
            if step > self._arrived:
                self._arrived, self._arrived_at = step, time.perf_counter()
                self._change.notify_all()
            self._change.wait_for(lambda: self._allowed > step or self._closed)
            return not self._closed

    def open(self) -> float:
        """On the bench's thread: let all ranks do one step; the seconds until the first saw that all had done it."""
        with self._change:
            self._change.wait_for(lambda: self._arrived == self._allowed or self._closed)
            self._allowed += 1
            started = time.perf_counter()
            self._change.notify_all()
            self._change.wait_for(lambda: self._arrived == self._allowed or self._closed)
            return self._arrived_at - started

    def close(self) -> None:
        """No more steps: whoever waits goes on and ends."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed


class TrainingRun:
    """A contestant: one step of `config` per `step`. Ends with its `with` block."""

    def __init__(self, config: RunConfig, *, record: bool = True, tokens: Any = None) -> None:
        self.config = config
        self.losses: list[list[float]] = [[] for _ in range(config.mesh.ranks)]
        self._record = record
        self._tokens = tokens if tokens is not None else global_batch(config)
        self._gate = Gate()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="bench", daemon=True)

    def __enter__(self) -> TrainingRun:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.close()
        self._thread.join(END_S)

    def step(self) -> float:
        """Raises: whatever a rank failed with."""
        seconds = self._gate.open()
        if self._gate.closed:
            raise self._failure or RuntimeError("the training run has ended")
        return seconds

    def _run(self) -> None:
        config = self.config
        world = World(
            ranks=config.mesh.ranks,
            parallel=config.world.max_running,
            collective=config.world.algorithm,
            bucket_bytes=config.parallel.bucket_bytes,
            patience_s=PATIENCE_S,
            record=self._record,
        )
        try:
            # The readers of a real run: what they cost belongs to recording.
            launch(self._program, world, lambda rank: (MemoryLedger(), CommLedger()) if self._record else ())
        except BaseException as error:
            self._failure = error
        finally:
            self._gate.close()

    def _program(self, ctx: Context) -> None:
        config, device = self.config, ctx.device
        model = build_model(config, device, first_micro_batch=ctx.rank * config.data.accumulate)
        strategy = build_strategy(config, model, ctx.comm, device, build_updater(config, 1))
        strategy.place(model.flats, lambda flat: draw_flat(flat, config.data.seed, exact_master=False))
        for losses in engine.train(model, self._batches(ctx), strategy, device):
            self.losses[ctx.rank] += losses

    def _batches(self, ctx: Context) -> Iterator[list[Any]]:
        own = data.micro_batches(self._tokens, ctx.rank, ctx.world_size, self.config.data.accumulate)
        step = 0
        while True:
            ctx.comm.barrier()
            if not self._gate.arrive(step):
                return
            yield own
            step += 1


def global_batch(config: RunConfig) -> Any:
    """One batch (rows, seq + 1) of the primer, the same whatever N; ids are folded into a small vocabulary."""
    text = data.read_text(None, config.model.seq, 256)
    return data.sample_batch(text, config.data.seed, 0, config.global_batch, config.model.seq) % config.model.vocab
