"""Which rank updates which slice of each unit's flat buffer (ZeRO paper, section 5).

As text and as HTML: one bar per buffer, cut into the ranks' slices, with padding dotted or hatched. A unit has one
buffer, or one for each tensor-parallel rank where its weights are cut over them. A rank has no slice of a unit that
lies on another pipeline stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import NamedTuple

from zerosim.comm.rank_status import ranks_text
from zerosim.errors import InputError
from zerosim.placement.axes import first_ranks
from zerosim.report.notebook import FONT, HATCH, card, escaped, table
from zerosim.stepper.session import Parts, Session
from zerosim.tensor.flat import Flat

RANK_TONES = ("#165cd8", "#ad400d", "#007d47", "#9a4878", "#b48600", "#23a2ae", "#8f86f4", "#958f83")
MOST_BARS = 64
"""A bar shows at most this many ranks; beyond, ranks are joined into groups."""


class OwnedSlice(NamedTuple):
    """Elements [start, stop) of a unit's flat buffer that a rank updates; `padding` of them belong to no parameter.

    `part` names the buffer where tensor-parallel ranks hold different ones of the unit ('tp 1').
    """

    unit: str
    numel: int
    rank: int
    start: int
    stop: int
    padding: int
    part: str = ""

    @property
    def buffer(self) -> str:
        """'h.0', or 'h.0, tp 1'."""
        return f"{self.unit}, {self.part}" if self.part else self.unit


class _Sum(NamedTuple):
    """How many elements a rank updates, padding among them; `like`: the lowest rank with the same slices."""

    rank: int
    numel: int
    padding: int
    like: int


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who updates what: one row per buffer and rank that holds it, units in order."""

    ranks: int
    rows: tuple[OwnedSlice, ...]

    def of(self, unit: str) -> tuple[OwnedSlice, ...]:
        """Return a unit's slices, by rank. Raises: InputError for an unknown unit."""
        found = tuple(row for row in self.rows if row.unit == unit)
        if not found:
            raise InputError(
                f"no unit {unit!r}: expected one of {', '.join(dict.fromkeys(row.unit for row in self.rows))}"
            )
        return found

    # -- as text --------------------------------------------------------------------------------
    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, width: int = 100) -> list[str]:
        """Return a bar of rank digits per buffer ('.' is padding), then each rank's sum. All bars have the same
        length."""
        buffers = self.buffers()
        names = max([4, *map(len, buffers)])
        numels = max([8, *(len(f"{row.numel:,}") for row in self.rows)])
        bar = max(8, width - names - numels - 4)
        lines = [f"{'unit':{names}} {'elements':>{numels}}  which rank updates it"]
        for name, slices in buffers.items():
            numel, who = slices[0].numel if slices else 0, self._who_updates_all(slices)
            shown = f"{who}, all of it" if who else _digits(_distinct(slices), bar)
            lines.append(f"{name:{names}} {numel:>{numels},}  {shown}")
        lines.append("")
        for rank, numel, padding, like in self._sums():
            extra = f", {padding:,} of them padding" if padding else ""
            lines.append(f"rank {rank}: {numel:,} elements{extra}" + (f", those of rank {like}" if like < rank else ""))
        if padding := sum(row.padding for row in self.rows):
            lines.append(f"'.' is padding: {padding:,} elements in all that belong to no parameter")
        if self.ranks > 10:
            lines.append("a bar's digits are ranks modulo 10")
        return lines

    # -- as HTML --------------------------------------------------------------------------------
    def _repr_html_(self) -> str:
        """Return HTML in which ranks are colours with their numbers."""
        bars = []
        for name, slices in self.buffers().items():
            numel = slices[0].numel if slices else 0
            if who := self._who_updates_all(slices):
                why = f"{name}: all {numel:,} elements are updated by {who}"
                bar = _part(who, Fraction(1), RANK_TONES[-1], why)
            else:
                end = max((row.stop for row in slices), default=1)
                bar = "".join(_parts_of(who, row, end) for who, row in _joined(_distinct(slices)))
            bars.append([name, f"{numel:,}", f'<div style="display:flex;width:100%;min-width:24em">{bar}</div>'])
        body = table(("unit", "elements", "which rank updates which slice"), bars, raw=(2,), left=(0, 2), wide="100%")
        sums, notes = self._sums(), []
        listed = [[str(own.rank), f"{own.numel:,}", f"{own.padding:,}"] for own in sums[:MOST_BARS]]
        body += table(("rank", "elements it updates", "padding"), listed)
        if twins := [own.rank for own in sums if own.like < own.rank]:
            first = ", ".join(map(str, twins[:8]))
            notes.append(f"Ranks {first} update the same slices as ranks before them: replicas.")
        if any(row.padding for row in self.rows):
            notes.append("Hatched: padding, elements that belong to no parameter.")
        if self.ranks > MOST_BARS:
            notes.append(f"Of {self.ranks:,} ranks, the first {MOST_BARS} are listed; bars join neighbouring ranks.")
        return card("Ownership", body, " ".join(notes))

    # -- what both show -------------------------------------------------------------------------
    def buffers(self) -> dict[str, list[OwnedSlice]]:
        """Return the rows of each buffer that holds something, by its name, units in order."""
        groups = groupby(self.rows, lambda row: row.buffer)
        return {name: [row for row in group if row.start < row.stop] for name, group in groups}

    def _who_updates_all(self, slices: Sequence[OwnedSlice]) -> str:
        """Return which ranks each update all of a buffer, as under DDP; else ''."""
        if len(slices) < 2 or any(row.stop - row.start != row.numel for row in slices):
            return ""
        return "every rank" if len(slices) == self.ranks else ranks_text([row.rank for row in slices])

    def _sums(self) -> list[_Sum]:
        sums, seen = [], dict[tuple[tuple[str, int, int], ...], int]()
        is_whole = all(map(self._who_updates_all, self.buffers().values()))
        for rank in range(self.ranks):
            own = [row for row in self.rows if row.rank == rank]
            slices = tuple((row.buffer, row.start, row.stop) for row in own if row.start < row.stop)
            like = rank if is_whole or not slices else seen.setdefault(slices, rank)
            sums.append(_Sum(rank, sum(row.stop - row.start for row in own), sum(row.padding for row in own), like))
        return sums


def ownership(session: Session) -> Ownership:
    """Return who updates what, as the ranks have placed it; before that, as the layout says."""
    layout, rows = session.experiment.layout, []
    for flat in layout.flats.values():
        mesh, axes = layout.mesh, flat.cut_axes if any(weight.splits for weight in flat.weights) else ()
        for index, first in enumerate(first_ranks(mesh, *axes)):
            part = ", ".join(f"{axis} {mesh.index(first, axis)}" for axis in axes if mesh.size(axis) > 1)
            for rank in layout.holders(flat.name):
                if mesh.index(rank, *axes) != index:
                    continue
                placed = _placed(session.parts[rank], flat.name)
                own = layout.own(rank, flat.name) if placed is None else placed.own
                row = OwnedSlice(flat.name, flat.numel, rank, own.start, own.stop, flat.padding(own), part)
                rows.append(row)
    return Ownership(layout.mesh.world_size, tuple(rows))


def _placed(parts: Parts | None, name: str) -> Flat | None:
    """Return a rank's flat of that name, once it has memory."""
    for flat in parts.model.flats if parts is not None else ():
        if flat.name == name and (flat.param_shard is not None or flat.master is not None):
            return flat
    return None


# -- bars ---------------------------------------------------------------------------------------
def _distinct(rows: Sequence[OwnedSlice]) -> list[OwnedSlice]:
    """Return the lowest of the ranks that update the same slice, as replicas do: a bar has room for one."""
    found: dict[tuple[int, int], OwnedSlice] = {}
    for row in rows:
        found.setdefault((row.start, row.stop), row)
    return list(found.values())


def _digits(slices: Sequence[OwnedSlice], length: int) -> str:
    """Return a slice's share of the bar in its rank's last digit; a slice or padding has at least one letter."""
    end = max([row.stop for row in slices], default=1)
    letters = [" "] * length
    for row in slices:
        first, last = row.start * length // end, max(row.start * length // end + 1, row.stop * length // end)
        for at in range(first, min(last, length)):
            letters[at] = str(row.rank % 10)
        if row.padding:
            tail = max(1, row.padding * length // end)
            for at in range(max(first, last - tail), min(last, length)):
                letters[at] = "."
    return "".join(letters)


def _joined(slices: Sequence[OwnedSlice]) -> list[tuple[str, OwnedSlice]]:
    """Return slices and their ranks; of very many, neighbours are joined, because a bar has no room for more."""
    each, joined = max(1, -(-len(slices) // MOST_BARS)), []
    for at in range(0, len(slices), each):
        group = slices[at : at + each]
        first, last = group[0], group[-1]
        who = str(first.rank) if first.rank == last.rank else f"{first.rank}-{last.rank}"
        joined.append((who, first._replace(stop=last.stop, padding=sum(row.padding for row in group))))
    return joined


def _parts_of(who: str, row: OwnedSlice, end: int) -> str:
    """Return a slice as a part of a bar of `end` elements, and its padding as another."""
    own, tone = row.stop - row.start - row.padding, RANK_TONES[row.rank % len(RANK_TONES)]
    what = f"{row.unit}, rank {who}: elements {row.start:,} to {row.stop:,}"
    parts = _part(who, Fraction(own, end), tone, what) if own else ""
    if row.padding:
        why = f"{what}, of which {row.padding:,} are padding"
        parts += _part("" if own else who, Fraction(row.padding, end), tone, why, hatched=True)
    return parts


def _part(label: str, share: Fraction, tone: str, title: str, *, hatched: bool = False) -> str:
    fill = f"{HATCH},{tone}" if hatched else tone
    return (
        f'<div title="{escaped(title)}" style="flex:{float(share):.6f} 1 0;min-width:6px;box-sizing:border-box;'
        f"background:{fill};color:#fff;font:{FONT};font-weight:bold;text-align:center;overflow:hidden;"
        f'white-space:nowrap;border:1px solid currentColor">{escaped(label) or "&nbsp;"}</div>'
    )
