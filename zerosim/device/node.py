"""A node's host memory and its drives: one pool each, which the node's ranks share. What one leaves, another may take.

A rank's part of a pool is the most that it has held so far, and the parts add up to what the node must have. So the
order in which ranks take turns does not matter: a run is refused exactly where a plan on shapes is, which runs ranks
one after the other and adds the same peaks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from zerosim.device.memory import Exact
from zerosim.errors import OutOfMemory
from zerosim.placement.memories import HOST, NVME
from zerosim.units import format_bytes

FEW = 4
CALLED = {HOST: "host memory", NVME: "room on its drives"}


class NodePool:
    """One memory of one node, or of the node's part that a rank has for itself. `held`: by rank the most so far."""

    def __init__(self, name: str, capacity: int | None = None) -> None:
        self.name, self.capacity = name, capacity
        self.held: dict[int, int] = {}
        self._held_bytes = 0
        self._lock = threading.Lock()

    def grant(self, rank: int, nbytes: int) -> bool:
        """Grant a rank so many bytes in all, if there is room: they count as its own from now on. Return whether there
        is."""
        with self._lock:
            more = nbytes - self.held.get(rank, 0)
            if more <= 0:
                return True
            if self.capacity is not None and self._held_bytes + more > self.capacity:
                return False
            self.held[rank] = nbytes
            self._held_bytes += more
            return True


class Share(Exact):
    """What one rank holds of a pool: grants as `Exact` does while the pool has it."""

    def __init__(self, pool: NodePool, rank: int) -> None:
        super().__init__(pool.capacity)
        self.pool, self.rank = pool, rank

    def reserve(self, id: int, nbytes: int) -> int | None:
        return super().reserve(id, nbytes) if self.pool.grant(self.rank, self.used_bytes + nbytes) else None


def pools_of(
    ranks: int, node_ranks: int, capacities: Mapping[str, int | None], *, shared: bool = True
) -> list[dict[str, NodePool]]:
    """Return each rank's pool of each memory; `node_ranks` neighbours are a node. Ranks of several processes do not see
    what the others take, and are not `shared`: each has an equal part for itself."""
    together = min(ranks, node_ranks)
    found: list[dict[str, NodePool]] = []
    for rank in range(ranks):
        name = f"node {rank // together}"
        if shared and rank % together:
            found.append(found[-1])
        elif shared:
            found.append({memory: NodePool(name, capacities.get(memory)) for memory in CALLED})
        else:
            each = {memory: whole and whole // together for memory, whole in capacities.items()}
            own = f"rank {rank}'s equal part of {name}"
            found.append({memory: NodePool(own, each.get(memory)) for memory in CALLED})
    return found


def out_of_node(
    name: str,
    memory: str,
    held: Mapping[int, int],
    capacity: int,
    *,
    rank: int,
    where: str,
    requested: int = 0,
    kind: str = "",
) -> OutOfMemory:
    """Return the error of a node whose memory is too small for its ranks' largest total. `requested`: the bytes that
    one of them asks for then."""
    asks = f": rank {rank} asks for {format_bytes(requested)} more for {kind}" if requested else ""
    at = f"in {where}" if where else "at the most"
    joined = f", and {name} has {format_bytes(capacity)}"
    return OutOfMemory(
        f"{name} is out of {CALLED[memory]} {at}{asks}; {_holds(held)}{joined}",
        rank=rank,
        requested=requested,
        kind=kind,
        capacity=capacity,
        where=where,
        memory=memory,
        held=held,
    )


def _holds(held: Mapping[int, int]) -> str:
    """'16 ranks hold 94.0 GB each, 1.50 TB together'."""
    if not held:
        return "its ranks hold nothing"
    together = f", {format_bytes(sum(held.values()))} together" if len(held) > 1 else ""
    if len(held) > 1 and len(set(held.values())) == 1:
        return f"{len(held)} ranks hold {format_bytes(next(iter(held.values())))} each{together}"
    if len(held) <= FEW:
        return (
            ", ".join(f"rank {rank} holds {format_bytes(nbytes)}" for rank, nbytes in sorted(held.items())) + together
        )
    least, most = min(held, key=lambda rank: held[rank]), max(held, key=lambda rank: held[rank])
    between = f"from {format_bytes(held[least])} (rank {least}) to {format_bytes(held[most])} (rank {most})"
    return f"{len(held)} ranks hold {between}{together}"
