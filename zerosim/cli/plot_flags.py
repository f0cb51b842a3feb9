"""The flags of `zerosim plot`'s figures, by name. Each figure names its own flags (`plot.py`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from zerosim.analysis.surfaces import SURFACES
from zerosim.cli.compare import AXES, names_of
from zerosim.cli.parser import nearest, size, stages, whole_number
from zerosim.cli.plan import add_reserve_flag, add_time_flags
from zerosim.cli.plot_runs import GPUS, RANKS, rank_numbers
from zerosim.config.option import known_word
from zerosim.ledger.memory import MARKS

MOST_STEPS = 10_000


def _flag(spelled: str, help: str, read: Callable[[str], Any] = str, default: Any = None, **more: Any) -> Any:
    """Return a function that adds a flag, spelled as in its help: '--limit --capacity SIZE'."""
    names = [word for word in spelled.split() if word.startswith("-")]
    metavar = spelled.split()[-1] if len(names) < len(spelled.split()) else None
    return lambda add: add(*names, metavar=metavar, help=help, type=read, default=default, **more)


def _from_0(text: str, or_else: str = "") -> int:
    value = whole_number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 0{or_else}")
    return value


def _from_0_or_all(text: str) -> int | str:
    return text if text == "all" else _from_0(text, ", or 'all'")


def _steps(text: str) -> int:
    steps = whole_number(text)
    if not 1 <= steps <= MOST_STEPS:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 to {MOST_STEPS:,} steps")
    return steps


def _surfaces(text: str) -> tuple[str, ...]:
    """Parse 'all', or one of the surfaces."""
    name = known_word(text, [*SURFACES, "all"])
    if name is None:
        known = nearest(text, [*SURFACES, "all"], "zerosim plot descent --help")
        raise argparse.ArgumentTypeError(f"unknown surface {text!r}{known}")
    return tuple(SURFACES) if name == "all" else (name,)


def inches(text: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d+(?:\.\d*)?)[x×](\d+(?:\.\d*)?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected inches, width x height, such as 8x4.5")
    return float(match[1]), float(match[2])


_BOTTOM = "along the bottom: numbers of layers of --model's width, such as 8,16,32, or names of models"
FLAGS: Mapping[str, Callable[[Callable[..., Any]], Any]] = {
    "limit": _flag("--limit --capacity SIZE", "draw a line at this size, such as 24GB", size),
    "gpu": _flag("--gpu NAME", "draw a line at the memory of this device, such as v100-32"),
    "allocator-limit": _flag("--limit --capacity SIZE", "size of the allocator's memory, such as 24GB", size),
    "allocator-gpu": _flag("--gpu NAME", "the allocator has the memory of this device, such as v100-32"),
    "clock": _flag("--gpu NAME", "GPU to time: a preset or a TOML file; or pass --node"),
    "clock-and-memory": _flag("--gpu NAME", "GPU for times and memory: a preset or a TOML file; or pass --node"),
    "time": add_time_flags,
    "reserve": add_reserve_flag,
    "sizes": _flag("--sizes LIST", _BOTTOM),
    "gpus-list": _flag("--ranks-list 1,2,4,...", f"along the bottom: numbers of GPUs (default: {GPUS})", rank_numbers),
    "ranks-list": _flag("--ranks-list 1,2,4,...", f"numbers of ranks (default: {RANKS})", rank_numbers),
    "stages": _flag("--stages 0,1,2,3", "ZeRO stages to draw (default: 0,1,2,3)", stages),
    "mark": _flag("--mark", "moment to draw (default: end_of_backward)", str,
        "end_of_backward", choices=(*MARKS, "peak")),
    "rank": _flag("--rank R", "rank to draw (default: 0)", _from_0, 0),
    "rank-or-all": _flag("--rank R|all", "rank whose events are drawn (default: 0)", _from_0_or_all, 0),
    "ranks-or-all": _flag("--rank R|all", "rank to draw (default: one of each group of identical ranks)",
        _from_0_or_all, "all"),
    "step": _flag("--step S|all", "step to draw (default: 0)", _from_0_or_all, 0),
    "optimizers": _flag("--optimizers sgd,adam,...", "optimizers to draw, up to 8 (default: sgd,adam,lion)",
        partial(names_of, *AXES["optimizers"][:2]), ("sgd", "adam", "lion")),
    "surface": _flag("--surface NAME", f"{', '.join(SURFACES)}, or all of them (default: all)", _surfaces,
        tuple(SURFACES)),
    "descent-steps": _flag("--steps S", "steps of each (default: 100)", _steps, 100),
}  # fmt: skip
