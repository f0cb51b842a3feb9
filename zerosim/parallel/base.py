"""The hooks that the engine calls around each use of a unit. A student subclasses `Strategy`, as `zero3.py` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.config.zero import GradMemory
from zerosim.device.device import Device
from zerosim.nn import Unit
from zerosim.optim.updater import Updater
from zerosim.parallel import across, curvature, norm, update
from zerosim.parallel.schedule import Timetable, Use
from zerosim.placement.layout import Layout
from zerosim.placement.partition import Slice
from zerosim.tensor.dummy_grads import DummyGrads
from zerosim.tensor.flat import Flat
from zerosim.tensor.offloaded import Outgoing


class Strategy:
    """The hooks, all empty. `comm` is the group that divides the model states, of N ranks; all its members call the
    same collectives in the same order. Who holds what follows from the run's stage, and from what a class says here."""

    stage: int | None = None  # the stage whose rows it has, whatever the run's
    keeps_params: bool | None = None  # whether every rank holds all parameters between uses; None: as the stage does
    keeps_grads: bool | None = None  # whether every rank holds all gradients until the step
    sees_all_grads = False  # every rank sees every reduced gradient, so that the norm needs no exchange
    averages = "after"  # when replicas average their parts: in "each" micro-batch, in the "last" backward, "after" it

    def __init__(self, comm: Comm, device: Device, updater: Updater) -> None:
        self.comm = comm
        self.device = device
        self.updater = updater
        self.flats: list[Flat] = []
        self.timetable = Timetable()

    @property
    def last(self) -> bool:
        """Whether this is the step's last micro-batch."""
        return self.timetable.last

    def begin(self, uses: Sequence[Use]) -> None:
        """A step begins, in which units are used in this order, those of `schedule.uses_of`."""
        self.timetable.begin(uses)
        for flat in self.flats:
            flat.begin_step()

    def open_forward(self) -> None:
        """Before each micro-batch's forward, and in a pipeline before its input is received."""

    def pre_forward(self, unit: Unit) -> None:
        """Before a unit's forward: its whole parameters must be there."""

    def post_forward(self, unit: Unit) -> None:
        """After it: they may go."""

    def open_backward(self) -> None:
        """Before each micro-batch's backward."""

    def pre_backward(self, unit: Unit) -> None:
        """Before a unit's backward: its whole parameters must be there again."""

    def post_input_grad(self, unit: Unit) -> None:
        """In place of `post_backward`, where weight gradients come later: the parameters may go."""

    def post_backward(self, unit: Unit) -> None:
        """After it: where `unit.reduces`, the flat's gradient of this micro-batch is complete (`Flat.take_grad`)."""

    def close_backward(self) -> None:
        """After each micro-batch's backward."""

    def end_backward(self) -> None:
        """After the last micro-batch's backward: what still waits to be reduced."""

    def reduce_grad_norm(self) -> float | None:
        """What gradients are multiplied by; None: all ranks skip. Raises: NonFiniteGradient, LossScaleExhausted."""
        return self._decided(self.updater.decide)

    def publish_params(self, flat: Flat) -> None:
        """After the update of a flat's own slice: bring it to the ranks that hold the whole."""

    def owned(self, flat: Flat) -> Slice:
        """The part of a flat that this rank updates."""
        return self.layout.own(self.device.rank, flat.name)

    def padded(self, flat: Flat) -> int:
        """Elements of a whole buffer, padding included."""
        return self.layout.padded(flat.name)

    # -- what the engine calls beside these -----------------------------------------------------------------------
    def join(self, groups: Groups, layout: Layout, memory: GradMemory = GradMemory()) -> None:  # noqa: B008  frozen
        """Take its place among the ranks, once, before `place`: their groups, who holds what, which gradients."""
        self.groups, self.layout, self.memory = groups, layout, memory

    def place(self, flats: Sequence[Flat], write: Callable[[Flat], None]) -> None:
        """Take memory for one flat after the other and `write` its weights, each before the next."""
        self.flats, layout, probes = list(flats), self.layout, self.updater.control.stops_at_nonfinite
        dummies, out = DummyGrads(self.device) if self.memory.fused else None, Outgoing(layout)
        for flat in flats:
            with self.device.scope(unit=flat.module):
                flat.lie(layout.rows(flat.name), layout.owner(flat.name), self.owned(flat), self.padded(flat))
                for state, row in flat.rows.items():
                    if state == "grad":
                        flat.place_grads(row, self.memory, flat.dtype, probes=probes, dummies=dummies, out=out)
                    elif state == "param":
                        flat.place_params(row)
                    elif state == "optim":
                        self.updater.allocate(flat)
                write(flat)

    def finish_backward(self) -> None:
        """Backward is over in all micro-batches; after this every rank holds its part of the averaged gradients."""
        self.end_backward()
        across.reduce(self.groups, self.layout, self.flats, averaged=self.averages != "after")

    def step(self) -> None:
        """Decide by the norm; then update the own parts and publish the new parameters. Or skip."""
        if (scale := self.reduce_grad_norm()) is not None:
            update.step(self.updater, self.flats, scale, self.memory, self.groups, self.publish_params)
        for flat in self.flats:
            flat.drop_grads()

    def estimate(self) -> None:
        """In place of `step` where gradients are those on drawn labels: update what the optimizer estimates."""
        curvature.estimate(self.updater, self.flats, self._decided(self.updater.control.unscale))

    def _decided(self, decide: Callable[[float], float | None]) -> float | None:
        return norm.decided(self.groups, self.layout, self.flats, decide, exchanges=not self.sees_all_grads)
