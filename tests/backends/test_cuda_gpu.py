"""What only a real GPU can say: kernels that truly run side by side, at sizes where order would show.

`pytest -m cuda` runs these alone; without a GPU they are skipped. All other tests of backend cuda run on a GPU too,
where there is one.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest
from same import assert_same_bits

from zerosim.config import RunConfig
from zerosim.train.result import RunResult
from zerosim.train.run import run

pytestmark = pytest.mark.cuda

SIZES: dict[str, Any] = dict(layers=4, hidden=256, heads=4, seq=256, micro_batch=4, steps=4, backend="cuda", lr=1e-3)


def trained(**fields: Any) -> RunResult:
    return run(RunConfig(**{**SIZES, **fields}))


@pytest.mark.parametrize("attention", ["eager", "flash", "batched flash"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_stages_have_the_same_bits_every_time(ranks: int, precision: str, attention: str) -> None:
    way = {"attention": attention.split()[-1], "batched_flash": "batched" in attention}
    fields = dict(ranks=ranks, precision=precision, dropout=0.1, **way)
    ddp = trained(stage=0, **fields)
    for stage in (0, 1, 2, 3):
        assert_same_bits(ddp, trained(stage=stage, parallel=2, **fields))


@pytest.mark.parametrize("ranks", [1, 4])
def test_stages_replayed_as_graphs_have_the_same_bits_every_time(ranks: int) -> None:
    """Near those without graphs: cuBLAS may choose another kernel for a workspace of one's own."""
    fields = dict(ranks=ranks, precision="fp32", steps=6)
    ddp = trained(stage=0, capture_graphs=True, **fields)
    for stage in (0, 3):
        assert_same_bits(ddp, trained(stage=stage, parallel=2, capture_graphs=True, **fields))
    np.testing.assert_allclose(ddp.losses, trained(stage=0, **fields).losses, rtol=2e-5)


@pytest.mark.parametrize("way", [{}, {"attention": "flash", "batched_flash": True}], ids=str)
def test_gradients_are_near_numpys(way: dict[str, Any]) -> None:
    """One step of plain SGD moves the weights by the gradient alone."""
    fields = dict(stage=0, ranks=1, precision="fp32", steps=1, optimizer="sgd", lr=1.0)
    there, here = trained(**fields, **way), trained(**fields, backend="numpy")
    for name, weight in here.weights.items():
        scale = np.abs(weight).max()
        np.testing.assert_allclose(there.weights[name], weight, atol=2e-5 * scale, rtol=0, err_msg=name)


def test_runs_give_their_memory_back() -> None:
    """Five runs of more than 100 MB each. What cuBLAS and CUDA keep for themselves is there after the first."""
    trained(ranks=2)
    before = cupy.cuda.Device(0).mem_info[0]
    for _ in range(4):
        trained(ranks=2)
    assert before - cupy.cuda.Device(0).mem_info[0] < 100e6
