"""A run's result as tables: the counts, the paper's formulas, and whether the two are the same number.

`summary` is all of it, for the command line and for a notebook's cells. Every run is a mesh: rows come in groups, one
for each pipeline stage, and stages that hold and send the same share one. An axis of one rank has no row or column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TypeVar

from rich.console import RenderableType
from rich.constrain import Constrain
from rich.table import Column
from rich.text import Text

from zerosim.analysis.compare import StateCheck, check_states, control_bytes, last_whole_step, peak_rank
from zerosim.analysis.copies import CopyCheck, check_copies
from zerosim.analysis.exchanges import check_exchanges
from zerosim.analysis.facts import is_owned
from zerosim.analysis.formulas import Form
from zerosim.analysis.nodes import NodeCheck, check_nodes, has_nodes, node_size
from zerosim.analysis.shares import alike_stages, share_of
from zerosim.analysis.traffic import TrafficCheck, check_traffic
from zerosim.analysis.weights import sizes
from zerosim.config import RunConfig
from zerosim.report import notes, words
from zerosim.report.look import PROSE_WIDTH, Adaptive, Cell, Grid, Stack, prose, right, spread, titled
from zerosim.report.names import KINDS, show
from zerosim.report.offload_tables import memories_table
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

Check = TypeVar("Check")
Groups = Sequence[tuple[str, list[Check]]]
"""A name and its checks for each group of equal pipeline stages; without a pipeline one, without a name."""

EACH_RANK = 8
"""Up to so many ranks have a row each."""
MOST_OWNED = 8
"""The most units or tensors of an owner that are named."""
_ACTIVATIONS = ("activation", "activation_grad", "kept")
_STATES = ("param", "grad", "optim")


def summary(result: RunResult) -> Stack:
    """Return a run's summary, from its loss to its bytes."""
    has_learned = result.mean_losses[-1] < result.mean_losses[0]
    return Stack(
        prose(words.headline(result.config), "bold"),
        prose(words.trained(result)),
        mesh_text(result.config),
        kept_text(result.config),
        set_aside_text(result.config),
        prose(words.learned(result), "bold green" if has_learned else "bold"),
        None if (text := words.scaled(result)) is None else prose(text),
        None if (text := words.lost(result)) is None else prose(text),
        owners_table(result) if is_owned(result.config) else None,
        states_table(result),
        memories_table(result),
        traffic_table(result),
        nodes_table(result),
        copies_table(result),
        peak_table(result),
        allocator_text(result),
        peaks_table(result),
        sample_text(result) if result.sample is not None else None,
        prose(words.closing(result)),
    )


def mesh_text(config: RunConfig) -> RenderableType | None:
    """Return how a mesh cuts and runs the model."""
    return prose(text) if (text := words.about(config)) else None


def set_aside_text(*configs: RunConfig) -> RenderableType | None:
    """Return which of the recipe's values these configurations go without, and why."""
    said = dict.fromkeys(text for config in configs for text in config.set_aside.values())
    return prose(f"Left out: {'; '.join(said)}.", "yellow") if said else None


def kept_text(config: RunConfig) -> RenderableType | None:
    """Return how recomputed blocks store their inputs; a warning if the given option changes nothing."""
    text = words.kept_inputs(config)
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


def states_table(result: RunResult) -> RenderableType:
    """Return model states per rank at the end of backward beside the paper's formula."""
    groups = _by_stage(result, partial(check_states, result))
    own = words.of_rank(result)
    body = Adaptive(_states_by_rank(groups, own).filled(), _states_by_kind(groups, own).filled())
    return titled("Model states per rank when backward ends, in bytes", body, notes.states_note(result))


def _states_by_rank(groups: Groups[StateCheck], own: Callable[[str], str]) -> Grid:
    """Return a row per rank (or the least, mean and most), a column per state; then formula and mark."""
    grid = Grid("pipeline", "", *(right(check.kind) for check in groups[0][1]), right("padding"))
    for stage, checks in groups:
        has_padding = any(checks[-1].padding)
        rows = _by_rank(checks, most=1 if stage else EACH_RANK)
        for at, (name, values, padding) in enumerate(rows):
            grid.add("" if at else stage, name, *values, padding if has_padding else None)
        if not stage:
            grid.rule()
        is_uneven = any(len(set(check.counted)) > 1 for check in checks)
        if has_padding or (is_uneven and all(name != "mean" for name, _, _ in rows)):
            grid.add("", "mean, unpadded" if has_padding else "mean", *(check.mean for check in checks))
        grid.add("", "formula", *(own(check.text) for check in checks), style="cyan")
        grid.add("", "in bytes", *(check.formula for check in checks), style="cyan")
        grid.add("", "agree", *(check.agrees for check in checks))
        grid.rule()
    return grid


def _by_rank(checks: Sequence[StateCheck], most: int) -> list[tuple[str, list[Fraction | int], Fraction | int]]:
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


def _states_by_kind(groups: Groups[StateCheck], own: Callable[[str], str]) -> Grid:
    """Return the same for little room: a row per state."""

    def cells(check: StateCheck) -> list[Cell]:
        padding = spread(check.padding, "\n") if any(check.padding) else None
        return [check.kind, spread(check.counted, "\n"), padding, own(check.text), check.formula, check.agrees]

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


def peaks_table(result: RunResult) -> RenderableType | None:
    """Return the peak of each pipeline stage, and its parts; None without a pipeline."""

    def of_stage(stage: int) -> list[list[Cell]]:
        share = share_of(result, stage)
        peak = max((result.memory[rank].peak for rank in share.ranks), key=lambda one: one.total_bytes)
        states, activations = (sum(peak.by_kind.get(kind, 0) for kind in kinds) for kinds in (_STATES, _ACTIVATIONS))
        rest = peak.total_bytes - states - activations
        return [[share.layers, states, activations, rest, peak.total_bytes, peak.scope.phase]]

    if result.layout.mesh.pp == 1:
        return None
    numbers = (right(name) for name in ("layers", "model states", "activations", "the rest", "peak"))
    grid = _grouped(Grid("pipeline", *numbers, "in"), _by_stage(result, of_stage), list)
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
    pieces = f"{result.config.gathering.piece}s"
    grid = Grid(right("rank"), right("elements"), Column(pieces, overflow="fold"))
    owners = sorted({unit.owner for unit in result.units if unit.owner is not None})
    for rank in owners:
        own = [unit for unit in result.units if unit.owner == rank]
        names, more = [unit.name for unit in own[:MOST_OWNED]], len(own) - MOST_OWNED
        names += [f"{more:,} more"] if more > 0 else []
        grid.add(str(rank), sum(unit.numel for unit in own), ", ".join(names))
    if idle := result.config.mesh.shards - len(owners):
        grid.add(f"{idle:,} more", 0, f"nothing, because there are fewer {pieces} than ranks")
    note = f"{pieces.capitalize()} are assigned by size: the largest first, each to the rank with the least so far."
    return titled("Who owns what", Adaptive(grid), note)


# -- traffic ------------------------------------------------------------------------------------
def traffic_rows(result: RunResult, step: int, stage: int = 0) -> list[TrafficCheck]:
    """Return the bytes that a rank of a pipeline stage sent, by operation and axis, then all. There is no row if
    nothing is sent or due."""
    exchanges = check_exchanges(result, step, stage)
    *states, total = check_traffic(result, step, stage)
    if exchanges:
        rows = [*exchanges, total]
        total = replace(
            total,
            dtypes=tuple(dict.fromkeys(dtype for check in rows for dtype in check.dtypes)),
            calls=sum(check.calls for check in rows),
            sent=tuple(map(sum, zip(*(check.sent for check in rows), strict=True))),
            formula=sum((check.formula for check in rows), Fraction(0)),
            form=Form(),  # factors of several axes have no common one
            with_padding=sum((check.with_padding for check in rows), Fraction(0)),
            even=all(check.even for check in rows),
            payload=sum(check.payload for check in rows),
        )
    rows = [*exchanges, *states]
    return [*([check for check in rows if any(check.sent) or check.with_padding] or rows), total]


def traffic_table(result: RunResult) -> RenderableType:
    """Return a rank's bytes sent in one step beside the closed forms, axis by axis, control traffic below."""
    step = last_whole_step(result)
    if step is None:
        return prose(words.traffic_title(result), "bold")
    groups = _by_stage(result, partial(traffic_rows, result, step))
    said = [notes.traffic_note(result, [check for _, checks in groups for check in checks])]
    said += [note] if (note := notes.curvature_note(result, step)) else []
    said.append(notes.control(result, control_bytes(result, step)))
    # The bytes that each rank copied between its device and the host for messages.
    rows = [[row for row in rank if row.step == step and row.purpose == "staging"] for rank in result.traffic]
    if any(rows):
        staged = [sum(row.payload_bytes for row in rank) for rank in rows]
        said.append(f"Messages staged through the host's memory: {spread(staged)} B copied per rank.")
    if result.is_modelled:
        said.append("The bytes of native collectives are not visible: payload is counted, a ring's bytes are modelled.")
    return titled(words.traffic_title(result), _sent_beside_formula(result, groups), "\n".join(said))


def _sent_beside_formula(result: RunResult, groups: Groups[TrafficCheck]) -> Adaptive:
    """Return the table in full, or with fewer columns in little room. For native collectives their payload is counted,
    their messages are not: so nothing agrees with a formula."""
    checks, modelled = [check for _, checks in groups for check in checks], result.is_modelled
    own = words.of_rank(result)
    axes, has_padding = {check.axis for check in checks if check.axis}, any(check.padding for check in checks)

    def cells(check: TrafficCheck) -> list[Cell]:
        return [
            check.op,
            check.axis if len(axes) > 1 else None,
            " ".join(check.dtypes),
            check.calls,
            check.payload if modelled else None,
            show(check.mean) if len(set(check.sent)) == 1 else f"{show(check.mean)}\n{spread(check.sent)}",
            check.padding if has_padding else None,
            own(check.text) if check.form.terms or check.op != "total" else "",
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


def nodes_table(result: RunResult) -> RenderableType | None:
    """Return the bytes that leave a node in the last whole step beside the closed forms; None if nodes are unknown."""
    step = last_whole_step(result)
    if step is None or not has_nodes(result.config):
        return None
    own = words.of_rank(result)

    def cells(check: NodeCheck) -> list[Cell]:
        volume = own(check.text) if check.form.terms else ""
        return [check.op, check.axis, show(check.counted), volume, check.formula, check.agrees]

    groups = _by_stage(result, partial(check_nodes, result, step))
    formula = (right("volume", style="cyan"), right("in bytes", style="cyan"))
    grid = Grid("pipeline", "operation", "axis", right("bytes"), *formula, "agree")
    grid = _grouped(grid, groups, cells, has_total=True).filled()
    title = f"Bytes that leave a node of {node_size(result.config)} ranks in step {step}"
    return titled(title, Adaptive(grid, grid.joined("operation", "axis")), notes.nodes_note(result.config))


def copies_table(result: RunResult) -> RenderableType | None:
    """Return the bytes between a rank's memories in the last whole step, by pipeline stage; None if there are none."""
    step, keeps, offloads = last_whole_step(result), result.config.memory.cpu_checkpointing, result.config.offload.is_on
    saves = result.config.memory.offload_activations
    if not (keeps or offloads or saves) or step is None:
        return None

    def cells(check: CopyCheck) -> list[Cell]:
        return [check.name, check.calls, spread(check.counted), check.text, check.formula, check.agrees]

    groups = _by_stage(result, partial(check_copies, result, step))
    formula = (right("formula" if offloads else "volume", style="cyan"), right("in bytes", style="cyan"))
    what = "model states" if offloads else "saved buffers" if saves else "kept inputs"
    grid = Grid("pipeline", what, right("calls"), right("bytes"), *formula, "agree")
    grid = _grouped(grid, groups, cells).filled()
    note = ""
    if keeps:
        note = f"bsh = {sizes(result.config)['bsh']:,} elements, one microbatch's input of a block. "
        if not offloads:
            note += "On the host: the most at once. The device's bytes above do not include it. "
    if saves:
        note += "What blocks save for backward is counted, without a formula. "
    note += "Copies pass over PCIe or to the drives, and are" if offloads else "Copies pass over PCIe, and are"
    note += " no part of what ranks send."
    body = Adaptive(grid, grid.without("calls"), grid.without("calls", "formula" if offloads else "volume"))
    return titled(f"Copies between {'memories' if offloads else 'device and host'} per rank and step", body, note)


# -- groups of pipeline stages --------------------------------------------------------------------
def _by_stage(result: RunResult, check: Callable[[int], list[Check]]) -> Groups[Check]:
    """Return the checks of every pipeline stage, those of equal stages together."""
    pp = result.layout.mesh.pp
    checks = [check(stage) for stage in range(pp)]
    return [(words.stage_name(run) if pp > 1 else "", checks[run[0]]) for run in alike_stages(checks)]


def _grouped(
    grid: Grid, groups: Groups[Check], cells: Callable[[Check], Iterable[Cell]], *, has_total: bool = False
) -> Grid:
    """Return a row per check, the stages' name before the first of a group; a rule below each group and above a
    total."""
    for stage, checks in groups:
        for at, check in enumerate(checks):
            if has_total and check is checks[-1]:
                grid.rule()
            grid.add("" if at else stage, *cells(check))
        if len(checks) > 1:
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
