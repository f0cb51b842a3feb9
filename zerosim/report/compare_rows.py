"""The rows of a comparison: functions of one column's result. A group of rows is a table; each column adds a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from zerosim.analysis.changes import by_units, sent
from zerosim.analysis.checks import Checks, agree, checks, formulas_agree
from zerosim.analysis.per_parameter import bytes_per_parameter
from zerosim.analysis.step_interval import step_interval
from zerosim.config.presets.cluster import Cluster
from zerosim.errors import InputError, OutOfMemory
from zerosim.report import words
from zerosim.report.interval import band, implausible, not_ranked, three_figures, trust
from zerosim.report.look import Cell
from zerosim.report.names import KINDS, kind_words
from zerosim.report.time import place, step_values, time_parts
from zerosim.report.verdict import Limit, Planned
from zerosim.report.warnings import warnings_of
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

LINKS: Mapping[str, float] = MappingProxyType({"1 Gb/s": 0.12e9, "400 Gb/s": 48e9})
"""A slow link between nodes and a fast one, in bytes per second as NCCL counts them."""
Value = int | Fraction | float | str | bool | None
"""A whole number or a fraction is in bytes."""
Values = Mapping[str, Value]


class Column:
    """A run or a plan, on a device with a `limit`. `over`: the seconds of its step over each of some links."""

    def __init__(
        self,
        found: Planned | RunResult,
        limit: Limit | None = None,
        cluster: Cluster | None = None,
        over: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        plan = self.plan = found if isinstance(found, Planned) else Planned(found)
        self.limit, self.cluster, self.over = limit, cluster, over
        self.result, self.config, time = plan.result, plan.result.config, plan.result.time
        self.taken, self.total_bytes = plan.fullest.reserved_bytes, plan.total_bytes(limit)
        self.reserve = 0 if limit is None else limit.reserve(self.config)
        self.fits = limit is not None and plan.fits(limit)
        self.step = None if time is None else step_values(self.config, time, cluster)

    @cached_property
    def checks(self) -> list[Checks]:
        return checks(self.result)

    @property
    def room(self) -> str | None:
        """How much of the device is free or missing; None without a device."""
        if self.limit is None:
            return None
        room = self.limit.nbytes - self.total_bytes
        size = ("at least " if self.plan.refusal is not None else "") + format_bytes(abs(room))
        return f"fits, {size} free" if self.fits else f"{size} short"

    def warnings(self) -> list[str]:
        """Return what is slow, unusual or implausible about it."""
        found = warnings_of(self.config, self.limit, self.cluster, self.taken if self.fits else None)
        said = None
        if self.step is not None and self.cluster is not None:
            said = implausible(self.config, self.step["mfu"], self.cluster)
        return found + ([said.rstrip(".")] if said else [])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: whether formulas agree, and the figures of every group of rows."""
        each = [[check.to_dict() for check in (*one.of_memory, *one.of_step)] for one in self.checks]
        formulas = {"agree": formulas_agree(self.checks), "checks": each}
        rows = {group.key: group.rows(self).items() for group in GROUPS}
        figures = {key: {head: _plain(value) for head, value in own} for key, own in rows.items()}
        return {"formulas": formulas, "time": self.step, "figures": figures}


def _plain(value: Value) -> Value:
    """Return a fraction as a number that JSON has."""
    return float(value) if isinstance(value, Fraction) else value


def _states(of: Column) -> Values:
    kinds = zip(*(one.states for one in of.checks), strict=True)
    per, most = bytes_per_parameter(of.result), lambda checks: max(max(check.counted) for check in checks)
    return {
        **dict(zip(("param", "grad", "optim", "states"), map(most, kinds), strict=True)),
        "formula": words.of_rank(of.checks)(of.checks[0].states[-1].text),
        "agrees": agree(chain(*(one.of_memory for one in of.checks))),
        "optim per parameter": float(per["optim"]),
        "states per parameter": float(per["total"]),
        "optimizer keeps": "\n".join(sorted({name for memory in of.result.memory for name in memory.states})) or None,
    }


def _peak(of: Column) -> Values:
    rank, peak = of.plan.fullest, of.plan.fullest.peak
    return {
        **{kind_words(kind): peak.by_kind.get(kind) or None for kind in KINDS},
        "unused inside the allocator": of.taken - peak.total_bytes or None,
        "peak": of.taken,
        "reserved (estimated)": of.reserve or None,
        **{f"beside it, {memory}": other.peak.total_bytes for memory, other in rank.others.items()},
    }


def _units(of: Column) -> Values:
    return {f"{unit or 'step'}, {kind_words(kind)}": n for (unit, kind), n in by_units(of.plan.fullest.peak).items()}


def _sent(of: Column) -> Values:
    """Return the bytes that a rank sends in the last whole step, by operation and in all."""
    rows: dict[str, Value] = {f"{op}, {axis}": nbytes for (op, axis), nbytes in sent(of.result).items()}
    if of.checks[0].of.step is None:
        return rows
    exchanged = [check for one in of.checks for check in one.exchanged]
    means = (sum(check.mean for check in found) for found in ([one.sent[-1] for one in of.checks], exchanged))
    states, activations = (round(mean / len(of.checks)) for mean in means)
    return {
        **rows,
        "sent": states,
        "volume": words.of_rank(of.checks)(of.checks[0].sent[-1].text),
        "exchanged, activations": activations or None,
        "agrees": None if of.result.is_modelled else agree(chain(*(one.of_step for one in of.checks))),
    }


def _time(of: Column) -> Values:
    """Return the parts of a modelled step, on the rank that ends last; of links the seconds alone."""
    over = {f"step, {link}": seconds for link, seconds in of.over.items()}
    if (time := of.result.time) is None or of.step is None or of.cluster is None:
        return over
    found, parts = step_interval(of.config, time, of.cluster), dict(time_parts(time))
    ends = [] if found is None else [three_figures(1e3 * end * time.seconds) for end in (found.low, found.high)]
    speed = {"tokens/s": three_figures(of.step["tokens_per_s"]), "MFU": f"{100 * of.step['mfu']:.1f} %"}
    return {**parts, "step": time.seconds, "8 of 10 measured": " to ".join(ends) or None, **speed, **over}


def _training(of: Column) -> Values:
    losses, lost = of.result.mean_losses, of.result.lost_updates
    if not losses:
        return {}
    stayed = f"{100 * float(sum(lost)) / len(lost):.3g} %" if lost else None
    return {"first loss": losses[0], "last loss": losses[-1], "lr": f"{of.config.optim.lr:g}", "stayed": stayed}


def _about_states(columns: Sequence[Column]) -> str:
    """Return what the letters of the formulas stand for."""
    is_part = any(words.holds_part(column.checks) for column in columns)
    has_experts = any("N_e" in one.of.held for column in columns for one in column.checks)
    letter = "Ψ_d are the parameters on a rank without its experts' Ψ_e." if has_experts else "Ψ_r are those on a rank."
    return "Of the rank with the most, padding included." + f" {letter}" * is_part


class Group(NamedTuple):
    """Rows below one heading, in JSON under `key`. `unit` is the first column's heading."""

    key: str
    title: str
    rows: Callable[[Column], Values]
    note: Callable[[Sequence[Column]], str] = lambda columns: ""
    unit: str = ""
    show: Callable[[float], str] = "{:.5g}".format
    """How a number that counts no bytes is shown."""

    def shows(self, head: str, values: Sequence[Value]) -> bool:
        """Return whether the row says anything."""
        is_quiet, some = self.key == "units" or head in IF_DIFFERENT, set(values)
        return some != {None} and (len(some) > 1 or not is_quiet)

    def cell(self, value: Value) -> Cell:
        return self.show(value) if isinstance(value, float) else value

    def change(self, a: Value, b: Value) -> Cell:
        """Return by how much b is more than a, with its sign; nothing for words."""
        if a is b is None or isinstance(a, str | bool) or isinstance(b, str | bool):
            return None
        change: Any = (b or 0) - (a or 0)
        size = self.show(abs(change)) if isinstance(change, float) else format_bytes(round(abs(change)))
        return f"{'-' if change < 0 else '+'}{size}" if change else "0"


def _about_sent(columns: Sequence[Column]) -> str:
    """Return what was counted, and what was not."""
    native = " The bytes of native collectives are not visible: a ring's bytes are modelled in their place."
    return "Without norms and overflow flags." + native * any(column.result.is_modelled for column in columns)


def _about_time(columns: Sequence[Column]) -> str:
    """Return where the steps were modelled, and how sure their seconds are."""
    timed = [(one.config, one.result.time, one.cluster) for one in columns if one.cluster and one.result.time]
    if not timed:
        return "For nodes of one A100 each."
    is_unknown = not_ranked([band(*one) for one in timed])
    cluster, found = timed[0][2], [step_interval(*one) for one in timed]
    note = f"On {place(cluster)}, on the rank that ends last. {trust(cluster, *found)}"
    return note + " Columns with overlapping ranges are not ranked." * bool(is_unknown)


GROUPS = (
    Group("states", "Model states when backward ends, bytes of a rank", _states, _about_states),
    Group("peak", "What the peak is made of, on the fullest GPU", _peak, unit="kind"),
    Group("units", "The same by unit and kind", _units, unit="unit"),
    Group("sent", "What each rank sends in a step, the mean over ranks", _sent, _about_sent, "operation"),
    Group("time", "Time of a step, modelled", _time, _about_time, "milliseconds", lambda value: f"{1e3 * value:.4g}"),
    Group("training", "Training on the same batches", _training, unit="figure", show="{:.4f}".format),
)
RULED = frozenset(("states", "peak", "sent", "step"))
"""Rows with a rule above them: sums."""
LOST: Mapping[type[Exception], str] = MappingProxyType({OutOfMemory: "no memory", InputError: "refused"})
"""The peak of a column without a result."""
LAST = frozenset(("sent", "volume", "exchanged, activations", "agrees", "step", "8 of 10 measured", "tokens/s", "MFU"))
"""Rows below those that only some columns have."""
IF_DIFFERENT = frozenset(("optim per parameter", "states per parameter", "optimizer keeps", "first loss", "lr"))
"""Rows that are left out where all columns have the same."""
