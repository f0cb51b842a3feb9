"""`zerosim step`: the stepper in a terminal (`stepper/tui/`); in a pipe, every event as text."""

from __future__ import annotations

import argparse
import sys

from zerosim.cli.options import add_run_flags, run_config
from zerosim.cli.parser import Parser
from zerosim.config import RunConfig


def add_arguments(parser: Parser) -> None:
    add_run_flags(parser)
    parser.epilog = (
        "In a terminal, from the first collective on: n goes on by one event, c to the next collective on all ranks,\n"
        "? shows the keys, q quits.\n"
        "In a pipe: one event per line (rank, number, text) of the first step, or of as many as --steps says."
    )


def main(args: argparse.Namespace) -> int:
    config = run_config(args)
    from zerosim.stepper.tui.terminal import Terminal, is_usable

    if not is_usable(sys.stdin, sys.stdout):
        return print_events(config, getattr(args, "steps", None) or 1)
    from zerosim.stepper.tui.keys import Stepper

    stepper = Stepper(config, Terminal(sys.stdin, sys.stdout))
    with stepper.terminal.opened():
        return stepper.run()


def print_events(config: RunConfig, steps: int) -> int:
    """Every event of the first `steps` steps in order, placing included; one line each."""
    from zerosim.stepper import debug

    with debug(config) as world:
        while world.step < steps:
            done = world.next()
            sys.stdout.write(f"rank {done.rank}  {done.number:>5}  {done.text}\n")
    return 0
