"""`zerosim fit`: the largest size that fits on a device, or the fewest ranks, found by running on shapes alone."""

from __future__ import annotations

import argparse
import sys
import time

from zerosim.analysis.search import SEARCHES, Tried, check_search, fewest_ranks, most_that_fits
from zerosim.cli.options import add_run_flags, run_config
from zerosim.cli.outputs import as_json, output, show, written
from zerosim.cli.parser import Parser
from zerosim.cli.plan import add_device_flags, device_limit
from zerosim.config import PLAN_DEFAULTS
from zerosim.errors import InputError
from zerosim.units import format_bytes


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("what to find")
    known = "; ".join(f"{name}: {what}" for name, what in SEARCHES.items())
    group.add_argument(
        "--find", metavar="|".join(SEARCHES), default="micro-batch", help=f"{known} (default: micro-batch)"
    )
    add_device_flags(group)
    add_run_flags(parser, planning=True)
    group = parser.add_argument_group("what it leaves")
    group.add_argument("--json", metavar="OUT.json", help="what was tried and found; - for stdout")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress and no summary")


def main(args: argparse.Namespace) -> int:
    """0 if something fits, 3 if nothing does."""
    config = run_config(args, PLAN_DEFAULTS, any_ranks=args.find == "ranks")
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

    if field == "ranks":
        found = fewest_ranks(config, limit.nbytes, peak_of, say)
    else:
        found = most_that_fits(config, field, limit.nbytes, peak_of, say)
    values = {
        "schema": 1,
        "find": args.find,
        "best": found.best and found.best._asdict(),
        "beyond": found.beyond and found.beyond._asdict(),
        "tried": [tried._asdict() for tried in found.tried],
        "limit": limit.to_dict(),
        "config": config.to_dict(),
    }
    with written((figures, as_json(lambda: values))):
        if not args.quiet:
            from zerosim.report.plan import fit_report

            show(args, fit_report(config, args.find, found, limit))
    return 0 if found.best is not None else 3
