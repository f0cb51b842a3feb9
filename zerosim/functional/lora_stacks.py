"""Adapters of a stack of experts' maps (LoRA), A (E r, I) and B (O, r E), as PEFT's `target_parameters` keep them.

    merged    the stack plus s B A, a copy of all experts' maps, made in forward and kept for backward, whose gradient
              is as large (peft 0.21, tuners/lora/layer.py, ParamWrapper)
    by rows   t = s A x (R, r), y += B t: two narrow products more for each row, grouped as the stack's own is
              (prime-rl, trainer/models/layers/lora/multi_moe.py)

Both compute the same. R rows are E experts' in turn; s = alpha / r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Kind
from zerosim.device.work import GROUPED, GROUPED_DGRAD, GROUPED_WGRAD
from zerosim.functional.common import Grads, like, weight_grad
from zerosim.functional.experts import grouped_work
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Operand, Tensor, apply, layer_of


@dataclass(frozen=True, slots=True)
class WithAdapter:
    """Saves handles of A and B."""

    a: Operand
    b: Operand
    scale: float
    experts: int
    transposed: bool

    def backward(self, grad: Buffer) -> Grads:
        device, k = grad.device, grad.device.backend
        left, right = self.factors()
        dstack = _outputs_first(grad.array, self.experts, transposed=self.transposed)
        da, db = self.a.new_grad(), self.b.new_grad()
        into_b, into_a = _by_expert(da.array, db.array, self.experts)
        flops = 2 * grad.numel * right.shape[1]
        device.kernel(flops, k.matmul, left.swapaxes(1, 2), dstack, into_a)
        device.kernel(flops, k.matmul, dstack, right.swapaxes(1, 2), into_b)
        for own in (da, db):
            device.kernel(own.numel, k.multiply, own.array, self.scale, own.array)
        return grad, da, db

    def factors(self) -> tuple[Array, Array]:
        """Return B (E, O, r) and A (E, r, I)."""
        return _by_expert(self.a.array, self.b.array, self.experts)


def _by_expert(a: Array, b: Array, experts: int) -> tuple[Array, Array]:
    """View b (O, r E) as (E, O, r), and a (E r, I) as (E, r, I)."""
    return _of_outputs(b, experts), a.reshape(experts, -1, a.shape[1])


def _outputs_first(array: Array, experts: int, *, transposed: bool) -> Array:
    """View a stack, or one map, as (E, O, I)."""
    each = array.reshape(experts, *array.shape[-2:])
    return each if transposed else each.swapaxes(1, 2)


def _of_outputs(b: Array, experts: int) -> Array:
    return b.reshape(b.shape[0], -1, experts).transpose(2, 0, 1)


def stack_with_adapter(stack: Operand, a: Operand, b: Operand, scale: float, *, transposed: bool = True) -> Tensor:
    """Return a stack plus scale times each expert's B A: a copy of all experts' maps, kept for backward.

    Shapes: stack and result (E, O, I), or (E, I, O) unless `transposed`; a (E r, I), b (O, r E). One map is (O, I).
    """
    device, k = stack.device, stack.device.backend
    experts = stack.shape[0] if len(stack.shape) == 3 else 1
    out, values = device.alloc(stack.shape, stack.dtype, Kind.ACTIVATION), stack.buffer
    rule = WithAdapter(a, b, scale, experts, transposed)
    left, right = rule.factors()
    into = _outputs_first(out.array, experts, transposed=transposed)
    device.kernel(2 * out.numel * right.shape[1], k.matmul, left, right, into)
    device.kernel(out.numel, k.multiply, out.array, scale, out.array)
    device.kernel(out.numel, k.add, out.array, values.array, out.array)
    return apply(rule, out, stack, a, b, op=layer_of(a, "lora_A"), saved={"merged": out})


@dataclass(frozen=True, slots=True)
class ByRows:
    """Saves x, t and handles of A and B."""

    x: Readable
    t: Buffer
    a: Operand
    b: Operand
    counts: tuple[int, ...]
    scale: float
    grad_scale: float

    def backward(self, grad: Buffer) -> Grads:
        device, dx = grad.device, None
        left, right = _by_expert(self.a.array, self.b.array, len(self.counts))
        dt = device.alloc(self.t.shape, grad.dtype, Kind.TEMP)
        _product(GROUPED_DGRAD, grad, left, self.counts, dt, self.scale)
        if self.x.requires_grad:
            dx = self.x.new_grad()
            _product(GROUPED_DGRAD, dt, right, self.counts, dx)
        da = weight_grad(self.a, lambda: self._weight_grad(self.a, dt.array, self.x.array), self.x)
        return grad, dx, da, weight_grad(self.b, lambda: self._weight_grad(self.b, grad.array, self.t.array))

    def _weight_grad(self, weight: Operand, left: Array, right: Array) -> Buffer:
        dweight, experts = weight.new_grad(), len(self.counts)
        device, of = dweight.device, dweight.array
        each = of.reshape(experts, -1, of.shape[1]) if weight is self.a else _of_outputs(of, experts)
        shape = left.shape[1], left.shape[0], right.shape[1], experts
        work = grouped_work(GROUPED_WGRAD, shape, left, right, of)
        device.kernels((work,), device.backend.grouped_wgrad, left, right, self.counts, self.grad_scale, each)
        return dweight


def add_adapter(
    y: Tensor, x: Tensor, a: Operand, b: Operand, counts: tuple[int, ...], scale: float, *, grad_scale: float = 1.0
) -> Tensor:
    """Return y, a stack's product of rows x, plus scale times each expert's B A of its rows. The gradients of A and B
    are multiplied by `grad_scale`. Shapes: y and result (R, O), x (R, I), a (E r, I), b (O, r E)."""
    device = x.device
    left, right = _by_expert(a.array, b.array, len(counts))
    t, out = like(x, x.array.shape[0], right.shape[1]), like(y)
    _product(GROUPED, x.buffer, right.swapaxes(1, 2), counts, t, scale)
    _product(GROUPED, t, left.swapaxes(1, 2), counts, out)
    device.kernel(out.numel, device.backend.add, out.array, y.array, out.array)
    rule = ByRows(held(x), t, a, b, counts, scale, grad_scale)
    return apply(rule, out, y, x, a, b, op=layer_of(a, "lora_A"), saved={"input": held(x), "narrow": t})


def _product(name: str, rows: Buffer, each: Array, counts: Sequence[int], out: Buffer, scale: float = 1.0) -> None:
    """Multiply each expert's rows by its matrix (K, N), then by `scale`."""
    device, (experts, inner, wide) = out.device, each.shape
    work = grouped_work(name, (rows.shape[0], inner, wide, experts), rows.array, each, out.array)
    device.kernels((work,), device.backend.grouped, rows.array, each, counts, out.array)
    if scale != 1.0:
        device.kernel(out.numel, device.backend.multiply, out.array, scale, out.array)
