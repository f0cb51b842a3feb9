"""Megatron's pipeline stages keep each chunk's last input and its gradient from one step to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(
    model="gpt", layers=8, hidden=16, heads=2, seq=8, vocab=256, ranks=4, stage=0, micro_batch=2, accumulate=8, steps=2
)
ONE = 2 * 2 * 8 * 16  # bytes of one input: bf16, b s h


def held(**fields: Any) -> list[int]:
    """Bytes of activations after a step, by pipeline stage."""
    result = run(RunConfig(**{**SMALL, **fields}))
    assert result.live_bytes_after == [0] * 4
    kinds = ("activation", "activation_grad")
    per_rank = [sum(memory.marks["after_step"].by_kind.get(kind, 0) for kind in kinds) for memory in result.memory]
    each = 4 // result.config.mesh.pp
    return [max(per_rank[first : first + each]) for first in range(0, 4, each)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("fields", "chunks"),
    [
        ({"pp": 4}, [0, 1, 1, 1]),
        ({"pp": 4, "pipeline": "gpipe"}, [0, 1, 1, 1]),
        ({"pp": 4, "pipeline": "interleaved"}, [1, 2, 2, 2]),
        ({"pp": 4, "pipeline": "zb-h1"}, [0, 1, 1, 1]),
        ({"pp": 4, "pipeline": "zb-v"}, [1, 2, 2, 2]),
        ({"pp": 2, "tp": 2, "sequence_parallel": True}, [0, 0.5]),
    ],
)
def test_two_tensors_a_chunk_stay(fields: dict[str, Any], chunks: list[float]) -> None:
    kept, not_kept = (held(**fields, keep_last_inputs=keeps) for keeps in (True, False))
    assert [a - b for a, b in zip(kept, not_kept, strict=True)] == [2 * ONE * count for count in chunks]


@pytest.mark.slow
def test_recipe_megatron_keeps_them_and_no_bit_changes() -> None:
    fields = {**SMALL, "pp": 2, "recipe": "megatron"}
    kept, not_kept = (run(RunConfig(**fields, **more)) for more in ({}, {"keep_last_inputs": False}))
    assert kept.config.parallel.keep_last_inputs
    assert kept.losses == not_kept.losses
    for name, value in kept.weights.items():
        np.testing.assert_array_equal(value, not_kept.weights[name])
