"""Published calculators term by term for notebook 09: the terms that each adds up, leaves out, or divides otherwise.

The rules' terms and the counts, plans of a flat model, are the notebook's own. Bytes per rank, Adam in mixed precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from zerosim.lessons.tables import table
from zerosim.report.look import Adaptive, Stack
from zerosim.report.plots.bars import Bar, bars_chart
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.style import KIND_PAINTS
from zerosim.units import format_bytes

PARAM, GRAD, OPTIM, BUCKET, LIVE = "param", "grad", "optim", "comm", "unsharded_param"
TERMS = (PARAM, GRAD, OPTIM, BUCKET, LIVE)
NAMES: Mapping[str, str] = MappingProxyType({BUCKET: "bucket", LIVE: "live parameters"})
"""Names in a table of the terms that are no model states; in a picture they have their kind's colour."""
NEAREST: Mapping[str, str] = MappingProxyType(
    {
        "ZeRO paper": "paper",
        "mlsysim 0.3.0": "paper",
        "accelerate estimate-memory": "paper",
        "Megatron-LM theoretical": "fp32 gradients",
        "llm-analysis": "fp32 gradients",
        "EleutherAI cookbook": "fp32 gradients",
        "DeepSpeed estimator, code": "deepspeed",
        "DeepSpeed estimator, docs": "deepspeed",
    }
)
"""By calculator: the recipe with the nearest count."""

_LEFT_OUT = "left out: it takes the largest part, not the sum"
WHY: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("mlsysim 0.3.0", BUCKET): "a bucket of 5 % of the rank's gradients",
        ("accelerate estimate-memory", PARAM): _LEFT_OUT,
        ("accelerate estimate-memory", GRAD): _LEFT_OUT,
        ("accelerate estimate-memory", OPTIM): "two moments of 4 bytes without the master, and not divided by N",
        ("EleutherAI cookbook", BUCKET): "a bucket of 5e8 elements, 2 bytes each, from stage 1 on",
        ("EleutherAI cookbook", LIVE): "1e9 live parameters in stage 3, 2 bytes each",
        ("DeepSpeed estimator, code", GRAD): (
            "beside 16/N there are 2-byte parameters and gradients; it has one of them"
        ),
        ("DeepSpeed estimator, docs", GRAD): "as in the code",
    }
)
"""By calculator and term: why the term differs from the count."""
MISSES: Mapping[str, str] = MappingProxyType(
    {
        "DeepSpeed, stage 2": (
            "no activations, logits or buckets; without offload the bytes of one moment, when the step has copied "
            "gradients to fp32"
        ),
        "DeepSpeed, stage 3": (
            "no activations, logits, buckets, prefetch or persistent parameters; 18 of the 20 bytes that the step "
            "divides"
        ),
        "accelerate": "no ranks, ZeRO stages or activations; the largest of four figures, not their sum",
    }
)
"""By the frameworks' own estimators, in a sentence, what each leaves out."""
DOCS_STAGE_2 = "the 2-byte gradients are whole on every rank"


@dataclass(frozen=True, slots=True)
class Compared:
    """One calculator's terms beside the counted ones, in bytes per rank."""

    name: str
    stage: int
    says: Mapping[str, Fraction]
    counted: Mapping[str, int]

    @property
    def recipe(self) -> str:
        """The recipe that was counted."""
        return NEAREST[self.name]

    @property
    def differences(self) -> dict[str, Fraction]:
        """By term, the calculator's figure minus the count; terms that agree are left out."""
        gaps = {term: self.says.get(term, Fraction(0)) - self.counted.get(term, 0) for term in TERMS}
        return {term: gap for term, gap in gaps.items() if gap}

    @property
    def total(self) -> Fraction:
        """The sum of the rule's terms."""
        return sum(self.says.values(), Fraction(0))

    @property
    def counted_total(self) -> int:
        return sum(self.counted.values())

    def why(self, term: str) -> str:
        """Return why a term differs. Raises: KeyError if no explanation is known."""
        if (self.name, self.stage, term) == ("DeepSpeed estimator, docs", 2, GRAD):
            return DOCS_STAGE_2
        return WHY[self.name, term]


def differences_table(found: Sequence[Compared]) -> Stack | Adaptive:
    """Return one line for each term that differs, and one for each calculator that agrees with its recipe
    throughout."""
    rows: list[Sequence[object]] = []
    for one in found:
        start = (one.name, one.stage)
        if not one.differences:
            rows.append((*start, "none", "", "", "", "every term is the count"))
        for term, gap in one.differences.items():
            both = (one.says.get(term, 0), one.counted.get(term, 0))
            says, counted = (format_bytes(int(nbytes)) if nbytes else "0" for nbytes in both)
            gigabytes = f"{float(gap) / 1e9:+.4g}"
            rows.append((*start, NAMES.get(term, term), says, counted, gigabytes, one.why(term)))
    recipes = ", ".join(dict.fromkeys(one.recipe for one in found))
    header = ("calculator", "stage", "term", "says", "counted", "GB", "why")
    return table(header, rows, title=f"Terms that differ; counted: {recipes}")


def calculators_figure(found: Sequence[Compared], title: str, subtitle: str = "") -> Chart:
    """Draw bars by term: each recipe's count, and below it the calculators that come near it."""
    near: dict[str, list[Compared]] = {}
    for one in sorted(found, key=lambda one: list(NEAREST).index(one.name)):
        near.setdefault(one.recipe, []).append(one)
    bars = []
    for recipe, those in near.items():
        bars.append(Bar(f"counted: {recipe}", dict(those[0].counted), 0, True))
        bars += [Bar(one.name, {term: int(part) for term, part in one.says.items()}, 0, True) for one in those]
    buffers = [f"{kind} is the {name}" for kind, name in NAMES.items() if any(bar.parts.get(kind) for bar in bars)]
    notes = [f"No model states: {', '.join(buffers)} that a calculator adds."] if buffers else []
    return bars_chart(title, subtitle, bars, KIND_PAINTS, notes, height=0.42 * len(bars) + 1.5)
