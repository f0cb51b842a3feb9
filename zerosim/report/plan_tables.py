"""Every table of a plan: the run, its time, live bytes at each mark and at the peak, counts beside formulas.

They follow the first page (`plan.py`) with --all; tables of model states and traffic are those of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.table import Column

from zerosim.analysis.blocks import has_block
from zerosim.analysis.changes import group_of
from zerosim.analysis.checks import Checks
from zerosim.analysis.compare import peak_rank
from zerosim.analysis.facts import is_owned
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.recipes import find_recipe
from zerosim.device.device import Kind
from zerosim.ledger.memory import MARKS, Snapshot
from zerosim.report import words
from zerosim.report.activations import activations_table
from zerosim.report.look import Adaptive, Grid, prose, right, titled
from zerosim.report.names import KINDS, counted, listed
from zerosim.report.offload_tables import memories_table
from zerosim.report.saving import save_table
from zerosim.report.tables import (
    allocator_text,
    copies_table,
    mesh_text,
    nodes_table,
    owners_table,
    peaks_table,
    states_table,
    traffic_table,
)
from zerosim.report.time import time_table
from zerosim.report.verdict import Limit, peak_bytes
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

MOST_HOLDERS = 10
_MARK_NAMES = {
    "after_init": "start",
    "end_of_forward": "forward",
    "end_of_backward": "backward",
    "gradients_upcast": "upcast",
    "after_step": "step",
}


def all_tables(found: Sequence[Checks], limit: Limit | None, cluster: Cluster | None) -> list[RenderableType | None]:
    """Return the tables behind a plan's first page, under headings."""
    result = found[0].of.result
    config = result.config
    recipe = find_recipe(config.parallel.recipe)
    time = time_table(result, cluster)
    return [
        heading("What was run"),
        prose(_what_was_run(result)),
        mesh_text(config),
        prose(f"Recipe {recipe.name}: {recipe.models} Source: {recipe.source}.", "dim"),
        None if time is None else heading("Time"),
        time,
        heading("Memory"),
        None if limit is None else prose(_room(result, limit)),
        memory_table(result),
        allocator_text(result),
        outside_table(config, limit),
        peaks_table(found),
        holders_table(result),
        owners_table(result) if is_owned(config) else None,
        activations_table(config, result.saved, result.saved_again) if has_block(result) else None,
        heading("Counts beside formulas"),
        *beside_formulas(found),
    ]


def beside_formulas(found: Sequence[Checks]) -> list[RenderableType | None]:
    """Return the tables of counts beside closed forms, each with its marks."""
    tables = (states_table, traffic_table, nodes_table, memories_table, copies_table, save_table)
    return [table(found) for table in tables]


def heading(text: str) -> RenderableType:
    """Return a heading above tables that have their own titles."""
    return prose(text.upper(), "bold underline")


def _what_was_run(result: RunResult) -> str:
    """Return how many parameters and ranks there are, and how many of them were run; the batch stands on the first
    page."""
    psi, ran, ranks = result.num_parameters, len(result.ran), result.config.mesh.ranks
    kernels = {
        "lean": "zerosim's",
        "megatron": "Megatron's",
        "eager": "transformers' eager",
        "liger": "Liger's",
        "foak": "unsloth's fused norms and transformers' eager",
        "litgpt": "litgpt's",
    }[result.config.memory.saves]
    saved = f" Forward saves the tensors that {kernels} kernels save." if result.config.model.has_blocks else ""
    text = f"Ψ = {counted(psi, 'parameter')} in {words.pieces(result)}. One step was run on tensor shapes only.{saved}"
    if ran == ranks:
        return f"{text} Every rank was simulated."
    if ran == 1:
        return f"{text} All {ranks:,} ranks are identical, so one was simulated."
    return f"{text} Of {ranks:,} ranks {ran:,} were simulated, one of each group of identical ranks."


def _room(result: RunResult, limit: Limit) -> str:
    """Return the device's memory, and what is left of it."""
    peak, program = peak_bytes(result), limit.nbytes - limit.reserve(result.config)
    room, left = abs(program - peak), "free" if peak <= program else "short"
    return (
        f"The device has {format_bytes(limit.nbytes)}, {format_bytes(program)} of them for the program. The peak takes "
        f"{format_bytes(peak)}: {format_bytes(room)} ({100 * room / limit.nbytes:.3g} %) {left}."
    )


def memory_table(result: RunResult) -> RenderableType:
    """Return live bytes by kind at each mark and at the peak, of the rank with the highest peak."""
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
        "Columns: after initialization, then at the end of forward, backward and the optimizer step."
        + (" upcast: with fp32 copies of gradients." if "upcast" in columns else "")
        + _prefetched(peak)
    )
    body = Adaptive(grid, grid.short(), fewer, fewer.without("start", "backward"))
    return titled(f"Live bytes of {whose}, by kind", body, note)


def _prefetched(peak: Snapshot) -> str:
    """Return how much of a peak is prefetched parameters."""
    ahead = {unit: nbytes for (unit, kind), nbytes in peak.by_unit.items() if kind == Kind.PREFETCHED_PARAM}
    if not ahead:
        return ""
    names = listed(list(ahead)) if len(ahead) <= MOST_HOLDERS else f"{next(iter(ahead))} and {len(ahead) - 1:,} more"
    return f" Of the peak {sum(ahead.values()):,} B are parameters gathered ahead, of {names}."


def holders_table(result: RunResult) -> RenderableType:
    """Return the parts of the peak: bytes by group of units and kind, the most first."""
    peak = result.memory[peak_rank(result)].peak
    groups: dict[tuple[str, str], int] = {}
    members: dict[tuple[str, str], set[str]] = {}
    for (unit, kind), nbytes in peak.by_unit.items():
        key = (group_of(unit), kind)
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


def outside_table(config: RunConfig, limit: Limit | None) -> RenderableType | None:
    """Return the device's memory beside the program, with sources; None if nothing is known."""
    lines = () if limit is None else limit.outside(config)
    if limit is None or not lines:
        return None
    grid = Grid("what", right("bytes"), Column("read in", overflow="fold"), Column("assumed", overflow="fold"))
    for one in lines:
        grid.add(one.name, one.nbytes, one.source, one.assumed)
    grid.rule()
    grid.add("total", sum(one.nbytes for one in lines), None, None, style="bold")
    note = "Not counted, and not in any peak. --reserve SIZE replaces these lines."
    if limit.kept is not None:
        note = f"Not counted, and not in any peak. --reserve: {format_bytes(limit.kept)} are kept in its place."
    less = grid.without("assumed")
    return titled("Outside the program", Adaptive(grid, less, less.without("read in")), note)
