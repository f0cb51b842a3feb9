"""The tokens of experts under a dispatcher that sends a token once to each place (DeepEP, HybridEP).

Such a dispatcher sends a token once to every node on which some of its experts are, to the GPU there that has its own
GPU's place. That GPU passes it on over the node's links, once to each GPU that needs it. Combine goes the same way
back: results for a token are added up before they leave. So the network carries a token's nodes, and a node's links
its GPUs, not its experts. The dispatcher's kernel reads tokens where they are, and adds up where they go, so nothing
sorts rows before. Which nodes a token needs depends on its router. Here each k of E experts are equally likely or,
where a router limits a token to some groups of experts, each k of theirs.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.device.events import Launch
from zerosim.ledger.collectives import collective_seconds
from zerosim.ledger.costs import Topology


class Shares(NamedTuple):
    """The shares of an all-to-all's rows that are sent on to GPUs of a node, and to nodes."""

    to_gpus: float
    to_nodes: float


def shares_of(config: RunConfig, place: Topology) -> Shares | None:
    """Return the shares of such a dispatcher in a group of ranks; None if another one runs."""
    if not relays(config):
        return None
    choice = config.experts.choice_of(config.model)
    return Shares(*(copies_of_row(*choice, places) for places in (place.members, place.nodes)))


def relays(config: RunConfig) -> bool:
    """Return whether the dispatcher sends a token once to each place."""
    return config.experts.dispatcher == "deepep"


def relayed_seconds(launch: Launch, place: Topology, cluster: Cluster, shares: Shares) -> float:
    """Return the seconds of an all-to-all of rows: the longer of both ways, since GPUs pass tokens on as they come."""
    inside = place._replace(members=place.together, nodes=1)
    within = collective_seconds(_part(launch, shares.to_gpus), inside, cluster)
    if place.nodes == 1:
        return within
    return max(within, collective_seconds(_part(launch, shares.to_nodes), place, cluster))


def bytes_by_link(payload: int, place: Topology, shares: Shares | None) -> tuple[float, float]:
    """Return the bytes of an all-to-all that a member sends over its node's links, and over the network. Without shares
    each row goes to its expert's GPU."""
    if shares is None:
        return payload * (place.together - 1) / place.members, payload * (
            place.members - place.together
        ) / place.members
    away = payload * shares.to_nodes * (place.members - place.together) / place.members
    return payload * shares.to_gpus * (place.together - 1) / place.together, away


def _part(launch: Launch, share: float) -> Launch:
    return launch._replace(payload_bytes=round(launch.payload_bytes * share))


def copies_of_row(experts: int, top_k: int, share: Fraction, places: int) -> float:
    """Return the places, GPUs or nodes, that a token needs for each of its k experts, which divide among them. A
    token's experts are in a `share` of their groups."""
    allowed, experts = math.ceil(places * share), max(top_k, int(experts * share))
    each = experts // allowed
    if not each:  # an expert is on several
        return 1.0
    none_there = math.comb(experts - each, top_k) / math.comb(experts, top_k)
    return allowed * (1 - none_there) / top_k
