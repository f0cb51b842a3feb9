"""A plan's first page: whether it fits, the parts of its peak, the time of a step, and what would help.

Reads a result of `train.plan.plan` (or of a real run). Every table behind the page: `plan_tables.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from rich.console import RenderableType
from rich.table import Column

from zerosim.analysis.capabilities import notes_of
from zerosim.analysis.checks import checks, formulas_agree
from zerosim.analysis.compare import peak_rank
from zerosim.analysis.formulas import STATES
from zerosim.config import RunConfig
from zerosim.config.parts.allocators import is_exact
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.optimizers import OPTIMIZERS as PRESETS
from zerosim.errors import OutOfMemory
from zerosim.ledger.memory import Snapshot
from zerosim.placement.spec import is_block
from zerosim.report import failures, words
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.memory import Certainty
from zerosim.report.names import KIND_WORDS, listed
from zerosim.report.offload_tables import most_elsewhere
from zerosim.report.plan_tables import all_tables, beside_formulas
from zerosim.report.saving import save_lines
from zerosim.report.tables import kept_text, set_aside_text
from zerosim.report.time import step_lines
from zerosim.report.verdict import Limit, alike, assumed, fits, is_saves_fault, save_peak, usual_text, verdict
from zerosim.report.warnings import warnings_of, warnings_text
from zerosim.train.result import RunResult
from zerosim.units import format_bytes, format_count

BAR = 16
"""Letters of the longest bar."""
SMALL = 0.01
"""Parts with less than this share of the program's bytes are joined."""
MORE = "More: --all (every table), --json FILE (every figure), zerosim explain (formulas with numbers)."
UNMOVED = "These are the bytes of a device with room for all. A full one moved paged states out before this end."
TAKES_MORE = "These are exact bytes. An allocator takes more."
_CAME = {"unsharded_param": "gathered", "prefetched_param": "prefetched"}
_BY_UNIT = (*_CAME, "unsharded_grad")
"""Kinds of temporary whole buffers, which are named by the units that hold them."""
_LOGITS = ("lm_head", "loss")  # the units that hold them and their gradients
_ITEMS = {"model states": STATES, "activations": ("activation", "activation_grad", "kept", "temp")}


def plan_report(
    result: RunResult,
    limit: Limit | None,
    advice: Sequence[str] = (),
    refusal: OutOfMemory | None = None,
    cluster: Cluster | None = None,
    *,
    sure: Certainty | None = None,
    unlike_run: str = "",
    imbalance: str = "",
    all: bool = False,
) -> Stack:
    """Return the first page of a plan, and with `all` every table after it.

    `advice` are the cheapest changes that fit, `refusal` is the allocator's message, `cluster` the clock's devices,
    `sure` says how sure it is that it fits, `unlike_run` where a run of the same flags differs, `imbalance` how full an
    expert may be.
    """
    config, where = result.config, f" of {limit.name}" if limit is not None and limit.name else ""
    does_fit = refusal is None and (limit is None or fits(result, limit))
    found = checks(result)
    has_agreed = formulas_agree(found)
    about = (
        f"{words.model_name(config)}: {words.headline(config, where)}. {format_count(result.num_parameters)} "
        f"parameters{words.trained_of(result)}, {config.tokens:,} tokens a step."
    )
    taken = max(memory.reserved_bytes for memory in result.memory)
    answer = f"Needs {format_bytes(taken)} per GPU." if limit is None else verdict(config, limit, taken)
    if limit is not None and is_saves_fault(result, limit):
        answer = f"{verdict(config, limit, save_peak(result))} The step alone fits. The save gathers whole states."
    lines, certain = step_lines(result, cluster), [] if sure is None else sure.lines()
    page = [
        Stack(
            prose(answer if refusal is None else f"Does not fit: {refusal}.", "bold green" if does_fit else "bold red"),
            *(prose(f"{'Also' if index else 'Cheapest change'}: {text}.") for index, text in enumerate(advice)),
            None if does_fit or advice else prose("No change that was tried fits: see zerosim fit --find mesh."),
            prose(about),
            *map(prose, notes_of(config, "size")),
            prose(imbalance) if imbalance else None,
            prose(why) if (why := words.undivided(config)) else None,
            prose(recipe) if (recipe := usual_text(config)) else None,
            prose(_first_step(result)) if config.optim.lazy_states else None,
            close=True,
        ),
        parts_table(result, limit),
        None if refusal is None else prose(UNMOVED if is_exact(config.memory) else TAKES_MORE),
        None if refusal is None else failures.room_text(refusal),
        None if does_fit or limit is None or is_saves_fault(result, limit) else prose(_too_much(result, limit)),
        Stack(*map(prose, elsewhere), close=True) if (elsewhere := most_elsewhere(result, cluster)) else None,
        Stack(*map(prose, certain), close=True) if certain else None,
        Stack(*map(prose, lines), close=True) if lines else None,
        Stack(*map(prose, saves), close=True) if (saves := save_lines(result, cluster)) else None,
        Stack(
            prose(assumed(config, limit, cluster), "dim"), prose(unlike_run, "dim") if unlike_run else None, close=True
        ),
        *_notes(result),
        warnings_text(warnings_of(config, limit, cluster, taken if does_fit else None) + (sure.doubts if sure else [])),
        prose("Formulas and counts agree.") if has_agreed else prose("Formulas and counts do not agree:", "bold red"),
    ]
    if all:
        return Stack(*page, *all_tables(found, limit, cluster))
    if not has_agreed:
        page += beside_formulas(found)
    return Stack(*page, prose(MORE, "dim"))


def _first_step(result: RunResult) -> str:
    """Return the first step's bytes, beside the later ones'."""
    first = max(memory.first_step_bytes for memory in result.memory)
    later = max(memory.peak.total_bytes for memory in result.memory)
    return (
        f"The first step, which creates the optimizer's states, peaks at {format_bytes(first)}, the second at "
        f"{format_bytes(later)}."
    )


def _notes(result: RunResult) -> list[RenderableType | None]:
    """Return notes that change the figures' meaning: left-out parts, notes on the model and the step."""
    config = result.config
    model = config.model
    notes = [f"Model {model.name}: {note}" for note in model.notes]
    if model.is_of_file and "seq" not in config.given and model.seq < model.positions:
        notes.append(
            f"--seq {model.seq} was assumed. The file's {model.positions:,} positions are its longest row; pass --seq "
            "for the rows of your data"
        )
    if config.optim.steps is None and result.steps[0].estimated:
        every = PRESETS[config.optim.optimizer].estimates_every
        notes.append(
            f"The step includes an estimate of curvature, as every {every}th does: memory and traffic include it, "
            f"and its time is the mean of {every} steps"
        )
    return [
        set_aside_text(config),
        kept_text(config),
        prose(" ".join(f"{note}." for note in notes), "dim") if notes else None,
    ]


# -- what a peak is made of -----------------------------------------------------------------------
def parts(config: RunConfig, at: Snapshot) -> dict[str, int]:
    """Name live bytes in plain words. The parts add up to the snapshot's total."""
    found: Counter[str] = Counter()
    whole: dict[str, Counter[str]] = {}
    for (unit, kind), nbytes in at.by_unit.items():
        if kind in _BY_UNIT:
            whole.setdefault(unit, Counter())[kind] += nbytes
        elif config.model.has_blocks and unit in _LOGITS and kind in _ITEMS["activations"]:
            found["logits and their gradients"] += nbytes
        else:
            found[KIND_WORDS[kind]] += nbytes
    units = sorted(whole, key=lambda unit: -whole[unit].total())
    groups: dict[tuple[str, bool], list[str]] = {}
    for unit in units[1:]:  # the largest unit has its own row
        groups.setdefault(_held(whole[unit]), []).append(unit)
    for several in filter(None, (units[:1], *groups.values())):
        held = _held(whole[several[0]])
        name = _by_units(several, *held, "more " if held == _held(whole[units[0]]) else "")
        found[name] = sum(whole[unit].total() for unit in several)
    return dict(found)


def _held(kinds: Container[str]) -> tuple[str, bool]:
    """Return how a unit's temporary parameters came ('' without any), and whether its whole gradient is there too."""
    came = next((word for kind, word in _CAME.items() if kind in kinds), "")
    return came, "unsharded_grad" in kinds


def _by_units(units: Sequence[str], came: str, has_grad: bool, more: str) -> str:
    """Name the temporary buffers of units that hold the same kinds: parameters, whole gradients, or both."""
    if len(units) == 1:
        noun = "block" if is_block(units[0]) else "unit"
        with_grad = " with its gradient" if has_grad else ""
        what = f"one {came} {noun}{with_grad}" if came else f"one {noun}'s whole gradient"
        return f"{what} ({units[0]})"
    if not came:
        return f"whole gradients of {len(units):,} {more}units"
    return f"{len(units):,} {more}{came} units{' with their gradients' if has_grad else ''}"


def parts_table(result: RunResult, limit: Limit | None) -> RenderableType:
    """Return what the fullest rank holds at its peak, largest first; then estimated memory beside it."""
    config = result.config
    rank = max(range(len(result.memory)), key=lambda rank: result.memory[rank].reserved_bytes)
    memory = result.memory[rank]
    held = parts(config, memory.peak)
    if unused := memory.reserved_bytes - memory.peak.total_bytes:
        held["unused inside the allocator"] = unused
    reserve = 0 if limit is None else limit.reserve(config)
    total = memory.reserved_bytes + reserve
    small = [name for name, nbytes in held.items() if nbytes < SMALL * memory.reserved_bytes]
    if len(small) > 1:
        held["everything else"] = sum(held.pop(name) for name in small)
    rows = sorted(held.items(), key=lambda row: -row[1])
    if limit is not None and reserve:
        outside = limit.outside(config) if limit.kept is None else ()
        names = dict.fromkeys(one.name.split()[0].removesuffix("Lt") for one in outside)
        rows.append((f"{', '.join(names) or '--reserve'} (estimated, not counted)", reserve))
    most = max(nbytes for _, nbytes in rows)
    grid = Grid(Column("what", overflow="fold"), right("bytes"), Column("bar"), has_header=False)
    for name, nbytes in rows:
        grid.add(name, alike(nbytes, format_bytes(total)), "█" * round(BAR * nbytes / most))
    grid.rule()
    grid.add("total", alike(total, format_bytes(total)), None, style="bold")
    has_gpus = limit is None or limit.device is None or limit.device.machine is None
    return titled(_whose(result, rank, "GPU" if has_gpus else "rank"), Adaptive(grid, grid.without("bar")))


def _whose(result: RunResult, rank: int, name: str) -> str:
    """Return which rank's peak it is, and when."""
    memory = result.memory[rank]
    stage, place = result.layout.mesh.index(rank, "pp"), words.place(result, rank)
    when = words.moment(*memory.peak.scope[:3]).removeprefix("in step 0, ")
    if len({one.reserved_bytes for one in result.memory}) == 1:
        return f"What each {name} holds at the peak ({when})"
    where = f"pipeline stage {stage}, rank {rank}{place}" if result.layout.mesh.pp > 1 else f"rank {rank}{place}"
    return f"What the fullest {name} holds at the peak: {where}, {when}"


def _too_much(result: RunResult, limit: Limit) -> str:
    """Name each item that alone exceeds the device's room for the program, else the largest: at the peak and at the
    marks."""
    memory, room = result.memory[peak_rank(result)], limit.nbytes - limit.reserve(result.config)
    most: dict[str, int] = {}
    for at in (memory.peak, *memory.marks.values()):
        items = parts(result.config, at)
        for name, kinds in _ITEMS.items():
            items[name] = sum(items.pop(KIND_WORDS[kind], 0) for kind in kinds)
        most = {name: max(most.get(name, 0), nbytes) for name, nbytes in (most | items).items()}
    alone = [f"{name} ({format_bytes(nbytes)})" for name, nbytes in most.items() if nbytes > room]
    if alone:
        return f"Too big by itself: {listed(alone)}."
    name = max(most, key=most.__getitem__)
    return f"No single item is too big by itself. The largest: {name}, {format_bytes(most[name])}."
