"""Runs that must be equal to the bit, or but for rounding; and a while in which nothing looks for garbage."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from zerosim.config import RunConfig
from zerosim.train.result import RunResult
from zerosim.train.run import run


@cache
def _run(text: str) -> RunResult:
    return run(RunConfig(**json.loads(text)))


def on_one_rank(fields: Mapping[str, Any], mesh: RunConfig) -> RunResult:
    """Train these fields on one rank with the global batch of a mesh, microbatch by microbatch."""
    count = mesh.global_batch // mesh.data.micro_batch
    return _run(json.dumps({**fields, "ranks": 1, "stage": 0, "accumulate": count}, sort_keys=True))


def assert_same_weights(result: RunResult, expected: RunResult) -> None:
    assert list(result.weights) == list(expected.weights)
    for name, values in expected.weights.items():
        assert result.weights[name].tobytes() == values.tobytes(), name


def assert_same_bits(result: RunResult, expected: RunResult) -> None:
    """Losses and weights."""
    assert result.losses == expected.losses
    assert_same_weights(result, expected)


def assert_same_training(result: RunResult, expected: RunResult) -> None:
    """What each step reports too, and nothing is live after."""
    assert repr(result.steps) == repr(expected.steps)  # the norm of a skipped step may be nan
    assert_same_bits(result, expected)
    assert set(result.live_bytes_after) == {0}


def without_key_biases(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Softmax does not see a constant added to all scores of a query: the true gradient of a key bias is 0. What is
    computed is rounding, and Adam, which divides a gradient by its own size, makes whole steps of its sign."""
    kept = {}
    for name, values in weights.items():
        third = len(values) // 3
        kept[name] = np.delete(values, slice(third, 2 * third)) if name.endswith("attn.c_attn.bias") else values
    return kept


def assert_close(result: RunResult, expected: RunResult, tolerance: float) -> None:
    """Losses and norms, relative; weights, absolute. Nothing is live after."""
    alike = np.shape(result.losses) == np.shape(expected.losses)  # as many data ranks: rank by rank
    losses = [each.losses if alike else each.mean_losses for each in (result, expected)]
    np.testing.assert_allclose(*losses, rtol=tolerance, atol=0)
    norms = [[step.grad_norm for step in each.steps] for each in (result, expected)]
    np.testing.assert_allclose(*norms, rtol=tolerance, atol=0)
    assert result.num_parameters == expected.num_parameters
    assert set(result.live_bytes_after) == {0}
    ours, theirs = (without_key_biases(each.weights) for each in (result, expected))
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=0, atol=tolerance, err_msg=name)


@contextmanager
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
