"""The hooks that the engine calls around each use of a unit. A student subclasses `Strategy`, as `zero3.py` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.config.parts.grads import PLAIN, GradMemory
from zerosim.device.device import Device
from zerosim.nn import Unit
from zerosim.optim.updater import Updater
from zerosim.parallel import across, curvature, norm, update
from zerosim.parallel.schedule import Timetable, Use
from zerosim.parallel.shards import HERE, Shards
from zerosim.placement.layout import Layout
from zerosim.placement.partition import Slice
from zerosim.tensor.dummy_grads import DummyGrads
from zerosim.tensor.flat import Flat, in_turn


class Strategy:
    """The hooks, all empty. `comm` is the group of N ranks that divides the model states; all its members call the same
    collectives in the same order. The run's ZeRO stage and the attributes below decide who holds what."""

    stage: int | None = None  # the ZeRO stage whose rows it has, at any ZeRO stage of the run
    keeps_params: bool | None = None  # whether every rank holds all parameters between uses; None: by ZeRO stage
    keeps_grads: bool | None = None  # whether every rank holds all gradients until the step
    sees_all_grads = False  # every rank sees every reduced gradient, so that the norm needs no exchange
    flats: Sequence[Flat] = ()  # the rank's, from `place` on
    averages = "after"  # when replicas average their shards: "each" microbatch or "beside" it, "last" or "after" it

    def __init__(self, comm: Comm, device: Device, updater: Updater) -> None:
        self.comm, self.device, self.updater = comm, device, updater
        self.timetable = Timetable()

    @property
    def last(self) -> bool:
        """Whether this is the step's last microbatch."""
        return self.timetable.last

    def begin(self, uses: Sequence[Use]) -> None:
        """Begin a step, in which units are used in this order (from `schedule.uses_of`)."""
        self.timetable.begin(uses)
        for flat in in_turn(self.flats):
            update.begin(self.updater, flat, self.memory)

    def open_forward(self) -> None:
        """Prepare a microbatch's forward. In a pipeline its input has not been received yet."""

    def pre_forward(self, unit: Unit) -> None:
        """Make a unit's whole parameters available for its forward."""

    def post_forward(self, unit: Unit) -> None:
        """Release a unit's parameters after its forward."""

    def open_backward(self) -> None:
        """Prepare a microbatch's backward."""

    def pre_backward(self, unit: Unit) -> None:
        """Make a unit's whole parameters available again for its backward."""

    def post_input_grad(self, unit: Unit) -> None:
        """Release a unit's parameters where weight gradients come later. Called in place of `post_backward`."""

    def post_backward(self, unit: Unit) -> None:
        """Reduce the complete gradient of this microbatch (`Flat.take_grad`), where `unit.reduces`."""

    def close_backward(self) -> None:
        """End a microbatch's backward."""

    def end_backward(self) -> None:
        """Reduce what still waits after the last microbatch's backward."""

    def reduce_grad_norm(self) -> float | None:
        """Return the gradients' factor; None: all ranks skip. Raises: NonFiniteGradient, LossScaleExhausted."""
        return self._decided(self.updater.decide)

    def publish_params(self, flat: Flat) -> None:
        """Bring a flat's updated slice to the ranks that hold the whole flat."""

    def owned(self, flat: Flat) -> Slice:
        """Return the part of a flat that this rank updates."""
        return self.layout.own(self.device.rank, flat.name)

    def padded(self, flat: Flat) -> int:
        """Return the number of elements of a whole buffer, padding included."""
        return self.layout.padded(flat.name)

    # -- what the engine calls beside these -----------------------------------------------------------------------
    def join(self, groups: Groups, layout: Layout, memory: GradMemory = PLAIN, shards: Shards = HERE) -> None:
        """Join the ranks, once, before `place`. `memory`: which gradients to store; `shards`: where shards are."""
        self.groups, self.layout, self.memory, self.shards = groups, layout, memory, shards

    def place(self, flats: Sequence[Flat], write: Callable[[Flat], None]) -> None:
        """Allocate one flat after the other, and `write` each one's weights before the next is allocated."""
        self.flats, probes = list(flats), self.shards.step.decides and self.updater.control.stops_at_nonfinite
        dummies = DummyGrads(self.device) if self.memory.fused else None
        for flat in in_turn(flats):
            with self.device.scope(unit=flat.spec.module):
                flat.held = self.layout.held(flat.name, self.owned(flat), self.padded(flat))
                for state, row in flat.held.rows.items():
                    if state == "grad":
                        flat.place_grads(row, self.memory, flat.value_dtype, probes=probes, dummies=dummies)
                    elif state == "param":
                        flat.place_params(row)
                    elif state == "optim":
                        self.updater.allocate(flat)
                write(flat)

    def finish_backward(self) -> None:
        """Finish backward after all microbatches: every rank then holds its shard of the averaged gradients."""
        self.end_backward()
        across.reduce(self.groups, self.layout, self.flats, self.shards, averaged=self.averages != "after")

    def step(self) -> None:
        """Decide by the norm; then update local shards and publish the new parameters, or skip."""
        if (scale := self.reduce_grad_norm()) is not None:
            update.step(self.updater, self.flats, scale, self.memory, self.groups, self.shards, self.publish_params)
        for flat in in_turn(self.flats):
            update.end(flat, self.memory)

    def estimate(self) -> None:
        """Update the optimizer's estimates from gradients on drawn labels. Called in place of `step`."""
        curvature.estimate(self.updater, self.flats, self._decided(self.updater.control.unscale))

    def _decided(self, decide: Callable[[float], float | None]) -> float | None:
        return norm.decided(self.groups, self.layout, self.flats, self.shards, decide, seen=self.sees_all_grads)
