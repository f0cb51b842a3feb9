"""Normalisation over the last dim: layer norm and RMS norm (arXiv 1910.07467), with variants of their parameters.

Saved for backward beside x: with `saves` 'lean' the statistics, as in PyTorch's kernels, one number a row
each in the compute dtype. With 'megatron' nothing more, as 2205.05198 counts (section 4.1: 2 sbh a norm), and
backward recomputes the statistics, to the same bits. With 'eager' an RMS norm of a half type keeps no x but its copy
in the compute dtype, the statistics and, for the gradient of a trained weight, what the weight multiplies: rounded
to x's dtype first, or in the compute dtype with the factor 1 + weight (Gemma's), as transformers' modules do, and in
the compute dtype with 'litgpt' and for OLMo 2, whose norms round last. D is the width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import compute_dtype
from zerosim.errors import InputError
from zerosim.functional.common import Grads, like, rows_of
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Operand, Outline, Saved, Tensor, apply, layer_of, outline


class Form(NamedTuple):
    """One kind of norm: its kernel, its parameters and statistics, and flops an element of forward, of the statistics
    alone and of backward. `absent` parameters of the kernel are not there. `more` are its last arguments."""

    kernel: str
    params: tuple[str, ...]
    stats: tuple[str, ...]
    forward: int
    again: int
    backward: int
    absent: int = 0
    more: tuple[float, ...] = ()


LAYER_NORM = Form("layer_norm", ("weight", "bias"), ("mean", "rstd"), forward=7, again=4, backward=11)
LAYER_NORM_NO_BIAS = LAYER_NORM._replace(params=("weight",), forward=6, backward=10, absent=1)
RMS_NORM = Form("rms_norm", ("weight",), ("rstd",), forward=4, again=2, backward=8)
RMS_NORM_PLUS_ONE = RMS_NORM._replace(more=(1.0,))


@dataclass(frozen=True, slots=True)
class Norm:
    """Saves x and, depending on `saves`, its statistics; or, in place of x, what eager modules keep."""

    form: Form
    x: Readable | Outline
    params: tuple[Operand, ...]
    eps: float
    stats: tuple[Buffer, ...] | None
    wide: Buffer | None = None
    normed: Buffer | None = None

    def saved(self) -> Saved:
        kept = dict(zip(("input", *self.form.params), (self.x, *self.params), strict=True))
        stats = zip(self.form.stats, self.stats, strict=True) if self.stats else dict.fromkeys(self.form.stats)
        return {**kept, **dict(stats), "fp32 input": self.wide, "normalised": self.normed}

    def backward(self, grad: Buffer) -> Grads:
        device, form = grad.device, self.form
        dx = self.x.new_grad() if self.x.requires_grad else None
        dparams = [param.new_grad() if param.requires_grad else None for param in self.params]
        stats = self.stats or self._again().values()  # live to the end of this call
        sources = rows_of(grad.array), rows_of(self._read().array), self.params[0].array
        results = None if dx is None else rows_of(dx.array), *(one and one.array for one in dparams)
        last = *(None for _ in range(form.absent)), *form.more
        kernel = getattr(device.backend, f"{form.kernel}_backward")
        device.kernel(form.backward * grad.numel, kernel, *sources, *(stat.array for stat in stats), *results, *last)
        return dx, *dparams

    def _read(self) -> Readable | Buffer:
        """Return what holds the input's values."""
        if self.wide is not None:
            return self.wide
        assert not isinstance(self.x, Outline)
        return self.x

    def _again(self) -> dict[str, Buffer]:
        x = self._read()
        device, rows, form = x.device, rows_of(x.array), self.form
        stats = _statistics(form, x, Kind.TEMP)
        kernel = getattr(device.backend, f"{form.kernel}_stats")
        device.kernel(form.again * rows.size, kernel, rows, self.eps, *(stat.array for stat in stats.values()))
        return stats


def layer_norm(
    x: Tensor, weight: Operand, bias: Operand | None, eps: float = 1e-5, *, widens: bool = False,
    policy: ActivationPolicy = DEFAULT,
) -> Tensor:  # fmt: skip
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last dim. Shapes: x (..., D), weight, bias (D).

    Without a bias nothing is added (Cohere's). `widens`: the result is in the compute dtype, as under autocast.
    Source: arXiv 1607.06450.
    """
    if bias is None:
        return _norm(LAYER_NORM_NO_BIAS, x, (weight,), eps, policy, widens=widens)
    return _norm(LAYER_NORM, x, (weight, bias), eps, policy, widens=widens)


def rms_norm(
    x: Tensor, weight: Operand, eps: float = 1e-5, *, plus_one: bool = False, rounds_last: bool = False,
    policy: ActivationPolicy = DEFAULT,
) -> Tensor:  # fmt: skip
    """Return x / sqrt(average of squares + eps) * weight over the last dim. Shapes: x (..., D), weight (D).

    With `plus_one` the factor is 1 + weight, so that a weight of 0 changes nothing (Gemma's). `rounds_last`: what the
    weight multiplies is kept in the compute dtype (OLMo 2's).

    Raises: InputError if weight is not one number for each column.
    """
    if weight.shape != x.shape[-1:]:
        raise InputError(f"rms_norm: x has {x.shape[-1]} columns, its weight has shape {weight.shape}")
    form = RMS_NORM_PLUS_ONE if plus_one else RMS_NORM
    return _norm(form, x, (weight,), eps, policy, rounds_last=rounds_last or policy.is_litgpt)


def _norm(
    form: Form, x: Tensor, params: tuple[Operand, ...], eps: float, policy: ActivationPolicy, *, widens: bool = False,
    rounds_last: bool = False,
) -> Tensor:  # fmt: skip
    wide = max(x.dtype, params[0].dtype, key=lambda dtype: dtype.itemsize)  # fp32 weights of a norm make it fp32
    wide = compute_dtype(x.dtype) if widens else wide
    device, out, rows, keeps = x.device, like(x, dtype=wide), rows_of(x.array), policy.saves != "megatron"
    stats = _statistics(form, x, Kind.ACTIVATION if keeps else Kind.TEMP)
    sources = [rows, *(param.array for param in params), *(None for _ in range(form.absent))]
    arrays = [*sources, eps, rows_of(out.array), *(stat.array for stat in stats.values()), *form.more]
    device.kernel(form.forward * out.numel, getattr(device.backend, form.kernel), *arrays)
    kept = tuple(stats.values()) if keeps else None
    if policy.saves not in ("eager", "litgpt") or form.kernel != RMS_NORM.kernel:
        rule = Norm(form, held(x), params, eps, kept)
    else:
        copy, normed = _eager(form, x, params[0], stats["rstd"], rounds_last=rounds_last)
        rule = Norm(form, held(x) if copy is None else outline(x), params, eps, kept, copy, normed)
    return apply(rule, out, x, *params, op=layer_of(params[0], form.kernel), saved=rule.saved())


def _eager(
    form: Form, x: Tensor, weight: Operand, rstd: Buffer, *, rounds_last: bool
) -> tuple[Buffer | None, Buffer | None]:
    """Return a copy of x in the compute dtype, if it has another, and, if the weight is trained, what it multiplies."""
    device, compute, copy = x.device, compute_dtype(x.dtype), None
    if x.dtype != compute:
        copy = device.alloc(x.shape, compute, Kind.ACTIVATION)
        device.kernel(0, device.backend.copy, x.array, copy.array)
    if not weight.requires_grad:
        return copy, None
    normed = device.alloc(x.shape, compute if form.more or rounds_last else x.dtype, Kind.ACTIVATION)
    arrays = rows_of((copy or x).array), rstd.array.reshape(-1, 1), rows_of(normed.array)
    device.kernel(normed.numel, device.backend.multiply, *arrays)
    return copy, normed


def _statistics(form: Form, x: Readable | Buffer, kind: Kind) -> dict[str, Buffer]:
    """Allocate one number a row for each statistic."""
    shape, dtype = (math.prod(x.shape[:-1]),), compute_dtype(x.dtype)
    return {name: x.device.alloc(shape, dtype, kind) for name in form.stats}
