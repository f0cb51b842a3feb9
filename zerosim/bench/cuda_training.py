"""zerosim's contestants on a GPU: a training run that takes one timed step at a time, and a bare square product.

The run is zerosim's own, as in `training.py`: ranks that `launch` starts, a barrier and a gate before each step.
Before a step all ranks stand at the gate and the GPU has nothing to do; then an event is recorded in rank 0's
stream and the gate opens. The barrier behind the step makes every rank's stream wait for all others, so that the
event which then goes into rank 0's stream is behind the work of all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from zerosim.backends.cuda.lane import CudaLane
from zerosim.backends.cuda.timer import LaneTimer
from zerosim.bench.cuda_turns import Timing
from zerosim.bench.training import END_S, PATIENCE_S, Gate
from zerosim.comm.runtime import Context, World, launch, make_backend
from zerosim.config import RunConfig
from zerosim.device.events import Event, Kernel, Reader
from zerosim.dtypes import dtype
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.traffic import CommLedger
from zerosim.models.model import load_flat
from zerosim.train import data, engine
from zerosim.train.build import build_rank, build_updater, place_rank


class LastStep:
    """A reader that keeps the events of the last step, and reads no more of them than their first kernel."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def read(self, events: list[Event]) -> None:
        if any(isinstance(event, Kernel) for event in events):  # behind the last step comes what a run leaves
            self.events = events


class CudaTraining:
    """A contestant: one step of `config` on GPUs per `step`. Begins and ends with its `with` block.

    The first step, in which kernels are compiled, is taken on entering; without `record` no flops are known.

    Raises: on entering and in `step`, whatever a rank failed with.
    """

    def __init__(self, config: RunConfig, weights: Mapping[str, Any], tokens: Any, *, record: bool = True) -> None:
        self.config = config
        self.losses: list[list[float]] = [[] for _ in range(config.mesh.ranks)]
        self._weights = weights
        self._tokens = tokens
        self._record = record
        self._last = [LastStep() for _ in range(config.mesh.ranks)]
        self._lanes: dict[int, CudaLane] = {}
        self._gate = Gate()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="bench", daemon=True)

    def __enter__(self) -> CudaTraining:
        self._thread.start()
        try:
            self._advance()
            self._timer = LaneTimer(self._lanes[0])
            self._timer.start()
            self._timer.stop()  # the first step's work is done: the next one finds an idle device
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
        started = time.perf_counter()
        self._timer.start()
        self._advance()
        device_s = self._timer.stop()
        return Timing(device_s, time.perf_counter() - started)

    def release(self) -> None:
        for lane in self._lanes.values():
            with lane.device:
                lane.pool.free_all_blocks()

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
        config = self.config
        world = World(
            ranks=config.mesh.ranks,
            parallel=config.world.max_running,
            backend="cuda",
            collective=config.world.algorithm,
            bucket_bytes=config.parallel.bucket_bytes,
            patience_s=PATIENCE_S,
            record=self._record,
        )
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
        config, device = self.config, ctx.device
        model, strategy = build_rank(ctx, config, build_updater(config, 1))
        place_rank(ctx, model, strategy, lambda flat: load_flat(flat, self._weights, exact_master=False))
        assert isinstance(device.lane, CudaLane)
        self._lanes[ctx.rank] = device.lane
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


class SquareProduct:
    """A contestant: `repeats` products of two (n, n) matrices of normals, through the same backend and nothing else.

    Takes three matrices on GPU 0: 6 n² bytes.
    """

    def __init__(self, n: int, precision: str, repeats: int) -> None:
        self._backend = make_backend("cuda")
        lane = self._backend.open_lane(0)
        assert isinstance(lane, CudaLane)
        self._lane, self._timer = lane, LaneTimer(lane)
        self._repeats = repeats
        self.flops: Mapping[str, int] = {"matmul": 2 * n**3 * repeats}
        values = np.random.default_rng(0).standard_normal((n, n), np.float32)
        with lane.use():
            self._left, self._right, self._out = (self._backend.empty((n, n), dtype(precision)) for _ in range(3))
            self._backend.from_host(values, self._left)
            self._backend.from_host(values, self._right)
        lane.synchronize()

    def step(self) -> Timing:
        started = time.perf_counter()
        with self._lane.use():
            self._timer.start()
            for _ in range(self._repeats):
                self._backend.matmul(self._left, self._right, self._out)
            device_s = self._timer.stop()
        return Timing(device_s, time.perf_counter() - started)

    def release(self) -> None:
        """Its matrices are in use until it is dropped."""
