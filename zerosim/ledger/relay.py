"""The tokens of experts between nodes, sent once to each node.

A dispatcher such as DeepEP or HybridEP sends a token once to every node on which some of its experts are, to the GPU
there that has its own GPU's place, and that GPU spreads it over the node's links. Combine goes the same way back: a
node's results for a token are added up before they leave. So the network carries a token's nodes, not its experts, and
the links of a node carry all rows. Which nodes a token needs depends on its router. Here each k of E experts are
equally likely or, where a router limits a token to some groups of experts, each k of theirs.
"""

from __future__ import annotations

import math

from zerosim.config.presets.cluster import Cluster
from zerosim.device.events import Launch
from zerosim.ledger.collectives import collective_seconds
from zerosim.ledger.costs import Topology


def relayed_seconds(launch: Launch, place: Topology, cluster: Cluster, copies: float) -> float:
    """Return the seconds of an all-to-all of rows, of which the network carries `copies` for each: the longer of both
    ways, since the GPUs of a node pass rows on as they come."""
    if place.nodes == 1 or place.together == 1:
        return collective_seconds(launch, place, cluster)
    inside = place._replace(members=place.together, nodes=1)
    across = launch._replace(payload_bytes=round(launch.payload_bytes * copies))
    return max(collective_seconds(launch, inside, cluster), collective_seconds(across, place, cluster))


def copies_of_row(experts: int, top_k: int, nodes: int, groups: int = 1, chosen: int = 1) -> float:
    """Return how often the network carries a token for each of its k experts that is on another node: the nodes that a
    token needs over its k experts. With groups of experts a token's are in `chosen` of them."""
    nodes_allowed = min(nodes, math.ceil(nodes * chosen / groups))
    allowed = max(top_k, experts * chosen // groups)
    on_node = allowed // nodes_allowed
    if not on_node:  # an expert's weights are on several nodes
        return 1.0
    none_there = math.comb(allowed - on_node, top_k) / math.comb(allowed, top_k)
    return nodes_allowed * (1 - none_there) / top_k
