"""Runs that must be equal to the bit."""

from __future__ import annotations

from zerosim.train.result import RunResult


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
