"""Ways to offload model states, those that offload least first: what may be tried where a device is too small."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.analysis.candidate import accepted, candidate
from zerosim.config import RunConfig
from zerosim.config.parts.allocators import feels_limit
from zerosim.config.presets.cluster import Cluster
from zerosim.errors import OutOfMemory
from zerosim.ledger.clock import StepTime
from zerosim.placement.memories import DEVICE, HOST, MEMORIES, NVME
from zerosim.train.offload import node_has
from zerosim.train.plan import judged, peak_of, plan


def other_memories(config: RunConfig, cluster: Cluster | None = None) -> tuple[str, ...]:
    """Return the memories beside the device's that a node is known to have; --nvme names drives, too."""
    known = {**node_has(config, cluster)}
    known[NVME] = known[NVME] or config.offload.nvme is not None
    return tuple(memory for memory, is_there in known.items() if is_there)


def offloads(config: RunConfig, memories: Collection[str]) -> Iterator[RunConfig]:
    """Yield the configuration with more of its states in these memories: the optimizer's on the host, at its own ZeRO
    stage and those above; at stage 3 parameters too; then both on NVMe. None offloads less than the configuration
    does."""
    own = config.parallel.zero_stage
    tried = [("optimizer=host", stage) for stage in range(max(own, 1), 4)]
    for where, stage in (*tried, ("optimizer=host,params=host", 3), ("optimizer=nvme,params=nvme", 3)):
        if HOST not in memories or ("nvme" in where and NVME not in memories):
            continue
        other = {"stage": stage} if stage != own else {}
        for changed in accepted([candidate(config, offload=where, **other)]):
            if _further(changed) > _further(config) and all(_is_further(changed, config)):
                yield changed


def ways(config: RunConfig, memories: Collection[str], late: int = 0) -> Iterator[RunConfig]:
    """Yield every way in which a configuration's ZeRO stage can offload to these memories, nothing first. `late`: from
    which step on the CPU's update is delayed, if the CPU updates."""
    places = [DEVICE, *(memory for memory in MEMORIES if memory in memories)]
    for params in places:
        for optimizer in places:
            pairs = (f"{what}={where}" for what, where in (("optimizer", optimizer), ("params", params)))
            where = ",".join(pair for pair in pairs if not pair.endswith(DEVICE))
            yield from accepted([candidate(config, offload=where, delayed_update=late if optimizer != DEVICE else 0)])


def _further(config: RunConfig) -> int:
    """How far from the device states lie, all together."""
    return sum(MEMORIES.index(config.offload.memory_of(what)) for what in ("optimizer", "params"))


def _is_further(changed: RunConfig, config: RunConfig) -> Iterator[bool]:
    for what in ("optimizer", "params"):
        yield MEMORIES.index(changed.offload.memory_of(what)) >= MEMORIES.index(config.offload.memory_of(what))


@dataclass(frozen=True, slots=True)
class Way:
    """A way to offload that was planned: the most that a rank takes from its device and a node's ranks from its other
    memories, its time, and the memories that are too small for it."""

    config: RunConfig
    peak_bytes: int
    reserve_bytes: int
    node_bytes: Mapping[str, int]
    time: StepTime | None
    too_small: tuple[str, ...]

    @property
    def where(self) -> str:
        """As --offload takes it; '' where all is on the device."""
        return self.config.offload.where

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without the time."""
        own = {name: getattr(self, name) for name in ("peak_bytes", "reserve_bytes")}
        nodes = {f"{memory}_bytes": self.node_bytes[memory] for memory in (HOST, NVME)}
        return {
            "offload": self.where, "stage": self.config.parallel.zero_stage, "fits": not self.too_small, **own, **nodes,
            "too_small": list(self.too_small),
        }  # fmt: skip


def planned_way(
    config: RunConfig, capacity: int, reserve: int, has: Mapping[str, int | None], cluster: Cluster | None
) -> Way:
    """Plan a configuration in nodes without limits, on devices of `capacity` bytes, of which `reserve` are kept; then
    name the memory that is too small. `has`: a node's bytes of its other memories, None if unknown."""
    free, room = cluster and cluster.without_limits(), capacity - reserve
    asked = candidate(config, host_memory=None).sure()
    try:
        result = plan(judged(asked, room if feels_limit(config.memory) else None), cluster=free)
        peak = max(memory.reserved_bytes for memory in result.memory)
    except OutOfMemory:  # an allocator refused: how much it takes is known, and what exact bytes are elsewhere
        exact = candidate(asked, allocator="exact", allocator_conf=None).sure()
        result, peak = plan(judged(exact, None), cluster=free, clock=False), peak_of(asked, room, free)
    most = {memory: max(sum(node.of(memory).values()) for node in result.nodes) for memory in has}
    too_small = [DEVICE] * (peak > room)
    too_small += [memory for memory, nbytes in has.items() if nbytes is not None and most[memory] > nbytes]
    return Way(config, peak, reserve, most, result.time, tuple(too_small))


def ranked(found: Iterable[Way], cluster: Cluster | None) -> list[Way]:
    """Sort the ways: those that fit first, the fastest of them first. Of equals, and of all without a clock, those that
    offload least come first. Drives of unknown speed come last, for the clock takes them to be as fast as the host."""
    unknown = cluster is not None and not has_drive_rate(cluster)

    def place(way: Way) -> tuple[bool, bool, float, int]:
        seconds = 0.0 if way.time is None else float(f"{way.time.seconds:.6g}")
        return bool(way.too_small), unknown and way.config.offload.uses_nvme, seconds, _further(way.config)

    return sorted(found, key=place)


def has_drive_rate(cluster: Cluster) -> bool:
    """Return whether the speed of its nodes' drives is known."""
    return math.isfinite(cluster.nvme_rate)
