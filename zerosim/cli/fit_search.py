"""What the searches of `zerosim fit` share: the device, refused options, progress, and the answer."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zerosim.analysis.candidate import candidate
from zerosim.analysis.search import Tried
from zerosim.cli.outputs import Output, leave, output
from zerosim.cli.parser import flag_of
from zerosim.cli.plan import device_cluster, device_limit, outside_values, planned_config
from zerosim.cli.streams import stopwatch
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zerosim.report.fit import Search


def search_of(args: argparse.Namespace, config: RunConfig, no_limit: str = "") -> tuple[Search, Output | None]:
    """Return the search and the output of its figures.

    Raises: InputError without a device, and if the figures cannot be written.
    """
    limit, figures = device_limit(args, config.memory.capacity), output(args, "json", config)
    if limit is None:
        raise InputError(no_limit or "no memory size to fit into: pass --gpu NAME or --limit SIZE")
    from zerosim.report.fit import Search

    asked = candidate(config, capacity=None).sure()
    return Search(args.find, asked, limit, device_cluster(args, limit), args.all), figures


def told_on(args: argparse.Namespace) -> Callable[[str], None]:
    """Print progress on stderr, with the seconds since now, if a person waits."""
    return stopwatch(quiet=args.quiet or not sys.stderr.isatty())


def mesh_told_on(args: argparse.Namespace) -> Callable[[RunConfig, Tried | None], None]:
    """Print each whole plan of a search of meshes as `told_on` does."""
    told = told_on(args)

    def say(tried: RunConfig, took: Tried | None) -> None:
        from zerosim.report.fit import mesh_flags

        how = "too much" if took is None else format_bytes(took.peak_bytes)
        speed = "" if took is None or took.time is None else f", {took.time.seconds:.4g} s"
        told(f"{mesh_flags(tried)}: {how}{speed}")

    return say


def clock_of(args: argparse.Namespace) -> Callable[[], None]:
    """Return a function that raises Stopped when --time-limit is over, from now on. Raises: InputError for a limit of
    no time."""
    from zerosim.analysis.mesh_search import Stopped

    limit, began = args.time_limit, time.monotonic()
    if limit is not None and not limit > 0:
        raise InputError(f"--time-limit {limit:g}: expected more than 0 seconds")

    def check_time() -> None:
        if limit is not None and time.monotonic() - began > limit:
            raise Stopped

    return check_time


def at_any_stage(args: argparse.Namespace, *, any_ranks: bool = False) -> RunConfig:
    """Build the configuration at the usual ZeRO stage or, if given options exclude it, at the highest that goes with
    them. Raises: InputError, the usual stage's."""
    refusal = None
    for stage in (None, 3, 2, 1, 0):
        own = {} if stage is None else {"stage": stage}
        try:
            return planned_config(argparse.Namespace(**{**vars(args), **own}), any_ranks=any_ranks)
        except InputError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def leave_found(
    args: argparse.Namespace, search: Search, figures: Output | None, best: Tried | None, found: dict[str, Any],
    report: Callable[[], RenderableType],
) -> int:  # fmt: skip
    """Write what was `found` and show the report. Return 0 if something fits, 3 if nothing does."""
    config, taken = (None, None) if best is None else (best.config, best.peak_bytes)
    outside = {"limit": search.limit.to_dict(), **outside_values(config or search.config, search.limit)}
    about = {"warnings": search.warnings(config, taken), "config": search.config.to_dict()}
    about["notes"] = list(search.config.model.notes)
    values = {"schema": 1, "find": search.find, **found, **outside, **about}
    leave(args, figures, lambda: values, report)
    return 3 if best is None else 0


def refuse(args: argparse.Namespace, *names: str) -> None:
    """Refuse the searched option. Raises: InputError if it was given."""
    for name in names:
        if hasattr(args, name):
            value = getattr(args, name)
            given = flag_of(name) if value is True else f"{flag_of(name)} {value}"
            raise InputError(f"{given}: the search varies it; leave it out")
    for name in ("partition_activations", "cpu_checkpointing"):
        if "recompute" in names and hasattr(args, name):
            raise InputError(
                f"{flag_of(name)}: --find recompute varies it; leave it out, and pass it to zerosim plan later"
            )
