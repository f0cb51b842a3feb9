"""`zerosim fit`: the largest size that fits on a device, or the fewest ranks, found by running on shapes alone."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from zerosim.analysis.search import (
    MOST_RANKS,
    SEARCHES,
    Tried,
    check_search,
    fewest_ranks,
    most_that_fits,
    with_value,
)
from zerosim.cli.options import add_run_flags
from zerosim.cli.outputs import as_json, output, show, written
from zerosim.cli.parser import Parser, flag_of, whole_number
from zerosim.cli.plan import (
    add_device_flags,
    add_time_flags,
    device_cluster,
    device_limit,
    outside_values,
    planned_config,
)
from zerosim.config import RunConfig
from zerosim.config.option import known_word
from zerosim.errors import InputError
from zerosim.units import format_bytes

if TYPE_CHECKING:
    from zerosim.train.plan import Figures


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("what to find")
    known = "; ".join(f"{name}: {what}" for name, what in SEARCHES.items())
    group.add_argument(
        "--find", metavar="|".join(SEARCHES), default="micro-batch", help=f"{known} (default: micro-batch)"
    )
    group.add_argument(
        "--most-ranks",
        metavar="N",
        type=whole_number,
        default=MOST_RANKS,
        help=f"with --find mesh: the most ranks that are tried (default: {MOST_RANKS})",
    )
    group.add_argument(
        "--global-batch",
        metavar="ROWS",
        type=whole_number,
        help="with --find fastest: rows of a step on all ranks (default: --micro-batch x --accumulate on each rank)",
    )
    add_device_flags(group)
    add_run_flags(parser, planning=True)
    add_time_flags(parser.add_argument_group("time, modelled where --gpu is given").add_argument)
    group = parser.add_argument_group("what it leaves")
    group.add_argument("--json", metavar="OUT.json", help="what was tried and found; - for stdout")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress and no summary")


def main(args: argparse.Namespace) -> int:
    """0 if something fits, 3 if nothing does."""
    args.find = known_word(args.find, SEARCHES) or args.find
    if args.global_batch is not None and args.find != "fastest":
        raise InputError("--global-batch: of --find fastest; here --micro-batch and --accumulate say it")
    if args.find == "mesh":
        return find_meshes(args)
    if args.find == "fastest":
        from zerosim.cli.fastest import find_fastest

        return find_fastest(args)
    config = planned_config(args, any_ranks=args.find == "ranks")
    field = check_search(config, args.find)
    if hasattr(args, field):
        raise InputError(f"--{args.find} {getattr(args, field)}: it is what is looked for; leave it out")
    limit, figures = device_limit(args, config.memory.capacity), output(args, "json", config)
    if limit is None:
        raise InputError("fit into what? pass --gpu NAME or --limit SIZE")
    config, cluster = config.replace(capacity=None), device_cluster(args, limit)
    from zerosim.report.time import speed_text, time_values
    from zerosim.train.plan import judged, peak_of, plan

    started = time.perf_counter()

    def say(tried: Tried) -> None:
        if not args.quiet and sys.stderr.isatty():
            passed = time.perf_counter() - started
            print(f"[{passed:5.1f} s] {args.find} {tried.value:,}: {format_bytes(tried.peak_bytes)}", file=sys.stderr)

    def room(tried: RunConfig) -> int:
        return limit.nbytes - limit.reserve(tried)

    def trial(tried: RunConfig) -> int:
        return peak_of(tried, room(tried))

    if field == "ranks":
        found = fewest_ranks(config, limit.nbytes, trial, say, limit.reserve)
    else:
        found = most_that_fits(config, field, limit.nbytes, trial, say, limit.reserve)
    shown = config if found.best is None else with_value(config, field, found.best.value)
    is_timed = found.best is not None and cluster is not None
    timed = plan(judged(shown, room(shown)), cluster=cluster) if is_timed else None
    values = {
        "schema": 1,
        "find": args.find,
        "best": found.best and found.best._asdict(),
        "beyond": found.beyond and found.beyond._asdict(),
        "tried": [tried._asdict() for tried in found.tried],
        "limit": limit.to_dict(),
        **outside_values(shown, limit),
        "time": timed and time_values(timed, cluster),
        "config": config.to_dict(),
    }
    with written((figures, as_json(lambda: values))):
        if not args.quiet:
            from zerosim.report.plan import fit_report

            speed = None if timed is None else speed_text(timed, cluster)
            show(args, fit_report(config, args.find, found, limit, speed))
    return 0 if found.best is not None else 3


SEARCHED = ("tp", "pp", "dp_replicate", "stage", "stage_layers", "recompute", "ranks")


def find_meshes(args: argparse.Namespace) -> int:
    """`--find mesh`: what is looked for may not be given."""
    for name in SEARCHED:
        if hasattr(args, name):
            more = "; the most ranks that are tried: --most-ranks" if name == "ranks" else ""
            raise InputError(f"{flag_of(name)} {getattr(args, name)}: it is what is looked for; leave it out{more}")
    for name in ("partition_activations", "cpu_checkpointing"):
        if hasattr(args, name):
            raise InputError(f"{flag_of(name)}: recompute is what is looked for; leave it out, and plan with it then")
    config = planned_config(args).replace(ranks=1)
    limit, figures = device_limit(args, config.memory.capacity), output(args, "json", config)
    if limit is None:
        raise InputError("fit into what? pass --gpu NAME or --limit SIZE")
    if not 1 <= args.most_ranks <= 65536:
        raise InputError(f"--most-ranks {args.most_ranks}: expected at least 1 and at most 65,536")
    config, cluster = config.replace(capacity=None), device_cluster(args, limit)
    from zerosim.analysis.meshes import cheapest_meshes
    from zerosim.report.time import step_values
    from zerosim.train.plan import figures_within

    started = time.perf_counter()

    def say(ranks: int, asked: RunConfig, fits: bool) -> None:
        if not args.quiet and sys.stderr.isatty():
            mesh, passed = asked.mesh, time.perf_counter() - started
            which = f"{ranks:,} ranks, tp {mesh.tp} x pp {mesh.pp}, stage {asked.parallel.zero_stage}"
            print(f"[{passed:5.1f} s] {which}: {'fits' if fits else 'too much'}", file=sys.stderr)

    nbytes, reserve = limit.nbytes, limit.reserve

    def beside(asked: RunConfig, capacity: int) -> Figures | None:
        """What it takes where the reserve of its mesh leaves enough."""
        return figures_within(asked, capacity - reserve(asked), cluster)

    found, tried = cheapest_meshes(config, nbytes, args.most_ranks, beside, say)
    values = {
        "schema": 1,
        "find": "mesh",
        "meshes": [{**one.to_dict(), "time": one.time and step_values(one.config, one.time, cluster)} for one in found],
        "tried": tried,
        "limit": limit.to_dict(),
        **outside_values(found[0].config if found else config, limit),
        "config": config.to_dict(),
    }
    with written((figures, as_json(lambda: values))):
        if not args.quiet:
            from zerosim.report.fit_meshes import meshes_report

            show(args, meshes_report(config, found, tried, args.most_ranks, limit, cluster))
    return 0 if found else 3
