"""A run's result as tables: the counts, the paper's formulas, and whether the two are the same number.

`summary` is all of it, for the command line and for a notebook's cells. Every run is a mesh: rows come in groups, one
for each pipeline stage, and stages that hold and send the same share one. An axis of one rank has no row or column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

from rich.console import RenderableType
from rich.constrain import Constrain
from rich.table import Column
from rich.text import Text

from zerosim.analysis.capabilities import note_of, notes_of
from zerosim.analysis.check import Check
from zerosim.analysis.checks import Checks, checks
from zerosim.analysis.compare import control_bytes, peak_rank
from zerosim.analysis.facts import is_owned
from zerosim.analysis.nodes import has_nodes, node_size
from zerosim.analysis.shares import alike_stages
from zerosim.analysis.weights import sizes
from zerosim.config import RunConfig
from zerosim.report import notes, words
from zerosim.report.look import PROSE_WIDTH, Adaptive, Cell, Grid, Stack, prose, right, spread, titled
from zerosim.report.names import KINDS, show
from zerosim.report.offload_tables import memories_table
from zerosim.report.saving import run_save_text
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

Row = TypeVar("Row")
Groups = Sequence[tuple[str, list[Row]]]
"""A name and its rows for each group of equal pipeline stages; without a pipeline one, without a name."""

EACH_RANK = 8
"""Up to so many ranks have a row each."""
MOST_OWNED = 8
"""The most units or tensors of an owner that are named."""
_ACTIVATIONS = ("activation", "activation_grad", "kept")
_STATES = ("param", "grad", "optim")


def summary(result: RunResult) -> Stack:
    """Return a run's summary, from its loss to its bytes."""
    found, has_learned = checks(result), result.mean_losses[-1] < result.mean_losses[0]
    return Stack(
        prose(words.headline(result.config), "bold"),
        prose(words.trained(result)),
        mesh_text(result.config),
        kept_text(result.config),
        set_aside_text(result.config),
        prose(words.learned(result), "bold green" if has_learned else "bold"),
        None if (text := words.scaled(result)) is None else prose(text),
        None if (text := words.lost(result)) is None else prose(text),
        None if (text := words.dropped(result)) is None else prose(text),
        owners_table(result) if is_owned(result.config) else None,
        states_table(found),
        memories_table(found),
        traffic_table(found),
        nodes_table(found),
        copies_table(found),
        prose(saved) if (saved := run_save_text(result)) else None,
        peak_table(result),
        allocator_text(result),
        peaks_table(found),
        sample_text(result) if result.sample is not None else None,
        prose(words.closing(found)),
    )


def mesh_text(config: RunConfig) -> RenderableType | None:
    """Return how a mesh cuts and runs the model."""
    return prose(text) if (text := note_of(config, "about")) else None


def set_aside_text(*configs: RunConfig) -> RenderableType | None:
    """Return which of the recipe's values these configurations go without, and why."""
    said = dict.fromkeys(text for config in configs for text in config.set_aside.values())
    return prose(f"Left out: {'; '.join(said)}.", "yellow") if said else None


def kept_text(config: RunConfig) -> RenderableType | None:
    """Return how recomputed blocks store their inputs; a warning if the given option changes nothing."""
    text = note_of(config, "kept")
    return prose(text, "bold yellow" if text.startswith("Warning") else "") if text else None


# -- memory -------------------------------------------------------------------------------------
def allocator_text(result: RunResult) -> RenderableType | None:
    """Return the most that the allocator held, on the rank with the largest amount; None if bytes are exact."""
    rank = max(range(len(result.memory)), key=lambda rank: result.memory[rank].reserved_bytes)
    held = result.memory[rank].allocator
    if held is None:
        return None
    name = {"caching": "PyTorch's caching allocator", "arena": "the arena"}[result.config.memory.allocator]
    text = (
        f"With {name}, rank {rank} had at the most {held.reserved_bytes:,} B reserved and {held.allocated_bytes:,} B "
        f"allocated for {held.requested_bytes:,} B requested: {100 * held.fragmentation:.1f} % of what was reserved "
        "was never filled."
    )
    moved = f" {held.moved_bytes:,} B were moved in {held.moves:,} moves to make holes one." if held.moves else ""
    return prose(text + moved)


def states_table(found: Sequence[Checks]) -> RenderableType:
    """Return model states per rank at the end of backward beside the paper's formula."""
    groups, own = _by_stage(found, lambda one: one.states), words.of_rank(found)
    body = Adaptive(_states_by_rank(groups, own).filled(), _states_by_kind(groups, own).filled())
    return titled("Model states per rank when backward ends, in bytes", body, notes.states_note(found))


def _states_by_rank(groups: Groups[Check], own: Callable[[str], str]) -> Grid:
    """Return a row per rank (or the least, mean and most), a column per state; then formula and mark."""
    grid = Grid("pipeline", "", *(right(check.name) for check in groups[0][1]), right("padding"))
    for stage, of_stage in groups:
        has_padding = any(of_stage[-1].padding)
        rows = _by_rank(of_stage, most=1 if stage else EACH_RANK)
        for at, (name, values, padding) in enumerate(rows):
            grid.add("" if at else stage, name, *values, padding if has_padding else None)
        if not stage:
            grid.rule()
        is_uneven = any(len(set(check.counted)) > 1 for check in of_stage)
        if has_padding or (is_uneven and all(name != "mean" for name, _, _ in rows)):
            grid.add("", "mean, unpadded" if has_padding else "mean", *(check.mean for check in of_stage))
        grid.add("", "formula", *(own(check.text) for check in of_stage), style="cyan")
        grid.add("", "in bytes", *(check.formula for check in of_stage), style="cyan")
        grid.add("", "agree", *(check.agrees for check in of_stage))
        grid.rule()
    return grid


def _by_rank(checks: Sequence[Check], most: int) -> list[tuple[str, list[Fraction | int], Fraction | int]]:
    """Yield (name, a value per check, padding) for each of at most `most` ranks, or for the least, mean and most."""
    ranks = len(checks[0].counted)
    padding = checks[-1].padding
    if ranks <= most:
        return [(f"rank {rank}", [check.counted[rank] for check in checks], padding[rank]) for rank in range(ranks)]
    if all(len(set(values)) == 1 for values in (padding, *(check.counted for check in checks))):
        return [(f"each of {ranks} ranks", [check.counted[0] for check in checks], padding[0])]
    return [
        ("least of a rank", [min(check.counted) for check in checks], min(padding)),
        ("mean", [Fraction(sum(check.counted), ranks) for check in checks], Fraction(sum(padding), ranks)),
        ("most of a rank", [max(check.counted) for check in checks], max(padding)),
    ]


def _states_by_kind(groups: Groups[Check], own: Callable[[str], str]) -> Grid:
    """Return the same for little room: a row per state."""

    def cells(check: Check) -> list[Cell]:
        padding = spread(check.padding, "\n") if any(check.padding) else None
        return [check.name, spread(check.counted, "\n"), padding, own(check.text), check.formula, check.agrees]

    numbers = (right(name) for name in ("counted", "padding"))
    formula = (right(name, style="cyan") for name in ("formula", "in bytes"))
    return _grouped(Grid("pipeline", "", *numbers, *formula, ""), groups, cells).stacked()


def peak_table(result: RunResult) -> RenderableType:
    """Return the moment with the most live bytes, and their kinds."""
    rank = peak_rank(result)
    peak = result.memory[rank].peak
    total = peak.total_bytes
    same = len({memory.peak.total_bytes for memory in result.memory}) == 1
    where = "each rank" if same and len(result.memory) > 1 else f"rank {rank}{words.place(result, rank)}"
    title = f"Peak: {format_bytes(total)} ({total:,} B) on {where}, {words.moment(*peak.scope[:3])}"
    return titled(title, kinds_table(peak.by_kind))


def peaks_table(found: Sequence[Checks]) -> RenderableType | None:
    """Return the peak of each pipeline stage, and its parts; None without a pipeline."""

    def of_stage(one: Checks) -> list[list[Cell]]:
        share, memory = one.of.share, one.of.result.memory
        peak = max((memory[rank].peak for rank in share.ranks), key=lambda peak: peak.total_bytes)
        states, activations = (sum(peak.by_kind.get(kind, 0) for kind in kinds) for kinds in (_STATES, _ACTIVATIONS))
        rest = peak.total_bytes - states - activations
        return [[share.layers, states, activations, rest, peak.total_bytes, peak.scope.phase]]

    if len(found) == 1:
        return None
    numbers = (right(name) for name in ("layers", "model states", "activations", "the rest", "peak"))
    grid = _grouped(Grid("pipeline", *numbers, "in"), _by_stage(found, of_stage), list)
    note = "For the rank with the highest peak on each stage. Activations include their gradients and stored inputs."
    return titled("Peak by pipeline stage, in bytes", Adaptive(grid, grid.short()), note)


def kinds_table(by_kind: Mapping[str, int]) -> Adaptive:
    """Return bytes by kind, the most first, with each kind in words."""
    grid = Grid("kind", right("bytes"), right("share"), Column("what it is", style="dim"))
    total = sum(by_kind.values())
    for kind, nbytes in sorted(by_kind.items(), key=lambda item: -item[1]):
        share = f"{100 * nbytes / total:.1f} %" if total else None
        grid.add(kind, nbytes, share, KINDS[kind].meaning if kind in KINDS else None)
    return Adaptive(grid, grid.without("what it is"))


def owners_table(result: RunResult) -> RenderableType:
    """Return which rank owns which units or tensors."""
    pieces = f"{note_of(result.config, 'piece')}s"
    grid = Grid(right("rank"), right("elements"), Column(pieces, overflow="fold"))
    owners = sorted({unit.owner for unit in result.units if unit.owner is not None})
    for rank in owners:
        own = [unit for unit in result.units if unit.owner == rank]
        names, more = [unit.name for unit in own[:MOST_OWNED]], len(own) - MOST_OWNED
        names += [f"{more:,} more"] if more > 0 else []
        grid.add(str(rank), sum(unit.numel for unit in own), ", ".join(names))
    if idle := result.layout.mesh.shards - len(owners):
        grid.add(f"{idle:,} more", 0, f"nothing, because there are fewer {pieces} than ranks")
    note = f"{pieces.capitalize()} are assigned by size: the largest first, each to the rank with the least so far."
    return titled("Who owns what", Adaptive(grid), note)


# -- traffic ------------------------------------------------------------------------------------
def traffic_table(found: Sequence[Checks]) -> RenderableType:
    """Return a rank's bytes sent in one step beside the closed forms, axis by axis, control traffic below."""
    result, step = found[0].of.result, found[0].of.step
    if step is None:
        return prose(words.traffic_title(result), "bold")
    groups = _by_stage(found, lambda one: one.traffic)
    said = [notes.traffic_note(found, [check for _, checks in groups for check in checks])]
    said += [note] if (note := notes.curvature_note(result, step)) else []
    said.append(notes.control(result, control_bytes(result, step)))
    # The bytes that each rank copied between its device and the host for messages.
    rows = [[row for row in rank if row.step == step and row.purpose == "staging"] for rank in result.traffic]
    if any(rows):
        staged = [sum(row.payload_bytes for row in rank) for rank in rows]
        said.append(f"Messages staged through the host's memory: {spread(staged)} B copied per rank.")
    if result.is_modelled:
        said.append("The bytes of native collectives are not visible: payload is counted, a ring's bytes are modelled.")
    return titled(words.traffic_title(result), _sent_beside_formula(found, groups), "\n".join(said))


def _sent_beside_formula(found: Sequence[Checks], groups: Groups[Check]) -> Adaptive:
    """Return the table in full, or with fewer columns in little room. For native collectives their payload is counted,
    their messages are not: so nothing agrees with a formula."""
    rows, own = [check for _, checks in groups for check in checks], words.of_rank(found)
    axes, modelled = {notes.axis_of(check) for check in rows if check.axis}, rows[0].modelled
    has_padding = any(check.with_padding != check.formula for check in rows)

    def cells(check: Check) -> list[Cell]:
        return [
            check.name,
            check.axis if len(axes) > 1 else None,
            " ".join(check.dtypes),
            check.calls,
            check.payload if modelled else None,
            show(check.mean) if len(set(check.counted)) == 1 else f"{show(check.mean)}\n{spread(check.counted)}",
            check.with_padding - (check.formula or 0) if has_padding else None,
            own(check.text) if (check.form and check.form.terms) or check.name != "total" else "",
            check.formula,
            None if modelled else check.agrees,
        ]

    numbers = (right(name) for name in ("calls", "payload", "a ring's" if modelled else "sent", "padding"))
    share = notes.sent_of_volume(axes)
    formula = (right("volume", style="cyan"), right(f"{share}, bytes" if share else "in bytes", style="cyan"))
    grid = Grid("pipeline", "operation", "axis", "dtype", *numbers, *formula, "agree")
    full = _grouped(grid, groups, cells, has_total=True).filled()
    fewer = full.without("dtype", "calls")
    short = fewer.joined("operation", "axis").stacked()
    return Adaptive(full, fewer, short, short.joined("pipeline", "operation").without("padding"))


def nodes_table(found: Sequence[Checks]) -> RenderableType | None:
    """Return the bytes that leave a node in the last whole step beside the closed forms; None if nodes are unknown."""
    config, step = found[0].of.result.config, found[0].of.step
    if step is None or not has_nodes(config):
        return None
    own = words.of_rank(found)

    def cells(check: Check) -> list[Cell]:
        volume = own(check.text) if check.form and check.form.terms else ""
        return [check.name, check.axis, show(check.mean), volume, check.formula, check.agrees]

    groups = _by_stage(found, lambda one: one.nodes)
    formula = (right("volume", style="cyan"), right("in bytes", style="cyan"))
    grid = Grid("pipeline", "operation", "axis", right("bytes"), *formula, "agree")
    grid = _grouped(grid, groups, cells, has_total=True).filled()
    title = f"Bytes that leave a node of {node_size(config)} ranks in step {step}"
    return titled(title, Adaptive(grid, grid.joined("operation", "axis")), notes.nodes_note(config))


def copies_table(found: Sequence[Checks]) -> RenderableType | None:
    """Return the bytes between a rank's memories in the last whole step, by pipeline stage; None if there are none."""
    config = found[0].of.result.config
    moved = [*notes_of(config, "moved")]
    if not moved or found[0].of.step is None or not any(one.copied for one in found):
        return None

    def cells(check: Check) -> list[Cell]:
        return [check.name, check.calls, spread(check.counted), check.text, check.formula, check.agrees]

    groups = _by_stage(found, lambda one: one.copied)
    offloads = "model states" in moved
    formula = "formula" if offloads else "volume"
    columns = (right("calls"), right("bytes"), right(formula, style="cyan"), right("in bytes", style="cyan"))
    grid = _grouped(Grid("pipeline", moved[-1], *columns, "agree"), groups, cells).filled()
    note = ""
    if "kept inputs" in moved:
        note = f"bsh = {sizes(config)['bsh']:,} elements, one microbatch's input of a block. "
        if not offloads:
            note += "On the host: the most at once. The device's bytes above do not include it. "
    if "saved buffers" in moved:
        note += "What blocks save for backward is counted, without a formula. "
    if "paged states" in moved:
        note += "A full device moves paged states, which is counted, without a formula. "
    note += f"Copies pass over PCIe{' or to the drives' * offloads}, and are no part of what ranks send."
    body = Adaptive(grid, grid.without("calls"), grid.without("calls", formula))
    return titled(f"Copies between {'memories' if offloads else 'device and host'} per rank and step", body, note)


# -- groups of pipeline stages --------------------------------------------------------------------
def _by_stage(found: Sequence[Checks], rows_of: Callable[[Checks], list[Row]]) -> Groups[Row]:
    """Return the rows of every pipeline stage, those of equal stages together."""
    rows = [rows_of(one) for one in found]
    return [(words.stage_name(run) if len(found) > 1 else "", rows[run[0]]) for run in alike_stages(rows)]


def _grouped(
    grid: Grid, groups: Groups[Row], cells: Callable[[Row], Iterable[Cell]], *, has_total: bool = False
) -> Grid:
    """Return a row per check, the stages' name before the first of a group; a rule below each group and above a
    total."""
    for stage, rows in groups:
        for at, row in enumerate(rows):
            if has_total and row is rows[-1]:
                grid.rule()
            grid.add("" if at else stage, *cells(row))
        if len(rows) > 1:
            grid.rule()
    return grid


# -- what the model wrote -----------------------------------------------------------------------
def sample_text(result: RunResult) -> RenderableType:
    """Return the prompt and the model's text. Control characters are shown as a dot."""
    prompt, answer = result.config.data.sample or "", (result.sample or b"").decode(errors="replace")

    def printable(text: str) -> str:
        return "".join(char if char.isprintable() or char == "\n" else "·" for char in text)

    body = Text(printable(prompt), style="dim").append(printable(answer), style="not dim")
    return titled("Sample", Constrain(body, PROSE_WIDTH))
