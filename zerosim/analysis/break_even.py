"""At which bandwidth communication hides: the record of a step, timed with links of one speed after the other.

The step runs once. How long its kernels take depends on the device alone; collectives get their times from each
cluster anew (`ledger/clock.py`). What is varied is the link that decides: where ranks fill more than one node the NICs
of a node, else the links within it.
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
from zerosim.train.plan import paces_of, plan

HIDDEN = 0.1
"""Waiting for collectives takes no more than this share of the step: communication counts as hidden."""
_NARROWEST = 1e-3  # of two bandwidths between which a search stops, relative


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step that has run on shapes, to be timed on clusters of the same device."""

    config: RunConfig
    paces: Mapping[int, Sequence[Entry]]
    stands_for: Sequence[int]

    def on(self, cluster: Cluster) -> StepTime:
        """The step with that cluster's links."""
        timeline = simulate(self.paces, self.stands_for, self.config.mesh.axes, costs_of(self.config, cluster))
        return step_time(timeline, self.stands_for)


def record_step(config: RunConfig, cluster: Cluster) -> Recorded:
    """Run a step on shapes, with kernels as fast as the cluster's device. Raises: InputError, as `plan` does."""
    result = plan(config.replace(steps=1), keep_events=True)
    return Recorded(config, paces_of(result, cluster), result.stands_for)


def link_of(ranks: int, cluster: Cluster) -> str:
    """Which of a cluster's bandwidths decides: its 'nic' or, where all ranks are on one node, its 'link'.

    Raises: InputError for one rank, which sends nothing.
    """
    if ranks < 2:
        raise wrong("ranks", " 1: one rank sends nothing, and waits for nothing; choose 2 or more")
    return "nic" if ranks > cluster.node_gpus else "link"


def with_link(cluster: Cluster, link: str, nbytes_per_s: float) -> Cluster:
    """The cluster with another bandwidth of its 'nic' or its 'link'."""
    return replace(cluster, nic=nbytes_per_s) if link == "nic" else replace(cluster, link=nbytes_per_s)


def exposed_share(time: StepTime) -> float:
    """The share of a step in which compute waits for collectives."""
    return sum(time.exposed.values()) / time.seconds


def times_by_bandwidth(step: Recorded, cluster: Cluster, bandwidths: Sequence[float]) -> list[StepTime]:
    """The step on the cluster with each of these bandwidths, in bytes per second."""
    link = link_of(step.config.mesh.ranks, cluster)
    return [step.on(with_link(cluster, link, speed)) for speed in bandwidths]


def hides_from(step: Recorded, cluster: Cluster, share: float = HIDDEN) -> float | None:
    """Bytes per second from which on waiting takes no more than that share of the step; None: at none that was tried.

    Other links, and the latencies of all, stay as they are, so that there may be none.
    """
    link = link_of(step.config.mesh.ranks, cluster)
    return least_bandwidth(lambda one: exposed_share(step.on(one)) <= share, cluster, link)


def within_from(step: Recorded, other: Recorded, factor: float, cluster: Cluster) -> float | None:
    """Bytes per second from which on a step takes no more than `factor` times as long as the other; None: at none."""
    link = link_of(step.config.mesh.ranks, cluster)
    return least_bandwidth(lambda one: step.on(one).seconds <= factor * other.on(one).seconds, cluster, link)


def least_bandwidth(holds: Callable[[Cluster], bool], cluster: Cluster, link: str) -> float | None:
    """The bandwidth of this link from which on something holds, up to 1,024 times the cluster's own and down to 1/1,024
    of it, which is returned where it holds everywhere; None where it does not hold at the highest."""

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
