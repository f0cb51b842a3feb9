"""Each key of another framework's file, planned with and without it: the bytes, traffic and seconds that it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

from zerosim.analysis.changes import Totals, totals
from zerosim.config import RunConfig
from zerosim.dialects import Reading
from zerosim.dialects.reading import Said
from zerosim.dialects.rows import row_of
from zerosim.errors import InputError
from zerosim.train.result import RunResult

READ = ("understood", "auto")


class Knob(NamedTuple):
    """A key, and what the plan has more with it than without it.

    does, default, myth  its effect in that framework, the default there, and what people take it for
    more                 the peak's, the traffic's and the step's difference; None if the plan is the same without it
    kinds                bytes by kind at the peak, without it and with it, the largest change first
    why_not              why the file cannot be planned without the key
    """

    said: Said
    does: str
    default: Any
    myth: str
    more: Totals | None = None
    kinds: Mapping[str, tuple[int, int]] = MappingProxyType({})
    why_not: str = ""

    @property
    def is_without_effect(self) -> bool:
        """Whether the plan without it is the same."""
        return self.said.how in READ and self.more is None and not self.why_not

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        more = self.more and {
            "peak_bytes": self.more.taken_bytes,
            "sent_bytes": float(self.more.sent_bytes),
            "seconds": self.more.seconds,
        }
        return {
            **self.said._asdict(),
            "does": self.does,
            "default": self.default if isinstance(self.default, str | int | float | bool | None) else str(self.default),
            "myth": self.myth,
            "with_minus_without": more,
            "peak_by_kind": {kind: {"without": a, "with": b} for kind, (a, b) in self.kinds.items() if a != b},
            "cannot_be_left_out": self.why_not,
        }


def knobs(
    reading: Reading,
    config: RunConfig,
    config_without: Callable[[str], RunConfig],
    plan: Callable[[RunConfig], RunResult],
) -> list[Knob]:
    """Return every key of the file in its order. `config_without` reads the file without a key.

    Equal configurations are planned once. Raises: InputError if the file itself cannot be planned.
    """
    whole, planned = plan(config), list[tuple[RunConfig, RunResult]]()
    after = totals(whole)
    found = []
    for said in reading.said:
        row = row_of(reading.rows, said.key)
        knob = Knob(said, row.does if row else "", row.default if row else None, row.myth if row else "")
        if said.how in READ:
            try:
                other = config_without(said.key)
                if other != config:
                    result = next((one for same, one in planned if same == other), None)
                    if result is None:
                        planned.append((other, result := plan(other)))
                    knob = _beside(knob, result, whole, after)
            except InputError as error:
                knob = knob._replace(why_not=str(error))
        found.append(knob)
    return found


def _beside(knob: Knob, without: RunResult, whole: RunResult, after: Totals) -> Knob:
    before = totals(without)
    is_timed = before.seconds is not None and after.seconds is not None
    more = Totals(
        after.taken_bytes - before.taken_bytes,
        after.sent_bytes - before.sent_bytes,
        (after.seconds or 0) - (before.seconds or 0) if is_timed else None,
    )
    if more[:2] == (0, Fraction(0)) and not more.seconds:
        return knob
    kinds = [max(result.memory, key=lambda one: one.peak.total_bytes).peak.by_kind for result in (without, whole)]
    return knob._replace(more=more, kinds=pairs(*kinds))


def pairs(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """Return both values of each key, 0 if one side lacks it, largest change first."""
    both = {key: (a.get(key, 0), b.get(key, 0)) for key in {**a, **b}}
    return dict(sorted(both.items(), key=lambda item: -abs(item[1][1] - item[1][0])))
