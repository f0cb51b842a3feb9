"""Variants of an exercise by seed, for graded credit. Seed 0 is the exercise as it is printed.

A seed draws these, unless they are the point of a run:

- sizes: tokens, vocabulary, layers; of a pipeline how many microbatches there are
- which units there are, in which order: GPT's or Llama's
- who owns what: the number of ranks, and so every rank's slice
- which bug: that of `given/bugs.py` or that of `given/other_bugs.py`, with its own hints
- the numbers of an answer that is asked by itself
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from zerosim.errors import InputError
from zerosim.grading.entry import ROWS, case
from zerosim.grading.exercise import Exercise
from zerosim.grading.given import other_bugs

MOST = 2**31 - 1
_RANKS = {2: (2, 3), 3: (3, 5), 4: (3, 4, 6), 5: (5, 7)}
_FIXED = ("tp", "hidden")  # a run with these has sizes that are its point
_FAMILIES = {"gpt": "GPT", "llama": "Llama"}


def variant(one: Exercise, seed: int) -> Exercise:
    """Return the exercise as that seed has it. Raises: InputError for a seed out of range."""
    if not 0 <= seed <= MOST:
        raise InputError(f"--seed {seed}: expected 0 to {MOST}")
    if seed == 0:
        return one
    draw, row = random.Random(f"{one.name} {seed}"), ROWS[one.name]
    changes: dict[str, Any] = {}
    if one.examine is not None:
        changes["examine"] = one.examine._replace(seed=seed)
    if hasattr(other_bugs, one.given.__name__) and draw.random() < 0.5:
        other = {key: tuple(value) if isinstance(value, list) else value for key, value in row.get("other", {}).items()}
        changes |= {"given": getattr(other_bugs, one.given.__name__), **other}
    # A skeleton or question may name GPT's units.
    families = ("gpt",) if "wte" in one.skeleton + one.question else tuple(_FAMILIES)
    family, layers = draw.choice(families), draw.choice((2, 3))
    cases = [case(one.stage, **_varied(run, draw, family, layers)) for run in row.get("runs", ())]
    return dataclasses.replace(one, cases=tuple(cases), **changes)


def _varied(run: dict[str, Any], draw: random.Random, family: str, layers: int) -> dict[str, Any]:
    """Return a run's flags, with the seed's draws and words for them."""
    if any(key in run for key in _FIXED):
        return run
    seq, vocab = draw.randint(4, 8), draw.choice((240, 256, 272))
    if "pp" in run:
        more = draw.randint(0, 1) * run["pp"]  # whole rounds, and none where microbatches are fewer than stages
        batches = run["accumulate"] + more * (run["accumulate"] >= run["pp"])
        drawn = {"seq": seq, "vocab": vocab, "accumulate": batches}
        return {**run, **drawn, "varied": [f"{seq} tokens of {vocab}"]}
    drawn = {"model": family, "layers": run.get("layers", layers), "seq": seq, "vocab": vocab}
    if "note" not in run and "secondary_shard" not in run:  # whose nodes must divide them
        drawn["ranks"] = draw.choice(_RANKS[run["ranks"]])
    words = f"{_FAMILIES[family]}, {drawn['layers']} layers, {seq} tokens of {vocab}"
    return {**run, **drawn, "varied": [words]}
