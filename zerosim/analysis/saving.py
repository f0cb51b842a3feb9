"""A planned save: its counts beside the closed forms, its seconds, and the interval between saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zerosim.analysis import forms
from zerosim.analysis.capabilities.saving import SUBJECT, is_beside, is_gathered, mtbf_hours
from zerosim.analysis.capability import Key
from zerosim.analysis.check import Check, Compared
from zerosim.analysis.formulas.saving import lost, young
from zerosim.analysis.lazy_states import has_states
from zerosim.config.presets.cluster import Cluster
from zerosim.ledger.saving import SaveCounts
from zerosim.train.result import RunResult
from zerosim.train.saved import Saved

HOUR = 3600.0


def check_save(of: Compared) -> list[Check]:
    """Check what the ranks of a pipeline stage save. What is gathered counts on the ranks that write it."""
    result, save = of.result, of.result.save
    if save is None or not has_states(result):
        return []
    counts = [save.counts[rank] for rank in of.share.ranks]
    found = []
    for (name, _), form in forms.of(of.forms, SUBJECT).items():
        counted, letters = _counted(name, counts, gathered=is_gathered(result.config)), of.held
        if name == "received" or (name == "on the host" and is_gathered(result.config)):
            letters = of.padded  # slices are gathered with their padding
        number = form.at(letters)
        text = of.shown(form) if name != "received" else form.where({one: 0 for one, n in of.held.items() if not n})
        found.append(Check(Key(SUBJECT, name), counted, text, form.at(of.held), (number,), even=False))
    return found


def _counted(name: str, counts: Sequence[SaveCounts], *, gathered: bool) -> tuple[int, ...]:
    if name == "received":
        return tuple(one.received for one in counts)
    if name == "on the drives":
        written = tuple(one.written for one in counts)
        return (sum(written),) if gathered else written
    return tuple(one.host for one in counts if one.written or not gathered)


class SaveTime(NamedTuple):
    """Seconds of a save on a cluster, on the slowest rank or node; None: the rate is not known.

    gathers    of the collectives
    to_host    of copies from the device
    drives     to write what a node's ranks write, at the rate of its drives
    """

    gathers: float
    to_host: float
    drives: float | None
    beside: bool

    @property
    def stands(self) -> float | None:
        """How long training stands still."""
        here = self.gathers + self.to_host
        return here if self.beside else None if self.drives is None else here + self.drives


def save_time(result: RunResult, cluster: Cluster) -> SaveTime:
    """Return the seconds of a planned save."""
    save, node = result.save, result.node_ranks
    assert save is not None
    nodes = [save.counts[first : first + node] for first in range(0, len(save.counts), node)]
    copied = 0.0
    for ranks in nodes:
        copying = sum(one.to_host > 0 for one in ranks)
        most = max(one.to_host for one in ranks)
        copied = max(copied, most / min(cluster.pcie, cluster.host_rate / max(1, copying)))
    most_on_node = max(sum(one.written + one.read for one in ranks) for ranks in nodes)
    drives = None if math.isinf(cluster.nvme_rate) else most_on_node / cluster.nvme_rate
    return SaveTime(max(one.gathers for one in save.counts), copied, drives, is_beside(result.config))


class Interval(NamedTuple):
    """How often to save by Young's formula, in seconds and steps (None: a step's seconds are not known), with the
    seconds between failures and the share of the time that is lost."""

    mtbf: float
    seconds: float
    steps: int | None
    lost: float


def interval_of(result: RunResult, cost: SaveTime) -> Interval | None:
    """Return the interval for the job's failures, at least as long as the drives write; None without a rate,
    and where training does not stand still."""
    if not cost.stands:
        return None
    step = None if result.time is None else result.time.seconds
    mtbf = mtbf_hours(result.config, len(result.memory))[0] * HOUR
    seconds = max(young(cost.stands, mtbf), cost.drives or 0.0 if cost.beside else 0.0)
    steps = None if step is None else max(1, round(seconds / step))
    return Interval(mtbf, seconds, steps, lost(cost.stands, seconds, mtbf))


def node_host(save: Saved, node_ranks: int) -> int:
    """Return the most host memory that the ranks of a node take together."""
    hosts = [one.host for one in save.counts]
    return max(sum(hosts[first : first + node_ranks]) for first in range(0, len(hosts), node_ranks))
