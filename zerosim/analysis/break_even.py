"""Find the bandwidth from which communication hides: time the record of one step with links of different speeds.

The step runs once. The time of its kernels depends on the device alone. Collectives get new times for each
cluster (`ledger/clock.py`). The varied bandwidth is the deciding one: the node's NICs if ranks fill more than one
node, else the links within the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.errors import wrong
from zerosim.ledger.clock import StepTime, simulate, step_time
from zerosim.ledger.costs_of import costs_of
from zerosim.ledger.entries import Entry
from zerosim.train.delayed import one_step
from zerosim.train.plan import paces_of, plan

HIDDEN = 0.1
"""Communication counts as hidden if waiting for collectives takes at most this share of the step."""
_NARROWEST = 1e-3  # the relative distance of two bandwidths at which a search stops


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded step on shapes, which can be timed on clusters of the same device."""

    config: RunConfig
    paces: Mapping[int, Sequence[Entry]]
    stands_for: Sequence[int]

    def on(self, cluster: Cluster) -> StepTime:
        """Time the step with that cluster's links."""
        timeline = simulate(self.paces, self.stands_for, self.config.mesh.axes, costs_of(self.config, cluster))
        return step_time(timeline, self.stands_for)


def record_step(config: RunConfig, cluster: Cluster) -> Recorded:
    """Record a step on shapes, with kernels as fast as on the cluster's device. Raises: InputError, as `plan` does."""
    result = plan(one_step(config), keep_events=True)
    return Recorded(config, paces_of(result, cluster), result.stands_for)


def link_of(ranks: int, cluster: Cluster) -> str:
    """Return which of a cluster's bandwidths decides: its 'nic' or, if all ranks are on one node, its 'link'.

    Raises: InputError for one rank, which sends nothing.
    """
    if ranks < 2:
        raise wrong("ranks", " 1: one rank sends nothing and never waits; choose 2 or more")
    return "nic" if ranks > cluster.node_gpus else "link"


def with_link(cluster: Cluster, link: str, nbytes_per_s: float) -> Cluster:
    """Return the cluster with another bandwidth of its 'nic' or its 'link'."""
    return replace(cluster, nic=nbytes_per_s) if link == "nic" else replace(cluster, link=nbytes_per_s)


def exposed_share(time: StepTime) -> float:
    """Return the share of a step in which compute waits for collectives."""
    return sum(time.exposed.values()) / time.seconds


def times_by_bandwidth(step: Recorded, cluster: Cluster, bandwidths: Sequence[float]) -> list[StepTime]:
    """Time the step on the cluster with each of these bandwidths, in bytes per second."""
    link = link_of(step.config.mesh.ranks, cluster)
    return [step.on(with_link(cluster, link, speed)) for speed in bandwidths]


def hides_from(step: Recorded, cluster: Cluster, share: float = HIDDEN) -> float | None:
    """Return the bytes per second from which waiting takes at most that share of the step; None if no tried bandwidth
    suffices.

    Other links and all latencies stay as they are, so there may be no such bandwidth.
    """
    link = link_of(step.config.mesh.ranks, cluster)
    return least_bandwidth(lambda one: exposed_share(step.on(one)) <= share, cluster, link)


def within_from(step: Recorded, other: Recorded, factor: float, cluster: Cluster) -> float | None:
    """Return the bytes per second from which a step takes at most `factor` times as long as the other; None if there is
    none."""
    link = link_of(step.config.mesh.ranks, cluster)
    return least_bandwidth(lambda one: step.on(one).seconds <= factor * other.on(one).seconds, cluster, link)


def least_bandwidth(holds: Callable[[Cluster], bool], cluster: Cluster, link: str) -> float | None:
    """Return the least bandwidth of this link for which a condition holds, between 1/1,024 and 1,024 times the
    cluster's own. Return the lower end if the condition holds everywhere, and None if it fails at the upper end."""

    def at(speed: float) -> bool:
        return holds(with_link(cluster, link, speed))

    own: float = getattr(cluster, link)
    powers = range(10, -11, -1)
    failed = next((power for power in powers if not at(own * 2.0**power)), None)
    if failed is None:
        return own * 2.0 ** powers[-1]
    if failed == powers[0]:
        return None
    low, high = own * 2.0**failed, own * 2.0 ** (failed + 1)
    while high / low > 1 + _NARROWEST:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at(middle) else (middle, high)
    return high
