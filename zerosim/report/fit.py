"""What a search found: the value that fits, the next one that does not, and all that were run."""

from __future__ import annotations

from rich.console import RenderableType

from zerosim.analysis.search import SEARCHES, Found, with_value
from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.report import words
from zerosim.report.grid import Grid, right
from zerosim.report.look import Adaptive, Stack, prose, titled
from zerosim.report.names import STAGES
from zerosim.report.plan import Limit
from zerosim.train.build import build_model
from zerosim.units import format_bytes, format_count


def fit_report(config: RunConfig, what: str, found: Found, limit: Limit) -> Stack:
    """The answer, then what was run for it."""
    device = limit.name or format_bytes(limit.nbytes)
    headline = f"{words.model_name(config)}: {STAGES[config.parallel.zero_stage]} on {device}, {SEARCHES[what]}"
    return Stack(
        prose(headline, "bold"),
        prose(_answer(config, what, found, limit), "bold green" if found.best is not None else "bold red"),
        _tried_table(what, found, limit),
    )


def _answer(config: RunConfig, what: str, found: Found, limit: Limit) -> str:
    best, beyond = found.best, found.beyond
    if best is None:
        least = min(found.tried, key=lambda tried: tried.peak_bytes)
        return (
            f"Nothing fits: {what} {least.value:,} takes the least, and its peak is {format_bytes(least.peak_bytes)} "
            f"of {format_bytes(limit.nbytes)}. Try a higher --stage, --recompute full or --attention flash."
        )
    room = limit.nbytes - best.peak_bytes
    text = (
        f"{what} {best.value:,}: the peak is {format_bytes(best.peak_bytes)} of {format_bytes(limit.nbytes)}, "
        f"{format_bytes(room)} are left."
    )
    if beyond is not None:
        text += f" {what} {beyond.value:,} does not fit, by {format_bytes(beyond.peak_bytes - limit.nbytes)}."
    elif what == "ranks":
        text += " One rank is enough." if config.mesh.dp_replicate == 1 else " One rank per replica is enough."
    else:
        text += " It is the end of what was searched."
    if what == "seq" and config.model.family == "gpt" and best.value > config.model.positions:
        text += (
            f" The table of {config.model.positions:,} positions was lengthened: a run needs --positions {best.value}."
        )
    if what in ("layers", "params"):
        numel = build_model(with_value(config, what, best.value), Device(0, make_backend("meta"))).num_parameters
        text += f" That is a model of {numel:,} parameters ({format_count(numel)})."
    return text


def _tried_table(what: str, found: Found, limit: Limit) -> RenderableType:
    grid = Grid(right(what), right("peak, bytes"), right(""), "fits")
    for tried in sorted(found.tried):
        fits = "yes" if tried.peak_bytes <= limit.nbytes else "no"
        peak = (tried.peak_bytes, format_bytes(tried.peak_bytes))
        grid.add(tried.value, *peak, fits, style="bold" if tried == found.best else "")
    return titled("What was run", Adaptive(grid))
