"""Common parts of the four ZeRO stages: when gradients are reduced (`reducer.py`) and parameters gathered
(`published.py`, `gathered.py`), and by which collectives (`exchange.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.config.parts.grads import PLAIN, GradMemory
from zerosim.device.device import Device, Phase
from zerosim.optim.updater import Updater
from zerosim.parallel import update
from zerosim.parallel.base import Strategy
from zerosim.parallel.exchange import Slices
from zerosim.parallel.published import Published
from zerosim.parallel.reducer import AtOnce, Reducer
from zerosim.parallel.schedule import Use
from zerosim.parallel.shards import HERE, Shards
from zerosim.placement.layout import Layout
from zerosim.tensor.flat import Flat, in_turn


class Stage(Strategy):
    """A ZeRO stage of the package. The default `reducer` is the paper's: slices, each reduced when it is complete."""

    def __init__(
        self,
        comm: Comm,
        device: Device,
        updater: Updater,
        reducer: Reducer | None = None,
        gathered: Published | None = None,
    ) -> None:
        super().__init__(comm, device, updater)
        self.reducer = reducer or self.default_reducer(comm)
        self.exchange = self.reducer.exchange
        self.gathered = gathered or self.default_gathered()
        self.averages = self.reducer.averages

    def default_reducer(self, comm: Comm) -> Reducer:
        return AtOnce(Slices())

    def default_gathered(self) -> Published:
        return Published(self.exchange)

    @property
    def trained(self) -> list[Flat]:
        """The flats that have gradients."""
        return [flat for flat in self.flats if flat.spec.is_trained]

    def join(self, groups: Groups, layout: Layout, memory: GradMemory = PLAIN, shards: Shards = HERE) -> None:
        super().join(groups, layout, memory, shards)
        self.reducer.join(groups, shards)

    def place(self, flats: Sequence[Flat], write: Callable[[Flat], None]) -> None:
        super().place(flats, write)
        for flat in flats:
            for state in (name for name in flat.held.rows if name in self.exchange.states):
                with self.device.scope(unit=flat.spec.module):
                    self.exchange.place(flat, state)
        for flat in self.trained if not self.memory.lasts else ():
            flat.collector.sent = self.exchange.sent_dtype
        self.reducer.place(self.trained, self.memory)
        self.gathered.place(flats)

    def begin(self, uses: Sequence[Use]) -> None:
        super().begin(uses)
        self.update_late(uses)
        self.reducer.begin(self.timetable)
        self.gathered.begin(self.timetable)

    def reduce(self, flat: Flat) -> None:
        """Reduce a flat's complete gradient of this microbatch. Without `sync` only the last microbatch's sum is
        reduced."""
        if not self.memory.sync and not self.last:
            flat.hold_grad()
        else:
            self.reducer.reduce(flat)

    def open_forward(self) -> None:
        self.gathered.open()

    def open_backward(self) -> None:
        self.gathered.open_backward()
        self.reducer.open(self.trained)

    def close_backward(self) -> None:
        self.reducer.close()
        self.shards.gradients.close_backward()

    def end_backward(self) -> None:
        self.reducer.finish()
        if self.memory.own_only:
            for flat in in_turn(self.flats):
                with flat.device.scope(unit=flat.spec.module):
                    flat.keep_own_grad()

    def reduce_grad_norm(self) -> float | None:
        (step := self.shards.step).renew(self.flats, self.publish_params)
        return step.hold(self.flats, super().reduce_grad_norm()) if step.decides else None

    def update_late(self, uses: Sequence[Use] = ()) -> None:
        """Start the update with gradients that were held back in the last step, if any were."""
        if (late := self.shards.step.begin(uses)) is not None:
            with self.device.phase(Phase.OPTIMIZER):
                update.step(self.updater, *late, self.memory, self.groups, self.shards, lambda flat: None)

    def finish(self, step: int) -> None:
        """Update with gradients that the last step held back, recorded as `step`."""
        with self.device.scope(step=step, phase=Phase.OPTIMIZER):
            self.update_late()
            self.shards.step.renew(self.flats, self.publish_params)
