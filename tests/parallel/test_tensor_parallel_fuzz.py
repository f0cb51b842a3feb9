"""Random meshes, models and options with tensor parallelism: no hang, no leak, shapes leave the record of the run, and
in float64 losses are those of one rank.

Seeded; `python tests/parallel/test_tensor_parallel_fuzz.py 1000 [SEED]` runs as many as one likes.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.train.plan import plan
from zerosim.train.run import run

CASES = 12
MOST_RANKS = 16


def drawn(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model with a batch, in fields that one rank can have too; and how a mesh cuts and runs it."""
    tp, family = rng.choice((2, 2, 3, 4)), rng.choice(("gpt", "gpt", "llama", "llama", "flat"))
    replicas, shards, accumulate = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2))
    while tp * replicas * shards > (8 if rng.random() < 0.8 else MOST_RANKS):
        replicas, shards = max(1, replicas - 1), max(1, shards - 1)
    if replicas == 1 and shards == 1:
        shards = rng.choice((1, 2))
    rows = rng.choice((1, 1, 2))
    model: dict[str, Any] = dict(model=family, steps=1, seed=rng.randrange(100), accumulate=accumulate)
    model |= dict(clip_norm=rng.choice((None, 0.3)), optimizer=rng.choice(("adam", "adamw", "sgd")))
    mesh: dict[str, Any] = dict(ranks=tp * replicas * shards, tp=tp, dp_replicate=replicas, micro_batch=rows)
    mesh |= dict(stage=rng.randrange(1 if replicas > 1 else 0, 4), collective=rng.choice(("direct", "direct", "ring")))
    mesh |= dict(bucket_bytes=rng.choice((None, 256, 4096)), reshard_after_forward=rng.random() < 0.8)
    if mesh["stage"]:
        mesh["partition"] = rng.choice(("slices", "slices", "owner"))
    if family == "flat":
        model |= dict(params=rng.randrange(5, 2000), units=rng.randrange(1, 5), seq=rng.randrange(1, 6))
    else:
        heads = tp * rng.choice((1, 2))
        model |= dict(layers=rng.randrange(1, 3), heads=heads, hidden=heads * rng.choice((2, 6)), seq=tp * 2)
        model |= dict(attention=rng.choice(("eager", "flash")), recompute=rng.choice(("none", "selective", "full")))
        model |= dict(
            saves=rng.choice(("lean", "megatron")), vocab=256 + rng.randrange(9), ffn=tp * rng.randrange(3, 9)
        )
        mesh["pad_vocab"] = rng.random() < 0.5 or model["vocab"] % tp > 0
        mesh["sequence_parallel"] = rng.random() < 0.6
        mesh["keep_gathered"] = mesh["sequence_parallel"] and rng.random() < 0.4
        if not mesh["sequence_parallel"]:
            model["seq"] = rng.randrange(1, 10)
        if family == "llama":
            right = [n for n in range(1, heads + 1) if not heads % n and not max(n, tp) % min(n, tp)]
            model["kv_heads"] = rng.choice(right)
        else:
            model |= dict(tie_embeddings=rng.random() < 0.6, dropout=rng.choice((0.0, 0.2)))
    return model, mesh


def check(model: dict[str, Any], mesh: dict[str, Any]) -> None:
    real = run(RunConfig(**model, **mesh, precision="fp64"))
    assert set(real.live_bytes_after) == {0}
    dealt = mesh["ranks"] // mesh["tp"]
    rest = dict(ranks=dealt, micro_batch=mesh["micro_batch"], stage=0)  # dropout is by micro-batch: so is the data
    one = run(RunConfig(**model, **rest, precision="fp64"))
    np.testing.assert_allclose(real.losses, one.losses, rtol=1e-11, atol=0)
    norms = [[step.grad_norm for step in result.steps] for result in (real, one)]
    np.testing.assert_allclose(*norms, rtol=1e-11, atol=0)
    assert real.weights.keys() == one.weights.keys()

    config = RunConfig(**model, **mesh, precision="bf16")
    real = run(config, keep_events=True)
    skipped = [step for step, report in enumerate(real.steps) if report.skipped]
    shapes = plan(config, skipped=skipped, keep_events=True)
    for rank in shapes.ran:
        for number, (got, expected) in enumerate(zip(shapes.events[rank], real.events[rank], strict=True)):
            assert got == expected, f"rank {rank}, event {number}"
    assert shapes.memory == real.memory
    assert shapes.traffic == real.traffic
    assert shapes.live_bytes_after == real.live_bytes_after == [0] * mesh["ranks"]


@pytest.mark.quick(2)
@pytest.mark.parametrize("part", range(4))
def test_random_meshes(part: int) -> None:
    fuzz(range(part * CASES // 4, (part + 1) * CASES // 4), seed=0)


def fuzz(cases: range, seed: int) -> None:
    for case in cases:
        model, mesh = drawn(random.Random(f"{seed} {case}"))
        try:
            check(model, mesh)
        except Exception as error:
            raise AssertionError(f"case {case} of seed {seed}: {model} on {mesh}: {error}") from error


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    fuzz(range(int(sys.argv[1])), seed=int(sys.argv[2]) if sys.argv[2:] else 0)
