"""Which collectives each hook called, beside the reference's: the first thing that a report says of a run.

A hook is found by the phase and by the unit's kernels: a collective before a unit computes belongs to `pre_forward` or
`pre_backward`, one after it to `post_forward` or `post_backward`. Without a unit, in the optimizer's phase, sums in
fp64 belong to `reduce_grad_norm` and the others to `publish_params`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from zerosim.device.events import Alloc, Event, Free, Kernel, Launch
from zerosim.grading.record import Finding, where
from zerosim.grading.trial import Trial
from zerosim.units import few

NO_COMPUTE = ("reduce", "fill", "copy")
"""Kernels that a hook runs itself."""

_ORDER = ("pre_forward", "post_forward", "pre_backward", "post_backward", "reduce_grad_norm", "publish_params")
_GATHERS = ("pre_forward", "pre_backward")
_WITHOUT = {
    "pre_forward": "gather a unit's parameters before its forward",
    "pre_backward": "gather a unit's parameters again before its backward",
    "post_backward": "without it the gradient covers only this rank's batch: reduce it over all ranks",
    "reduce_grad_norm": "each rank has the squares of its own slices only: sum them over all ranks",
    "publish_params": (
        "after the update a rank has new values only in its local slice: publish_params must gather all slices"
    ),
}
_RESHARD = (
    "a unit's buffer stays until you call flat.reshard() and no name of yours holds it: free it in "
    "post_forward and post_backward, and gather it again before the next use"
)
_PURPOSE = "squares are no model state: pass purpose='control', so that their sum is not counted as traffic of one"
_LAST = "reduce once a step, when the last microbatch was added: self.last"
_EACH = "reduce in every microbatch, and add up slices: whole gradients that wait for the last one cost ZeRO-1's memory"
_WHOLE = "every rank needs the whole again: all_gather the slices, out=grad"
_EVERY = "reduce every unit whose .reduces is true, on every rank, and leave its slice in grad_shard"
_SHARED = "two units share this buffer: after which one's backward is its gradient complete?"
_INSTEAD = {
    ("all_reduce", "reduce_scatter"): "an all_reduce returns the whole, and a rank needs its slice: use reduce_scatter",
    ("reduce_scatter", "all_reduce"): "a reduce_scatter returns only a slice: use all_reduce where all ranks need all",
    ("all_gather", "reduce_scatter"): "an all_gather adds nothing up: reduce_scatter sums over ranks, and cuts",
    ("reduce_scatter", "all_gather"): "a reduce_scatter adds up: all_gather puts the slices one after the other",
}


class Called(NamedTuple):
    """A collective of one hook: `what` must agree with the reference's."""

    step: int
    hook: str
    what: tuple[str, str, str, int]  # op, purpose, axis, payload bytes
    unit: str
    number: int

    @property
    def key(self) -> tuple[object, ...]:
        """What a hook must call. A reduction belongs to its unit, a gather may be launched in another unit's hook."""
        return (*self.what, self.unit if self.hook == "post_backward" else "")

    @property
    def label(self) -> str:
        op, purpose, axis, _ = self.what
        where = f" within the {axis}" if axis == "node" else ""
        return f"{op}{where}" if purpose == "states" else f"{op}{where} (purpose {purpose!r})"


def called(record: Sequence[Event]) -> list[Called]:
    """Return a rank's collectives with their hooks, in order."""
    found, computed = list[Called](), set[object]()
    for number, event in enumerate(record):
        scope = event.scope
        if isinstance(event, Kernel) and event.name not in NO_COMPUTE:
            computed.add(scope)
        elif isinstance(event, Launch) and event.op != "barrier":  # which carries nothing
            hook = f"{'post' if scope in computed else 'pre'}_{scope.phase}" if scope.unit else f"end_{scope.phase}"
            if scope.phase == "optimizer":
                hook = "reduce_grad_norm" if event.dtype == "fp64" else "publish_params"
            what = event.op, event.purpose, event.axis, event.payload_bytes
            found.append(Called(scope.step, hook, what, scope.unit, number))
    return found


class Hook(NamedTuple):
    """One hook's collectives of a rank and a step, and the reference's."""

    rank: int
    step: int
    name: str
    mine: list[Called]
    theirs: list[Called]

    @property
    def differs(self) -> bool:
        ours, theirs = (Counter(row.key for row in rows) for rows in (self.mine, self.theirs))
        return ours != theirs


def compared(mine: Trial, reference: Trial, rank: int, step: int) -> list[Hook]:
    """Return the hooks of a step, in their order. Of a run that failed, those that ended, with the same part of the
    reference's run."""
    record, theirs = mine.records[rank], reference.records[rank]
    ours, wanted = called(record), called(theirs)
    if not mine.ended[rank]:
        reached = {event.scope for event in record} - {record[-1].scope if record else None}
        ours = [row for row in ours if record[row.number].scope in reached]
        wanted = [row for row in wanted if theirs[row.number].scope in reached]
    ours, wanted = ([row for row in rows if row.step == step] for rows in (ours, wanted))
    names = sorted({row.hook for row in (*ours, *wanted)}, key=lambda name: ([*_ORDER, name].index(name), name))
    return [
        Hook(rank, step, name, [a for a in ours if a.hook == name], [b for b in wanted if b.hook == name])
        for name in names
    ]


def steps_of(trial: Trial) -> range:
    return range(trial.config.optim.steps or 1)


def table(mine: Trial, reference: Trial) -> tuple[str, ...]:
    """Return the collectives by hook as lines: of the first step and rank that differ from the reference's, or one line
    that says that none do. None of f and g's, and of pipelines: no hook calls those."""
    if any(isinstance(event, Launch) and event.axis in ("tp", "pp") for event in reference.records[0]):
        return ()
    ranks = range(len(mine.records))
    for rows in (compared(mine, reference, rank, step) for step in steps_of(mine) for rank in ranks):
        if any(row.differs for row in rows):
            cells = [("  " + row.name, *_sides(row), row.differs) for row in rows]
            head = f"collectives of rank {rows[0].rank} in step {rows[0].step}", "yours", "the reference's", False
            name, wide = (max(len(str(cell[at])) for cell in (head, *cells)) for at in (0, 1))
            return tuple(f"{a:<{name}}  {b:<{wide}}  {c}{' <- differs' * d}" for a, b, c, d in (head, *cells))
    if not any(compared(mine, reference, rank, 0) for rank in ranks):
        return ()
    so_far = "" if mine.failure is None else "up to the failure "
    return (f"collectives: {so_far}each hook calls what the reference's calls",)


def with_table_kept(trial: Trial) -> Trial:
    """Return a reference that keeps the tied table from wte's forward to the head's."""

    def is_left_out(event: Event) -> bool:
        return isinstance(event, Launch) and event.op == "all_gather" and event.scope[1:3] == ("forward", "lm_head")

    return trial._replace(records=[[event for event in record if not is_left_out(event)] for record in trial.records])


def in_halves(trial: Trial) -> Trial:
    """Return a reference whose answer makes an all_reduce out of a reduce_scatter and an all_gather."""
    halves = ("reduce_scatter", "all_gather")

    def split(event: Event) -> list[Event]:
        if isinstance(event, Launch) and event.op == "all_reduce" and event.purpose == "states":
            return [event._replace(op=op) for op in halves]
        return [event]

    return trial._replace(records=[[half for event in record for half in split(event)] for record in trial.records])


def _sides(hook: Hook) -> tuple[str, str]:
    """Return both sides in words; if only units or sizes differ, with the first that does."""
    ours, theirs = _counted(hook.mine), _counted(hook.theirs)
    if not hook.differs or ours != theirs:
        return ours, theirs
    lacking, extra = (
        [row for row in rows if row.key not in {one.key for one in others}]
        for rows, others in ((hook.theirs, hook.mine), (hook.mine, hook.theirs))
    )
    ((a, x), (b, y)) = ((rows[0].unit, rows[0].what[-1]) for rows in (extra or hook.mine, lacking or hook.theirs))
    return (f"{ours}, {a}'s", f"{theirs}, {b}'s") if x == y else (f"{ours} of {x:,} B", f"{theirs} of {y:,} B")


def _counted(rows: Sequence[Called]) -> str:
    return ", ".join(f"{count} {label}" for label, count in Counter(row.label for row in rows).items()) or "none"


class Told(NamedTuple):
    """The first hook whose collectives are not the reference's. `kept`: units that were not gathered because their
    buffers were still there."""

    hook: Hook
    finding: Finding
    is_missing: bool
    kept: tuple[str, ...] = ()


def told(mine: Trial, reference: Trial, rank: int = 0, last: int | None = None) -> Told | None:
    """Return a rank's first hook whose collectives are not the reference's, up to step `last`, in words. None: all
    are."""
    for step in steps_of(mine)[: None if last is None else last + 1]:
        for hook in compared(mine, reference, rank, step):
            if hook.differs:
                return _told(hook, mine)
    return None


def _told(hook: Hook, mine: Trial) -> Told:
    record, batches = mine.records[hook.rank], mine.config.data.accumulate
    ours, theirs = (Counter((row.what, row.unit) for row in rows) for rows in (hook.mine, hook.theirs))
    lacking, extra = theirs - ours, ours - theirs
    if not extra:
        return _missing(hook, mine, lacking)
    words = f"{hook.name} calls {_counted(hook.mine)} in step {hook.step}, the reference {_counted(hook.theirs)}"
    (op, purpose, _, sent), (other, right, _, wanted) = (next(iter(each or ours))[0] for each in (extra, lacking))
    if not lacking:
        units = few([unit for _, unit in extra if unit])
        words, hint = words + (f": more for {units}" if units else ""), "call a collective once for each buffer"
        if hook.name == "post_backward" and len(hook.mine) == batches * len(hook.theirs) > len(hook.theirs):
            hint = _LAST
        elif hook.name == "post_backward" and mine.config.model.tie_embeddings:
            hint = _SHARED
    elif _counted(hook.mine) == _counted(hook.theirs) and sent == wanted:
        given, due = (few(list(dict.fromkeys(unit for _, unit in each))) for each in (extra, lacking))
        words = f"{hook.name} calls {op} for {given} in step {hook.step}, the reference for {due}"
        hint = _SHARED if mine.config.model.tie_embeddings else "which unit's gradient is complete in this hook?"
    elif _counted(hook.mine) == _counted(hook.theirs):
        words = f"{hook.name} sends {sent:,} B in one call in step {hook.step}, the reference {wanted:,} B"
        hint = "which buffer, of how many elements and of which dtype, does the collective get?"
    else:
        hint = _PURPOSE if op == other and purpose != right else _INSTEAD.get((op, other), "")
    at = next(row.number for row in hook.mine if (row.what, row.unit) in extra)
    return Told(hook, Finding(words, hint, where(hook.rank, record, at).only()), is_missing=False)


def _missing(hook: Hook, mine: Trial, lacking: Counter[tuple[tuple[str, str, str, int], str]]) -> Told:
    record, op = mine.records[hook.rank], next(iter(lacking))[0][0]
    called, of = (sum(row.what[0] == op for row in rows) for rows in (hook.mine, hook.theirs))
    units = list(dict.fromkeys(unit or _unit_of(mine, what[-1]) for what, unit in lacking))
    kept, at = _kept(record, hook, units)
    words = f"{hook.name} calls no {op} in step {hook.step}, where the reference calls {of}"
    hint = _WHOLE if (hook.name, op) == ("post_backward", "all_gather") else _WITHOUT.get(hook.name, "")
    if called:
        words = f"{hook.name} calls {op} {called} of {of} times in step {hook.step}"
        words += f": not for {few(units)}" if all(units) and not kept else ""
    if called and hook.name == "post_backward" and op != "all_gather":
        hint = _EACH if of == mine.config.data.accumulate * called else _EVERY
    if kept:
        words += f": {few(kept)} {'is' if len(kept) == 1 else 'are'} still gathered from before"
    place = where(hook.rank, record, _end_of(record, hook) if at is None else at)
    place = place.only("unsharded_param" if kept else "")
    return Told(hook, Finding(words, _RESHARD if kept else hint, place), is_missing=True, kept=kept)


def _unit_of(trial: Trial, nbytes: int) -> str:
    """Return the only unit whose whole parameters have so many bytes, or ''."""
    names = [name for name, size in trial.gathered_bytes.items() if size == nbytes]
    return names[0] if len(names) == 1 else ""


def _kept(record: Sequence[Event], hook: Hook, units: Sequence[str]) -> tuple[tuple[str, ...], int | None]:
    """Return the units whose gathered buffer is still live when they are used in a phase; and the first such event."""
    live, begun, kept, first = dict[int, Alloc](), set[str](), list[str](), None
    phase = hook.name.partition("_")[2]
    for number, event in enumerate(record if hook.name in _GATHERS else ()):
        unit, here = event.scope.unit, event.scope[:2] == (hook.step, phase)
        if here and unit in units and unit not in begun:
            begun.add(unit)
            if any(alloc.kind == "unsharded_param" and alloc.scope.unit == unit for alloc in live.values()):
                kept.append(unit)
                first = number if first is None else first
        if isinstance(event, Alloc):
            live[event.id] = event
        elif isinstance(event, Free):
            live.pop(event.id, None)
    return tuple(kept), first


def _end_of(record: Sequence[Event], hook: Hook) -> int:
    """Return the last event of a hook's phase; if the phase never came, the last of the record."""
    phase = "optimizer" if hook.name in _ORDER[4:] else hook.name.partition("_")[2]
    numbers = [number for number, event in enumerate(record) if event.scope[:2] == (hook.step, phase)]
    return numbers[-1] if numbers else len(record) - 1
