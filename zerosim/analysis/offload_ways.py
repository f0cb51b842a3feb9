"""Ways to offload model states, those that offload least first: what may be tried where a device is too small."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from zerosim.analysis.candidate import accepted, candidate
from zerosim.analysis.meshes import ladder
from zerosim.analysis.search import Tried
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.placement.memories import DEVICE, HOST, MEMORIES, NVME
from zerosim.train.offload import node_has


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


def offloaded(families: Iterable[Sequence[RunConfig]], memories: Collection[str]) -> Iterator[list[RunConfig]]:
    """Yield the families of data parallelism alone with their states in these memories, as DeepSpeed offloads them, or
    fully_shard, which moves all."""
    for first in (family[0] for family in families):
        mesh, recipe = first.mesh.axes, first.parallel.recipe
        if mesh.tp * mesh.pp * mesh.cp * mesh.ep > 1 or recipe not in ("deepspeed", "hf-deepspeed", "fsdp2", "paper"):
            continue
        for changed in offloads(first, memories):
            moves_all = all(changed.offload.memory_of(what) != DEVICE for what in ("optimizer", "params"))
            if changed.parallel.zero_stage == first.parallel.zero_stage and (moves_all or recipe != "fsdp2"):
                yield ladder(changed)


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


def ranked(found: Iterable[Tried], cluster: Cluster | None) -> list[Tried]:
    """Sort the ways: those that fit first, the fastest of them first. Of equals, and of all without a clock, those that
    offload least come first. Drives of unknown speed come last, for the clock takes them to be as fast as the host."""
    unknown = cluster is not None and not has_drive_rate(cluster)

    def place(way: Tried) -> tuple[bool, bool, float, int]:
        seconds = 0.0 if way.time is None else float(f"{way.time.seconds:.6g}")
        return bool(way.too_small), unknown and way.config.offload.uses_nvme, seconds, _further(way.config)

    return sorted(found, key=place)


def has_drive_rate(cluster: Cluster) -> bool:
    """Return whether the speed of its nodes' drives is known."""
    return math.isfinite(cluster.nvme_rate)
