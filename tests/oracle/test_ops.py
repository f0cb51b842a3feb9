"""Every fused op beside PyTorch's own: values and gradients.

float64   both compute the same real function, so differences are a few roundings of 1e-16
float32   likewise with 6e-8, and sums of up to some hundred terms in another order
half      zerosim computes in float32 and rounds once; so PyTorch does here: in float32, then `.to`
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from zerosim import functional as Z
from zerosim.comm.runtime import make_backend
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import dtype, int64
from zerosim.tensor.autograd import backward
from zerosim.tensor.tensor import tensor

from .compare import within, within_one_ulp

TORCH = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RTOL = {"fp64": 1e-13, "fp32": 2e-6}  # of the largest value


@dataclass(frozen=True)
class Case:
    """One op on given inputs: `shapes` of its float operands, `ids` its whole-number operand, if any."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    zerosim: Callable[..., Any]
    torch: Callable[..., Any]
    ids: Any = None
    scale: float = 1.0
    slack: float = 1.0  # times RTOL


def causal_attention(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """Written out, so that it is another formulation than the one in `gpt.py`."""
    rows, tokens, width = qkv.shape
    q, k, v = qkv.view(rows, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    probs = scores.masked_fill(future, -math.inf).softmax(-1)
    return (probs @ v).transpose(1, 2).reshape(rows, tokens, width // 3)


def attention(name: str, rows: int, tokens: int, width: int, heads: int, scale: float = 1.0) -> Case:
    return Case(
        f"attention-{name}",
        ((rows, tokens, 3 * width),),
        lambda qkv: Z.attention(qkv, heads),
        lambda qkv: causal_attention(qkv, heads),
        scale=scale,
    )


def embedding(name: str, shape: tuple[int, ...], vocab: int, width: int) -> Case:
    ids = np.random.default_rng(5).integers(0, vocab, shape)
    return Case(name, ((vocab, width),), lambda w, i: Z.embedding(i, w), lambda w, i: F.embedding(i, w), ids)


def cross_entropy(name: str, shape: tuple[int, ...], vocab: int, scale: float = 1.0, slack: float = 1.0) -> Case:
    ids = np.random.default_rng(6).integers(0, vocab, shape)
    return Case(
        name,
        ((*shape, vocab),),
        Z.cross_entropy,
        lambda logits, i: F.cross_entropy(logits.flatten(0, -2), i.flatten()).reshape(1),
        ids,
        scale,
        slack,
    )


CASES = [
    Case("linear", ((3, 7, 48), (48, 80), (80,)), Z.linear, lambda x, w, b: x @ w + b),
    Case("linear-no-bias", ((5, 33), (33, 20)), Z.linear, lambda x, w: x @ w),
    Case("linear-transposed", ((2, 9, 40), (70, 40)), lambda x, w: Z.linear(x, w, transposed=True), F.linear),
    Case("layer_norm", ((4, 50, 96), (96,), (96,)), Z.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5)),
    # More rows than one cache block holds, values whose variance eps is not small against.
    Case(
        "layer_norm-small",
        ((900, 64), (64,), (64,)),
        Z.layer_norm,
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        scale=3e-3,
    ),
    Case("gelu", ((9, 700),), Z.gelu, lambda x: F.gelu(x, approximate="tanh"), scale=2.0),
    attention("one-token", 2, 1, 8, 2),
    attention("short", 3, 17, 24, 3),
    attention("one-block", 2, 64, 32, 4),
    attention("blocks", 2, 150, 32, 2),
    attention("sharp", 1, 70, 16, 1, scale=4.0),
    embedding("embedding", (4, 30), 19, 12),
    embedding("embedding-sparse", (2, 5), 300, 7),
    Case("add_rows", ((3, 6, 10), (8, 10)), Z.add_rows, lambda x, rows: x + rows[: x.shape[-2]]),
    cross_entropy("cross_entropy", (5, 21), 64),
    # Logits up to 70: exp(logit - log-sum-exp) inherits the rounding of a number of that size, 70 * 6e-8.
    cross_entropy("cross_entropy-confident", (40,), 256, scale=20.0, slack=4.0),
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def values_of(case: Case) -> list[Any]:
    random = np.random.default_rng(sum(case.name.encode()))
    return [case.scale * random.standard_normal(shape) for shape in case.shapes]


def run_zerosim(case: Case, precision: str, values: list[Any], seed: Any = None) -> tuple[Any, list[Any]]:
    """The op's result and, with a gradient of the result to start from, those of its operands."""
    device = Device(0, make_backend("numpy"))
    inputs = [tensor(value, device, dtype=precision, requires_grad=True) for value in values]
    ids = [] if case.ids is None else [upload(case.ids, device, "int64")]
    y = case.zerosim(*inputs, *ids)
    out = y.numpy()
    if seed is None:
        return out, []
    backward(y.node, [upload(seed, device, precision)])
    return out, [device.backend.to_host(x.grad.array) for x in inputs]


def upload(values: Any, device: Device, name: str) -> Buffer:
    buffer = device.alloc(values.shape, int64 if name == "int64" else dtype(name), Kind.ACTIVATION)
    device.backend.from_host(values, buffer.array)
    return buffer


def run_torch(case: Case, kind: torch.dtype, values: list[Any], seed: Any = None) -> tuple[torch.Tensor, list[Any]]:
    inputs = [torch.tensor(value, dtype=kind, requires_grad=True) for value in values]
    ids = [] if case.ids is None else [torch.tensor(case.ids)]
    y = case.torch(*inputs, *ids)
    if seed is not None:
        y.backward(torch.tensor(seed, dtype=kind))
    return y.detach(), [x.grad.numpy() for x in inputs if x.grad is not None]


@by_case
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_values_and_gradients(case: Case, precision: str) -> None:
    values = values_of(case)
    shape = tuple(run_torch(case, torch.float64, values)[0].shape)
    seed = np.random.default_rng(1).standard_normal(shape)
    out, grads = run_zerosim(case, precision, values, seed)
    expected, expected_grads = run_torch(case, TORCH[precision], values, seed)
    assert len(grads) == len(expected_grads) == len(case.shapes)
    for what, got, wanted in zip(
        ("value", "gradient 0", "gradient 1", "gradient 2"),
        (out, *grads),
        (expected.numpy(), *expected_grads),
        strict=False,
    ):
        assert got.dtype == wanted.dtype
        within(f"{case.name} {precision} {what}", got, wanted, rtol=case.slack * RTOL[precision])


@by_case
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_types_round_once(case: Case, precision: str) -> None:
    kind = TORCH[precision]
    stored = [torch.tensor(value).to(kind).double().numpy() for value in values_of(case)]
    out, _ = run_zerosim(case, precision, stored)
    expected, _ = run_torch(case, torch.float32, stored)
    if case.name.startswith("cross_entropy"):  # its result is kept in float32
        within(f"{case.name} {precision} value", out, expected.numpy(), rtol=RTOL["fp32"])
        return
    limits = torch.finfo(kind)
    rounded = expected.to(kind).double().numpy()
    within_one_ulp(
        f"{case.name} {precision} value",
        out,
        rounded,
        eps=limits.eps,
        smallest=limits.smallest_normal,
        rtol=RTOL["fp32"],
    )


@by_case
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_type_gradients(case: Case, precision: str) -> None:
    """Against float32 gradients of the stored values: rounded once, in attention also by its stored probabilities."""
    kind = TORCH[precision]
    stored = [torch.tensor(value).to(kind).double().numpy() for value in values_of(case)]
    shape = tuple(run_torch(case, torch.float64, stored)[0].shape)
    seed = torch.tensor(np.random.default_rng(2).standard_normal(shape)).to(kind).double().numpy()
    _, grads = run_zerosim(case, precision, stored, seed)
    _, expected = run_torch(case, torch.float32, stored, seed)
    for i, (got, wanted) in enumerate(zip(grads, expected, strict=True)):
        within(f"{case.name} {precision} gradient {i}", got, wanted, rtol=1.5 * torch.finfo(kind).eps)
