"""A plan as rich renderables: what one rank holds at each mark, what its peak was made of, whether it fits.

Reads a result of `shapes.plan` (or of a real run); tables of model states and traffic, with their formulas, are
those of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Column

from zerosim.analysis.compare import is_owned, peak_rank
from zerosim.config.presets.recipes import find_recipe
from zerosim.ledger.memory import MARKS
from zerosim.report import words
from zerosim.report.activations import activations_table
from zerosim.report.grid import Grid, right
from zerosim.report.look import Adaptive, Stack, prose, titled
from zerosim.report.names import KINDS, OPTIMIZERS, counted
from zerosim.report.tables import owners_table, states_table, traffic_table
from zerosim.train.result import RunResult
from zerosim.units import format_bytes, format_count

MOST_HOLDERS = 10
_MARK_NAMES = {
    "after_init": "start",
    "end_of_forward": "forward",
    "end_of_backward": "backward",
    "gradients_upcast": "upcast",
    "after_step": "step",
}


class Limit(NamedTuple):
    """A device's memory: what the device is called ('' where only its bytes are known), and its bytes."""

    name: str
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.nbytes}


def plan_report(result: RunResult, limit: Limit | None, advice: str | None) -> Stack:
    """All of a plan. `advice` is the cheapest change that was found to fit."""
    return Stack(
        prose(_headline(result, limit), "bold"),
        prose(_what_was_run(result)),
        None if limit is None else prose(verdict(result, limit), "bold green" if fits(result, limit) else "bold red"),
        None if advice is None else prose(advice),
        memory_table(result),
        holders_table(result),
        owners_table(result) if is_owned(result.config) else None,
        states_table(result),
        activations_table(result.config, result.saved, result.saved_again) if _has_blocks(result) else None,
        traffic_table(result),
        prose(_recipe(result), "dim"),
        prose(notes, "dim") if (notes := _model_notes(result)) else None,
    )


def fits(result: RunResult, limit: Limit) -> bool:
    return _peak_bytes(result) <= limit.nbytes


def verdict(result: RunResult, limit: Limit) -> str:
    """Whether it fits and by how much."""
    peak = _peak_bytes(result)
    room = limit.nbytes - peak
    share = f"{100 * abs(room) / limit.nbytes:.3g} %"
    if room >= 0:
        of = f"{format_bytes(peak)} of {format_bytes(limit.nbytes)}"
        return f"It fits: the peak is {of}, {format_bytes(room)} ({share}) are left."
    return (
        f"It does not fit: the peak is {format_bytes(peak)}, {format_bytes(-room)} ({share}) more than the "
        f"{format_bytes(limit.nbytes)}{f' of {limit.name}' if limit.name else ''}."
    )


def _peak_bytes(result: RunResult) -> int:
    return result.memory[peak_rank(result)].peak.total_bytes


def _headline(result: RunResult, limit: Limit | None) -> str:
    where = f" of {limit.name}" if limit is not None and limit.name else ""
    return f"{words.model_name(result.config)}: {words.headline(result.config)}{where}"


def _what_was_run(result: RunResult) -> str:
    config, psi = result.config, result.num_parameters
    model = counted(psi, "parameter") + (f" ({format_count(psi)})" if psi >= 10**6 else "")
    batch = (
        counted(config.mesh.ranks, "rank"),
        counted(config.data.accumulate, "micro-batch", "micro-batches"),
        counted(config.data.micro_batch, "row"),
        f"{config.model.seq:,} tokens = {config.global_batch * config.model.seq:,} tokens",
    )
    text = (
        f"Ψ = {model} in {counted(len(result.units), 'unit')}, {config.precision.param_dtype}, "
        f"{OPTIMIZERS[config.optim.optimizer]}. One step of {' x '.join(batch)} was run on shapes alone"
    )
    return f"{text}{_policy(result)}. {_ranks_run(result)}"


def _policy(result: RunResult) -> str:
    config = result.config
    if config.model.family not in ("gpt", "llama"):
        return ""
    recompute = {"none": "nothing is", "selective": "the attention core is", "full": "blocks are"}[
        config.memory.recompute
    ]
    kernels = {"lean": "zerosim's", "megatron": "Megatron's"}[config.memory.saves]
    attention = f"{config.memory.attention} attention"
    return f", with {attention} and what {kernels} kernels save; {recompute} computed again in backward"


def _ranks_run(result: RunResult) -> str:
    ran, ranks = len(result.ran), result.config.mesh.ranks
    if ran == ranks:
        return "Every rank was run." if ranks > 1 else ""
    if ran == 1:
        return f"Of {ranks:,} ranks one was run: they cannot differ."
    return f"Of {ranks:,} ranks {ran:,} were run, one of each kind that can differ."


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
    whose = "every rank" if same and len(result.memory) > 1 else f"rank {rank}"
    peak = memory.peak
    note = (
        f"Peak: {peak.total_bytes:,} B, {words.moment(*peak.scope[:3])}. "
        "start: all is placed; forward, backward, step: when each ends."
        + (" upcast: gradients are there in fp32 too." if "upcast" in columns else "")
    )
    body = Adaptive(grid, grid.short(), fewer, fewer.without("start", "backward"))
    return titled(f"Live bytes of {whose}, by kind", body, note)


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
    """h.17 belongs to h.*"""
    head, _, tail = unit.rpartition(".")
    return f"{head}.*" if head and tail.isdigit() else unit


def _has_blocks(result: RunResult) -> bool:
    return result.config.model.family in ("gpt", "llama")


def _model_notes(result: RunResult) -> str:
    """What a preset's source leaves open, or a config.json asks for that is not modelled."""
    notes = result.config.model.notes
    return f"Model {result.config.model.name}: {'; '.join(notes)}." if notes else ""


def _recipe(result: RunResult) -> str:
    recipe = find_recipe(result.config.parallel.recipe)
    note = recipe.note(result.config.parallel.zero_stage)
    return f"Recipe {recipe.name}: {recipe.models} Source: {recipe.source}." + (f" {note}." if note else "")
