"""What an entry of the catalogue is made of: runs on one tiny model, and the checks that are usual at a stage.

Volumes are the paper's (arXiv 1910.02054, section 7).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from zerosim.analysis.formulas.traffic import volume
from zerosim.config import RunConfig
from zerosim.grading import adapting, checks, traffic
from zerosim.grading.exercise import Case, Exercise

_TINY: dict[str, Any] = dict(
    model="gpt", layers=2, hidden=24, heads=2, seq=5, vocab=256, micro_batch=1, steps=2, bucket_bytes=None, lr=1e-2
)
"""Five or six units, about 21,000 parameters: an event more or less is a unit, not noise."""

RUN = (("weights", checks.weights), ("bytes", checks.states), ("peak", checks.highest))
SENT = (("volume", traffic.volume), ("calls", traffic.number))
PLAIN, SHARDED = (*RUN, *SENT), (*RUN, ("gathered", checks.gathered), *SENT)


def case(stage: int, ranks: int, *, note: str = "", tied: bool = False, **changes: Any) -> Case:
    """A run on the tiny model, named after what is changed of it."""
    config = RunConfig(**{**_TINY, "stage": stage, "ranks": ranks, "tie_embeddings": tied, **changes})
    who = f"{ranks} ranks" if config.mesh.pp == 1 else f"{ranks} stages"
    parts = [who, *(["tied"] if tied else []), *([note] if note else [])]
    if config.data.accumulate > 1:
        parts.append(f"{config.data.accumulate} micro-batches")
    if config.optim.clip_norm is not None:
        parts.append(f"clip {config.optim.clip_norm}")
    return Case(", ".join(parts), config)


def stages_of(stages: int, micro_batches: int) -> dict[str, Any]:
    """What a run on a pipeline with a layer on each stage changes."""
    return dict(ranks=stages, pp=stages, layers=stages, accumulate=micro_batches)


def _elements(stage: int) -> Callable[[RunConfig, int, int], Fraction]:
    """Elements sent per rank and step, times N/(N-1), by the paper's closed form."""

    def sent(config: RunConfig, psi: int, tied: int) -> Fraction:
        form = volume(stage, micro_batches=config.data.accumulate, tied=config.model.tie_embeddings)
        return form.total.elements.at(Ψ=psi, VD=tied)

    return sent


def exercise(
    head: tuple[int, str, Any, int, str],
    question: str,
    hints: tuple[str, ...],
    runs: tuple[dict[str, Any], ...],
    *,
    sent: str = "",
    **more: Any,
) -> Exercise:
    """An exercise with what is usual at its stage, and `more` of what is not.

    `head` is its number and name, what is given, the stage and the title; `sent` is its volume in words.
    """
    number, name, given, stage, title = head
    usual = dict(
        cases=tuple(case(stage, **run) for run in runs),
        judges=SHARDED if stage == 3 else PLAIN,
        volume=(sent or str(volume(stage)), _elements(stage)),
        adapt=adapting.strategy,
        gathered=1 if stage == 3 else None,
    )
    return Exercise(number, name, title, question, given, stage, hints=hints, **{**usual, **more})
