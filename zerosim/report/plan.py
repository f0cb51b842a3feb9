"""Plans and searches on shapes alone: what one rank holds at each mark, what its peak was made of, what fits.

Reads a result of `train.plan.plan` (or of a real run); tables of model states and traffic, with their formulas, are
those of a run.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.table import Column

from zerosim.analysis.compare import peak_rank
from zerosim.analysis.forms import is_owned
from zerosim.analysis.search import SEARCHES, Found, Tried, with_value
from zerosim.analysis.shares import is_mesh
from zerosim.comm.runtime import make_backend
from zerosim.config import MemoryConfig, RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.optimizers import OPTIMIZERS as PRESETS
from zerosim.config.presets.recipes import find_recipe
from zerosim.device.device import Device, Kind
from zerosim.errors import OutOfMemory
from zerosim.ledger.memory import MARKS, Snapshot
from zerosim.placement.mesh import DATA
from zerosim.report import failures, words
from zerosim.report.activations import activations_table, has_block
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.names import KINDS, OPTIMIZERS, STAGES, counted, listed
from zerosim.report.tables import (
    allocator_text,
    copies_table,
    kept_text,
    mesh_text,
    owners_table,
    peaks_table,
    set_aside_text,
    states_table,
    traffic_table,
)
from zerosim.report.time import time_table
from zerosim.report.verdict import Limit, assumed, fits, outside_table, taken_column, takes, too_much, verdict
from zerosim.train.build import build_model
from zerosim.train.result import RunResult
from zerosim.units import format_bytes, format_count

MOST_HOLDERS = 10
_OF_BLOCKS = ("gpt", "llama")  # families of models
_MARK_NAMES = {
    "after_init": "start",
    "end_of_forward": "forward",
    "end_of_backward": "backward",
    "gradients_upcast": "upcast",
    "after_step": "step",
}


def plan_report(
    result: RunResult,
    limit: Limit | None,
    advice: str | None,
    refusal: OutOfMemory | None = None,
    cluster: Cluster | None = None,
) -> Stack:
    """All of a plan. `advice` is the cheapest change that was found to fit, `refusal` what an allocator said;
    `cluster` is what its time is of."""
    config, where = result.config, f" of {limit.name}" if limit is not None and limit.name else ""
    recipe, notes = find_recipe(config.parallel.recipe), config.model.notes
    of_stage = f" {note}." if (note := recipe.note(config.parallel.zero_stage, config.precision.stored)) else ""
    answer = None
    if limit is not None:
        answer = prose(verdict(result, limit), "bold green" if fits(result, limit) else "bold red")
    if refusal is not None:
        answer = prose(f"It does not fit: {refusal}.", "bold red")
    return Stack(
        prose(f"{words.model_name(config)}: {words.headline(config, where)}", "bold"),
        prose(_what_was_run(result)),
        mesh_text(config),
        kept_text(config),
        set_aside_text(config),
        answer,
        None if refusal is None else failures.room_text(refusal),
        None if limit is None else prose(assumed(config, limit), "dim"),
        None if limit is None or fits(result, limit) else prose(too_much(result, limit)),
        None if advice is None else prose(advice),
        time_table(result, cluster),
        memory_table(result),
        allocator_text(result),
        outside_table(config, limit),
        peaks_table(result),
        holders_table(result),
        owners_table(result) if is_owned(config) else None,
        states_table(result),
        activations_table(config, result.saved, result.saved_again) if has_block(result.saved) else None,
        traffic_table(result),
        copies_table(result),
        prose(f"Recipe {recipe.name}: {recipe.models} Source: {recipe.source}.{of_stage}", "dim"),
        # What a preset's source leaves open, or a config.json asks for that is not modelled.
        prose(f"Model {config.model.name}: {'; '.join(notes)}.", "dim") if notes else None,
        answer,
    )


def _what_was_run(result: RunResult) -> str:
    config, psi = result.config, result.num_parameters
    model = counted(psi, "parameter") + (f" ({format_count(psi)})" if psi >= 10**6 else "")
    batch = (
        counted(config.mesh.axes.size(*DATA), "data rank" if is_mesh(config) else "rank"),
        counted(config.data.accumulate, "micro-batch", "micro-batches"),
        counted(config.data.micro_batch, "row"),
        f"{config.model.seq:,} tokens = {config.global_batch * config.model.seq:,} tokens",
    )
    text = (
        f"Ψ = {model} in {words.pieces(result)}, {config.precision.param_dtype}, "
        f"{OPTIMIZERS[config.optim.optimizer]}. One step of {' x '.join(batch)} was run on shapes alone"
    )
    if config.model.family in _OF_BLOCKS:
        kernels = {"lean": "zerosim's", "megatron": "Megatron's"}[config.memory.saves]
        text += (
            f", with {config.memory.attention} attention and what {kernels} kernels save; "
            f"{_run_again(config.memory)} computed again in backward"
        )
    if config.optim.steps is None and result.steps[0].estimated:
        every = PRESETS[config.optim.optimizer].estimates_every
        text += (
            f". It is a step with an estimate of curvature, as every {every}th is: memory and traffic are with it, "
            f"its time is the mean of {every} steps"
        )
    ran, ranks = len(result.ran), config.mesh.ranks
    if ran == ranks:
        return f"{text}. {'Every rank was run.' if ranks > 1 else ''}"
    if ran == 1:
        return f"{text}. Of {ranks:,} ranks one was run: they cannot differ."
    return f"{text}. Of {ranks:,} ranks {ran:,} were run, one of each kind that can differ."


def _run_again(memory: MemoryConfig) -> str:
    """The subject of '... computed again in backward'."""
    if memory.again.every:
        return "blocks are" if memory.again.every == 1 else f"one block in {memory.again.every} is"
    words = {
        "none": "nothing is",
        "selective": "the attention core is",
        "selective:op": "all but attention and every second matmul of a block is",
    }
    return words.get(memory.recompute, f"of every block {memory.recompute.partition(':')[2].replace(',', ', ')} is")


def memory_table(result: RunResult) -> RenderableType:
    """Live bytes by kind at each mark and at the peak, of the rank with the highest peak."""
    rank = peak_rank(result)
    memory = result.memory[rank]
    columns: dict[str, Mapping[str, int]] = {
        _MARK_NAMES[mark]: memory.marks[mark].by_kind for mark in MARKS if mark in memory.marks
    }
    columns["peak"] = memory.peak.by_kind
    grid = Grid("kind", *(right(name, style="bold" if name == "peak" else "") for name in columns))
    for kind in KINDS:
        if any(kind in by_kind for by_kind in columns.values()):
            grid.add(kind, *(by_kind.get(kind) or None for by_kind in columns.values()))
    grid.rule()
    grid.add("total", *(sum(by_kind.values()) or None for by_kind in columns.values()), style="bold")
    fewer = grid.short().without(*columns.keys() - {"start", "backward", "peak"})

    same = len({memory.peak.total_bytes for memory in result.memory}) == 1
    whose = "every rank" if same and len(result.memory) > 1 else f"rank {rank}{words.place(result, rank)}"
    peak = memory.peak
    note = (
        f"Peak: {peak.total_bytes:,} B, {words.moment(*peak.scope[:3])}. "
        "start: all is placed; forward, backward, step: when each ends."
        + (" upcast: gradients are there in fp32 too." if "upcast" in columns else "")
        + _prefetched(peak)
    )
    body = Adaptive(grid, grid.short(), fewer, fewer.without("start", "backward"))
    return titled(f"Live bytes of {whose}, by kind", body, note)


def _prefetched(peak: Snapshot) -> str:
    """How much of a peak is parameters whose turn has not come."""
    ahead = {unit: nbytes for (unit, kind), nbytes in peak.by_unit.items() if kind == Kind.PREFETCHED_PARAM}
    if not ahead:
        return ""
    names = listed(list(ahead)) if len(ahead) <= MOST_HOLDERS else f"{next(iter(ahead))} and {len(ahead) - 1:,} more"
    return f" Of the peak {sum(ahead.values()):,} B are parameters gathered ahead, of {names}."


def holders_table(result: RunResult) -> RenderableType:
    """What the peak was made of: bytes by group of units and kind, the most first."""
    peak = result.memory[peak_rank(result)].peak
    groups: dict[tuple[str, str], int] = {}
    members: dict[tuple[str, str], set[str]] = {}
    for (unit, kind), nbytes in peak.by_unit.items():
        key = (_group(unit), kind)
        groups[key] = groups.get(key, 0) + nbytes
        members.setdefault(key, set()).add(unit)
    ordered = sorted(groups.items(), key=lambda item: -item[1])
    total = peak.total_bytes

    grid = Grid(Column("units", overflow="fold"), Column("kind", overflow="fold"), right("bytes"), right("share"))
    for key, nbytes in ordered[:MOST_HOLDERS]:
        count = len(members[key])
        name = f"{key[0]} ({count:,})" if count > 1 else next(iter(members[key])) or "step"
        grid.add(name, key[1], nbytes, f"{100 * nbytes / total:.1f} %")
    if rest := sum(nbytes for _, nbytes in ordered[MOST_HOLDERS:]):
        grid.add("the rest", None, rest, f"{100 * rest / total:.1f} %")
    return titled("What the peak was made of", Adaptive(grid, grid.short()))


def _group(unit: str) -> str:
    """h.17 belongs to h.*, h.17.mlp.c_fc to h.*.mlp.c_fc."""
    return ".".join("*" if part.isdigit() else part for part in unit.split("."))


# -- a search -----------------------------------------------------------------------------------
def fit_report(config: RunConfig, what: str, found: Found, limit: Limit, speed: str | None = None) -> Stack:
    """The answer, then what was run for it; `speed` is how fast the answer is, where a clock says it."""
    device = limit.name or format_bytes(limit.nbytes)
    on = f" ({words.shape(config)})" if words.shape(config) and what != "ranks" else ""
    if is_mesh(config) and what == "ranks":
        on = f" (tp {config.mesh.tp} x pp {config.mesh.pp})"
    headline = f"{words.model_name(config)}: {STAGES[config.parallel.zero_stage]} on {device}{on}, {SEARCHES[what]}"
    grid = Grid(right(what), right(taken_column(config)), right(""), "fits")
    for tried in sorted(found.tried):
        does = "yes" if tried.taken_bytes <= limit.nbytes else "no"
        peak = (tried.peak_bytes, format_bytes(tried.peak_bytes))
        grid.add(tried.value, *peak, does, style="bold" if tried == found.best else "")
    shown = config if found.best is None else with_value(config, what.replace("-", "_"), found.best.value)
    return Stack(
        prose(headline, "bold"),
        prose(_answer(config, what, found, limit), "bold green" if found.best is not None else "bold red"),
        None if speed is None else prose(speed),
        prose(assumed(shown, limit), "dim"),
        set_aside_text(shown),
        titled("What was run", Adaptive(grid)),
        outside_table(shown, limit),
    )


def _answer(config: RunConfig, what: str, found: Found, limit: Limit) -> str:
    best, beyond = found.best, found.beyond
    is_exact = config.memory.allocator == "exact"
    if best is None:
        least = min(found.tried, key=lambda tried: tried.taken_bytes)
        peak = "takes the least, and its peak is" if is_exact else "needs at least"
        return (
            f"Nothing fits: {what} {least.value:,} {peak} {format_bytes(least.peak_bytes)} "
            f"of {format_bytes(limit.nbytes)}{_beside(least)}.{_what_to_try(config, limit)}"
        )
    text = (
        f"{what} {best.value:,}: {takes(config)} {format_bytes(best.peak_bytes)} of {format_bytes(limit.nbytes)}"
        f"{_beside(best)}, {format_bytes(limit.nbytes - best.taken_bytes)} are left."
    )
    if beyond is not None:
        least_of_it = "" if is_exact else "at least "  # it was refused there, and not run on
        more = format_bytes(beyond.taken_bytes - limit.nbytes)
        text += f" {what} {beyond.value:,} does not fit, by {least_of_it}{more}."
    elif what == "ranks" and is_mesh(config):
        text += " One data rank is enough."
    elif what == "ranks":
        text += " One rank is enough." if config.mesh.dp_replicate == 1 else " One rank per replica is enough."
    else:
        text += " It is the end of what was searched."
    if what == "seq" and config.model.family == "gpt" and best.value > config.model.positions:
        text += (
            f" The table of {config.model.positions:,} positions was lengthened: a run needs --positions {best.value}."
        )
    if what in ("layers", "params"):
        numel = build_model(with_value(config, what, best.value), Device(0, make_backend("meta"))).num_parameters
        text += f" That is a model of {numel:,} parameters ({format_count(numel)})."
    return text


def _beside(tried: Tried) -> str:
    """What is kept outside the program, if anything is."""
    kept = tried.reserve_bytes
    return f", {format_bytes(kept)} are kept for what is outside the program" if kept else ""


def _what_to_try(config: RunConfig, limit: Limit) -> str:
    """Flags that were not given and take less; none of what the device or the model does not have."""
    has_flash = limit.device is None or limit.device.flash is not False
    flags = ["a higher --stage"] if config.parallel.zero_stage < 3 else []
    if config.model.has_blocks:
        flags += ["--recompute full"] if config.memory.recompute != "full" else []
        flags += ["--attention flash"] if config.memory.attention == "eager" and has_flash else []
    return f" Try {' or '.join(flags)}." if flags else ""
