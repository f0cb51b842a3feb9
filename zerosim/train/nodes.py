"""What the ranks of a node hold of its host memory and its drives together, and whether the node has it.

Each rank counts with the most that it held: ranks that are alike hold it at about the same time, and pinned memory is
kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerosim.device.node import out_of_node
from zerosim.placement.memories import HOST, NVME
from zerosim.train.memory import RankMemory


class NodeMemory(NamedTuple):
    """A node, and by rank the most that was held of its host memory and of its drives."""

    node: int
    host: Mapping[int, int]
    nvme: Mapping[int, int]

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def nvme_bytes(self) -> int:
        return sum(self.nvme.values())

    def of(self, memory: str) -> Mapping[int, int]:
        """Return by rank the most that was held of one of the node's memories."""
        return {HOST: self.host, NVME: self.nvme}[memory]


def nodes_of(memory: Sequence[RankMemory], node_ranks: int) -> list[NodeMemory]:
    """Return the nodes of every rank's memory, of so many neighbouring ranks each."""
    held = [(one.peak_bytes(HOST), one.peak_bytes(NVME)) for one in memory]
    return [
        NodeMemory(
            first // node_ranks,
            {rank: held[rank][0] for rank in range(first, min(first + node_ranks, len(held)))},
            {rank: held[rank][1] for rank in range(first, min(first + node_ranks, len(held)))},
        )
        for first in range(0, len(held), node_ranks)
    ]


def check_nodes(memory: Sequence[RankMemory], node_ranks: int, capacities: Mapping[str, int | None]) -> None:
    """Check every node. Raises: OutOfMemory for the first node that has less than its ranks hold."""
    limits = {name: capacity for name, capacity in capacities.items() if capacity is not None}
    for node in nodes_of(memory, node_ranks) if limits else ():
        for name, capacity in limits.items():
            held = node.of(name)
            if sum(held.values()) <= capacity:
                continue
            rank = max(held, key=lambda rank: held[rank])
            other = memory[rank].others.get(name)
            scope = None if other is None else other.peak.scope
            where = "" if scope is None else " of ".join(part for part in (scope.phase, scope.unit) if part)
            error = out_of_node(f"node {node.node}", name, held, capacity, rank=rank, where=where)
            error.live = {} if other is None else dict(other.peak.by_kind)
            raise error


def nodes_values(nodes: Sequence[NodeMemory]) -> list[dict[str, int]]:
    """Return the JSON form: nodes that hold equally much share a row, with the first one's number."""
    alike = Counter((node.host_bytes, node.nvme_bytes) for node in nodes)
    first = {(node.host_bytes, node.nvme_bytes): node.node for node in reversed(nodes)}
    return [
        {"node": first[key], "stands_for": count, "host_peak_bytes": key[0], "nvme_peak_bytes": key[1]}
        for key, count in alike.items()
    ]
