"""Who owns which slice of what, as a picture: one bar per unit, cut into the ranks' slices, padding hatched.

Owns its HTML and its text. Rows are plain data (`stepper.OwnedSlice`): elements [start, stop) of a unit's
flat buffer that a rank updates, `padding` of them beyond the last parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import groupby
from typing import Protocol

from zerosim.report.html import FONT, HATCH, card, escaped, table

RANK_TONES = ("#165cd8", "#ad400d", "#007d47", "#9a4878", "#b48600", "#23a2ae", "#8f86f4", "#958f83")
MOST_BARS = 64
"""A bar shows so many ranks; beyond them, ranks are joined into groups."""


class SliceRow(Protocol):
    """One rank's slice of one unit."""

    @property
    def unit(self) -> str: ...
    @property
    def numel(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def padding(self) -> int: ...


def by_unit(rows: Sequence[SliceRow]) -> Mapping[str, list[SliceRow]]:
    """Rows of each unit, those that hold something, units in order."""
    return {unit: [row for row in group if row.start < row.stop] for unit, group in groupby(rows, lambda row: row.unit)}


def is_whole_everywhere(rows: Sequence[SliceRow], ranks: int) -> bool:
    """Whether every rank updates all of it, as under DDP."""
    return len(rows) == ranks > 1 and all(row.stop - row.start == row.numel for row in rows)


def firsts(rows: Sequence[SliceRow]) -> list[SliceRow]:
    """Of the ranks that update the same slice, as replicas do, the lowest: a bar has room for one."""
    found: dict[tuple[int, int], SliceRow] = {}
    for row in rows:
        found.setdefault((row.start, row.stop), row)
    return list(found.values())


def owned_numel(rows: Sequence[SliceRow], rank: int) -> tuple[int, int]:
    """Elements that a rank updates, and those of them that are padding."""
    own = [row for row in rows if row.rank == rank]
    return sum(row.stop - row.start for row in own), sum(row.padding for row in own)


# -- text ---------------------------------------------------------------------------------------
def ownership_lines(rows: Sequence[SliceRow], ranks: int, width: int = 100) -> list[str]:
    """A bar of rank digits per unit ('.' is padding), then each rank's sum. Bars have one length each."""
    units = by_unit(rows)
    names = max([4, *(len(unit) for unit in units)])
    numels = max([8, *(len(f"{row.numel:,}") for row in rows)])
    bar = max(8, width - names - numels - 4)
    lines = [f"{'unit':{names}} {'elements':>{numels}}  which rank updates it"]
    for unit, slices in units.items():
        numel = slices[0].numel if slices else 0
        shown = "every rank, all of it" if is_whole_everywhere(slices, ranks) else _digits(firsts(slices), bar)
        lines.append(f"{unit:{names}} {numel:>{numels},}  {shown}")
    padding = sum(row.padding for row in rows)
    lines.append("")
    lines += [f"rank {rank}: {own:,} elements{extra}" for rank, own, extra in _sums(rows, ranks)]
    if padding:
        lines.append(f"'.' is padding: {padding:,} elements in all that belong to no parameter")
    if ranks > 10:
        lines.append("a bar's digits are ranks modulo 10")
    return lines


def ownership_text(rows: Sequence[SliceRow], ranks: int, width: int = 100) -> str:
    """The lines as one text, as `repr` shows it."""
    return "\n".join(ownership_lines(rows, ranks, width))


def _digits(slices: Sequence[SliceRow], length: int) -> str:
    """A slice's share of the bar in its rank's last digit; a slice or padding that is there has one letter at least."""
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


def _sums(rows: Sequence[SliceRow], ranks: int) -> list[tuple[int, int, str]]:
    sums, seen = [], dict[tuple[tuple[str, int, int], ...], int]()
    is_whole = all(is_whole_everywhere(slices, ranks) for slices in by_unit(rows).values())
    for rank in range(ranks):
        own, padding = owned_numel(rows, rank)
        slices = tuple((row.unit, row.start, row.stop) for row in rows if row.rank == rank and row.start < row.stop)
        first = rank if is_whole or not slices else seen.setdefault(slices, rank)
        extra = f", {padding:,} of them padding" if padding else ""
        sums.append((rank, own, extra + (f", those of rank {first}" if first < rank else "")))
    return sums


# -- HTML ---------------------------------------------------------------------------------------
def ownership_html(rows: Sequence[SliceRow], ranks: int) -> str:
    """The picture for a notebook: a bar per unit, ranks as colours with their numbers, padding hatched."""
    lines = []
    for unit, slices in by_unit(rows).items():
        numel = slices[0].numel if slices else 0
        if is_whole_everywhere(slices, ranks):
            bar = _part("every rank", Fraction(1), RANK_TONES[-1], f"{unit}: every rank updates all {numel:,} elements")
        else:
            bar = "".join(_slice(row, max(row.stop for row in slices)) for row in _joined(firsts(slices)))
        lines.append([unit, f"{numel:,}", f'<div style="display:flex;width:100%;min-width:24em">{bar}</div>'])
    body = table(("unit", "elements", "which rank updates which slice"), lines, raw=(2,), left=(0, 2), wide="100%")
    shown = _sums(rows, ranks)[:MOST_BARS]
    sums = table(
        ("rank", "elements it updates", "padding"),
        [[str(rank), f"{own:,}", f"{owned_numel(rows, rank)[1]:,}"] for rank, own, _ in shown],
    )
    notes = []
    if any(twins := [rank for rank, _, extra in _sums(rows, ranks) if "those of rank" in extra]):
        notes.append(f"Ranks {', '.join(map(str, twins[:8]))} update the same slices as ranks before them: replicas.")
    if any(row.padding for row in rows):
        notes.append("Hatched: padding, elements that belong to no parameter.")
    if ranks > MOST_BARS:
        notes.append(f"Of {ranks:,} ranks, the first {MOST_BARS} are listed; bars join neighbouring ranks.")
    return card("Ownership", body + sums, " ".join(notes))


def _joined(slices: Sequence[SliceRow]) -> Sequence[SliceRow]:
    """Of very many slices, those of every k-th rank: a bar has no room for more."""
    if len(slices) <= MOST_BARS:
        return slices
    return [
        _Group(slices[at : at + -(-len(slices) // MOST_BARS)])
        for at in range(0, len(slices), -(-len(slices) // MOST_BARS))
    ]


class _Group:
    """Neighbouring slices shown as one."""

    def __init__(self, rows: Sequence[SliceRow]) -> None:
        first, last = rows[0], rows[-1]
        self.unit, self.numel, self.rank = first.unit, first.numel, first.rank
        self.start, self.stop, self.last_rank = first.start, last.stop, last.rank
        self.padding = sum(row.padding for row in rows)


def _slice(row: SliceRow, end: int) -> str:
    own, tone = row.stop - row.start - row.padding, RANK_TONES[row.rank % len(RANK_TONES)]
    last_rank = getattr(row, "last_rank", row.rank)
    who = str(row.rank) if last_rank == row.rank else f"{row.rank}-{last_rank}"
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
