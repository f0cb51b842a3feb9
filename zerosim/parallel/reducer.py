"""Reducers: when finished gradients are reduced. By which collectives: their exchange (`exchange.py`).

AtOnce         each gradient when it is complete. `late`: wait for it when the next one is complete, and hold its input
               until then (FSDP2's reduce_scatter_state)
InBuckets      for gradients that are stored whole (stages 0 and 1): several together, in place, as soon as they fill
               a bucket; that costs no memory and saves launches. `late`: wait for them when backward ends. Or in
               copies of these gradients that live through the run (PyTorch's DDP)
OutOfBuffers   ZeRO-R's constant-size buffers, CB (ZeRO paper, section 6.2): gradients are copied into a buffer whose
               size does not depend on the model's, and reduced from there
AfterDrain     one of these in a pipeline: no reduction before the last input gradient is sent, then all of them, on
               every pipeline stage at once. A reduction inside the last backward holds up the stages before it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zerosim.comm.group import Work
from zerosim.comm.groups import Groups
from zerosim.config.parts.grads import GradMemory
from zerosim.device.device import Buffer, Kind
from zerosim.parallel.exchange import Slices
from zerosim.parallel.schedule import Timetable
from zerosim.parallel.shards import HERE, Shards
from zerosim.tensor.flat import Flat


class Reducer:
    """Common parts of all reducers: reductions in flight, and storing their results.

    averages   when local shards are averaged over the ranks that hold the same ones (HSDP): each result in "each"
               microbatch; "beside" each backward or, their sum, the "last" one, in flight until it ends (FSDP2's
               all-reduce stream, _fsdp_collectives.py, foreach_reduce); or "after" it, in `across.py`
    """

    def __init__(self, exchange: Slices, *, averages: str = "after") -> None:
        self.exchange = exchange
        self.averages = averages
        self.timetable = Timetable()
        self._in_flight: deque[tuple[Work[Any], Callable[[Any], None]]] = deque()
        self._averages: list[tuple[Flat, Buffer | None, Work[Any] | None]] = []  # a buffer: it is stored then

    def join(self, groups: Groups, shards: Shards = HERE) -> None:
        """Join the ranks."""
        self.groups, self.gradients = groups, shards.gradients
        self.exchange.join(groups, shards)

    def place(self, flats: Sequence[Flat], memory: GradMemory) -> None:
        """Allocate memory that lives through the run, for the trained `flats`."""

    def begin(self, timetable: Timetable) -> None:
        """Begin a step."""
        self.timetable = timetable

    def open(self, flats: Sequence[Flat]) -> None:
        """Begin a microbatch's backward, which computes the gradients of `flats`."""

    def reduce(self, flat: Flat) -> None:
        """Take a flat's complete gradient, to be reduced now or later."""
        raise NotImplementedError

    def close(self) -> None:
        """End a microbatch's backward."""
        self.wait()
        if self.averages == "beside":
            self.arrive()

    def finish(self) -> None:
        """Finish the step's last backward: everything is reduced when this returns."""
        self.wait()
        self.arrive()

    def arrive(self) -> None:
        """Wait for averages in flight, and store those of one microbatch."""
        averages, self._averages = self._averages, []
        for flat, own, average in averages:
            flat.device.turn(flat.name)
            if average is not None:
                average.wait()
            if own is not None:
                with flat.device.scope(unit=flat.spec.module):
                    self.gradients.keep(flat, own)

    def launch(self, flats: Sequence[Flat], grads: list[Buffer]) -> int:
        """Reduce whole gradients, which are removed from the list, in as many calls as the exchange needs."""
        waiting, calls = dict(zip(flats, grads, strict=True)), self.exchange.calls(flats)
        averages = self.averages in ("each", "beside") or (self.averages == "last" and self.timetable.last)
        grads.clear()
        for together in calls:
            work = self.exchange.launch_reduce(together, [waiting.pop(flat) for flat in together])
            self._in_flight.append((work, partial(self._keep, together, averages)))
        return len(calls)

    def wait(self, most: int = 0) -> None:
        """Wait until at most `most` reductions are in flight, in the order of their launch."""
        while len(self._in_flight) > most:
            work, then = self._in_flight.popleft()
            then(work.wait())

    def _keep(self, flats: Sequence[Flat], averages: bool, reduced: Any) -> None:
        """Store the reduced local shards, or add them to those of earlier microbatches; before that, average them or
        launch the average."""
        parts = reduced if isinstance(reduced, list) else [reduced]
        del reduced
        for flat in flats:
            with flat.device.scope(unit=flat.spec.module):
                own, average = self._keep_part(flat, self.exchange.own_part(flat, parts.pop(0)), averages)
                self._averages.append((flat, own, average))

    def _keep_part(self, flat: Flat, own: Buffer | None, averages: bool) -> tuple[Buffer | None, Work[Any] | None]:
        """Store a local shard, unless its average is to arrive first. Return what is to be stored later, and what is in
        flight."""
        if own is None:
            return None, None
        replicas = self.groups.replicas(*flat.held.axes, *flat.spec.cut_axes) if averages else None
        if replicas is not None and self.averages == "each":
            replicas.all_reduce(own)
        if replicas is not None and self.averages == "beside":
            return own, replicas.launch_all_reduce(own)
        self.gradients.keep(flat, own)
        shard = flat.grad_shard if self.averages == "last" else None
        return None, None if replicas is None or shard is None else replicas.launch_all_reduce(shard)


class AtOnce(Reducer):
    def __init__(self, exchange: Slices, *, late: bool = False, averages: str = "after") -> None:
        super().__init__(exchange, averages=averages)
        self.late = late

    def reduce(self, flat: Flat) -> None:
        self.wait()  # hold at most one input beside the gradient that backward makes
        self.launch([flat], flat.take_finished())
        if not self.late:
            self.wait()


class InBuckets(Reducer):
    """Up to `capacity` bytes together (None: one flat at a time). The collective cuts a larger flat."""

    def __init__(self, exchange: Slices, capacity: int | None, *, late: bool = False) -> None:
        super().__init__(exchange)
        self.capacity = capacity or 0
        self.late = late
        self._waiting: list[Flat] = []
        self._copies: dict[str, Buffer] = {}  # of gradients, by flat

    def place(self, flats: Sequence[Flat], memory: GradMemory) -> None:
        for flat in flats if memory.bucket_copies else ():
            with flat.device.scope(unit=flat.spec.module):
                padding = flat.numel - flat.spec.num_parameters
                copy = flat.device.alloc((flat.numel,), flat.grad_dtype, Kind.COMM, padding=padding)
                self._copies[flat.name] = copy

    def reduce(self, flat: Flat) -> None:
        if self._waiting and self._nbytes(flat, *self._waiting) > self.capacity:
            self._reduce()
        self._waiting.append(flat)
        if self._nbytes(*self._waiting) >= self.capacity:
            self._reduce()

    def close(self) -> None: ...

    def finish(self) -> None:
        self._reduce()
        self.wait()

    def _nbytes(self, *flats: Flat) -> int:
        return sum(flat.padded_numel * flat.grad_dtype.itemsize for flat in flats)

    def _reduce(self) -> None:
        """Reduce everything that waits."""
        waiting, self._waiting = self._waiting, []
        for together in self.exchange.calls(waiting):
            grads = [flat.whole_grad() for flat in together]
            sent = [self._copies.get(flat.name, grad) for flat, grad in zip(together, grads, strict=True)]
            _copy(grads, sent)
            work = self.exchange.launch_in_place(together, [*sent])
            self._in_flight.append((work, partial(self._keep_windows, together, grads, sent)))
            if not self.late:
                self.wait()

    def _keep_windows(
        self, flats: Sequence[Flat], grads: Sequence[Buffer], sent: Sequence[Buffer], reduced: Any
    ) -> None:
        _copy(sent, grads)
        parts = reduced if isinstance(reduced, list) else [reduced]
        for flat, grad, part in zip(flats, grads, parts, strict=True):
            self.gradients.keep_in_place(flat, self.exchange.own_window(flat, grad, part))


class OutOfBuffers(Reducer):
    """`count` buffers of `numel` elements; with two, one is filled while the other is reduced.

    The buffers live from the beginning of a backward to its end or, `lasting`, to the end of the run. The paper's
    example of a buffer that grows with the model, a fused fp32 one of all gradients, is 12 GB for 3B parameters.
    Source: DeepSpeed edaa722, stage_1_and_2.py (setup_buckets: reduce_bucket_size elements, two of them under
    overlap_comm, for each backward), stage3.py (one, from start to end); a gradient larger than a buffer is reduced in
    place. One rank has the same buffer, and a model with few trained parameters too (DeepSpeed 0.19.8, as run on CPUs).
    A pipeline stage that trains nothing has none.
    """

    def __init__(
        self, exchange: Slices, numel: int, *, count: int = 1, lasting: bool = False, averages: str = "after"
    ) -> None:
        super().__init__(exchange, averages=averages)
        self.numel = numel
        self.count = count
        self.lasting = lasting
        self._buffers: deque[Buffer] = deque()  # the first one is being filled
        self._flats: list[Flat] = []
        self._windows: list[Buffer] = []

    def place(self, flats: Sequence[Flat], memory: GradMemory) -> None:
        if self.lasting:
            self.open(flats)

    def open(self, flats: Sequence[Flat]) -> None:
        if flats and not self._buffers:
            take = partial(flats[0].device.alloc, (self.numel,), flats[0].grad_dtype, Kind.COMM)
            self._buffers.extend(take() for _ in range(self.count))

    def reduce(self, flat: Flat) -> None:
        grads = flat.take_finished()
        used, numel = sum(window.numel for window in self._windows), grads[0].numel
        if used + numel > self.numel:
            self._send()
            used = 0
        if numel > self.numel:
            self.launch([flat], grads)
            work, then = self._in_flight.pop()
            then(work.wait())
            return
        window = self._buffers[0][used : used + numel]
        flat.device.kernel(0, flat.device.backend.copy, grads.pop().array, window.array)
        self._flats.append(flat)
        self._windows.append(window)

    def close(self) -> None:
        self._send()
        super().close()
        if not self.lasting:
            self._buffers.clear()

    def _send(self) -> None:
        if self._windows:
            flats, windows = self._flats, self._windows
            self._flats, self._windows = [], []
            calls = self.launch(flats, windows)
            self.wait(calls if self.count > 1 else 0)  # the reductions from the buffer that is filled next
            self._buffers.rotate(-1)


class AfterDrain(Reducer):
    """Hold complete gradients until a pipeline has drained, then reduce them through `reducer`, in the same order.

    Source: Megatron-LM d98e8a6, core/pipeline_parallel/schedules.py:866 (finalize_model_grads_func after the loop) and
    core/distributed/param_and_grad_buffer.py:805 (finish_grad_sync starts the call where nothing overlaps); DeepSpeed
    edaa722, runtime/pipe/schedule.py:237 (ReduceGrads in the schedule's last step).
    """

    def __init__(self, reducer: Reducer) -> None:
        super().__init__(reducer.exchange, averages=reducer.averages)
        self.reducer = reducer
        self._complete: list[Flat] = []

    def join(self, groups: Groups, shards: Shards = HERE) -> None:
        self.reducer.join(groups, shards)

    def place(self, flats: Sequence[Flat], memory: GradMemory) -> None:
        self.reducer.place(flats, memory)

    def reduce(self, flat: Flat) -> None:
        self._complete.append(flat)

    def finish(self) -> None:
        complete, self._complete = self._complete, []
        self.reducer.open(complete)
        for flat in complete:
            self.reducer.reduce(flat)
        self.reducer.close()
        self.reducer.finish()


def _copy(sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source is not target:
            source.device.kernel(0, source.device.backend.copy, source.array, target.array)
