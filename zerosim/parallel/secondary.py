"""hpZ (ZeRO++, arXiv 2306.10209, 3.2): a second shard of the parameters, within a node, from which backward gathers.

                    memory of a rank       sent of the parameters, for each microbatch
    forward         2 Psi / N              2 Psi (N-1)/N, across nodes
    backward        + 2 Psi / d            2 Psi (d-1)/d, within a node of d ranks; recompute's gathers too

A rank's second shard is N/d neighbouring primary ones: node's rank i stores those that the ranks i N/d, i N/d + 1, ...
own. An update makes it stale. The first forward that gathers the flat cuts the new one out of the gathered whole, so no
bit of a run changes. It is a row of the layout, beside 'param'. Flats that stay gathered until backward ends, or for
good, have none.

Source: DeepSpeed, runtime/zero/partition_parameters.py, _partition_param_sec. FSDP2 reshards to a smaller group
after each forward (reshard_after_forward=G): the same traffic; its second shard lives from forward to backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.device.device import Buffer, Kind
from zerosim.parallel.exchange import Slices
from zerosim.parallel.gathered import Gathered, Prefetch, Residency
from zerosim.parallel.gathers import NODE, Arriving
from zerosim.placement.partition import Slice
from zerosim.tensor.flat import Flat

STATE = "secondary"


class Secondary(Gathered):
    """Gather within the node in backward."""

    def __init__(self, exchange: Slices, residency: Residency, prefetch: Prefetch | None = None) -> None:
        super().__init__(exchange, residency, prefetch)
        self.shards: dict[str, Buffer] = {}  # by flat
        self._old: set[str] = set()  # flats that were updated since their second shard was made

    def place(self, flats: Sequence[Flat]) -> None:
        for flat in (flat for flat in flats if STATE in flat.held.rows):
            part = self.part(flat)
            with flat.device.scope(unit=flat.spec.module):
                padding = flat.spec.padding(part)
                self.shards[flat.name] = flat.device.alloc((part.size,), flat.dtype, Kind.PARAM, padding=padding)
            self._old.add(flat.name)
        super().place(flats)

    def part(self, flat: Flat) -> Slice:
        """Return this rank's second shard of a flat."""
        node = self.exchange.groups(NODE)
        return flat.held.rows[STATE].partition.part((flat.numel,), 0, node.rank, node.size)

    def publish(self, flat: Flat) -> None:
        super().publish(flat)
        self._old.add(flat.name)

    def gather(self, flat: Flat) -> Buffer:
        shard = self._second(flat)
        if shard is None:
            return super().gather(flat)
        return self.exchange.gathers.gather(flat, self.exchange.groups(NODE), shard)

    def launch_gather(self, flat: Flat) -> Arriving:
        shard = self._second(flat)
        if shard is None:
            return super().launch_gather(flat)
        return self.exchange.gathers.launch(flat, self.exchange.groups(NODE), shard)

    def fetch(self, flat: Flat) -> None:
        if self._second(flat) is None:  # backward reads the second shard, which is on the device
            super().fetch(flat)

    def _second(self, flat: Flat) -> Buffer | None:
        """Return the second shard if this use gathers from it: in backward."""
        action = self.timetable.action
        return self.shards.get(flat.name) if action is not None and action.sends < 0 else None

    def _unshard(self, flat: Flat) -> None:
        super()._unshard(flat)
        if flat.name in self._old and flat.name in self.shards:
            part, shard = self.part(flat), self.shards[flat.name]
            arrived = flat.whole_param()[part.start : part.stop]
            flat.device.kernel(0, flat.device.backend.copy, arrived.array, shard.array)
            self._old.remove(flat.name)
