"""A step's time by the bandwidth between GPUs, one line per ZeRO stage: where it falls to the time of its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from zerosim.analysis.break_even import HIDDEN, exposed_share
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.errors import InputError
from zerosim.ledger.clock import StepTime
from zerosim.report.names import counted
from zerosim.report.plots.axes import tick_bytes, ticks
from zerosim.report.plots.lines import BAND, Band, draw_band, draw_line, finish_lines, log_axes
from zerosim.report.plots.page import frame, open_page, plain, settle
from zerosim.report.plots.streams import seconds_words

_LINKS = {"nic": "all NICs of a node", "link": "a GPU's links to the others of its node"}
_HIGHEST = 4.0  # times the step with the fastest links: above it a line leaves the picture


class Line(NamedTuple):
    """A ZeRO stage's steps by bandwidth, the bytes per second from which on waiting is at most a tenth of a step, and
    by bandwidth the interval of eight of ten measured steps."""

    times: Sequence[StepTime]
    hides_from: float | None
    bands: Sequence[Band | None] = ()

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
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw `lines` by stage's name, their times by `bandwidths`, which are bytes per second of `link`.

    A point is filled where communication hides. Raises: InputError for no lines.
    """
    if not lines:
        raise InputError("no stages: there is nothing to draw; give at least one")
    page = open_page(size, theme)
    least = max(line.times[-1].seconds for line in lines.values())
    notes = [
        f"Filled: communication is hidden; compute waits for collectives for at most {100 * HIDDEN:g} % of the step.",
        f"Broken line: {cluster.name}'s own links.",
        *[BAND] * any(any(line.bands) for line in lines.values()),
        trust or "Modelled, not measured.",
    ]
    title = "Time of a step, by bandwidth"
    frame(
        page,
        title,
        f"{config.mesh.ranks:,} ranks of {cluster.name}, {counted(config.global_batch, 'sequence')}",
        notes=notes,
    )
    axes = log_axes(page, f"bandwidth of {_LINKS[link]}, in bytes per second", bandwidths)
    axes.set_ylim(0, _HIGHEST * least)
    axes.axvline(getattr(cluster, link), color=page.theme.text, linewidth=1.0, dashes=(4, 2), gid="own")
    labels = []
    for index, (name, line) in enumerate(lines.items()):
        pairs = zip(bandwidths, line.times, strict=True)
        points = [(at, time.seconds, exposed_share(time) <= HIDDEN) for at, time in pairs]
        draw_band(page, axes, index, name, bandwidths, line.bands or [None] * len(bandwidths))
        where = "never hidden"
        if line.hides_from is not None:
            where = f"hidden from {tick_bytes(float(f'{line.hides_from:.2g}'))}/s"
        marks = {"s": page.points * 2.5, "linewidths": 1.0, "clip_on": True}
        labels.append(draw_line(page, axes, index, name, points, f"{plain(name)}\n{where}", 1.5, **marks))
    ticks(axes.xaxis, LogLocator(10, subs=(1.0, 3.0), numticks=12), lambda value: f"{tick_bytes(value)}/s")
    ticks(axes.yaxis, MaxNLocator(6), seconds_words)
    settle(page)
    return finish_lines(page, axes, labels, lines=2)
