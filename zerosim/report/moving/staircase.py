"""ZeRO-3's staircase: on one rank, unit after unit is gathered, used and freed, down in forward and up in backward.

Read from one rank's record of a step. Source: ZeRO paper (arXiv 1910.02054), section 5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zerosim.device.device import Phase
from zerosim.device.events import Alloc, Event, Free, Retag
from zerosim.errors import InputError
from zerosim.report.moving.film import Film, Moving, line, rect, words
from zerosim.report.names import STAGES
from zerosim.report.plots.style import KIND_PAINTS
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

_PLAY, _HOLD = 15.0, 2.5  # seconds, of the step and of its end
_LEFT, _RIGHT, _TOP, _LANE, _CHART = 118, 700, 96, 25, 84  # pixels
_PARAM, _AHEAD, _GRAD = "unsharded_param", "prefetched_param", "unsharded_grad"
MOST_UNITS = 16


class Stay(NamedTuple):
    """A unit's whole buffer on this rank from event `start` up to `stop`, counted from the step's first."""

    unit: str
    kind: str
    phase: str
    nbytes: int
    start: int
    stop: int


class Climb(NamedTuple):
    """One step of one rank: its stays, bytes of parameters after each event, and the beginnings of the phases."""

    stays: list[Stay]
    param_bytes: list[int]
    phases: list[tuple[str, int]]

    @property
    def num_events(self) -> int:
        return len(self.param_bytes)


def read_climb(events: Sequence[Event], step: int = 0) -> Climb:
    """Read a step. `events` begin when the rank does."""
    live: dict[int, tuple[str, int, Stay | None]] = {}
    stays: list[Stay] = []
    param_bytes: list[int] = []
    phases: list[tuple[str, int]] = []
    total = 0
    for event in events:
        now = len(param_bytes)
        if isinstance(event, Free | Retag):
            kind, nbytes, stay = live.pop(event.id)
            total -= nbytes if kind in ("param", _PARAM, _AHEAD) else 0
            if stay is not None:
                stays.append(stay._replace(stop=now))
        if isinstance(event, Alloc | Retag):
            kind, nbytes = event.kind, event.nbytes if isinstance(event, Alloc) else nbytes
            total += nbytes if kind in ("param", _PARAM, _AHEAD) else 0
            is_whole = kind in (_PARAM, _AHEAD, _GRAD) and event.scope.step == step
            stay = Stay(event.scope.unit, kind, event.scope.phase, nbytes, now, now) if is_whole else None
            live[event.id] = kind, nbytes, stay
        if event.scope.step == step:
            if not phases or phases[-1][0] != event.scope.phase:
                phases.append((event.scope.phase, now))
            param_bytes.append(total)
    stays += [stay._replace(stop=len(param_bytes)) for _, _, stay in live.values() if stay is not None]
    return Climb(sorted(stays, key=lambda stay: stay.start), param_bytes, phases)


def moving_staircase(result: RunResult, rank: int = 0, *, theme: str = "light") -> Moving:
    """Draw the first step of a rank. The result has kept its events.

    Raises: InputError for a run without gathered units, and for more units than are readable.
    """
    config, climb = result.config, read_climb(result.events[rank])
    gathered = [stay for stay in climb.stays if stay.kind != _GRAD]
    units = list(dict.fromkeys(stay.unit for stay in gathered))
    if not units:
        raise InputError(
            f"{STAGES[config.parallel.zero_stage]} gathers no units: there is no staircase; pass --stage 3"
        )
    if len(units) > MOST_UNITS:
        raise InputError(f"{len(units)} units: expected at most {MOST_UNITS} in one picture; choose fewer layers")
    ranks, most = config.mesh.ranks, max(climb.param_bytes)
    whole = sum(memory.marks["after_init"].by_kind.get("param", 0) for memory in result.memory)
    own = result.memory[rank].marks["after_init"].by_kind.get("param", 0)
    said = f"At most {format_bytes(most)} of {format_bytes(whole)} of parameters are gathered at once."
    title = f"ZeRO-3: one step on one of {ranks} GPUs"
    alt = (
        f"{title}. In forward each unit from {units[0]} to {units[-1]} is gathered, used and freed; in backward the "
        f"same from {units[-1]} up, and its gradient is reduced. {format_bytes(own)} of parameters always stay. {said}"
    )
    height = _TOP + _LANE * len(units) + _CHART + 66
    film = Film((_RIGHT + 20, height), _PLAY + _HOLD, title, alt, theme)
    film.put(words(title, 16, 26, "b", 'style="font-size:18px"'))
    _put_captions(film, climb, units, said)
    _put_lanes(film, climb, units)
    _put_chart(film, climb, whole, _TOP + _LANE * len(units) + 14)
    _put_cursor(film, height)
    film.put(words("time: events in their order, not seconds", _RIGHT, height - 10, "me", 'style="font-size:12px"'))
    return film.picture()


def _x(climb: Climb, event: float) -> float:
    return round(_LEFT + event / climb.num_events * (_RIGHT - _LEFT), 1)


def _at(climb: Climb, event: float) -> float:
    """Return an event's seconds in the film."""
    return event / climb.num_events * _PLAY


def _put_captions(film: Film, climb: Climb, units: Sequence[str], said: str) -> None:
    """Write what happens now, a line at a time; in the still picture a summary."""
    lines: list[tuple[float, str]] = []
    for stay in climb.stays:
        size = format_bytes(stay.nbytes)
        if stay.kind != _GRAD and stay.phase == Phase.FORWARD:
            lines.append((_at(climb, stay.start), f"forward: gather {stay.unit} ({size}), compute with it, free it"))
        elif stay.kind != _GRAD:
            again = f"backward: gather {stay.unit} again ({size}), reduce its gradient, free both"
            lines.append((_at(climb, stay.start), again))
    for phase, first in climb.phases:
        if phase == Phase.OPTIMIZER:
            lines.append(
                (_at(climb, first), "optimizer step: each GPU updates its local shard, and nothing is gathered")
            )
    stops = [start for start, _ in lines[1:]] + [_PLAY]
    for (start, text), stop in zip(lines, stops, strict=True):
        film.put(words(text, 16, 52), film.seen([(start, stop)]), still=False)
    film.put(words(said, 16, 52), film.seen([(_PLAY, _PLAY + _HOLD)]))


def _put_lanes(film: Film, climb: Climb, units: Sequence[str]) -> None:
    theme, bottom = film.theme, _TOP + _LANE * len(units)
    for at, (phase, begin) in enumerate(climb.phases):
        stop = climb.phases[at + 1][1] if at + 1 < len(climb.phases) else climb.num_events
        x0, x1 = _x(climb, begin), _x(climb, stop)
        if x1 - x0 > 3:
            film.put(rect(x0, _TOP - 26, x1 - x0 - 1, 20, theme.band))
            name = phase if x1 - x0 > 70 else "step" if phase == Phase.OPTIMIZER else ""
            film.put(words(name, (x0 + x1) / 2, _TOP - 11, "mc", 'style="font-size:13px"'))
            film.put(line(x0, _TOP - 4, x0, bottom, theme.grid))
    for row, unit in enumerate(units):
        y = _TOP + _LANE * row
        film.put(words(unit, _LEFT - 10, y + 17, "e"))
        film.put(line(_LEFT, y + _LANE - 1.5, _RIGHT, y + _LANE - 1.5, theme.grid))
    for stay in climb.stays:
        if stay.unit in units:
            is_grad = stay.kind == _GRAD
            top = _TOP + _LANE * units.index(stay.unit) + (13 if is_grad else 2)
            x0, x1 = _x(climb, stay.start), _x(climb, stay.stop)
            seen = film.seen([(_at(climb, stay.start), _at(climb, stay.stop))], before=1.0, after=0.45)
            film.put(rect(x0, top, x1 - x0, 8 if is_grad else 10, theme.color(KIND_PAINTS[stay.kind])), seen)


def _put_chart(film: Film, climb: Climb, whole: int, top: float) -> None:
    """Draw bytes of parameters, under the line of the whole model's."""
    theme, bottom = film.theme, top + _CHART

    def y(nbytes: int) -> float:
        return round(bottom - nbytes / whole * (_CHART - 16), 1)

    kept = climb.param_bytes[0]
    path, before = [f"M{_x(climb, 0):g} {bottom:g}V{y(kept):g}"], kept
    for at, nbytes in enumerate(climb.param_bytes):
        if nbytes != before:
            path.append(f"H{_x(climb, at):g}V{y(nbytes):g}")
            before = nbytes
    path.append(f"H{_RIGHT}V{bottom:g}Z")
    film.put(f'<path d="{"".join(path)}" fill="{theme.color(KIND_PAINTS[_PARAM])}"/>')
    film.put(rect(_LEFT, y(kept), _RIGHT - _LEFT, bottom - y(kept), theme.color(KIND_PAINTS["param"])))
    for text, low in (("parameters", bottom - 22), ("on this GPU", bottom - 6)):
        film.put(words(text, _LEFT - 10, low, "me", 'style="font-size:12px"'))
    film.put(line(_LEFT, bottom, _RIGHT, bottom, theme.muted))


def _put_cursor(film: Film, height: float) -> None:
    """Draw a cover that uncovers the step from left to right; none in the still picture. The line of the whole model
    and the key lie on it."""
    theme, end = film.theme, height - 36
    slid = film.slid((0.0, _PLAY), _RIGHT - _LEFT + 2)
    cover = rect(_LEFT, _TOP - 4, _RIGHT - _LEFT + 2, end - _TOP, theme.background)
    film.put(
        [
            f'<g class="{film.seen([(0.0, _PLAY)])} o">',
            cover,
            line(_LEFT, _TOP - 4, _LEFT, end - 4, theme.text),
            "</g>",
        ],
        slid,
    )
    top = height - 66 - _CHART + 14
    film.put(line(_LEFT, top + 16, _RIGHT, top + 16, theme.text, 'stroke-dasharray="5 4"'))
    film.put(words("the whole model", _RIGHT, top + 10, "e", 'style="font-size:12px"'))
    x = 16.0
    for kind, text in (("param", "own part"), (_PARAM, "gathered"), (_GRAD, "whole gradient")):
        film.put(rect(x, height - 20, 14, 11, theme.color(KIND_PAINTS[kind])))
        film.put(words(text, x + 20, height - 10, "", 'style="font-size:12px"'))
        x += 40 + 7.2 * len(text)
