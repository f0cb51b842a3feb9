"""What is gathered before its turn: whole units, or so many elements."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile

from zerosim.nn import Unit
from zerosim.parallel.gathered import Gathered, Prefetch
from zerosim.parallel.schedule import Timetable, Use
from zerosim.placement.spec import is_block
from zerosim.tensor.flat import Flat


@dataclass
class Units(Prefetch):
    """Prefetch the next `count` units of this forward or backward that are not resident; without `forward`, of this
    backward (FSDP1's BACKWARD_PRE). The volume stays the same; the peak grows by those units.

    by_adapters   where adapters are units of their own (FSDP1), they come between two blocks: the next block is
                  gathered when backward has reached the block's first adapter, so not beside its feed-forward
    at_loss       the root's backward begins with the loss, which the model computes, and prefetches then (FSDP)
    """

    count: int
    forward: bool = True
    by_adapters: bool = False
    at_loss: bool = False

    def open_backward(self, gathered: Gathered) -> None:
        coming = gathered.timetable.uses[gathered.timetable.at :]
        if self.at_loss and coming and coming[0].action.sends < 0:
            self._launch(gathered, (use.unit for use in takewhile(lambda use: use.action == coming[0].action, coming)))

    def launch(self, gathered: Gathered) -> None:
        action, at = gathered.timetable.action, gathered.timetable.at
        goes_forward = action is None or action.sends > 0
        waits = self.by_adapters and at > 0 and _has_adapters(gathered.timetable.uses[at - 1].unit)
        if self.forward if goes_forward else not waits:
            self._launch(gathered, self._coming(gathered))

    def end(self, gathered: Gathered, unit: Unit) -> None:
        if self.by_adapters and _has_adapters(unit):
            self._launch(gathered, self._coming(gathered))

    def _coming(self, gathered: Gathered) -> Iterator[Unit]:
        return (use.unit for use in gathered.timetable.rest_of_action())

    def _launch(self, gathered: Gathered, coming: Iterator[Unit]) -> None:
        missing = (unit for unit in coming if any(flat.param is None for flat in unit.flats))
        for place, unit in enumerate(islice(missing, self.count + 2)):
            for flat in filter(gathered.is_absent, unit.flats):
                if place < self.count:
                    gathered.launch(unit, flat)
                else:  # ZeRO-Infinity's next reads
                    gathered.fetch(flat)


def _has_adapters(unit: Unit) -> bool:
    """Return whether adapters are trained beside a frozen block."""
    return is_block(unit.name) and len({flat.spec.is_trained for flat in unit.flats}) > 1


@dataclass
class Elements(Prefetch):
    """Prefetch by elements, as DeepSpeed does (stage3_prefetch_bucket_size and max_live_parameters).

    numel      at each use, launch the next flats of this forward or backward until they have `numel` elements. The last
               flat may exceed the limit, so the prefetched elements grow from use to use
    max_live   at a use, launch at most as many elements as keep the gathered ones, those in flight included, at
               `max_live`; 0: no limit. Only prefetch is limited: a unit's own parameters are always gathered

    The prefetcher looks at each use once. It skips a buffer that is already gathered or in flight; if that buffer is
    freed before the use, it is gathered on demand. DeepSpeed keeps it instead, and prefetches from forward into
    backward: left out, as is its max_reuse_distance. Source: DeepSpeed edaa722,
    runtime/zero/partitioned_param_coordinator.py, fetch_sub_module.
    """

    numel: int
    max_live: int = 0
    _queue: deque[tuple[int, Use, Flat]] = field(default_factory=deque)  # the step's uses that were not examined yet

    def begin(self, timetable: Timetable) -> None:
        self._queue = deque((at, use, flat) for at, use in enumerate(timetable.uses) for flat in use.gathers)

    def launch(self, gathered: Gathered) -> None:
        if not self._queue:
            return
        most = min(self.numel, self.max_live - gathered.live) if self.max_live else self.numel
        timetable, launched = gathered.timetable, 0
        while self._queue:
            at, use, flat = self._queue[0]
            if at >= timetable.at and (launched >= most or use.action != timetable.action):
                return
            self._queue.popleft()
            if at >= timetable.at and gathered.is_absent(flat):
                gathered.launch(use.unit, flat)
                launched += flat.numel
