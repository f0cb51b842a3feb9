"""Attention on the device in parts and blocks: of whatever size, its results are those of the whole, and scores of all
queries are never held. What a whole one computes is in `test_backends.py`."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pytest
from cuda_arrays import junk, to_device
from kernel_cases import CASES, Case, check

from zerosim.backends.cuda import attention as cuda_attention
from zerosim.backends.cuda import batched as cuda_batched
from zerosim.backends.cuda import batched_plan
from zerosim.backends.cuda import blocks as cuda_blocks
from zerosim.backends.cuda import flash as cuda_flash
from zerosim.backends.cuda import fused as cuda_fused
from zerosim.backends.cuda import tiles as cuda_tiles
from zerosim.backends.cuda.backend import CudaBackend
from zerosim.backends.kernels import Dropout, Heads, Met, Probs
from zerosim.backends.numpy import fused as numpy_fused
from zerosim.dtypes import DType, fp16, fp32

KEY = (123, 2**64 - 456)
T = 35  # tokens of 2 sequences, with 6 heads of queries and 2 of keys and values
GROUPED = [case for case in CASES if case.name.endswith(" grouped")]
FLASH = [case for case in GROUPED if case.name.startswith("flash")]
EAGER = [case for case in GROUPED if case not in FLASH]
halves_too = pytest.mark.parametrize("dtype", [fp32, fp16], ids=str)


def check_on_device(case: Case, dtype: DType) -> None:
    check(CudaBackend(), case, dtype, *case.run(CudaBackend(), dtype))


@halves_too
@pytest.mark.parametrize("case", EAGER, ids=lambda case: case.name)
def test_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch, case: Case, dtype: DType) -> None:
    """Whole sequences at a time, some heads at a time, one at a time."""
    for scores in (6 * T * T + 3, 4 * T * T, 1):
        monkeypatch.setattr(cuda_attention, "SCORES", scores)
        check_on_device(case, dtype)
    assert len(list(cuda_attention.parts((3, 3, 2, 20, 20), True))) == 9
    assert len(list(cuda_attention.parts((3, 3, 2, 20, 20), False))) == 1


@halves_too
@pytest.mark.parametrize("case", FLASH, ids=lambda case: case.name)
def test_blocks_are_the_whole(monkeypatch: pytest.MonkeyPatch, case: Case, dtype: DType) -> None:
    monkeypatch.setattr(cuda_tiles, "QUERIES", 16)
    for scores in (10**6, 2 * T * 16 * 2, 5 * T, 1):
        monkeypatch.setattr(cuda_tiles, "SCORES", scores)
        check_on_device(case, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("flash", [cuda_flash, cuda_batched])
def test_scores_of_all_queries_are_never_held(monkeypatch: pytest.MonkeyPatch, flash: Any, dtype: Any) -> None:
    """Every piece of memory that flash and a block ask for is of SCORES scores at most; all would not hold one head's
    T x T."""
    scores, tokens, heads, dropout = 2 * 1024, 256, Heads(2, 1), Dropout(KEY, 0.25)
    for module in (cuda_tiles, batched_plan):
        monkeypatch.setattr(module, "SCORES", scores)
    blocks = cuda_blocks if flash is cuda_flash else flash
    draw = np.random.default_rng(5).standard_normal
    qkv, grad = (to_device(draw((1, tokens, columns)).astype(dtype)) for columns in (16, 8))
    out, dqkv = to_device(junk((1, tokens, 8), np.dtype(dtype))), to_device(junk((1, tokens, 16), np.dtype(dtype)))
    lse, delta = (to_device(junk((1, 2, tokens), np.dtype(np.float32))) for _ in range(2))
    q, kv, where = qkv[..., :8], to_device(np.ones((1, tokens, 8), dtype)), Met((range(tokens),), (range(tokens),), 300)
    merged, dq, dkv = (to_device(np.zeros((1, tokens, 8), np.float32)) for _ in range(3))
    asked: list[int] = []
    pool = cp.cuda.MemoryPool()

    def malloc(size: int) -> Any:
        asked.append(size)
        return pool.malloc(size)

    with cp.cuda.using_allocator(malloc):
        flash.flash_attention(qkv, heads, dropout, out, lse)
        flash.flash_attention_backward(grad, qkv, heads, dropout, out, lse, delta, dqkv)
        blocks.attention_block(q, kv, heads, where, dropout, merged, lse)
        blocks.attention_block_backward(grad, q, kv, heads, where, dropout, lse, delta, dq, dkv)
    assert asked
    assert max(asked) <= 4 * scores
    assert pool.total_bytes() < 2 * tokens * tokens


def test_rows_of_a_mask_are_the_masks() -> None:
    for tokens, keys, run, start in ((1, 1, 1, 0), (13, 9, 4, 5), (64, 64, 64, 0), (33, 17, 3, 14)):
        whole = np.empty((5, tokens, tokens), np.uint8)
        numpy_fused.dropout_mask(KEY, 0.3, whole)
        mask = to_device(junk((3, run, keys), whole.dtype))
        cuda_fused.mask_rows(Dropout(KEY, 0.3), mask, 2 * tokens * tokens + start * tokens, tokens * tokens, tokens)
        assert np.array_equal(mask.get(), whole[2:, start : start + run, :keys])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("flash", [cuda_flash, cuda_batched])
def test_no_sequences_and_no_tokens(flash: Any, shape: tuple[int, int]) -> None:
    batch, tokens = shape
    qkv, out, lse, probs = (
        to_device(np.empty(s, np.float32))
        for s in ((batch, tokens, 24), (batch, tokens, 8), (batch, 2, tokens), (batch, 2, tokens, tokens))
    )
    cuda_attention.attention(qkv, Heads(2, 2), Probs(probs), out)
    cuda_attention.attention_backward(out, qkv, Heads(2, 2), Probs(probs), probs, qkv)
    flash.flash_attention(qkv, Heads(2, 2), Dropout(KEY, 0.5), out, lse)
    flash.flash_attention_backward(out, qkv, Heads(2, 2), Dropout(KEY, 0.5), out, lse, lse, qkv)
    none = Heads(2, 2), Met((range(tokens),), (range(tokens),), tokens), Dropout(KEY, 0.5)
    blocks = cuda_blocks if flash is cuda_flash else flash
    blocks.attention_block(out, qkv[..., 8:], *none, out, lse)
    cuda_flash.attention_delta(out, out, Heads(2, 2), lse)
    blocks.attention_block_backward(out, out, qkv[..., 8:], *none, lse, lse, out, qkv[..., 8:])
