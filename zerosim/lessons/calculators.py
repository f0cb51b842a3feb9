"""Published calculators beside the count, term by term: what each adds, leaves out, or divides otherwise.

Owns the terms of each calculator's rule (`terms`) and why a term differs from the count of the recipe that
comes nearest (`WHY`). The rules' totals are `analysis/formulas/calculators.py`, against which the terms are
checked; the counts are plans of a flat model. Bytes per rank, Adam in mixed precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from zerosim.analysis.formulas import calculators
from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.lessons.tables import table
from zerosim.report.look import Adaptive, Stack
from zerosim.report.plots.bars import Bar, draw_bars, key_of, too_thin
from zerosim.report.plots.page import frame, open_page
from zerosim.report.plots.style import KIND_PAINTS
from zerosim.train.plan import plan
from zerosim.units import format_bytes, format_count

PARAM, GRAD, OPTIM, BUCKET, LIVE = "param", "grad", "optim", "comm", "unsharded_param"
TERMS = (PARAM, GRAD, OPTIM, BUCKET, LIVE)
NAMES: Mapping[str, str] = MappingProxyType({BUCKET: "bucket", LIVE: "live parameters"})
"""What the terms that are no model states are called in a table; in a picture they have their kind's colour."""
NEAREST: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ZeRO paper": ("paper", "end_of_backward"),
        "mlsysim 0.3.0": ("paper", "end_of_backward"),
        "accelerate estimate-memory": ("paper", "end_of_backward"),
        "Megatron-LM theoretical": ("fp32 gradients", "end_of_backward"),
        "llm-analysis": ("fp32 gradients", "end_of_backward"),
        "EleutherAI cookbook": ("fp32 gradients", "end_of_backward"),
        "DeepSpeed estimator, code": ("deepspeed", "gradients_upcast"),
        "DeepSpeed estimator, docs": ("deepspeed", "gradients_upcast"),
    }
)
"""By calculator: the recipe whose count comes nearest, and the moment of the step that it is about."""

WHY: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("mlsysim 0.3.0", BUCKET): "a bucket of 5 % of the rank's gradients",
        ("accelerate estimate-memory", PARAM): "left out: it takes the largest part, not the sum",
        ("accelerate estimate-memory", GRAD): "left out: it takes the largest part, not the sum",
        ("accelerate estimate-memory", OPTIM): "two moments of 4 bytes without the master, and not divided by N",
        ("EleutherAI cookbook", BUCKET): "a bucket of 5e8 elements, 2 bytes each, from stage 1 on",
        ("EleutherAI cookbook", LIVE): "1e9 live parameters in stage 3, 2 bytes each",
        (
            "DeepSpeed estimator, code",
            GRAD,
        ): "beside 16/N there are 2-byte parameters and gradients; it has one of them",
        ("DeepSpeed estimator, docs", GRAD): "as in the code",
    }
)
DOCS_STAGE_2 = "the 2-byte gradients are whole on every rank"


@dataclass(frozen=True, slots=True)
class Compared:
    """One calculator's terms beside those counted, in bytes per rank. `recipe` says what was run."""

    name: str
    stage: int
    says: Mapping[str, Fraction]
    recipe: str
    counted: Mapping[str, int]

    @property
    def differences(self) -> dict[str, Fraction]:
        """By term, what it says less what was counted; terms that agree are left out."""
        gaps = {term: self.says.get(term, Fraction(0)) - self.counted.get(term, 0) for term in TERMS}
        return {term: gap for term, gap in gaps.items() if gap}

    @property
    def total(self) -> Fraction:
        """Of the rule's terms."""
        return sum(self.says.values(), Fraction(0))

    @property
    def counted_total(self) -> int:
        return sum(self.counted.values())


def why(one: Compared, term: str) -> str:
    """Why a term differs. Raises: KeyError where nothing explains it."""
    if one.name == "DeepSpeed estimator, docs" and one.stage == 2 and term == GRAD:
        return DOCS_STAGE_2
    return WHY[one.name, term]


def terms(name: str, stage: int, psi: int, ranks: int) -> dict[str, Fraction] | None:
    """What a calculator's rule adds up, by term; None where it has no answer. Largest layer: none."""
    if (name.startswith("DeepSpeed") and stage < 2) or (name.startswith("Megatron") and stage > 1):
        return None
    if name == "accelerate estimate-memory":
        return {OPTIM: Fraction(8 * psi)}
    grad_bytes = 2 if name in ("ZeRO paper", "mlsysim 0.3.0") else 4
    found = {
        PARAM: Fraction(2 * psi, ranks if stage >= 3 else 1),
        GRAD: Fraction(grad_bytes * psi, ranks if stage >= 2 else 1),
        OPTIM: Fraction(12 * psi, ranks if stage >= 1 else 1),
    }
    if name == "mlsysim 0.3.0":
        found[BUCKET] = found[GRAD] / 20
    if name == "EleutherAI cookbook":
        found[BUCKET] = Fraction(2 * 500_000_000 if stage >= 1 else 0)
        found[LIVE] = Fraction(2 * 1_000_000_000 if stage == 3 else 0)
    if name.startswith("DeepSpeed") and stage == 2:
        # An fp32 gradient beside the 2-byte one: 2 + 18/N in the code; in the docs the 2-byte one is whole, 4 + 16/N.
        halves = Fraction(2 * psi, ranks if name.endswith("code") else 1)
        found[GRAD] = halves + Fraction(4 * psi, ranks)
    return found


def count(recipe: str, stage: int, psi: int, ranks: int, mark: str) -> dict[str, int]:
    """Model states by kind on rank 0 of a flat model at a mark, counted on shapes. `fp32 gradients` is the paper's
    recipe with grad_dtype fp32. A stage without the mark is read at the end of backward."""
    changes = {"grad_dtype": "fp32"} if recipe == "fp32 gradients" else {"recipe": recipe}
    config = RunConfig(model="flat", params=psi, units=1, ranks=ranks, stage=stage, steps=1, **PLAN_DEFAULTS)
    memory = plan(config.replace(**changes)).memory[0]
    return memory.model_states(mark if mark in memory.marks else "end_of_backward")


def compare(name: str, stage: int, psi: int = 7_500_000_000, ranks: int = 64) -> Compared | None:
    """A calculator beside the recipe that comes nearest; None where it has no answer."""
    says = terms(name, stage, psi, ranks)
    if says is None:
        return None
    recipe, mark = NEAREST[name]
    return Compared(name, stage, says, recipe, count(recipe, stage, psi, ranks, mark))


def answers(psi: int = 7_500_000_000, ranks: int = 64) -> Stack | Adaptive:
    """What each published rule says for stages 0 to 3, in GB."""
    rows = []
    for calculator in calculators():
        totals = [calculator.model_states(stage, psi, ranks) for stage in range(4)]
        rows.append((calculator.name, *("-" if total is None else f"{float(total) / 1e9:.4g}" for total in totals)))
    return table(("GB per rank", "stage 0", "stage 1", "stage 2", "stage 3"), rows)


def differences_table(found: Sequence[Compared]) -> Stack | Adaptive:
    """One line for each term that differs, and one for each calculator that agrees with its recipe throughout."""
    rows: list[Sequence[object]] = []
    for one in found:
        start = (one.name, one.stage)
        if not one.differences:
            rows.append((*start, "none", "", "", "", "every term is the count"))
        for term, gap in one.differences.items():
            says, counted = one.says.get(term, Fraction(0)), one.counted.get(term, 0)
            gigabytes = f"{float(gap) / 1e9:+.4g}"
            rows.append((*start, NAMES.get(term, term), _gb(says), _gb(counted), gigabytes, why(one, term)))
    recipes = ", ".join(dict.fromkeys(one.recipe for one in found))
    return table(
        ("calculator", "stage", "term", "says", "counted", "GB", "why"),
        rows,
        title=f"Terms that differ; counted: {recipes}",
    )


def calculators_figure(stage: int, psi: int = 7_500_000_000, ranks: int = 64, theme: str = "light") -> Any:
    """Bars by term: each recipe's count, and below it the calculators that come near it. A matplotlib Figure."""
    bars = []
    for recipe in dict.fromkeys(recipe for recipe, _ in NEAREST.values()):
        near = [
            one for name, (own, _) in NEAREST.items() if own == recipe and (one := compare(name, stage, psi, ranks))
        ]
        if near:
            bars.append(Bar(f"counted: {recipe}", dict(near[0].counted), 0, True))
        bars += [Bar(one.name, {term: int(part) for term, part in one.says.items()}, 0, True) for one in near]
    page = open_page((8.0, 0.42 * len(bars) + 1.5), theme)
    heading = f"Model states per rank in stage {stage}: counted, and as calculators have it"
    subtitle = f"Ψ = {format_count(psi)} parameters, N = {ranks} ranks, Adam in mixed precision"
    frame(page, heading, subtitle, key_of(page, bars, KIND_PAINTS), [*_keys(bars), *too_thin(bars)])
    draw_bars(page, bars, KIND_PAINTS)
    return page.figure


def _keys(bars: Sequence[Bar]) -> list[str]:
    """What the colours of buffers stand for here, where there are any."""
    found = [f"{kind} is the {name}" for kind, name in NAMES.items() if any(bar.parts.get(kind) for bar in bars)]
    return [f"No model states: {', '.join(found)} that a calculator adds."] if found else []


def _gb(nbytes: Fraction | int) -> str:
    return format_bytes(int(nbytes)) if nbytes else "0"
