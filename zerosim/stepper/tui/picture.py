"""The stepper's picture: a column for every rank, what just happened, what comes next, and the keys.

Kinds of memory are told apart by their letter; colour repeats it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from zerosim.analysis.shares import is_mesh
from zerosim.comm.rank_status import ranks_text
from zerosim.device.events import Launch, Message, Scope
from zerosim.dtypes import dtype
from zerosim.report.names import counted
from zerosim.report.notebook import LETTERS, ordered
from zerosim.report.words import headline
from zerosim.stepper.match import numbered, where_in_step
from zerosim.stepper.tui.page import SHORT_KEYS, filled, keys_line, tile
from zerosim.units import format_bytes

if TYPE_CHECKING:
    from zerosim.stepper import DebugWorld, Moment, PendingCollective, RankView

LEAST_WIDTH, LEAST_HEIGHT = 40, 12
LEAST_COLUMN = 19


def most_bytes(world: DebugWorld, before: Mapping[str, int]) -> dict[str, int]:
    """Return by kind its largest bytes on any rank, now or before: the kinds that have a row, and the bars' one
    scale."""
    most = dict(before)
    for view in world.ranks:
        for name in view.memories:
            for kind, nbytes in view.memory(name).by_kind.items():
                most[kind] = max(nbytes, most.get(kind, 0))
    return most


def shown_ranks(num_ranks: int, width: int, around: int) -> range:
    """Return the ranks that have a column on a terminal of that width: all, or those around one."""
    count = min(num_ranks, max(1, (width + 1) // (LEAST_COLUMN + 1)))
    first = min(max(0, around - count // 2), num_ranks - count)
    return range(first, first + count)


def frame(world: DebugWorld, most: Mapping[str, int], status: str, width: int, height: int) -> list[Text]:
    """Return the whole screen. `most` is `most_bytes` of now; `status` are sentences below the picture."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        least = f"make it {LEAST_WIDTH} x {LEAST_HEIGHT} or more"
        return [Text(f"{width} x {height} is too small:"), Text(least), Text("q quits")]
    last, coming, views, rounds = world.last, world.peek(), world.ranks, world.pending_collectives
    all_launch = all(isinstance(event, Launch) for event in world.session.pending)  # then rank 0 goes next
    around = last.rank if last and not all_launch else 0
    shown = shown_ranks(len(views), width, around)
    head = [
        Text(_title(world), style="bold"),
        Text.assemble(("did   ", "dim"), _line(last) if last else "nothing yet"),
        Text.assemble(("next  ", "dim"), _line(coming) if coming else "nothing: the run is over"),
        _rule(shown, len(views), width),
    ]
    said = _wrapped(" ".join(status.split()), width, 1 if height < 16 else 3, " … e: all of it")
    foot = [
        *_legend(most, width),
        *_in_flight(world, rounds, 2 if height < 30 else 4),
        *(Text(line, style="bold") for line in said or [""]),
        keys_line(width, SHORT_KEYS[:-2], SHORT_KEYS[-2:]),
    ]
    each, room = (width - (len(shown) - 1)) // len(shown), height - len(head) - len(foot)
    columns = []
    for rank in shown:
        did, comes = last is not None and rank == last.rank, coming is not None and rank == coming.rank
        name = f"{'▶' if did else ' '}rank {rank}{' · goes next' if comes else ''}"
        first = Text(name, style="bold reverse" if did else "bold")
        top = [first, Text(views[rank].place.replace(",", ""), style="dim")] if is_mesh(world.config) else [first]
        columns.append(filled([*top, *_column(views[rank], rounds, most, each, room - len(top))], room))
        for line in columns[-1]:
            line.truncate(each, pad=True)
    between = Text.assemble(("│", "dim"))
    return [*head, *(between.join(row) for row in zip(*columns, strict=True)), *foot]


# -- around the columns -------------------------------------------------------------------------
def _title(world: DebugWorld) -> str:
    where = f"step {world.step:g}" if world.step < math.inf else "after the last step"
    if world.session.failure is not None:
        where = "the run has failed"
    return f"{headline(world.config)} · {where} · {len(world.session.events):,} events"


def _line(moment: Moment) -> str:
    """Return a moment in words, without the step, which is in the title."""
    return repr(moment).replace(f", step {moment.event.scope.step}, ", ", ")


def _rule(shown: range, num_ranks: int, width: int) -> Text:
    """Return a line; if not all ranks are shown, it names those that are."""
    label = f" {ranks_text(shown)} of {num_ranks:,} " if len(shown) < num_ranks else ""
    return Text(f"──{label}".ljust(width, "─"), style="dim")


def _legend(most: Mapping[str, int], width: int) -> list[Text]:
    """Return the meaning of the letters of the kinds seen so far, in one or two lines."""
    lines = [Text()]
    for kind, _ in ordered(most):
        if lines[-1].cell_len + len(kind) + 4 > width:
            lines.append(Text())
        lines[-1].append_text(tile(kind)).append(f" {kind}  ", style="dim")
    return filled(lines, 2 if width < 100 else 1)


def _in_flight(world: DebugWorld, rounds: Sequence[PendingCollective], height: int) -> list[Text]:
    """Return the collectives in flight and each rank's bytes, always as many lines, so that nothing jumps."""
    lines, last = [], world.last
    if last and isinstance(last.event, Message) and not any(_has_joined(last.rank, round) for round in rounds):
        lines += _arrows(world, [last.rank])
    for round in rounds:
        joined = [rank for rank, _ in round.joined]
        call = numbered(round.op, round.sequence)
        line = f"{call}: {ranks_text(joined)} joined, waits for {ranks_text(round.missing)}"
        if line not in lines:  # a ring's rounds are alike
            lines += [line, *_arrows(world, joined)]
    if len(lines) > height:
        lines = [*lines[: height - 1], f"and {len(lines) - height + 1} more"]
    return filled([Text(line) for line in lines] or [Text("no collective in flight", style="dim")], height)


def _has_joined(rank: int, round: PendingCollective) -> bool:
    return any(rank == joined for joined, _ in round.joined)


def _arrows(world: DebugWorld, ranks: Sequence[int]) -> list[str]:
    """Return 'rank 0 ──1,640 B→ rank 1': the last message of each of these ranks, of an all-to-all all of its own.
    Those that sent alike share an arrow; with several messages each has a line."""
    alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
    row = world.session.experiment.config.model.moved_row
    for rank in ranks:
        history = world.session.recorders[rank].history
        last = next((event for event in reversed(history) if isinstance(event, Message)), None)
        if last is not None:
            sent = [event for event in history if isinstance(event, Message) and event.work == last.work]
            launch = next(event for event in reversed(history) if isinstance(event, Launch) and event.work == last.work)
            is_rows = row and (launch.op, launch.axis, launch.purpose) == ("all_to_all", "ep", "activations")
            width = row * dtype(launch.dtype).itemsize if is_rows else 0
            if launch.op != "all_to_all":
                sent = sent[-1:]
            alike.setdefault(tuple((_load(one.nbytes, width), one.peer) for one in sent), []).append(rank)
    lines = [f"{ranks_text(senders)} {_ways(sent)}" for sent, senders in alike.items()]
    return lines if any(len(sent) > 1 for sent in alike) else ["   ".join(lines)] if lines else []


def _load(nbytes: int, width: int) -> str:
    return f"{counted(nbytes // width, 'row')}, {nbytes:,} B" if width else f"{nbytes:,} B"


def _ways(sent: Sequence[tuple[str, int]]) -> str:
    ways = (f"──{load}→ {'each of the others' if peer < 0 else f'rank {peer}'}" for load, peer in sent)
    return "  ".join(ways)


def _wrapped(text: str, width: int, most: int, cut: str = "…") -> list[str]:
    """Wrap to at most so many lines; if there are more, `cut` ends the last."""
    lines = textwrap.wrap(text, width)
    return lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1][: width - len(cut)] + cut]


# -- a rank's column ----------------------------------------------------------------------------
def _column(
    view: RankView, rounds: Sequence[PendingCollective], most: Mapping[str, int], width: int, height: int
) -> list[Text]:
    """Return a rank's column: its place in the mesh and in the program, its next event or what it waits for, its live
    bytes by kind."""
    by_kind, kinds = view.memory().by_kind, [kind for kind, _ in ordered(most)]
    places = [view.place] if 0 < len(view.place) < width else view.place.split(", ")[:2] if view.place else []
    free = height + 1 - len(places)
    tall = 2 if free - 6 >= 2 * len(kinds) else 1  # lines per kind: with two, its bar has the whole width
    stand_lines = min(5 if width < 30 else 3, max(2, free - 3 - tall * len(kinds)))
    where, stands = _standing(view, rounds)
    lines = [
        *(Text(line) for line in places),
        Text(where),
        *filled([Text(line, style="cyan") for line in _wrapped(stands, width - 1, stand_lines)], stand_lines),
        _number_line(Text("bytes"), f"{sum(by_kind.values()):,}", width),
    ]
    room = height - len(lines)
    shown = kinds if tall * len(kinds) <= room else kinds[: max(0, room - 1)]
    scale = max(most.values(), default=1)
    for kind in shown:
        lines += (_bar if tall == 1 else _tall_bar)(kind, by_kind.get(kind, 0), scale, width)
    if len(shown) < len(kinds):
        rest = sum(by_kind.get(kind, 0) for kind in kinds[len(shown) :])
        lines.append(_number_line(Text("others"), f"{rest:,}", width))
    for name in view.memories[1:]:  # below the device's, as far as there is room
        elsewhere = view.memory(name).by_kind
        bars = [line for kind, nbytes in ordered(elsewhere) if nbytes for line in _bar(kind, nbytes, scale, width)]
        lines += [_number_line(Text(name), f"{sum(elsewhere.values()):,}", width), *bars]
    return lines[:height]


def _standing(view: RankView, rounds: Sequence[PendingCollective]) -> tuple[str, str]:
    """Return a rank's place in the program, and its next event or what it waits for."""
    coming = view.next_event
    if coming is not None:
        scope = coming.event.scope
        stands = f"before {coming.text.removesuffix(', ' + where_in_step(scope))}"
    else:
        events = view.events
        scope = events[-1].scope if events else Scope()
        waits = (
            f"in {numbered(round.op, round.sequence)}, waits for {ranks_text(round.missing)}"
            for round in rounds
            if _has_joined(view.rank, round)
        )
        stands = next(waits, view.status)
    return "finished" if stands == "finished" else where_in_step(scope._replace(step=-1)), stands


def _number_line(name: Text, number: str, width: int, style: str = "bold") -> Text:
    """Return a name on the left and a number on the right."""
    return name.append(number.rjust(width - 1 - name.cell_len), style=style)


def _bar(kind: str, nbytes: int, most: int, width: int) -> list[Text]:
    """Return a kind's bytes as a row of its letter, the number at its end; `most` bytes fill the room left of the
    number."""
    number, digits = f"{nbytes:,}", max(len(f"{most:,}"), 7)
    if digits > width - 8:
        number, digits = format_bytes(nbytes), 8
    if not nbytes:
        return [_number_line(Text(LETTERS.get(kind, "?"), style="dim"), "0", width, "dim")]
    length = _length(nbytes, most, width - digits - 2)
    return [tile(kind, length).append(number.rjust(width - 1 - length))]


def _tall_bar(kind: str, nbytes: int, most: int, width: int) -> list[Text]:
    """Return the kind's name and its bytes, and below them a bar; `most` bytes fill the column."""
    number = f"{nbytes:,}" if len(f"{nbytes:,}") < width - 3 else format_bytes(nbytes)
    name = kind if len(kind) + len(number) + 2 <= width else LETTERS.get(kind, "?")
    line = _number_line(Text(name, style="" if nbytes else "dim"), number, width, "" if nbytes else "dim")
    return [line, tile(kind, _length(nbytes, most, width - 1)) if nbytes else Text()]


def _length(nbytes: int, most: int, room: int) -> int:
    return min(max(1, room), max(1, round(room * nbytes / max(most, 1))))
