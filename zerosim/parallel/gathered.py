"""Gathered parameters: each flat is absent, in flight, or resident. A `Residency` says what stays, a `Prefetch` what
comes early.

    resident    the whole flat is gathered (`flat.param`)
    in flight   the flat is being gathered for a later use
    unshard     make a unit's parameters resident: already resident, or by waiting, or by a gather now; then prefetch
    reshard     free them, unless they stay
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zerosim.device.device import Buffer, Kind
from zerosim.nn import Unit
from zerosim.parallel.exchange import Slices
from zerosim.parallel.gathers import Arriving
from zerosim.parallel.published import Published
from zerosim.parallel.schedule import Timetable
from zerosim.placement.spec import is_block, unit_of
from zerosim.tensor.flat import Flat


@dataclass(frozen=True, slots=True)
class Residency:
    """The units and flats that stay gathered. In the paper: none.

    keep_all    all units stay from forward to backward (FSDP's reshard_after_forward=False, 2 Psi, and ZeRO-2's peak)
    keep_next   a unit that is used next once more stays: the last one, whose backward follows its forward
    keep_root   units outside the blocks stay until a microbatch's backward ends, with their gradients (FSDP's root)
    persistent  whether a flat of so many elements stays for good. It is gathered once after each step
    keep_output the buffer in which the last block arrived stays until its forward ends (FSDP2 copies out of it)

    The root is one unit, so those of its parts that no backward reads stay as long as the others.
    """

    keep_all: bool = False
    keep_next: bool = False
    keep_root: bool = False
    persistent: Callable[[int], bool] = lambda numel: False
    keep_output: bool = False

    def is_root(self, unit: str) -> bool:
        """Return whether a unit is the root's."""
        return self.keep_root and not is_block(unit_of(unit))

    def keeps(self, unit: str) -> bool:
        """Return whether a unit stays from forward to backward."""
        return self.keep_all or self.is_root(unit)


class Prefetch:
    """The gathers that are launched early: none."""

    def begin(self, timetable: Timetable) -> None:
        """Begin a step."""

    def launch(self, gathered: Gathered) -> None:
        """Launch gathers. Called when a unit is resident and about to compute."""

    def open_backward(self, gathered: Gathered) -> None:
        """Launch gathers before a backward, for the loss's."""

    def end(self, gathered: Gathered, unit: Unit) -> None:
        """Launch gathers after a unit's backward, before it is freed."""


class Gathered(Published):
    """The sharded parameters: which rank holds which whole flat, and when."""

    def __init__(
        self,
        exchange: Slices,
        residency: Residency = Residency(),
        prefetch: Prefetch | None = None,
    ) -> None:
        super().__init__(exchange)
        self.residency = residency
        self.prefetch = prefetch or Prefetch()
        self.timetable = Timetable()
        self.live = 0  # elements that are resident or in flight and will be freed
        self._in_flight: dict[str, Arriving] = {}  # by flat
        self._persistent: frozenset[str] = frozenset()  # flats
        self._output: list[Buffer] = []  # the last block's, which is no longer read
        self._waiting: list[Unit] = []  # units of the root whose backward has ended, or is none

    def place(self, flats: Sequence[Flat]) -> None:
        stays = self.residency.persistent
        self._persistent = frozenset(one.name for one in flats if stays(one.spec.num_parameters) or not one.held.axes)
        for flat in flats:
            if flat.name in self._persistent:
                self._arrive(flat, self.exchange.gather(flat, exactly=True) if flat.held.axes else flat.shard())

    def begin(self, timetable: Timetable) -> None:
        """Begin a step."""
        self.timetable = timetable
        self.prefetch.begin(timetable)

    def unshard(self, unit: Unit) -> None:
        """Make a unit's parameters resident, before a use."""
        for flat in unit.flats:
            self._unshard(flat)
        self.prefetch.launch(self)

    def reshard_after_forward(self, unit: Unit) -> None:
        """Free a unit's parameters after its forward, unless they stay."""
        stays = unit.goes_back and self.residency.keeps(unit.name)
        if not unit.goes_back and self.residency.is_root(unit.name) and self.timetable.turns_next:
            self._waiting.append(unit)
            return
        if not stays and not (self.residency.keep_next and self.timetable.is_used_next(unit)):
            if self.residency.keep_output and self._is_last_block(unit):
                freed = [one for one in unit.flats if one.name not in self._persistent]
                self._output = [one.param for one in freed if one.param and one.param is not one.param_shard]
                for output in self._output:
                    output.device.retag(output, Kind.COMM)
            for flat in unit.flats:
                self._reshard(flat)

    def open_backward(self) -> None:
        self._output = []
        self.prefetch.open_backward(self)

    def _is_last_block(self, unit: Unit) -> bool:
        more = any(is_block(use.unit.name) for use in self.timetable.rest_of_action())
        return is_block(unit.name) and not more and self.timetable.turns_next

    def reshard(self, unit: Unit) -> None:
        """Free a unit's parameters after its backward, unless another unit that shares a flat still needs it."""
        for flat in unit.flats:
            if unit.reduces or unit.ends or not self.residency.keeps(flat.spec.module):
                self._reshard(flat)

    def release(self, unit: Unit) -> Iterator[Flat]:
        """Free what is no longer needed after a unit's backward or its input gradient. Yield each flat whose gradient
        is then complete. The root's units wait until the whole backward ends."""
        self.prefetch.end(self, unit)
        done = [] if self.residency.is_root(unit.name) else [unit]
        if not done:
            self._waiting.append(unit)
        if self.timetable.ends_action:
            done, self._waiting = [*done, *self._waiting], []
        action = self.timetable.action
        for one in done:
            if action is None or action.gathers:
                self.reshard(one)
            if not (self.timetable.defers and one.defers):
                yield from one.completes

    def publish(self, flat: Flat) -> None:
        """Gather new parameters of flats that stay resident for good."""
        if flat.name in self._persistent and flat.held.axes:
            flat.reshard()  # free the old ones before the new ones arrive
            self._arrive(flat, self.exchange.gather(flat, exactly=True))

    # -- one flat ------------------------------------------------------------------------------------------------
    def gather(self, flat: Flat) -> Buffer:
        return self.exchange.gather(flat)

    def launch_gather(self, flat: Flat) -> Arriving:
        return self.exchange.launch_gather(flat)

    def fetch(self, flat: Flat) -> None:
        """Read a local shard on NVMe into the host's memory, for a later gather of this action."""
        self.exchange.shards.parameters.fetch(flat)

    def is_absent(self, flat: Flat) -> bool:
        return flat.param is None and flat.name not in self._in_flight

    def launch(self, unit: Unit, flat: Flat) -> None:
        """Gather an absent flat for a later unit."""
        with flat.device.scope(unit=unit.name):
            self._in_flight[flat.name] = self.launch_gather(flat)
        self.live += flat.numel

    def _unshard(self, flat: Flat) -> None:
        flat.device.turn(flat.name)
        work = self._in_flight.pop(flat.name, None)
        if work is not None:
            full = work.wait()
            if full is not flat.param_shard:  # with --partition owner it is the owner's own
                flat.device.retag(full, Kind.UNSHARDED_PARAM)
            self._arrive(flat, full)
        elif flat.param is None:
            self._arrive(flat, self.gather(flat))
            self.live += flat.numel

    def _arrive(self, flat: Flat, full: Buffer) -> None:
        """Set the whole buffer, and drop the copies that brought the local shard."""
        flat.unshard(full)
        self.exchange.shards.parameters.drop(flat)

    def _reshard(self, flat: Flat) -> None:
        flat.device.turn(flat.name)
        if flat.name not in self._persistent:
            self.live -= flat.numel if flat.param is not None else 0
            flat.reshard()
