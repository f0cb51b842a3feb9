"""Activations between a block's two maps: GELU and ReLU of one map, gated ones (arXiv 2002.05202) of two side by side.

Each saves its input, and backward computes its gate again, as fused GPU kernels do. With `saves` 'eager' a gated one
keeps the gate's function too, as transformers' modules do. With 'liger' its gradient overwrites its input.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from zerosim.device.device import Buffer, Kind
from zerosim.errors import InputError
from zerosim.functional.common import Grads, grad_like, like, rows_of
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Tensor, apply


class Form(NamedTuple):
    """One activation: its kernel, and flops an element of the result, forward and backward."""

    kernel: str
    forward: int
    backward: int


GELU, GELU_ERF, RELU = Form("gelu", 8, 16), Form("gelu_erf", 5, 11), Form("relu", 1, 1)
GATES = MappingProxyType({"swiglu": "silu", "geglu": "gelu"})
SWIGLU, GEGLU = Form("swiglu", 6, 10), Form("geglu", 9, 19)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Saves x."""

    form: Form
    x: Readable

    def backward(self, grad: Buffer) -> Grads:
        dx, kernel = grad_like(grad), getattr(grad.device.backend, f"{self.form.kernel}_backward")
        grad.device.kernel(self.form.backward * grad.numel, kernel, grad.array, self.x.array, dx.array)
        return (dx,)


def _elementwise(form: Form, x: Tensor) -> Tensor:
    out = like(x)
    x.device.kernel(form.forward * out.numel, getattr(x.device.backend, form.kernel), x.array, out.array)
    return apply(Elementwise(form, held(x)), out, x, op=form.kernel, saved={"input": held(x)})


def gelu(x: Tensor) -> Tensor:
    """Return 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), GPT-2's GELU. Shapes: x and result any, the same.

    Source: arXiv 1606.08415.
    """
    return _elementwise(GELU, x)


def gelu_erf(x: Tensor) -> Tensor:
    """Return 0.5 x (1 + erf(x / sqrt(2))), GELU itself (BERT's, GPT-NeoX's). Shapes: x and result any, the same."""
    return _elementwise(GELU_ERF, x)


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0) (OPT's, T5's). Shapes: x and result any, the same."""
    return _elementwise(RELU, x)


@dataclass(frozen=True, slots=True)
class Gated:
    """Saves x and, for eager modules, the function of its gate, which our backward does not read."""

    form: Form
    x: Readable
    gate: Buffer | None
    in_place: bool = False

    def backward(self, grad: Buffer) -> Grads:
        dx, kernel = self._result(), getattr(grad.device.backend, f"{self.form.kernel}_backward")
        rows = rows_of(grad.array), rows_of(self.x.array), rows_of(dx.array)
        grad.device.kernel(self.form.backward * grad.numel, kernel, *rows)
        return (dx,)

    def _result(self) -> Buffer:
        if not self.in_place:
            return self.x.new_grad()
        self.x.device.retag(self.x.buffer, Kind.ACTIVATION_GRAD)
        return self.x.buffer


def _gated(form: Form, x: Tensor, policy: ActivationPolicy) -> Tensor:
    if x.shape[-1] % 2:
        raise InputError(f"{form.kernel}: {x.shape[-1]} columns are not two halves, a gate and what it gates")
    out, kernel = like(x, *x.shape[:-1], x.shape[-1] // 2), getattr(x.device.backend, form.kernel)
    x.device.kernel(form.forward * out.numel, kernel, rows_of(x.array), rows_of(out.array))
    gate = None
    if policy.saves in ("eager", "foak", "litgpt"):
        gate = x.device.alloc(out.shape, out.dtype, Kind.ACTIVATION)
        of_gate, half = getattr(x.device.backend, GATES[form.kernel]), rows_of(x.array)[:, : out.shape[-1]]
        x.device.kernel(form.forward * out.numel, of_gate, half, rows_of(gate.array))
    rule = Gated(form, held(x), gate, policy.saves == "liger" and x.discarded is None)
    return apply(rule, out, x, op=form.kernel, saved={"input": held(x), "gate": gate})


def swiglu(x: Tensor, *, policy: ActivationPolicy = DEFAULT) -> Tensor:
    """Return gate * sigmoid(gate) * up. Shapes: x (..., 2F) with columns gate|up; result (..., F).

    Raises: InputError for an odd number of columns.
    """
    return _gated(SWIGLU, x, policy)


def geglu(x: Tensor, *, policy: ActivationPolicy = DEFAULT) -> Tensor:
    """Return gelu(gate) * up (Gemma's). Shapes: x (..., 2F) with columns gate|up; result (..., F).

    Raises: InputError for an odd number of columns.
    """
    return _gated(GEGLU, x, policy)
