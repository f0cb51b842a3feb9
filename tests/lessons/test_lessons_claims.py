"""The small programs that test claims: against NumPy, closed forms and bit patterns."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.lessons.claims import peers, pipeline_idle, rounded_to_bf16, sent_by_phase, split_mlp, volume
from zerosim.train.plan import plan
from zerosim.train.run import run


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_split_mlp_is_the_whole_one(ranks: int) -> None:
    found = split_mlp(ranks, rows=6, width=16)
    assert found.largest_difference < 1e-12
    assert found.operations == ("all_reduce",)
    assert found.weight_elements * ranks == 8 * 16 * 16
    assert found.sent_bytes * ranks == 2 * (ranks - 1) * 6 * 16 * 8  # a ring's all_reduce of fp64


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 32])
def test_a_pipeline_idles_as_gpipe_says(stages: int, micro_batches: int) -> None:
    assert pipeline_idle(stages, micro_batches) == Fraction(stages - 1, micro_batches + stages - 1)


def test_bf16_is_rounded_to_nearest_even() -> None:
    random = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0], np.float32)
    for values in (random, ties):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert rounded_to_bf16(values).tobytes() == expected.tobytes()


def test_readings_of_a_run() -> None:
    ring = run(RunConfig(stage=0, ranks=3, steps=1, collective="ring"), keep_events=True)
    assert [peers(events) for events in ring.events] == [{1}, {2}, {0}]
    flat = plan(RunConfig(model="flat", params=4096, units=4, ranks=4, stage=3))
    assert volume(flat) == 3
    once = 2 * 4096 * 3 // 4
    assert sent_by_phase(flat) == {
        "forward: all_gather": once,
        "backward: all_gather": once,
        "backward: reduce_scatter": once,
    }
