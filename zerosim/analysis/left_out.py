"""Which of the options that a person gave cost too much memory: without them the configuration would fit.

Only options about how a step is executed are left out. The model, what is trained, the formats of numbers, the recipe
and the number of ranks stay, and --fp32-softmax: without it a plan has another attention kernel by default.
`cheapest.py` itself tries other values of recompute, attention, loss and prefetch.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator
from typing import Any

from zerosim.analysis.candidate import Candidate, candidate, taken_back
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.parts.gathering import Gathering
from zerosim.config.parts.grads import GradMemory
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.reduction import Reduction

_HOW = {name for part in (ParallelConfig, Reduction, Gathering, GradMemory) for name in part.options()}
_MORE = {"dp_replicate", "secondary_shard", "stash_window", "foreach", "collective"}
_KEPT = {"stage", "recipe", "pad_vocab", "bucket_bytes", "prefetch", "prefetch_elements", "delayed_update"}
MAY_GO = tuple(name for name in OPTIONS if name in (_HOW | _MORE) - _KEPT)
"""The options that may be left out, in the order of the help."""


def left_out(
    config: RunConfig, given: Collection[str], fits: Callable[[RunConfig], bool]
) -> Iterator[tuple[RunConfig, str]]:
    """Yield configurations that fit without some of the `given` options, and their flags: each option alone, else
    as few together as are needed."""
    names, found = [name for name in MAY_GO if name in given and name in config.given], False
    alone = {name: _without(config, [name]) for name in names}
    costly = [name for name, (_, changed) in alone.items() if changed is not None and changed != config]
    for name in costly:
        gone, changed = alone[name]
        if changed is not None and fits(changed):
            found = True
            yield changed, given_flags(config, gone)
    if found or len(costly) < 2:
        return
    gone, changed = _without(config, costly)
    if changed is None or not fits(changed):
        return
    for name in costly:
        fewer, other = _without(config, [one for one in gone if one != name])
        if name in gone and other is not None and len(fewer) < len(gone) and fits(other):
            gone, changed = fewer, other
    yield changed, given_flags(config, gone)


def _without(config: RunConfig, names: Collection[str]) -> tuple[list[str], RunConfig | None]:
    """Leave these options out, and given ones that have no effect or no place without them. Return all that are left
    out, and the configuration; None if the others refuse that."""
    gone, made = list(names), Candidate(config)
    while gone and (made := candidate(config, **taken_back(gone))).config is None:
        if made.field in gone or made.field not in config.given or made.field not in MAY_GO:
            break
        gone.append(made.field)
    return gone, made.config


def given_flags(config: RunConfig, names: Collection[str]) -> str:
    """Return the flags of these options, as a person gave them."""
    return " ".join(given_flag(name, config.given[name]) for name in names)


def given_flag(name: str, value: Any) -> str:
    """Return the flag of a value that a person gave, as a shell reads it."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {shlex.quote(str(value))}"
