"""A stepped world as the plain data that the stepper's screen shows (`report/stepper.py`). Reads; steps nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from zerosim.comm.rank_status import ranks_text
from zerosim.device.events import Launch, Message, Scope
from zerosim.report.stepper import Picture, RankPicture, arrow, shown_ranks
from zerosim.report.words import headline
from zerosim.stepper.match import numbered, place

if TYPE_CHECKING:
    from zerosim.stepper import DebugWorld, Moment, RankView, UnderWay


def step_of(world: DebugWorld, moment: Moment) -> float:
    """The step that a coming event belongs to: placing is part of the first, what follows the last is in none."""
    step = moment.event.scope.step
    if step >= 0:
        return step
    return math.inf if any(event.scope.step >= 0 for event in world.ranks[moment.rank].events) else 0


def picture_of(world: DebugWorld, width: int, status: str, most: Mapping[str, int]) -> Picture:
    """This moment, for a screen so wide. `most` are the bytes by kind that were the most in any picture before."""
    last, coming = world.last, None if world.session.failure else world.peek()
    rounds = world.inbox
    views = world.ranks
    pending = {type(view.coming.event) if view.coming else None for view in views}
    around = last.rank if last and pending != {Launch} else 0  # where all have come to a collective, rank 0 goes next
    shown = shown_ranks(len(views), width, around)
    ranks = [_rank(views[rank], rounds) for rank in shown]
    return Picture(
        title=_title(world, coming),
        did=_line(last) if last else "nothing yet",
        coming=_line(coming) if coming else "nothing: the run is over",
        last_rank=last.rank if last else None,
        next_rank=coming.rank if coming else None,
        ranks=ranks,
        num_ranks=len(views),
        under_way=_under_way(world, rounds),
        status=status,
        most=_most([most, *(view.memory().by_kind for view in views)]),
    )


def _most(seen: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The most of each kind, in the order in which kinds came."""
    most: dict[str, int] = {}
    for by_kind in seen:
        for kind, nbytes in by_kind.items():
            most[kind] = max(nbytes, most.get(kind, 0))
    return most


def _title(world: DebugWorld, coming: Moment | None) -> str:
    step = step_of(world, coming) if coming else math.inf
    where = f"step {step:g}" if step < math.inf else "after the last step"
    if world.session.failure is not None:
        where = "the run has failed"
    return f"{headline(world.config)} · {where} · {len(world.session.events):,} events"


def _line(moment: Moment) -> str:
    """A moment in words, but the step, which the title says."""
    return repr(moment).replace(f", step {moment.event.scope.step}, ", ", ")


def _rank(view: RankView, rounds: list[UnderWay]) -> RankPicture:
    coming = view.coming
    if coming is not None:
        scope = coming.event.scope
        stands = f"before {coming.text.removesuffix(', ' + place(scope))}"
    else:
        events = view.events
        scope = events[-1].scope if events else Scope()
        stands = next((_waits(view.rank, round) for round in rounds if _has_joined(view.rank, round)), view.stands)
    where = "finished" if stands == "finished" else _where(scope)
    return RankPicture(view.rank, view.place, where, stands, view.memory().by_kind)


def _where(scope: Scope) -> str:
    where = scope.phase + (f" of {scope.unit}" if scope.unit else "")
    return where + (f", micro-batch {scope.slot}" if scope.slot else "")


def _has_joined(rank: int, round: UnderWay) -> bool:
    return any(rank == joined for joined, _ in round.joined)


def _waits(rank: int, round: UnderWay) -> str:
    return f"in {numbered(round.op, round.sequence)}, waits for {ranks_text(round.missing)}"


def _under_way(world: DebugWorld, rounds: list[UnderWay]) -> list[str]:
    """What is under way and who has sent what, in lines."""
    lines = []
    last = world.last
    if last and isinstance(last.event, Message) and not any(_has_joined(last.rank, round) for round in rounds):
        lines.append(_arrows(world, [last.rank]))
    for round in rounds:
        joined = [rank for rank, _ in round.joined]
        call = numbered(round.op, round.sequence)
        line = f"{call}: {ranks_text(joined)} joined, waits for {ranks_text(round.missing)}"
        if line in lines:
            continue  # a ring's rounds are told once
        lines.append(line)
        if arrows := _arrows(world, joined):
            lines.append(arrows)
    return lines


def _arrows(world: DebugWorld, ranks: list[int]) -> str:
    """The last message of each of these ranks; those that sent alike share an arrow."""
    alike: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        history = world.session.recorders[rank].history
        sent = next((event for event in reversed(history) if isinstance(event, Message)), None)
        if sent is not None:
            alike.setdefault((sent.peer, sent.nbytes), []).append(rank)
    return "   ".join(
        arrow(ranks_text(senders), "each of the others" if peer < 0 else f"rank {peer}", nbytes)
        for (peer, nbytes), senders in alike.items()
    )
