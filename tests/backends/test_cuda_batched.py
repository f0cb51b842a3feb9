"""Flash attention by strided-batched products computes what the default does, in launches that sequences and heads do
not multiply. Its scratch is in `test_cuda_attention.py`, whole runs are in `test_cuda.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_arrays import junk, to_device
from kernel_cases import CASES as PLAIN
from kernel_cases import Case, check
from test_blocks import CASES as BLOCKS
from test_family_kernels import CASES as FAMILIES
from test_gpt_oss_kernels import CASES as SINKS
from test_latent_kernels import CASES as LATENT

from zerosim.backends.cuda import batched, batched_plan, flash
from zerosim.backends.cuda import products as cuda_products
from zerosim.backends.cuda.backend import BatchedCudaBackend
from zerosim.backends.forms import Scores
from zerosim.backends.kernels import Dropout, Heads
from zerosim.backends.numpy.ops import NUMPY_TYPES
from zerosim.dtypes import DType, bf16, fp32

KEY = (123, 2**64 - 456)
WHOLE = [case for case in (*PLAIN, *FAMILIES, *SINKS, *LATENT) if "flash" in case.name and not case.blocks]
halves_too = pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)


def run_case(case: Case, dtype: DType, **where: Any) -> None:
    check(BatchedCudaBackend(), case, dtype, *case.run(BatchedCudaBackend(), dtype, **where))


@pytest.mark.parametrize("case", [*WHOLE, *BLOCKS], ids=lambda case: case.name)
def test_kernel_computes_its_formula(case: Case) -> None:
    run_case(case, bf16, strided=True)


@halves_too
@pytest.mark.parametrize("case", [case for case in WHOLE if case.name.endswith(" grouped")], ids=lambda case: case.name)
def test_groups_and_tiles_are_the_whole(monkeypatch: pytest.MonkeyPatch, case: Case, dtype: DType) -> None:
    """Whole sequences at a time, one of two key-value heads, and one query of it."""
    monkeypatch.setattr(batched_plan, "QUERIES", 16)
    for scores in (10**6, 6 * 35 * 16, 3 * 35 * 16, 1):
        monkeypatch.setattr(batched_plan, "SCORES", scores)
        run_case(case, dtype)


@pytest.mark.parametrize("width", [32, 48, 256])
@pytest.mark.parametrize("form", [Scores(), Scores(causal=False), Scores(cap=3.0, window=20, alibi=1.0)], ids=str)
@halves_too
def test_head_widths_and_forms(width: int, form: Scores, dtype: DType) -> None:
    """Beside the default's results: both round the same values, and add them in other orders."""
    heads, dropout, stored = Heads(4, 2, form=form), Dropout(KEY, 0.2), NUMPY_TYPES[dtype.name]
    draw = np.random.default_rng(width).standard_normal
    qkv, grad = (to_device(draw((2, 40, n * width)).astype(stored)) for n in (heads.packed, heads.queries))
    found: list[list[Any]] = []
    for way in (flash, batched):
        outs = [to_device(junk((2, 40, n * width), stored)) for n in (heads.queries, heads.packed)]
        lse, delta = (to_device(junk((2, 4, 40), np.dtype(np.float32))) for _ in range(2))
        way.flash_attention(qkv, heads, dropout, outs[0], lse)
        way.flash_attention_backward(grad, qkv, heads, dropout, outs[0], lse, delta, outs[1])
        found.append([a.get().astype(np.float64) for a in (*outs, lse, delta)])
    for there, here in zip(*found, strict=True):
        scale = np.abs(there).max()
        np.testing.assert_allclose(here, there, rtol=0, atol=(1e-5 if dtype is fp32 else 2 * dtype.eps) * scale)


def test_sequences_and_heads_take_no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products a tile in forward and five in backward, of one sequence and head as of many. The default's products
    grow with the sequences."""
    launch, calls = cuda_products.cublas.gemmStridedBatchedEx, [0]

    def counted(*arguments: Any) -> None:
        calls[0] += 1
        launch(*arguments)

    monkeypatch.setattr(cuda_products.cublas, "gemmStridedBatchedEx", counted)
    monkeypatch.setattr(batched_plan, "QUERIES", 16)

    def products(way: Any, sequences: int, heads: Heads) -> list[int]:
        qkv, out = (to_device(np.ones((sequences, 64, n * 8), np.float32)) for n in (heads.packed, heads.queries))
        lse, delta, chance = (
            *(to_device(np.ones((sequences, heads.queries, 64), np.float32)) for _ in range(2)),
            (KEY, 0.0),
        )
        found = []
        for run in (
            lambda: way.flash_attention(qkv, heads, Dropout(*chance), out, lse),
            lambda: way.flash_attention_backward(out, qkv, heads, Dropout(*chance), out, lse, delta, qkv),
        ):
            calls[0] = 0
            run()
            found.append(calls[0])
        return found

    for sequences, heads in ((1, Heads(1, 1)), (3, Heads(2, 2)), (5, Heads(6, 2))):
        assert products(batched, sequences, heads) == [2 * 4, 5 * 4]
    for more, fewer in zip(products(flash, 5, Heads(6, 2)), products(flash, 1, Heads(1, 1)), strict=True):
        assert more > fewer
