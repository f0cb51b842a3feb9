"""`zerosim fit`: the largest size that fits on a device, or the fewest ranks, found by running on shapes alone."""

from __future__ import annotations

import argparse
import sys
import time

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
from zerosim.cli.plan import add_device_flags, device_limit, outside_values, planned_config
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.units import format_bytes


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
    add_device_flags(group)
    add_run_flags(parser, planning=True)
    group = parser.add_argument_group("what it leaves")
    group.add_argument("--json", metavar="OUT.json", help="what was tried and found; - for stdout")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress and no summary")


def main(args: argparse.Namespace) -> int:
    """0 if something fits, 3 if nothing does."""
    if args.find == "mesh":
        return find_meshes(args)
    config = planned_config(args, any_ranks=args.find == "ranks")
    field = check_search(config, args.find)
    if hasattr(args, field):
        raise InputError(f"--{args.find} {getattr(args, field)}: it is what is looked for; leave it out")
    limit, figures = device_limit(args, config.memory.capacity), output(args, "json", config)
    if limit is None:
        raise InputError("fit into what? pass --gpu NAME or --limit SIZE")
    config = config.replace(capacity=None)
    from zerosim.train.plan import peak_of

    started = time.perf_counter()

    def say(tried: Tried) -> None:
        if not args.quiet and sys.stderr.isatty():
            passed = time.perf_counter() - started
            print(f"[{passed:5.1f} s] {args.find} {tried.value:,}: {format_bytes(tried.peak_bytes)}", file=sys.stderr)

    def trial(tried: RunConfig) -> int:
        return peak_of(tried, limit.nbytes - limit.reserve(tried))

    if field == "ranks":
        found = fewest_ranks(config, limit.nbytes, trial, say, limit.reserve)
    else:
        found = most_that_fits(config, field, limit.nbytes, trial, say, limit.reserve)
    values = {
        "schema": 1,
        "find": args.find,
        "best": found.best and found.best._asdict(),
        "beyond": found.beyond and found.beyond._asdict(),
        "tried": [tried._asdict() for tried in found.tried],
        "limit": limit.to_dict(),
        **outside_values(config if found.best is None else with_value(config, field, found.best.value), limit),
        "config": config.to_dict(),
    }
    with written((figures, as_json(lambda: values))):
        if not args.quiet:
            from zerosim.report.plan import fit_report

            show(args, fit_report(config, args.find, found, limit))
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
    config = config.replace(capacity=None)
    from zerosim.analysis.meshes import cheapest_meshes
    from zerosim.train.plan import peak_and_sent

    started = time.perf_counter()

    def say(ranks: int, asked: RunConfig, fits: bool) -> None:
        if not args.quiet and sys.stderr.isatty():
            mesh, passed = asked.mesh, time.perf_counter() - started
            which = f"{ranks:,} ranks, tp {mesh.tp} x pp {mesh.pp}, stage {asked.parallel.zero_stage}"
            print(f"[{passed:5.1f} s] {which}: {'fits' if fits else 'too much'}", file=sys.stderr)

    nbytes, reserve = limit.nbytes, limit.reserve

    def beside(asked: RunConfig, capacity: int) -> tuple[int, int] | None:
        """What it takes where the reserve of its mesh leaves enough."""
        return peak_and_sent(asked, max(1, capacity - reserve(asked)))

    found, tried = cheapest_meshes(config, nbytes, args.most_ranks, beside, say)
    values = {
        "schema": 1,
        "find": "mesh",
        "meshes": [one.to_dict() for one in found],
        "tried": tried,
        "limit": limit.to_dict(),
        **outside_values(found[0].config if found else config, limit),
        "config": config.to_dict(),
    }
    with written((figures, as_json(lambda: values))):
        if not args.quiet:
            from zerosim.report.fit_meshes import meshes_report

            show(args, meshes_report(config, found, tried, args.most_ranks, limit))
    return 0 if found else 3
