"""The elements of an exercise: its row of `given/exercises.toml`, its code, and the defaults of its ZeRO stage.

Runs are on one tiny model. Volumes are the paper's (arXiv 1910.02054, section 7).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib import resources
from typing import Any

from zerosim.analysis.formulas.traffic import Schedule, volume
from zerosim.config import RunConfig
from zerosim.grading import adapting, checks, traffic
from zerosim.grading.asking import by_calls
from zerosim.grading.exercise import Case, Exercise

ROWS: dict[str, dict[str, Any]] = tomllib.loads(
    resources.files("zerosim.grading.given").joinpath("exercises.toml").read_text("utf-8")
)

_TINY: dict[str, Any] = dict(
    model="gpt", layers=2, hidden=24, heads=2, seq=5, vocab=256, micro_batch=1, steps=2, bucket_bytes=None, lr=1e-2
)
"""Five or six units, about 21,000 parameters: a difference of an event is a unit, not noise."""

RUN = (("weights", checks.weights), ("bytes", checks.states), ("peak", checks.highest))
SENT = (("volume", traffic.volume), ("calls", traffic.number))
PLAIN, SHARDED = (*RUN, *SENT), (*RUN, ("gathered", checks.gathered), *SENT)

_REDUCES = ("post_backward", "reduce", "launch_reduce", "launch_in_place")
_PUBLISHES = (*_REDUCES, "publish_params", "publish", "launch_publish")
_GATHERS = (
    *("pre_forward", "post_forward", "pre_backward", *_REDUCES),
    *("unshard", "reshard", "reshard_after_forward", "gather", "launch_gather"),
)
_YOURS = (_REDUCES, _PUBLISHES, _PUBLISHES, _GATHERS)
"""By ZeRO stage, the methods that a strategy must not take from zerosim."""


def case(
    stage: int, ranks: int, *, note: str = "", tied: bool = False, varied: Sequence[str] = (), **changes: Any
) -> Case:
    """Make a run on the tiny model, named after its changes; `varied`: by a seed, in words."""
    config = RunConfig(**{**_TINY, "stage": stage, "ranks": ranks, "tie_embeddings": tied, **changes})
    who = f"{ranks} ranks" if config.mesh.pp == 1 else f"{ranks} stages"
    parts = [who, *(["tied"] if tied else []), *([note] if note else []), *varied]
    if config.data.accumulate > 1:
        parts.append(f"{config.data.accumulate} microbatches")
    if config.optim.clip_norm:
        parts.append(f"clip {config.optim.clip_norm}")
    return Case(", ".join(parts), config)


def _elements(stage: int) -> Callable[[RunConfig, int, int], Fraction]:
    """Return the elements sent per rank and step, times N/(N-1), by the paper's closed form."""

    def sent(config: RunConfig, psi: int, tied: int) -> Fraction:
        form = volume(stage, Schedule(config.data.accumulate, tied=config.model.tie_embeddings))
        return form.total.elements.at(Ψ=psi, VD=tied)

    return sent


def exercise(name: str, given: Any, **code: Any) -> Exercise:
    """Make the exercise of that name: its row, its ZeRO stage's defaults, and `code` for the rest."""
    row: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in ROWS[name].items()}
    stage, runs, sent, check = (row.pop(key, "") for key in ("stage", "runs", "sent", "asked"))
    row.pop("other", None)
    if check:
        code["examine"] = code["examine"]._replace(**dict(zip(("name", "expected", "counted"), check, strict=True)))
    usual = dict(
        cases=tuple(case(stage, **run) for run in runs),
        judges=SHARDED if runs and stage == 3 else PLAIN if runs else (),
        volume=(sent or str(volume(stage)), _elements(stage)),
        adapt=adapting.strategy if runs else adapting.only_asked(given),
        gathered=1 if stage == 3 else None,
        yours=_YOURS[stage],
        decisive=("weights",) if runs else check[:1],
    )
    return Exercise(number=list(ROWS).index(name) + 1, name=name, given=given, stage=stage, **{**usual, **row, **code})


def asked(name: str, given: Any, questions: Callable[[int], Sequence[Any]], wrong: Callable[..., Any]) -> Exercise:
    """Make the exercise of that name, whose answer is a function that is only called."""
    return exercise(name, given, examine=by_calls(questions, wrong))
