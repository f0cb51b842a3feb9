"""The pictures' words on their runs: which model on how many ranks. Text only, no layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from zerosim.config import OPTIONS
from zerosim.errors import InputError
from zerosim.report.names import STAGES
from zerosim.report.words import shape
from zerosim.train.result import RunResult
from zerosim.units import format_bytes, format_count

EVENTS = "events in their order (not seconds)"
_LONGEST_NAME = 32
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
_PARTITIONED = ("", " (P_os)", " (P_os+g)", " (P_os+g+p)")


def stage_label(stage: int) -> str:
    """Return 'DDP', 'ZeRO-1 (P_os)': the stage's name, and the paper's name for it."""
    return STAGES[stage] + _PARTITIONED[stage]


def check_results(results: Mapping[str, RunResult]) -> None:
    """Check results. Raises: InputError if there is nothing to draw."""
    if not results:
        raise InputError("no results: there is nothing to draw; give at least one")


def run_words(results: Mapping[str, RunResult]) -> str:
    """Return 'Ψ = 7.50B parameters on N = 64 ranks, bf16, adam'; values that differ between runs as a range or a list,
    and a recipe that is not the default."""
    runs = results.values()
    psi = _range((result.num_parameters for result in runs), format_count)
    ranks = _range((result.config.mesh.ranks for result in runs), lambda count: f"{count:,}")
    precision = "/".join(dict.fromkeys(result.config.precision.param_dtype for result in runs))
    optimizer = "/".join(dict.fromkeys(result.config.optim.optimizer for result in runs))
    of_mesh = shape(*(result.config for result in runs))
    noun = "rank" if ranks == "1" else "ranks"
    where = f" on {ranks} {noun}, {of_mesh}" if of_mesh else f", N = {ranks} data-parallel {noun}"
    recipes = "/".join(dict.fromkeys(result.config.parallel.recipe for result in runs))
    recipe = f", recipe {recipes}" if recipes != OPTIONS["recipe"].default else ""
    return f"Ψ = {psi} parameters{where}, {precision} with {optimizer}{recipe}"


def limit_words(limit: tuple[str, int]) -> str:
    """Return 'V100: 32.0 GB', or 'limit: 32.0 GB' for a device without a name."""
    name, nbytes = limit
    name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
    return f"{name or 'limit'}: {format_bytes(nbytes)}"


def _range(values: Iterable[int], show: Callable[[int], str]) -> str:
    known = sorted(set(values))
    low, high = show(known[0]), show(known[-1])
    return low if low == high else f"{low} to {high}"


def tick_bytes(value: float) -> str:
    """Return '20 GB', '2.5 MB', '0': a tick's round number in decimal units."""
    scaled, at = float(value), 0
    while abs(scaled) >= 999.9995 and at < len(_UNITS) - 1:
        scaled, at = scaled / 1000, at + 1
    return f"{scaled:.4g} {_UNITS[at]}" if scaled else "0"


def seconds_words(value: float) -> str:
    """Return '1.31 s', '13.4 ms'."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} s"


def whole_words(value: float) -> str:
    """Return '1,024'."""
    return f"{value:,.0f}"


def percent(share: float, least: float = 0.001) -> str:
    """Return '84', '0.9', '0.003', '<0.001', '0': percent, with few digits."""
    value = 100 * share
    return (
        "0" if value == 0 else f"<{least:g}" if value < least else f"{value:.0f}" if value >= 9.95 else f"{value:.1g}"
    )
