"""A step's time by the bandwidth between GPUs, one line per ZeRO stage: where it falls to the time of its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zerosim.analysis.break_even import HIDDEN, exposed_share
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.errors import InputError
from zerosim.ledger.clock import StepTime
from zerosim.report.names import counted
from zerosim.report.plots import panel
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.panel import Axis, Panel, Rule
from zerosim.report.plots.throughput import BAND
from zerosim.report.plots.words import seconds_words, tick_bytes

_LINKS = {"nic": "all NICs of a node", "link": "a GPU's links to the others of its node"}
_HIGHEST = 4.0  # times the step with the fastest links: above it a line leaves the picture


class Line(NamedTuple):
    """A ZeRO stage's steps by bandwidth, the bytes per second from which on waiting is at most a tenth of a step, and
    by bandwidth the interval of eight of ten measured steps."""

    times: Sequence[StepTime]
    hides_from: float | None
    bands: Sequence[tuple[float, float] | None] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_s": [time.seconds for time in self.times],
            "bands_s": list(self.bands),
            "exposed_share": [exposed_share(time) for time in self.times],
            "hides_from_bytes_per_s": self.hides_from,
        }


def overlap_figure(
    lines: Mapping[str, Line],
    bandwidths: Sequence[float],
    link: str,
    config: RunConfig,
    cluster: Cluster,
    *,
    trust: str = "",
) -> Chart:
    """Return `lines` by stage's name, their times by `bandwidths`, which are bytes per second of `link`.

    A point is filled where communication hides. Raises: InputError for no lines.
    """
    if not lines:
        raise InputError("no stages: there is nothing to draw; give at least one")
    top = _HIGHEST * min(line.times[-1].seconds for line in lines.values())
    marks = []
    for index, (name, line) in enumerate(lines.items()):
        where = "never hidden"
        if line.hides_from is not None:
            where = f"hidden from {tick_bytes(float(f'{line.hides_from:.2g}'))}/s"
        seen = [(at, time) for at, time in zip(bandwidths, line.times, strict=True) if time.seconds <= top]
        points = [(at, time.seconds) for at, time in seen]
        band = [(at, *ends) for at, ends in zip(bandwidths, line.bands, strict=False) if ends and ends[1] <= top]
        filled = [exposed_share(time) <= HIDDEN for _, time in seen]
        marks.append(panel.Line(name, points, index, f"{name}\n{where}", filled, band))
    notes = [
        f"Filled: communication is hidden; compute waits for collectives for at most {100 * HIDDEN:g} % of the step.",
        f"Broken line: {cluster.name}'s own links.",
        *[BAND] * any(any(line.bands) for line in lines.values()),
        trust or "Modelled, not measured.",
    ]
    label = f"bandwidth of {_LINKS[link]}, in bytes per second"
    ends = bandwidths[0] / 1.15, bandwidths[-1] * 1.15
    x = Axis(label, ends, lambda value: f"{tick_bytes(value)}/s", log=True)
    shown = Panel((Rule(x=getattr(cluster, link)), *marks), x, Axis(ends=(0, top), words=seconds_words))
    subtitle = f"{config.mesh.ranks:,} ranks of {cluster.name}, {counted(config.global_batch, 'sequence')}"
    return Chart("Time of a step, by bandwidth", subtitle, ((shown,),), notes=tuple(notes))
