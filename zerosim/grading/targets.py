"""What exercises are made of: runs on one tiny model, lists of checks, and the paper's volumes.

Source of the volumes: ZeRO paper (arXiv 1910.02054), section 7, as in `analysis/formulas/traffic.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from zerosim.analysis.formulas.traffic import volume
from zerosim.config import RunConfig
from zerosim.grading import checks, traffic
from zerosim.grading.exercise import Case

_TINY: dict[str, Any] = dict(
    model="gpt", layers=2, hidden=24, heads=2, seq=5, vocab=256, micro_batch=1, steps=2, bucket_bytes=None, lr=1e-2
)
"""Five or six units, about 21,000 parameters: an event more or less is a unit, not noise."""


def case_of(label: str, stage: int, **changes: Any) -> Case:
    """A run on the tiny model, its head its own unless told otherwise."""
    return Case(label, RunConfig(**{**_TINY, "stage": stage, "tie_embeddings": False, **changes}))


def elements(stage: int) -> Callable[[RunConfig, int, int], Fraction]:
    """Elements sent per rank and step, times N/(N-1), by the paper's closed form."""

    def sent(config: RunConfig, psi: int, tied: int) -> Fraction:
        form = volume(stage, micro_batches=config.data.accumulate, tied=config.model.tie_embeddings)
        return (form.grads + form.params) * psi + form.tied * tied

    return sent


RUN = (("weights", checks.weights), ("bytes", checks.states), ("peak", checks.highest))
SENT = (("volume", traffic.volume), ("calls", traffic.number))
GATHERED = (("gathered", checks.gathered),)
PLAIN, SHARDED = (*RUN, *SENT), (*RUN, *GATHERED, *SENT)
