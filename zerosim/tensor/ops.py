"""Primitive ops: the alphabet that fused ops (`functional.py`) are checked against and taught with.

Each is a rule (its saved buffers, and how a gradient passes back through it) and the function that makes it. Operands
broadcast as in NumPy, numbers count as constants, and a gradient is summed back to its operand's shape. Models use the
fused ops, which cost a fraction of a graph of these.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType
from zerosim.errors import InputError
from zerosim.tensor.tensor import Operand, Outline, Parameter, Saved, Tensor, apply, check_device, outline, tensor

Grads = tuple[Buffer | None, ...]


def broadcast_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Broadcast as NumPy does: dims are aligned at the end and must be equal or 1. Raises: InputError."""
    length = max(len(a), len(b))
    a_dims, b_dims = (1,) * (length - len(a)) + a, (1,) * (length - len(b)) + b
    if any(m != n and 1 not in (m, n) for m, n in zip(a_dims, b_dims, strict=True)):
        raise InputError(f"shapes {a} and {b} do not broadcast")
    return tuple(n if m == 1 else m for m, n in zip(a_dims, b_dims, strict=True))


def _sum_to(grad: Buffer, target: Outline | Parameter) -> Buffer:
    """Return `grad`, of the broadcast shape, summed to the shape of `target`."""
    if grad.shape == target.shape:
        return grad
    out = target.new_grad()
    grad.device.kernel(grad.numel, grad.device.backend.sum_to, grad.array, out.array)
    return out


def _elementwise(run: Callable[[Array, Array, Array], None], a: Buffer, b: Array) -> Buffer:
    """Return a new buffer like `a`, filled by a binary kernel: the gradients' arithmetic."""
    out = a.device.alloc(a.shape, a.dtype, Kind.ACTIVATION_GRAD)
    a.device.kernel(out.numel, run, a.array, b, out.array)
    return out


def _into(x: Operand) -> Outline | Parameter:
    """Return what is saved of an operand to compute its gradient; a parameter is a handle and holds no bytes."""
    return x if isinstance(x, Parameter) else outline(x)


class _Binary:
    """An op of two operands. It sums each operand's gradient back to its shape; a subclass gives the gradient before
    that, and the operands that it reads."""

    def __init__(self, a: Operand, b: Operand) -> None:
        self.into = _into(a), _into(b)
        self.save(a, b)

    def save(self, a: Operand, b: Operand) -> None:
        """Save the operands whose values backward reads."""

    def saved(self) -> Saved | None:
        """Return those operands, by name."""
        return None

    def backward(self, grad: Buffer) -> Grads:
        a, b = self.into
        return (
            _sum_to(self.grad_a(grad), a) if a.requires_grad else None,
            _sum_to(self.grad_b(grad), b) if b.requires_grad else None,
        )

    def grad_a(self, grad: Buffer) -> Buffer:
        return grad

    def grad_b(self, grad: Buffer) -> Buffer:
        return grad


class Add(_Binary):
    """Saves nothing."""


class Subtract(_Binary):
    """Saves nothing."""

    def grad_b(self, grad: Buffer) -> Buffer:
        return _elementwise(grad.device.backend.multiply, grad, -1.0)


class _Product(_Binary):
    """Saves each operand that the other one's gradient reads."""

    def save(self, a: Operand, b: Operand) -> None:
        self.a = a if b.requires_grad else None
        self.b = b if a.requires_grad else None

    def saved(self) -> Saved:
        return {"a": self.a, "b": self.b}


class Multiply(_Product):
    def grad_a(self, grad: Buffer) -> Buffer:
        assert self.b is not None
        return _elementwise(grad.device.backend.multiply, grad, self.b.array)

    def grad_b(self, grad: Buffer) -> Buffer:
        assert self.a is not None
        return _elementwise(grad.device.backend.multiply, grad, self.a.array)


class Divide(_Binary):
    """Saves b and, where b wants a gradient, a."""

    def save(self, a: Operand, b: Operand) -> None:
        self.a = a if b.requires_grad else None
        self.b = b

    def saved(self) -> Saved:
        return {"a": self.a, "b": self.b}

    def grad_a(self, grad: Buffer) -> Buffer:
        return _elementwise(grad.device.backend.divide, grad, self.b.array)

    def grad_b(self, grad: Buffer) -> Buffer:
        k = grad.device.backend  # d(a/b)/db = -a / b^2
        assert self.a is not None
        times_a = _elementwise(k.multiply, grad, self.a.array)
        over_b = _elementwise(k.divide, _elementwise(k.divide, times_a, self.b.array), self.b.array)
        return _elementwise(k.multiply, over_b, -1.0)


class MatMul(_Product):
    def grad_a(self, grad: Buffer) -> Buffer:
        assert self.b is not None
        return _matmul(grad.device, grad.array, self.b.array.swapaxes(-1, -2), grad.dtype, Kind.ACTIVATION_GRAD)

    def grad_b(self, grad: Buffer) -> Buffer:
        assert self.a is not None
        return _matmul(grad.device, self.a.array.swapaxes(-1, -2), grad.array, grad.dtype, Kind.ACTIVATION_GRAD)


class _Saved:
    """Saves one buffer: the operand or the result, depending on how the derivative is written."""

    def __init__(self, saved: Buffer) -> None:
        self.saved = saved


class Exp(_Saved):
    def backward(self, grad: Buffer) -> Grads:
        return (_elementwise(grad.device.backend.multiply, grad, self.saved.array),)


class Log(_Saved):
    def backward(self, grad: Buffer) -> Grads:
        return (_elementwise(grad.device.backend.divide, grad, self.saved.array),)


class Sqrt(_Saved):
    def backward(self, grad: Buffer) -> Grads:
        k = grad.device.backend
        return (_elementwise(k.multiply, _elementwise(k.divide, grad, self.saved.array), 0.5),)


class Tanh(_Saved):
    def backward(self, grad: Buffer) -> Grads:
        k = grad.device.backend
        square = _elementwise(k.multiply, self.saved, self.saved.array)
        return (_elementwise(k.subtract, grad, _elementwise(k.multiply, grad, square.array).array),)


class Sum:
    """Hands the gradient to every element that was added."""

    def __init__(self, x: Operand, kept: tuple[int, ...]) -> None:
        self.into = _into(x)
        self.kept = kept

    def backward(self, grad: Buffer) -> Grads:
        device, out = grad.device, self.into.new_grad()
        device.kernel(0, device.backend.fill, out.array, 0.0)
        device.kernel(out.numel, device.backend.add, out.array, grad.array.reshape(self.kept), out.array)
        return (out,)


class Reshape:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def backward(self, grad: Buffer) -> Grads:
        return (grad.reshape(*self.shape),)


class Transpose:
    def __init__(self, order: tuple[int, ...]) -> None:
        self.inverse = tuple(order.index(i) for i in range(len(order)))

    def backward(self, grad: Buffer) -> Grads:
        return (_transposed(grad, self.inverse, Kind.ACTIVATION_GRAD),)


class MaskFuture:
    """Masked scores are constants: no gradient goes through them."""

    def backward(self, grad: Buffer) -> Grads:
        out = grad.device.alloc(grad.shape, grad.dtype, Kind.ACTIVATION_GRAD)
        grad.device.kernel(grad.numel, grad.device.backend.mask_future, grad.array, 0.0, out.array)
        return (out,)


def _matmul(device: Device, a: Array, b: Array, dtype: DType, kind: Kind) -> Buffer:
    shape = (*broadcast_shape(tuple(a.shape[:-2]), tuple(b.shape[:-2])), a.shape[-2], b.shape[-1])
    out = device.alloc(shape, dtype, kind)
    device.kernel(2 * out.numel * a.shape[-1], device.backend.matmul, a, b, out.array)
    return out


def _transposed(x: Buffer, order: tuple[int, ...], kind: Kind) -> Buffer:
    out = x.device.alloc(tuple(x.shape[i] for i in order), x.dtype, kind)
    x.device.kernel(0, x.device.backend.copy, x.array.transpose(order), out.array)
    return out


def _operands(name: str, a: Operand | float, b: Operand | float) -> tuple[Operand, Operand]:
    """Return both as operands of one device and dtype: a number becomes a constant like the other operand."""
    if isinstance(a, Real) and isinstance(b, Operand):
        a = tensor(a, b.device, dtype=b.dtype)
    elif isinstance(b, Real) and isinstance(a, Operand):
        b = tensor(b, a.device, dtype=a.dtype)
    if not isinstance(a, Operand) or not isinstance(b, Operand):
        raise InputError(f"{name} takes tensors and numbers, not {type(a).__name__} and {type(b).__name__}")
    check_device(a, b)
    if a.dtype != b.dtype:
        raise InputError(f"{name} takes tensors of one dtype, not {a} and {b}")
    return a, b


def _binary(name: str, rule: type[_Binary], a: Operand | float, b: Operand | float) -> Tensor:
    left, right = _operands(name, a, b)
    device = left.device
    out = device.alloc(broadcast_shape(left.shape, right.shape), left.dtype, Kind.ACTIVATION)
    device.kernel(out.numel, getattr(device.backend, name), left.array, right.array, out.array)
    made = rule(left, right)
    return apply(made, out, left, right, op=name, saved=made.saved())


def add(a: Operand | float, b: Operand | float) -> Tensor:
    return _binary("add", Add, a, b)


def subtract(a: Operand | float, b: Operand | float) -> Tensor:
    return _binary("subtract", Subtract, a, b)


def multiply(a: Operand | float, b: Operand | float) -> Tensor:
    return _binary("multiply", Multiply, a, b)


def divide(a: Operand | float, b: Operand | float) -> Tensor:
    return _binary("divide", Divide, a, b)


def matmul(a: Operand, b: Operand) -> Tensor:
    """Multiply a (..., M, K) @ b (..., K, N); leading dims broadcast. Raises: InputError if K differs."""
    a, b = _operands("matmul", a, b)
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
        raise InputError(f"matmul of {a.shape} and {b.shape}: the inner sizes must be equal, both at least 2-d")
    rule, out = MatMul(a, b), _matmul(a.device, a.array, b.array, a.dtype, Kind.ACTIVATION)
    return apply(rule, out, a, b, op="matmul", saved=rule.saved())


def _unary(kernel: str, x: Operand) -> Buffer:
    out = x.device.alloc(x.shape, x.dtype, Kind.ACTIVATION)
    x.device.kernel(out.numel, getattr(x.device.backend, kernel), x.array, out.array)
    return out


def exp(x: Tensor) -> Tensor:
    out = _unary("exp", x)
    return apply(Exp(out), out, x, op="exp", saved={"result": out})


def log(x: Tensor) -> Tensor:
    return apply(Log(x.buffer), _unary("log", x), x, op="log", saved={"input": x})


def sqrt(x: Tensor) -> Tensor:
    out = _unary("sqrt", x)
    return apply(Sqrt(out), out, x, op="sqrt", saved={"result": out})


def tanh(x: Tensor) -> Tensor:
    out = _unary("tanh", x)
    return apply(Tanh(out), out, x, op="tanh", saved={"result": out})


def _kept(x: Operand, dims: tuple[int, ...] | None) -> tuple[int, ...]:
    rank = len(x.shape)
    chosen = range(rank) if dims is None else [d % rank for d in dims]
    return tuple(1 if d in chosen else n for d, n in enumerate(x.shape))


def sum(x: Operand, dims: tuple[int, ...] | None = None, *, keepdims: bool = False) -> Tensor:
    """Sum over `dims` (None: all of them)."""
    kept = _kept(x, dims)
    out = x.device.alloc(kept, x.dtype, Kind.ACTIVATION)
    x.device.kernel(x.array.size, x.device.backend.sum_to, x.array, out.array)
    if not keepdims:
        gone = range(len(kept)) if dims is None else [d % len(kept) for d in dims]
        out = out.reshape(*(n for d, n in enumerate(kept) if d not in gone))
    return apply(Sum(x, kept), out, x)


def mean(x: Operand, dims: tuple[int, ...] | None = None, *, keepdims: bool = False) -> Tensor:
    count = 1
    for size, kept in zip(x.shape, _kept(x, dims), strict=True):
        count *= size // kept
    return divide(sum(x, dims, keepdims=keepdims), float(count))


def maximum(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the maximum over `dims`, kept as 1, as a constant: no gradient (a shift, for stable softmax)."""
    out = x.device.alloc(_kept(x, dims), x.dtype, Kind.ACTIVATION)
    x.device.kernel(x.buffer.numel, x.device.backend.max_to, x.array, out.array)
    return Tensor(out)


def reshape(x: Tensor, *shape: int) -> Tensor:
    """Return the same elements in another shape: shares the bytes."""
    return apply(Reshape(x.shape), x.buffer.reshape(*shape), x)


def transpose(x: Tensor, *order: int) -> Tensor:
    """Reorder dims into a copy; without an order, reverse them."""
    rank = len(x.shape)
    order = tuple(d % rank for d in order) or tuple(reversed(range(rank)))
    return apply(Transpose(order), _transposed(x.buffer, order, Kind.ACTIVATION), x)


def mask_future(scores: Tensor, value: float = float("-inf")) -> Tensor:
    """Return scores (..., T, T) with `value` where the key comes after the query."""
    out = scores.device.alloc(scores.shape, scores.dtype, Kind.ACTIVATION)
    scores.device.kernel(out.numel, scores.device.backend.mask_future, scores.array, value, out.array)
    return apply(MaskFuture(), out, scores)
