"""A run's result as tables: what was counted, what the paper's formula says, and whether the two are the same number.

`summary` is all of it, for the command line and for a notebook's cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from rich.console import RenderableType
from rich.constrain import Constrain
from rich.table import Column
from rich.text import Text

from zerosim.analysis.compare import StateCheck, check_states, control_bytes, last_whole_step, peak_rank
from zerosim.analysis.forms import is_owned
from zerosim.analysis.shares import is_mesh
from zerosim.analysis.traffic import TrafficCheck, check_traffic
from zerosim.config import RunConfig
from zerosim.report import mesh, mesh_words, words
from zerosim.report.copies import copies_table
from zerosim.report.look import PROSE_WIDTH, Adaptive, Grid, Stack, prose, right, spread, stacked, titled
from zerosim.report.names import KINDS, show
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

EACH_RANK = 8
"""Up to so many ranks have a row each."""
MOST_OWNED = 8
"""So many of an owner's units or tensors are named."""


def summary(result: RunResult) -> Stack:
    """What a run did, from its loss to its bytes."""
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
        traffic_table(result),
        copies_table(result),
        peak_table(result),
        allocator_text(result),
        mesh.peaks_table(result),
        sample_text(result) if result.sample is not None else None,
        prose(words.closing(result)),
    )


def mesh_text(config: RunConfig) -> RenderableType | None:
    """How a mesh cuts and runs the model."""
    return prose(mesh_words.about(config)) if is_mesh(config) and mesh_words.about(config) else None


def set_aside_text(*configs: RunConfig) -> RenderableType | None:
    """Which of the recipe's values these configurations go without, and why."""
    said = dict.fromkeys(text for config in configs for text in config.set_aside.values())
    return prose(f"Left out: {'; '.join(said)}.", "yellow") if said else None


def kept_text(config: RunConfig) -> RenderableType | None:
    """How recomputed blocks keep their inputs; a warning where what was asked for changes nothing."""
    text = mesh_words.kept_inputs(config)
    return prose(text, "bold yellow" if text.startswith("Warning") else "") if text else None


# -- memory -------------------------------------------------------------------------------------
def allocator_text(result: RunResult) -> RenderableType | None:
    """What the allocator held at the most, on the rank where that was most; None where bytes are exact."""
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
    """Model states per rank at the end of backward beside the paper's formula."""
    if is_mesh(result.config):
        return mesh.states_table(result, words.states_note(result))
    checks = check_states(result)
    padding = () if any(checks[-1].padding) else ("padding",)
    body = Adaptive(*(grid.without(*padding) for grid in (_states_by_rank(checks), _states_by_kind(checks))))
    return titled("Model states per rank when backward ends, in bytes", body, words.states_note(result))


def _states_by_rank(checks: Sequence[StateCheck]) -> Grid:
    """A row per rank (or the least, mean and most), a column per state; then formula and mark."""
    has_padding = any(checks[-1].padding)
    grid = Grid("", *(right(check.kind) for check in checks), right("padding"))
    rows = _by_rank(checks)
    for name, values, padding in rows:
        grid.add(name, *values, padding)
    grid.rule()
    is_uneven = any(len(set(check.counted)) > 1 for check in checks)
    if has_padding or (is_uneven and all(name != "mean" for name, _, _ in rows)):
        grid.add("mean, unpadded" if has_padding else "mean", *(check.mean for check in checks))
    grid.add("formula", *(check.text for check in checks), style="cyan")
    grid.add("in bytes", *(check.formula for check in checks), style="cyan")
    grid.add("agree", *(check.agrees for check in checks))
    return grid


def _by_rank(checks: Sequence[StateCheck]) -> list[tuple[str, list[Fraction | int], Fraction | int]]:
    """(name, a value per check, padding) for each rank, or for the least, mean and most where they are many."""
    ranks = len(checks[0].counted)
    padding = checks[-1].padding
    if ranks <= EACH_RANK:
        return [(f"rank {rank}", [check.counted[rank] for check in checks], padding[rank]) for rank in range(ranks)]
    if all(len(set(check.counted)) == 1 for check in checks) and not any(padding):
        return [(f"each of {ranks} ranks", [check.counted[0] for check in checks], 0)]
    return [
        ("least of a rank", [min(check.counted) for check in checks], min(padding)),
        ("mean", [Fraction(sum(check.counted), ranks) for check in checks], Fraction(sum(padding), ranks)),
        ("most of a rank", [max(check.counted) for check in checks], max(padding)),
    ]


def _states_by_kind(checks: Sequence[StateCheck]) -> Grid:
    """The same where there is little room: a row per state."""
    formula = (right("formula", style="cyan"), right("in bytes", style="cyan", overflow="fold"))
    grid = Grid("", right("counted", overflow="fold"), right("padding"), *formula, "")
    for check in checks:
        counted, padding = spread(check.counted, "\n"), spread(check.padding, "\n")
        grid.add(check.kind, counted, padding, stacked(check.text), check.formula, check.agrees)
    return grid


def peak_table(result: RunResult) -> RenderableType:
    """The moment with the most live bytes, and what they were."""
    rank = peak_rank(result)
    peak = result.memory[rank].peak
    total = peak.total_bytes
    same = len({memory.peak.total_bytes for memory in result.memory}) == 1
    where = "each rank" if same and len(result.memory) > 1 else f"rank {rank}{mesh_words.place(result, rank)}"
    title = f"Peak: {format_bytes(total)} ({total:,} B) on {where}, {words.moment(*peak.scope[:3])}"
    return titled(title, kinds_table(peak.by_kind))


def kinds_table(by_kind: Mapping[str, int]) -> Adaptive:
    """Bytes by kind, the most first, with what each kind is."""
    grid = Grid("kind", right("bytes"), right("share"), Column("what it is", style="dim"))
    total = sum(by_kind.values())
    for kind, nbytes in sorted(by_kind.items(), key=lambda item: -item[1]):
        share = f"{100 * nbytes / total:.1f} %" if total else None
        grid.add(kind, nbytes, share, KINDS[kind].meaning if kind in KINDS else None)
    return Adaptive(grid, grid.without("what it is"))


def owners_table(result: RunResult) -> RenderableType:
    """Which rank owns which units or tensors."""
    pieces = f"{result.config.gathering.piece}s"
    grid = Grid(right("rank"), right("elements"), Column(pieces, overflow="fold"))
    owners = sorted({unit.owner for unit in result.units if unit.owner is not None})
    for rank in owners:
        own = [unit for unit in result.units if unit.owner == rank]
        names, more = [unit.name for unit in own[:MOST_OWNED]], len(own) - MOST_OWNED
        names += [f"{more:,} more"] if more > 0 else []
        grid.add(str(rank), sum(unit.numel for unit in own), ", ".join(names))
    if idle := result.config.mesh.shards - len(owners):
        grid.add(f"{idle:,} more", 0, f"nothing: there are fewer {pieces} than ranks")
    note = (
        f"{pieces.capitalize()} are dealt out by size: the largest first, each to the rank that has the least so far."
    )
    return titled("Who owns what", Adaptive(grid), note)


# -- traffic ------------------------------------------------------------------------------------
def traffic_table(result: RunResult) -> RenderableType:
    """What a rank sends in one step beside the paper's volume, control traffic below."""
    step = last_whole_step(result)
    if step is None:
        return prose(words.traffic_title(result), "bold")
    notes = [note] if (note := words.curvature_note(result, step)) else []
    notes.append(words.control(result, control_bytes(result, step)))
    # What each rank copied between its device and the host for messages.
    rows = [[row for row in rank if row.step == step and row.purpose == "staging"] for rank in result.traffic]
    if any(rows):
        staged = [sum(row.payload_bytes for row in rank) for rank in rows]
        notes.append(f"Messages staged through the host's memory: {spread(staged)} B copied per rank.")
    if result.is_modelled:
        notes.append("Native collectives do not tell what they send: payload is counted, a ring's bytes are modelled.")
    if is_mesh(result.config):
        return mesh.traffic_table(result, step, words.traffic_title(result), notes)
    checks = check_traffic(result, step)
    body = _modelled(checks) if result.is_modelled else _sent_beside_formula(checks)
    return titled(words.traffic_title(result), body, "\n".join([words.volume_note(result, step), *notes]))


def _sent_beside_formula(checks: Sequence[TrafficCheck]) -> Adaptive:
    """In full, or with fewer columns where there is little room."""
    left_out = [] if len({check.axis for check in checks[:-1]}) > 1 else ["axis"]
    left_out += [] if any(check.padding for check in checks) else ["padding"]
    numbers = (right(name) for name in ("calls", "sent", "padding"))
    share = "×(N-1)/N, bytes" if "axis" in left_out else "sent of it, bytes"
    formula = (right("volume", style="cyan"), right(share, style="cyan"))
    full = Grid("operation", "axis", "dtype", *numbers, *formula, "agree")
    formula = (right("volume", style="cyan"), right("in bytes", style="cyan", overflow="fold"))
    short = Grid("operation", right("sent", overflow="fold"), *formula, "")
    for check in checks:
        if check is checks[-1]:
            full.rule()
            short.rule()
        count = (check.calls, _sent(check), check.padding)
        full.add(check.op, check.axis, " ".join(check.dtypes), *count, check.text, check.formula, check.agrees)
        name = f"{check.op}\n{check.axis}" if check.axis and "axis" not in left_out else check.op
        padding = f"\n{show(check.padding)} padding" if check.padding else ""
        short.add(name, _sent(check) + padding, stacked(check.text), check.formula, check.agrees)
    return Adaptive(full.without(*left_out), short)


def _modelled(checks: Sequence[TrafficCheck]) -> Adaptive:
    """Native collectives: what they were given is counted, what they sent is not; so nothing agrees with a formula."""
    grid = Grid("operation", "dtype", *(right(name, overflow="fold") for name in ("calls", "payload", "a ring's")))
    for check in checks:
        if check is checks[-1]:
            grid.rule()
        grid.add(check.op, " ".join(check.dtypes), check.calls, check.payload, _sent(check))
    return Adaptive(grid)


def _sent(check: TrafficCheck) -> str:
    """What a rank sent; where ranks differ, the mean, and the least and most."""
    if len(set(check.sent)) == 1:
        return show(check.sent[0])
    return f"{show(check.mean)}\n{spread(check.sent)}"


# -- what the model wrote -----------------------------------------------------------------------
def sample_text(result: RunResult) -> RenderableType:
    """The prompt and what the model made of it. Control characters are shown as a dot."""
    prompt, answer = result.config.data.sample or "", (result.sample or b"").decode(errors="replace")

    def printable(text: str) -> str:
        return "".join(char if char.isprintable() or char == "\n" else "·" for char in text)

    body = Text(printable(prompt), style="dim").append(printable(answer), style="not dim")
    return titled("Sample", Constrain(body, PROSE_WIDTH))
