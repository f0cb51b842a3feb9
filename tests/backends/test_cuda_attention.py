"""Attention on the device, eager and flash, against NumPy's: grouped queries, dropout, odd sizes, parts and blocks.

What half types may differ by: NumPy multiplies v with probabilities in float32, tensor cores with the stored ones,
half a last place away; so a result is off by at most that of each probability times its v. In backward the same
holds for the scores' gradient. Slacks below are sums of such terms, taken from NumPy's own arrays.
"""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pytest
from cuda_arrays import Values, assert_close, both, junk, rounded, strided, to_device

from zerosim.backends.cuda import attention as cuda_attention
from zerosim.backends.cuda import flash as cuda_flash
from zerosim.backends.cuda import fused as cuda_fused
from zerosim.backends.kernels import Dropout, Heads
from zerosim.backends.numpy import attention as numpy_attention
from zerosim.backends.numpy import flash as numpy_flash
from zerosim.backends.numpy import fused as numpy_fused
from zerosim.dtypes import FLOATING, DType, bf16, compute_dtype, fp16, fp32

KEY = (123, 2**64 - 456)
# B, T, H, K, d
SHAPES = [(1, 1, 1, 1, 1), (2, 7, 3, 3, 5), (3, 33, 4, 2, 8), (1, 150, 6, 1, 3), (2, 70, 2, 2, 16)]
# Sizes change loops, and types change sums and roundings: every type at two sizes, every size in two types.
PAIRS = [(shape, dtype) for shape in SHAPES for dtype in (FLOATING if shape in SHAPES[1:3] else (fp32, bf16))]
every_pair = pytest.mark.parametrize(("shape", "dtype"), PAIRS, ids=str)
every_chance = pytest.mark.parametrize("dropout", [0.0, 0.25])
every_way = pytest.mark.parametrize(("dropout", "keeps_dropped"), [(0.0, False), (0.25, False), (0.25, True)])
Shape = tuple[int, int, int, int, int]


class Case:
    """Inputs of one size and type, and NumPy's probabilities for them."""

    def __init__(self, shape: Shape, dtype: DType, dropout: float) -> None:
        batch, tokens, heads, kv_heads, width = shape
        rng = np.random.default_rng(5)
        self.heads, self.dtype, self.dropout, self.keep = Heads(heads, kv_heads), dtype, dropout, 1.0 - dropout
        self.qkv = rounded(2 * rng.standard_normal((batch, tokens, (heads + 2 * kv_heads) * width)), dtype)
        self.grad = rounded(rng.standard_normal((batch, tokens, heads * width)), dtype)
        self.scores = (batch, heads, tokens, tokens)
        self.mask = np.empty(self.scores, np.uint8) if dropout else None
        if self.mask is not None:
            numpy_fused.dropout_mask(KEY, dropout, self.mask)
        self.out, self.probs = np.empty_like(self.grad), np.empty(self.scores, self.qkv.dtype)
        self.lse = np.empty(self.scores[:3], np.float64 if dtype.itemsize == 8 else np.float32)
        numpy_attention.attention(self.qkv, self.heads, self.mask, self.keep, self.out, self.probs, None)
        numpy_flash.flash_attention(self.qkv, self.heads, Dropout(KEY, dropout), self.out, self.lse)

    def junk(self, *like: Values) -> list[Values]:
        return [junk(x.shape, x.dtype) for x in like]

    def loose(self, largest: float) -> float:
        """Roundings of the compute dtype, of scores up to about 30, over a row of T; and, in half types, half a last
        place of each of a row's probabilities times `largest`: together at most that of their sum, 1."""
        roundings = 64 * compute_dtype(self.dtype).eps * max(1.0, largest)
        return roundings + (self.dtype.eps * largest / self.keep if self.dtype.is_half else 0.0)


def largest(x: Values) -> float:
    return float(np.abs(x.astype(float)).max())


# -- eager ---------------------------------------------------------------------------------------------
@every_pair
@every_way
def test_attention(shape: Shape, dtype: DType, dropout: float, keeps_dropped: bool) -> None:
    case = Case(shape, dtype, dropout)
    outputs: list[Any] = [*case.junk(case.out, case.probs), None]
    if keeps_dropped:
        outputs[2] = junk(case.scores, case.probs.dtype)
    inputs = [case.qkv, case.heads, case.mask, case.keep]
    (out, probs, *dropped) = both(numpy_attention.attention, cuda_attention.attention, inputs, outputs)
    assert not np.triu(probs[0], 1).any()
    assert_close(*probs, dtype, 64 * compute_dtype(dtype).eps)
    assert_close(*out, dtype, case.loose(largest(case.qkv)))
    for got, _ in dropped:
        assert np.array_equal(got, probs[0] * case.mask)


@every_pair
@every_way
def test_attention_backward(shape: Shape, dtype: DType, dropout: float, keeps_dropped: bool) -> None:
    case = Case(shape, dtype, dropout)
    dropped = None
    if keeps_dropped:
        dropped = rounded(case.probs.astype(float) * case.mask, dtype)
    inputs = [case.grad, case.qkv, case.heads, case.probs, case.mask, dropped, case.keep]

    def host(*args: Any) -> None:
        numpy_attention.attention_backward(*args[:-1], np.empty(0), args[-1])

    def cuda(*args: Any) -> None:
        cuda_attention.attention_backward(*args[:-1], to_device(junk(case.scores, case.probs.dtype)), args[-1])

    ((got, wanted),) = both(host, cuda, inputs, case.junk(case.qkv))
    assert_close(got, wanted, dtype, backward_slack(case, shape))


def backward_slack(case: Case, shape: Shape) -> Values:
    """The sums of the sizes of what is added up, times what each may be off by: half types, half a last place of the
    probability and half of the score's gradient; else some roundings on the way."""
    batch, tokens, heads, kv_heads, width = shape

    def by_head(x: Values, count: int) -> Values:
        return np.abs(x.astype(float)).reshape(batch, tokens, count, width).swapaxes(1, 2)

    def packed(x: Values, count: int) -> Values:
        summed = x.reshape(batch, count, -1, tokens, width).sum(2)
        return summed.swapaxes(1, 2).reshape(batch, tokens, -1)

    cuts = np.cumsum([heads * width, kv_heads * width])
    q, *pair = (by_head(x, n) for x, n in zip(np.split(case.qkv, cuts, -1), (heads, kv_heads, kv_heads), strict=True))
    k, v = (x.repeat(heads // kv_heads, axis=1) for x in pair)
    p, g = case.probs.astype(float), by_head(case.grad, heads)
    chance = 1.0 / case.keep if case.mask is None else case.mask / case.keep
    dp = g @ v.swapaxes(-1, -2) * chance
    ds = p * (dp + (dp * p).sum(-1, keepdims=True)) * width**-0.5
    terms = packed(ds @ k, heads), packed(ds.mT @ q, kv_heads), packed((p * chance).mT @ g, kv_heads)
    if not case.dtype.is_half:
        return 64 * case.dtype.eps * np.concatenate(terms, -1)
    least = case.dtype.eps * case.dtype.min_normal * tokens * heads / kv_heads  # below it there is but one last place
    return case.dtype.eps * np.concatenate(terms, -1) + least * max(largest(case.qkv), largest(case.grad))


@pytest.mark.parametrize(("dtype", "dropout"), [(fp32, 0.0), (fp16, 0.25)], ids=str)
def test_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: DType, dropout: float) -> None:
    """Whole sequences at a time, some heads at a time, one at a time."""
    shape = (3, 20, 6, 3, 4)
    case = Case(shape, dtype, dropout)
    for scores in (2 * 6 * 400 + 3, 4 * 400, 1):
        monkeypatch.setattr(cuda_attention, "SCORES", scores)
        test_attention(shape, dtype, dropout, False)
        test_attention_backward(shape, dtype, dropout, False)
    assert len(list(cuda_attention.parts((3, 3, 2, 20, 20), True))) == 9
    assert len(list(cuda_attention.parts((3, 3, 2, 20, 20), False))) == 1
    assert case.scores == (3, 6, 20, 20)


# -- flash ---------------------------------------------------------------------------------------------
@every_pair
@every_chance
def test_flash_attention(shape: Shape, dtype: DType, dropout: float) -> None:
    case = Case(shape, dtype, dropout)
    inputs = [case.qkv, case.heads, Dropout(KEY, dropout)]
    out, lse = both(numpy_flash.flash_attention, cuda_flash.flash_attention, inputs, case.junk(case.out, case.lse))
    assert_close(*out, dtype, case.loose(largest(case.qkv)))
    assert_close(*lse, compute_dtype(dtype), 64 * compute_dtype(dtype).eps)


@every_pair
@every_chance
def test_flash_attention_backward(shape: Shape, dtype: DType, dropout: float) -> None:
    case = Case(shape, dtype, dropout)
    inputs = [case.grad, case.qkv, case.heads, Dropout(KEY, dropout), case.out, case.lse]
    delta, dqkv = both(
        numpy_flash.flash_attention_backward,
        cuda_flash.flash_attention_backward,
        inputs,
        case.junk(case.lse, case.qkv),
    )
    terms = shape[-1] * largest(case.grad) * largest(case.out)
    assert_close(*delta, compute_dtype(dtype), shape[-1] * compute_dtype(dtype).eps * terms)
    assert_close(*dqkv, dtype, backward_slack(case, shape))


@pytest.mark.parametrize(("dtype", "dropout"), [(fp32, 0.0), (fp16, 0.25)], ids=str)
def test_blocks_are_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: DType, dropout: float) -> None:
    monkeypatch.setattr(cuda_flash, "QUERIES", 16)
    for scores, tokens in ((10**6, 40), (2 * 40 * 16 * 2, 40), (5 * 20, 20), (1, 6)):
        monkeypatch.setattr(cuda_flash, "SCORES", scores)
        for shape in ((2, tokens, 2, 2, 3), (1, tokens, 6, 3, 3)):
            test_flash_attention(shape, dtype, dropout)
            test_flash_attention_backward(shape, dtype, dropout)


@pytest.mark.parametrize("dtype", [fp32, fp16], ids=str)
def test_flash_never_holds_scores_of_all_queries(monkeypatch: pytest.MonkeyPatch, dtype: DType) -> None:
    """Every piece of memory that it asks for is of SCORES scores at most; all would not hold one head's T x T."""
    scores, tokens = 2 * 1024, 256
    shape = (1, tokens, 2, 1, 4)
    monkeypatch.setattr(cuda_flash, "SCORES", scores)
    case = Case(shape, dtype, 0.25)
    sent = [to_device(x) for x in (case.grad, case.qkv, case.out, case.lse)]
    out, lse, delta, dqkv = (to_device(x) for x in case.junk(case.out, case.lse, case.lse, case.qkv))
    asked: list[int] = []
    pool = cp.cuda.MemoryPool()

    def malloc(size: int) -> Any:
        asked.append(size)
        return pool.malloc(size)

    with cp.cuda.using_allocator(malloc):
        cuda_flash.flash_attention(sent[1], case.heads, Dropout(KEY, 0.25), out, lse)
        cuda_flash.flash_attention_backward(sent[0], sent[1], case.heads, Dropout(KEY, 0.25), *sent[2:], delta, dqkv)
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


# -- both ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [fp32, fp16], ids=str)
def test_arrays_may_be_strided_and_results_wider(dtype: DType) -> None:
    case = Case((2, 9, 4, 2, 3), dtype, 0.25)
    wide = [x.astype(case.lse.dtype) for x in (case.out, case.probs, case.probs, case.qkv)]
    inputs = [case.qkv, case.heads, case.mask, case.keep]
    for outputs in ([case.out, case.probs, case.probs], wide[:3]):
        found = both(numpy_attention.attention, cuda_attention.attention, inputs, case.junk(*outputs), strided)
        stored = fp32 if outputs is not wide[:3] and outputs[0].dtype == np.float32 else dtype
        for got, wanted in found:
            assert_close(got, wanted, stored, case.loose(largest(case.qkv)))
    inputs = [case.grad, case.qkv, case.heads, Dropout(KEY, 0.25), case.out, case.lse]
    for dqkv in (case.qkv, wide[3]):
        _, (got, wanted) = both(
            numpy_flash.flash_attention_backward,
            cuda_flash.flash_attention_backward,
            inputs,
            case.junk(case.lse, dqkv),
            strided,
        )
        assert_close(got, wanted, dtype, backward_slack(case, (2, 9, 4, 2, 3)))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)], ids=str)
def test_no_sequences_and_no_tokens(shape: tuple[int, int]) -> None:
    batch, tokens = shape
    qkv, out, lse, probs = (
        to_device(np.empty(s, np.float32))
        for s in ((batch, tokens, 24), (batch, tokens, 8), (batch, 2, tokens), (batch, 2, tokens, tokens))
    )
    cuda_attention.attention(qkv, Heads(2, 2), None, 1.0, out, probs, None)
    cuda_attention.attention_backward(out, qkv, Heads(2, 2), probs, None, None, 1.0, probs, qkv)
    cuda_flash.flash_attention(qkv, Heads(2, 2), Dropout(KEY, 0.5), out, lse)
    cuda_flash.flash_attention_backward(out, qkv, Heads(2, 2), Dropout(KEY, 0.5), out, lse, lse, qkv)
