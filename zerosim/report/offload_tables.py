"""Offloaded model states, for people: by memory beside the closed forms, and of a node's memories."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from zerosim.analysis.capabilities.delayed import has_late
from zerosim.analysis.checks import Checks
from zerosim.config.presets.cluster import Cluster
from zerosim.placement.memories import HOST, NVME
from zerosim.report.look import Adaptive, Grid, right, spread, titled
from zerosim.train.offload import moves_states, node_memories
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

IN = {"device": "on the device", HOST: "in the host's memory", NVME: "on NVMe"}


def memories_table(found: Sequence[Checks]) -> RenderableType | None:
    """Return each model state's bytes of a rank in its memory; None if all lie on the device."""
    result = found[0].of.result
    if not result.config.offload.is_on:
        return None
    grid = Grid("pipeline", "state", "lies", right("bytes"), right("formula", style="cyan"), right("in bytes"), "agree")
    for stage, one in enumerate(found):
        for at, check in enumerate(one.memories):
            name = "" if at or len(found) == 1 else f"stage {stage}"
            grid.add(name, check.name, IN[check.axis], spread(check.counted), check.text, check.formula, check.agrees)
    grid = grid.filled()
    note = "Between uses, offloaded states take no device memory. "
    if has_late(result):
        note += "The update is delayed: the host holds gradients of two steps, and new parameters beside the old ones. "
    note += " ".join(most_elsewhere(result, None))
    return titled(
        "Where model states lie when backward ends, bytes per rank", Adaptive(grid, grid.without("in bytes")), note
    )


def most_elsewhere(result: RunResult, cluster: Cluster | None) -> Sequence[str]:
    """Return the most that a node's ranks take of its host memory and its drives, together and each, and the memories'
    sizes."""
    config, lines = result.config, list[str]()
    if not moves_states(config):
        return lines
    has, nodes = node_memories(config, cluster), result.nodes
    for memory, name in ((HOST, "Host memory"), (NVME, "NVMe")):
        fullest = max(nodes, key=lambda node: sum(node.of(memory).values())).of(memory)
        if total := sum(fullest.values()):
            known = f" of {format_bytes(capacity)}" if (capacity := has[memory]) is not None else ""
            of = "the node" if len(nodes) == 1 else f"the fullest of {len(nodes):,} nodes"
            each = format_bytes(max(fullest.values()))
            ranks = f"{each} on its rank" if len(fullest) == 1 else f"{each} on each of its {len(fullest)} ranks"
            if min(fullest.values()) < max(fullest.values()):
                ranks = f"{format_bytes(min(fullest.values()))} to {each} on its {len(fullest)} ranks"
            lines.append(f"{name} of {of} at the most: {format_bytes(total)}{known}, {ranks}.")
    return lines
