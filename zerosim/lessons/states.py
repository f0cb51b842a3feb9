"""The state of parameters over one step: whole, sharded, gathered, sharded again; watched event by event.

Owns the watching (a world is stepped, and after each event every rank is looked at) and the pictures of it
for notebook 06. Source: ZeRO paper (arXiv 1910.02054), section 5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerosim.device.events import Mark
from zerosim.errors import InputError
from zerosim.lessons.sheet import Sheet, cell, open_sheet, picture, write
from zerosim.report.plots.page import Page, Picture, open_page
from zerosim.report.plots.style import KIND_PAINTS, OTHER_PAINT, mixed
from zerosim.stepper import DebugWorld

MOST_LANES = 40
_NOTHING = "nothing here"


class StateSpan(NamedTuple):
    """A parameter was in a state on a rank before events [start, stop) of the world and after the one before start."""

    rank: int
    name: str
    state: str
    start: int
    stop: int


class PhaseSpan(NamedTuple):
    """A rank was in a phase during events [start, stop) of the world."""

    rank: int
    phase: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StateLog:
    """What was watched, in the world's order of events; numbers count from where watching began."""

    names: tuple[str, ...]
    ranks: int
    num_events: int
    states: tuple[StateSpan, ...]
    phases: tuple[PhaseSpan, ...]

    def of(self, rank: int, name: str) -> list[str]:
        """The states of one parameter on one rank, in their order, each once per change."""
        return [span.state for span in self.states if (span.rank, span.name) == (rank, name)]


def one_per_unit(world: DebugWorld) -> list[str]:
    """The first parameter of each unit's buffer, by name: a unit is gathered and freed as one."""
    first: dict[str, str] = {}
    for name, view in world.ranks[0].parameters.items():
        first.setdefault(view.unit, name)
    return list(first.values())


def watch_states(world: DebugWorld, names: Sequence[str]) -> StateLog:
    """Step `world` until every rank has ended its step, and look at those parameters on every rank at each event.

    Raises: InputError for an unknown parameter, or when the run is over.
    """
    views = [rank.parameters for rank in world.ranks]
    open_states = [[(views[rank][name].state, 0) for name in names] for rank in range(len(views))]
    open_phases = [("", 0)] * len(views)
    states: list[StateSpan] = []
    phases: list[PhaseSpan] = []
    ended: set[int] = set()
    at = 0
    while len(ended) < len(views):
        moment = world.next()
        at += 1
        if isinstance(moment.event, Mark) and moment.event.name == "after_step":
            ended.add(moment.rank)
        phase, since = open_phases[moment.rank]
        if moment.event.scope.phase != phase:
            phases.append(PhaseSpan(moment.rank, phase, since, at - 1))
            open_phases[moment.rank] = (moment.event.scope.phase, at - 1)
        for rank, parameters in enumerate(views):
            for index, name in enumerate(names):
                state, since = open_states[rank][index]
                now = parameters[name].state
                if now != state:
                    states.append(StateSpan(rank, name, state, since, at))
                    open_states[rank][index] = (now, at)
    for rank, (phase, since) in enumerate(open_phases):
        phases.append(PhaseSpan(rank, phase, since, at))
        states += [
            StateSpan(rank, name, state, start, at)
            for name, (state, start) in zip(names, open_states[rank], strict=True)
        ]
    return StateLog(tuple(names), len(views), at, tuple(states), tuple(span for span in phases if span.phase))


def states_figure(log: StateLog, title: str, rank: int | None = None) -> Picture:
    """A lane per parameter and rank, coloured while the whole parameter is there.

    `rank` None draws all of them, grouped by rank.
    Raises: InputError for more lanes than can be read.
    """
    lanes = [(of, name) for of in range(log.ranks) if rank in (None, of) for name in log.names]
    if not 1 <= len(lanes) <= MOST_LANES:
        raise InputError(f"{len(lanes)} lanes: expected 1 to {MOST_LANES}; watch fewer parameters, or draw one rank")
    wide = log.num_events
    page = open_page((8.0, max(3.0, 1.55 + 0.3 * len(lanes))), "light")
    paints = {state: _paint(page, state) for state in ("gathered", "sharded", "whole", _NOTHING)}
    seen = {_shown(span.state) for span in log.states if rank in (None, span.rank)}
    sheet = open_sheet(
        title,
        "Along x are the events of all ranks in the order in which they happened (not seconds).",
        across=(-0.2 * wide, 1.01 * wide),
        up=(0.4 - len(lanes), 1.5),
        size=page.size,
        key=[
            (state, {"facecolor": color, "edgecolor": page.theme.muted})
            for state, color in paints.items()
            if state in seen
        ],
        page=page,
    )
    _draw_phases(sheet, log, lanes[0][0])
    for at, (of, name) in enumerate(lanes):
        words = name if len(log.names) > 1 and rank is not None else f"rank {of}"
        words = f"{words}, {name}" if len(log.names) > 1 and rank is None else words
        write(sheet, (-0.01 * wide, -at), words, ha="right", scale=0.8)
        for span in log.states:
            if (span.rank, span.name) != (of, name):
                continue
            color = paints.get(_shown(span.state), page.theme.band)
            tall = 0.78 if span.state in ("gathered", "whole") else 0.2
            middle = (span.start + span.stop) / 2
            cell(sheet, (middle, -at), span.stop - span.start, tall, fill=color, edge=color)
    return picture(sheet)


def _shown(state: str) -> str:
    """Not gathered yet or freed again: in a picture both are a rank that holds nothing."""
    return _NOTHING if state in ("elsewhere", "freed") else state


def _paint(page: Page, state: str) -> str:
    """Parameters' blue while all is there; a pale one while a slice is; grey for nothing."""
    theme = page.theme
    if state == "gathered":
        return theme.color(KIND_PAINTS["unsharded_param"])
    if state == "whole":
        return theme.color(KIND_PAINTS["param"])
    if state == "sharded":
        return mixed(theme.color(KIND_PAINTS["param"]), theme.background)
    return mixed(theme.color(OTHER_PAINT), theme.background)


def _draw_phases(sheet: Sheet, log: StateLog, rank: int) -> None:
    """Above the lanes, the phases of one rank."""
    theme = sheet.page.theme
    for span in log.phases:
        if span.rank == rank and span.phase in ("forward", "backward", "optimizer"):
            middle, width = (span.start + span.stop) / 2, span.stop - span.start
            cell(sheet, (middle, 1.0), width, 0.7, fill=theme.band, edge=theme.background)
            write(sheet, (middle, 1.0), span.phase if width > 0.1 * log.num_events else "opt", scale=0.8)
    write(sheet, (-0.01 * log.num_events, 1.0), f"rank {rank} is in", ha="right", scale=0.8, color=theme.muted)
