"""What should I run? Three plans that differ in kind, or the smallest changes that make one fit.

    simplest   data parallelism alone, on its framework's own switches
    fastest    of all meshes (`mesh_search.py`)
    offloaded  if nothing fits on the devices: states in the nodes' other memories
    longest    the longest rows up to the model's own limit; if their length is given, the largest batch

Of plans that are the same the first one stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any, NamedTuple

from zerosim.analysis.candidate import accepted, candidate, candidate_at
from zerosim.analysis.capabilities import offload, tuning
from zerosim.analysis.cheapest import changes_alone, flags_of
from zerosim.analysis.left_out import given_flag
from zerosim.analysis.mesh_search import Group, Known, Meshes, Say, Stopped, best_meshes
from zerosim.analysis.meshes import divisors, fused_loss, ladders
from zerosim.analysis.offload_ways import offloaded, other_memories
from zerosim.analysis.search import Devices, Tried, most_that_fits
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.placement.memories import HOST

MOST_CHANGES = 6
LESS = (1.0, 0.95, 0.9, 0.8, 0.7)
ROUND = 1024
"""The longest rows are multiples of this many tokens."""
GROWN = 64
"""How many times as many GPUs are tried, at most."""


class Proposed(NamedTuple):
    """A plan that is advised: its kind, and the first change that frees memory if it is a little short, with its flags
    and price (None: none does)."""

    kind: str
    tried: Tried
    relief: tuple[Tried, str, str] | None = None


class Fix(NamedTuple):
    """A change with which a model fits that does not fit otherwise: what it is, its flags, its price, and its plan."""

    name: str
    flags: str
    price: str
    tried: Tried


class Advice(NamedTuple):
    """The plans; if there is none, the least that was tried (None: the search was stopped before) and the changes that
    fit; what was found out about each group of ways; and whether the search ended by itself."""

    plans: tuple[Proposed, ...]
    fixes: tuple[Fix, ...] = ()
    least: Tried | None = None
    groups: tuple[Group, ...] = ()
    candidates: int = 0
    planned: int = 0
    ended: bool = True
    beyond: Tried | None = None


def advise(
    config: RunConfig,
    global_batch: int,
    devices: Devices,
    *,
    node: int,
    length_given: bool,
    check_time: Callable[[], None] = lambda: None,
    say: Say = lambda config, tried: None,
) -> Advice:
    """Find plans of `config`'s model and ranks, with that many rows in a step. Raises: InputError if no mesh divides
    them, KeyboardInterrupt before the first plan."""
    families = list(ladders(config, global_batch, node))
    if not families:
        raise InputError(
            f"--global-batch {global_batch}: no mesh of {config.mesh.ranks} GPUs divides so many rows; choose a "
            f"multiple of {config.mesh.ranks}"
        )
    known = Known(config, devices)

    def best(some: list[list[RunConfig]], allowed: Callable[[RunConfig], bool]) -> Meshes:
        of = dict(node=node, check_time=check_time, say=say, most=1, known=known, allowed=allowed)
        return best_meshes(config, some, devices, **of) if some else Meshes(())  # type: ignore[arg-type]

    alone = [family for family in families if _is_simple(family[0])]
    small = [family for family in alone if family[0].parallel.recipe != "megatron"]  # whose scripts are for meshes
    plans, fixes, least = list[Proposed](), list[Fix](), None

    def propose(kind: str, tried: Tried) -> None:
        if all(tried.config != one.tried.config for one in plans):
            plans.append(Proposed(kind, tried))

    simple, fast, ended = best(small or alone, _is_simple), Meshes((), ended=False), False
    for one in simple.found:
        propose("simplest", one)
    try:
        if simple.ended:
            fast = best(families, lambda asked: True)
        for one in fast.found:
            propose("fastest", one)
        if fast.ended and not plans:
            lean = best(list(offloaded(families, other_memories(config, devices.cluster))), _is_whole)
            for one in lean.found:
                propose("offloaded", one)
            fast = replace(lean, groups=(*fast.groups, *lean.groups)) if lean.found else fast
        if fast.ended and plans:
            check_time()
            longest = _longest(config, families, devices, length_given) if plans[0].kind != "offloaded" else None
            if longest is not None:
                propose(*longest)
            for number, plan in enumerate(plans):
                check_time()
                plans[number] = plan._replace(relief=_relief(plan.tried, devices))
        elif fast.ended:
            least = _least(config, families, devices)
            for fix in _fixes(least.config, devices):
                fixes.append(fix)
                check_time()
        ended = fast.ended
    except (KeyboardInterrupt, Stopped):  # what was found until then stays
        if not plans and least is None:
            raise
    groups, planned = tuple(fast.groups or simple.groups), simple.planned + fast.planned
    counts = fast.candidates or simple.candidates, planned, ended
    return Advice(tuple(plans), tuple(fixes), least, groups, *counts, fast.beyond or simple.beyond)


def _is_whole(config: RunConfig) -> bool:
    mesh = config.mesh.axes
    return mesh.tp == mesh.pp == mesh.cp == mesh.ep == 1


def _is_simple(config: RunConfig) -> bool:
    return _is_whole(config) and not offload.where(config)


def _longest(
    config: RunConfig, families: list[list[RunConfig]], devices: Devices, length_given: bool
) -> tuple[str, Tried] | None:
    """Return the longest rows, one on each rank or on ranks that share it, with all recompute and a fused loss, if none
    was given; up to the positions that the model was made for. If it reads no more or their length is given, return the
    largest batch of one pass."""
    bases = [family[-1] for family in families if _is_simple(family[0]) and family[0].parallel.zero_stage == 3]
    base = next(iter(bases), min((family[-1] for family in families), key=lambda one: one.mesh.pp))
    base = candidate(base, micro_batch=1, accumulate=1).config or base
    base = candidate(base, **fused_loss(base)).config or base
    own, most = config.model.seq, config.model.positions
    exact, name = replace(devices, is_strict=False), "micro_batch" if length_given or most <= own else "seq"
    if name == "micro_batch":
        found = most_that_fits(base, name, exact.tried).best
    else:
        found = None
        for cp in [one for one in divisors(config.mesh.ranks) if one <= 8]:
            for asked in accepted([candidate(base, cp=cp, seq=own)]):
                longer = _longest_rows(asked, most, exact)
                found = longer if found is None or (longer and longer.value > found.value) else found
            if found is not None and found.value == most:
                break
    if found is None:
        return None
    for part in LESS:  # an allocator may need the rest
        value = max(1, int(part * found.value))
        value -= value % ROUND if name == "seq" and value > ROUND else 0
        less = candidate(found.config, **{name: value}).config
        if less is not None and (timed := devices.within(less)) is not None:
            return "largest batch" if name == "micro_batch" else "longest rows", timed
    return None


def _longest_rows(config: RunConfig, most: int, devices: Devices) -> Tried | None:
    """Return the longest rows that fit, in steps of an eighth of a power of two."""
    lengths = [2**power * eighths // 8 for power in range(10, most.bit_length()) for eighths in range(8, 16)]
    lengths = [*(one for one in lengths if config.model.seq <= one < most), most]
    low, high, best = 0, len(lengths) - 1, None
    while low <= high:
        middle = high if best is None and high == len(lengths) - 1 else (low + high) // 2
        asked = candidate(config, seq=lengths[middle]).config
        tried = None if asked is None else devices.tried(asked)
        if tried is not None and tried.fits:
            best, low = tried._replace(value=lengths[middle]), middle + 1
        else:
            high = middle - 1
    return best


def _relief(tried: Tried, devices: Devices) -> tuple[Tried, str, str] | None:
    """Return the cheapest change that frees a fiftieth of the peak, with its flags and price."""
    own, devices = tried.config, replace(devices, is_strict=False)
    for changed, price in changes_alone(own):
        less = devices.tried(changed)
        if less.peak_bytes < 0.98 * tried.peak_bytes:
            return less, flags_of(own, changed), price
    return None


def _least(config: RunConfig, families: list[list[RunConfig]], devices: Devices) -> Tried:
    """Return data parallelism at ZeRO-3 with all recompute and one row, or the family that is nearest to it."""
    order = sorted((family[-1] for family in families), key=lambda one: (not _is_simple(one), -one.parallel.zero_stage))
    return devices.tried(candidate(order[0], micro_batch=1, accumulate=1).config or order[0])


def _fixes(least: RunConfig, devices: Devices) -> Iterator[Fix]:
    """Yield what makes the least configuration fit, the smallest change of each kind first, each planned."""
    found = 0
    for name, price, options in _kinds(least, devices):
        for values in options:
            others = {name: value for name, value in values.items() if name != "stage"}
            changed = candidate_at(least, values.get("stage", least.parallel.zero_stage), **others)
            if changed.config is not None and (tried := devices.tried(changed.config)).fits:
                found += 1
                yield Fix(name, " ".join(starmap(given_flag, values.items())), price, tried)
                break
        if found == MOST_CHANGES:
            return


Values = Mapping[str, Any]


def _kinds(least: RunConfig, devices: Devices) -> Iterator[tuple[str, str, list[Values]]]:
    ranks, seq = least.mesh.ranks, least.model.seq
    lean = fused_loss(least)
    yield "the head and its loss in chunks", "the head runs again", [lean] if lean else []
    yield "shorter rows", "less context", [{"seq": seq >> power, **lean} for power in range(1, 5)]
    if HOST in other_memories(least, devices.cluster):
        both = ("optimizer=host", "optimizer=host,params=host")
        on_host: list[Values] = [{"stage": 3, "recipe": "deepspeed", "offload": where, **lean} for where in both]
        yield "states in host memory", "the CPU's step, and copies", on_host
    lora: Values = {} if tuning.has_adapters(least) else {"lora_rank": 16, "lora_target": "all-linear"}
    if lora:
        yield "8-bit optimizer states", "another optimizer", [{"optimizer": "adam8bit", **lean}]
        yield "adapters alone (LoRA)", "the base stays as it is", [{**lora, **lean}]
    if least.tuning.base is None:
        yield "adapters on a 4-bit base (QLoRA)", "the base in 4 bits", [{**lora, "base": "nf4", **lean}]
    more = [2**power for power in range(1, GROWN.bit_length())]
    shared: Values = {"stage": 3, "recipe": "fsdp2"} if ranks == 1 else {}  # alone it had nothing to share
    yield "more GPUs", "their price", [{"ranks": ranks * times, **shared, **lean} for times in more]
