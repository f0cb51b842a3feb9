"""`zerosim step`: the stepper in a terminal (`stepper/tui/`); in a pipe, every event as text; with --html, a page."""

from __future__ import annotations

import argparse
import sys

from zerosim.cli.auto import resolved
from zerosim.cli.options import add_run_flags, run_config
from zerosim.cli.parser import Parser, size, stages
from zerosim.config import OPTIONS, RunConfig
from zerosim.errors import InputError

PAGE = {"collective": "ring"}
"""A page's defaults: shards travel from neighbour to neighbour."""
PAGE_MODEL = {"layers": 2, "micro_batch": 1, "seq": 16}
"""A page's model where no flag names one: its gathered parameters are seen beside the activations."""
NO_KEYS = (
    "This terminal cannot read single keys, so every event follows as text. To step through them in a browser: "
    "zerosim step --html step.html"
)


def add_arguments(parser: Parser) -> None:
    add_run_flags(parser)
    add = parser.add_argument_group("output").add_argument
    add(
        "--html", metavar="OUT.html", help="the first step as a page that plays in any browser, in place of the stepper"
    )
    add("--stages", metavar="0,1,2,3", type=stages, help="with --html: which ZeRO stages (default: --stage alone)")
    add(
        "--device-memory",
        metavar="SIZE",
        type=size,
        help="with --html: a device's memory, such as 900KB, as a line in the page; the run may exceed it",
    )
    parser.epilog = (
        "In a terminal, from the first collective on: n goes on by one event, c to the next collective on all ranks, "
        "? shows the keys, q quits.\n"
        "With --html: a page on which the first step plays, from which one can also step (docs/player.md). Its model "
        "is small (--layers 2 --micro-batch 1 --seq 16) unless a file or a flag such as --model gpt names one, and its "
        "collectives go round a ring (--collective direct for others).\n"
        "In a pipe: one event per line (rank, number, text) of the first step, or of as many as --steps says."
    )


def main(args: argparse.Namespace) -> int:
    defaults = None if args.html is None else PAGE if names_model(args) else PAGE | PAGE_MODEL
    config = resolved(args, run_config(args, defaults))
    if args.html is not None:
        from zerosim.cli.pages import step_page

        return step_page(args, config)
    if args.device_memory is not None:
        raise InputError("--device-memory: pass --html OUT.html too; --capacity bounds the memory of a run")
    if args.stages is not None:
        raise InputError(
            "--stages: pass --html OUT.html too, or --stage for the stepper, which steps through one stage"
        )
    from zerosim.stepper.tui.terminal import Terminal, is_usable

    if not is_usable(sys.stdin, sys.stdout):
        if sys.stdout.isatty():
            print(NO_KEYS, file=sys.stderr)
        return print_events(config, getattr(args, "steps", None) or 1)
    from zerosim.stepper.tui.keys import Stepper

    stepper = Stepper(config, Terminal(sys.stdin, sys.stdout))
    with stepper.terminal.opened():
        return stepper.run()


def names_model(args: argparse.Namespace) -> bool:
    """Return whether a scenario or a flag says which model or which batch runs."""
    sizes = {name for name, option in OPTIONS.items() if option.group == "model"} | PAGE_MODEL.keys() | {"weights"}
    return args.scenario is not None or not sizes.isdisjoint(vars(args))


def print_events(config: RunConfig, steps: int) -> int:
    """Print every event of the first `steps` steps in order, including initialization, one line each."""
    from zerosim.analysis.advice import advised
    from zerosim.stepper import debug

    with advised(config), debug(config) as world:
        while world.step < steps:
            done = world.next()
            sys.stdout.write(f"rank {done.rank}  {done.number:>5}  {done.text}\n")
    return 0
