"""`zerosim step --html` and `zerosim plan --html`: the player's page for a run or a plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TextIO

from zerosim.analysis.advice import advised
from zerosim.cli.outputs import Output, human_stream, output, written
from zerosim.config import RunConfig
from zerosim.errors import InputError, printable
from zerosim.playback import Recorded, encode, page, record
from zerosim.playback.encode import check_size
from zerosim.playback.html import title_of
from zerosim.report.names import counted
from zerosim.train.plan import plan
from zerosim.units import format_bytes

MOST_CARDS = 8
"""A plan's page shows every rank up to this number of ranks."""


def step_page(args: argparse.Namespace, config: RunConfig) -> int:
    """Record the first step at each requested ZeRO stage, and write the player's page."""
    if args.stages is not None and hasattr(args, "stage"):
        raise InputError("--stage and --stages are both given: choose one")
    configs = [config] if args.stages is None else [config.at_stage(stage) for stage in args.stages]
    file = output(args, "html", config)
    assert file is not None
    with naming_page(file):
        check_size(*configs)
    recorded = []
    for one in configs:
        with advised(one):
            recorded.append(replace(record(one), limit=args.device_memory))
    leave_page(file, recorded, sys.stdout)
    return 0


def plan_page(args: argparse.Namespace, file: Output, config: RunConfig, limit: int | None = None) -> None:
    """Write the player's page of a plan's first step. Run every rank if there are few, else one per class of ranks."""
    step = config.replace(steps=1, allocator="exact", allocator_conf=None)
    every_rank = args.every_rank or config.mesh.ranks <= MOST_CARDS
    with naming_page(file):
        check_size(step, every_rank=every_rank)
    recorded = Recorded(plan(step, every_rank=every_rank, keep_events=True), limit=limit)
    leave_page(file, [recorded], human_stream(args))


@contextmanager
def naming_page(file: Output) -> Iterator[None]:
    """Say in a refusal inside the block that it is about a page."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{file.name}: {error}") from None


def leave_page(file: Output, recorded: Sequence[Recorded], stream: TextIO) -> None:
    """Write the page of the recording, and print its contents."""
    with naming_page(file):
        data = encode(*recorded)
    text = page(data).encode()
    with written((file, lambda out: out.write(text))):
        pass  # the text below is only true if nothing failed
    count = counted(sum(len(run["events"]) for run in data["runs"]), "event")
    less = " Kernels are left out." if data["runs"][0]["left_out"] else ""
    what = f"{title_of(data)}, {count}.{less}"
    print(f"{printable(str(file.path))}, {format_bytes(len(text))}: {what} Open it in a browser.", file=stream)
