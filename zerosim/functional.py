"""Fused ops: what models are made of, one class each with its backward rule.

A rule saves what its own backward reads and nothing else: handles of operands (a `Parameter` is
never saved as an array, its data comes and goes) and the few buffers named in its docstring.

Shape legend: B batch, T tokens, D model, H heads, V vocabulary, I and O the widths of a linear map,
M = product of the leading dims.
"""

from __future__ import annotations

from zerosim.backends.kernels import Array
from zerosim.device import Buffer, Kind
from zerosim.dtypes import compute_dtype, uint8
from zerosim.errors import InputError
from zerosim.tensor import Operand, Tensor, apply

Grads = tuple[Buffer | None, ...]


def _rows(array: Array) -> Array:
    """(..., D) as (M, D), without a copy."""
    return array.reshape(-1, array.shape[-1])


def _like(x: Tensor, *shape: int) -> Buffer:
    return x.device.alloc(shape or x.shape, x.dtype, Kind.ACTIVATION)


def _grad_like(x: Buffer) -> Buffer:
    return x.device.alloc(x.shape, x.dtype, Kind.ACTIVATION_GRAD)


class Linear:
    """Saves x and the handles of weight and bias."""

    def __init__(self, x: Tensor, weight: Operand, bias: Operand | None, transposed: bool) -> None:
        self.x = x
        self.weight = weight
        self.bias = bias
        self.transposed = transposed

    def backward(self, grad: Buffer) -> Grads:
        device, k = grad.device, grad.device.backend
        x, weight, rows = _rows(self.x.array), self.weight.array, _rows(grad.array)
        flops = 2 * x.shape[0] * weight.size
        dx = None
        if self.x.requires_grad:
            dx = self.x.new_grad()
            across = weight if self.transposed else weight.T
            device.kernel(flops, k.matmul, rows, across, _rows(dx.array))
        dweight = self.weight.new_grad()
        left, right = (rows.T, x) if self.transposed else (x.T, rows)
        device.kernel(flops, k.matmul, left, right, dweight.array)
        if self.bias is None:
            return dx, dweight
        dbias = self.bias.new_grad()
        device.kernel(rows.size, k.column_sum, rows, dbias.array)
        return dx, dweight, dbias


def linear(x: Tensor, weight: Operand, bias: Operand | None = None, *, transposed: bool = False) -> Tensor:
    """y = x @ weight + bias.

    Shapes: x (..., I), weight (I, O) or, transposed, (O, I); bias (O); y (..., O).
    """
    width, wide = weight.shape[::-1] if transposed else weight.shape
    if x.shape[-1] != width:
        raise InputError(f"linear: x has {x.shape[-1]} columns, its weight of shape {weight.shape} takes {width}")
    out = _like(x, *x.shape[:-1], wide)
    rows = _rows(x.array)
    x.device.kernel(
        2 * rows.shape[0] * width * wide,
        x.device.backend.linear,
        rows,
        weight.array.T if transposed else weight.array,
        None if bias is None else bias.array,
        _rows(out.array),
    )
    inputs = (x, weight) if bias is None else (x, weight, bias)
    return apply(Linear(x, weight, bias, transposed), out, *inputs)


class LayerNorm:
    """Saves x, and mean and rstd (M each, in the compute dtype)."""

    def __init__(self, x: Tensor, weight: Operand, bias: Operand, mean: Buffer, rstd: Buffer) -> None:
        self.x = x
        self.weight = weight
        self.bias = bias
        self.mean = mean
        self.rstd = rstd

    def backward(self, grad: Buffer) -> Grads:
        device = grad.device
        dx = self.x.new_grad() if self.x.requires_grad else None
        dweight, dbias = self.weight.new_grad(), self.bias.new_grad()
        device.kernel(
            11 * grad.numel,
            device.backend.layer_norm_backward,
            _rows(grad.array),
            _rows(self.x.array),
            self.weight.array,
            self.mean.array,
            self.rstd.array,
            None if dx is None else _rows(dx.array),
            dweight.array,
            dbias.array,
        )
        return dx, dweight, dbias


def layer_norm(x: Tensor, weight: Operand, bias: Operand, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim. Shapes: x (..., D), weight, bias (D)."""
    device, out = x.device, _like(x)
    rows = _rows(x.array)
    stats = compute_dtype(x.dtype)
    mean = device.alloc((rows.shape[0],), stats, Kind.ACTIVATION)
    rstd = device.alloc((rows.shape[0],), stats, Kind.ACTIVATION)
    device.kernel(
        7 * out.numel,
        device.backend.layer_norm,
        rows,
        weight.array,
        bias.array,
        eps,
        _rows(out.array),
        mean.array,
        rstd.array,
    )
    return apply(LayerNorm(x, weight, bias, mean, rstd), out, x, weight, bias)


class Gelu:
    """Saves x; the tanh is computed again in backward, as the fused GPU kernels do."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def backward(self, grad: Buffer) -> Grads:
        dx = _grad_like(grad)
        grad.device.kernel(16 * grad.numel, grad.device.backend.gelu_backward, grad.array, self.x.array, dx.array)
        return (dx,)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form (GPT-2's)."""
    out = _like(x)
    x.device.kernel(8 * out.numel, x.device.backend.gelu, x.array, out.array)
    return apply(Gelu(x), out, x)


class Attention:
    """Saves qkv, the probabilities (B, H, T, T) and, with dropout, its 1-byte mask."""

    def __init__(self, qkv: Tensor, num_heads: int, probs: Buffer, mask: Buffer | None, keep: float) -> None:
        self.qkv = qkv
        self.num_heads = num_heads
        self.probs = probs
        self.mask = mask
        self.keep = keep

    def backward(self, grad: Buffer) -> Grads:
        device = grad.device
        dqkv = self.qkv.new_grad()
        workspace = device.alloc(self.probs.shape, self.probs.dtype, Kind.TEMP)
        device.kernel(
            8 * self.probs.numel * (grad.shape[-1] // self.num_heads),
            device.backend.attention_backward,
            grad.array,
            self.qkv.array,
            self.num_heads,
            self.probs.array,
            None if self.mask is None else self.mask.array,
            self.keep,
            workspace.array,
            dqkv.array,
        )
        return (dqkv,)


def attention(qkv: Tensor, num_heads: int, *, dropout: float = 0.0, key: tuple[int, int] = (0, 0)) -> Tensor:
    """Causal self-attention, heads side by side, scale 1/sqrt(D/H).

    Shapes: qkv (B, T, 3D) with columns q|k|v, each cut into H heads; result (B, T, D). `dropout` is
    the chance that a probability is dropped, `key` names its random numbers.
    """
    device = qkv.device
    batch, tokens, width = qkv.shape
    if width % (3 * num_heads):
        raise InputError(f"attention: {num_heads} heads do not divide a third of {width} columns")
    out = _like(qkv, batch, tokens, width // 3)
    probs = _like(qkv, batch, num_heads, tokens, tokens)
    mask = _mask(qkv, probs.shape, dropout, key)
    device.kernel(
        4 * probs.numel * (width // 3 // num_heads),
        device.backend.attention,
        qkv.array,
        num_heads,
        None if mask is None else mask.array,
        1.0 - dropout,
        out.array,
        probs.array,
    )
    return apply(Attention(qkv, num_heads, probs, mask, 1.0 - dropout), out, qkv)


class Embedding:
    """Saves ids."""

    def __init__(self, ids: Buffer, weight: Operand) -> None:
        self.ids = ids
        self.weight = weight

    def backward(self, grad: Buffer) -> Grads:
        dweight = self.weight.new_grad()
        grad.device.kernel(
            grad.numel, grad.device.backend.embedding_backward, grad.array, self.ids.array, dweight.array
        )
        return (dweight,)


def embedding(ids: Buffer, weight: Operand) -> Tensor:
    """Rows of `weight` (V, D) by `ids` (...), int64 in [0, V): (..., D)."""
    device = ids.device
    out = device.alloc((*ids.shape, weight.shape[1]), weight.dtype, Kind.ACTIVATION)
    device.kernel(0, device.backend.embedding, ids.array, weight.array, out.array)
    return apply(Embedding(ids, weight), out, weight)


class AddRows:
    """Saves the handle of what was added; its gradient is summed over the batch. x is not kept."""

    def __init__(self, x: Tensor, rows: Operand) -> None:
        self.x_requires_grad = x.requires_grad
        self.rows = rows

    def backward(self, grad: Buffer) -> Grads:
        device, drows = grad.device, self.rows.new_grad()
        used = grad.shape[-2]
        if used < drows.shape[0]:
            device.kernel(0, device.backend.fill, drows.array, 0.0)
        device.kernel(grad.numel, device.backend.sum_to, grad.array, drows.array[:used])
        return grad if self.x_requires_grad else None, drows


def add_rows(x: Tensor, rows: Operand) -> Tensor:
    """x (B, T, D) + the first T of `rows` (at least T, D): learned positions."""
    if x.shape[-2:] != (min(x.shape[-2], rows.shape[0]), rows.shape[1]):
        raise InputError(f"add_rows: x of shape {x.shape} needs as many rows as tokens, of its width, not {rows.shape}")
    device, out = x.device, _like(x)
    device.kernel(out.numel, device.backend.add, x.array, rows.array[: x.shape[-2]], out.array)
    return apply(AddRows(x, rows), out, x, rows)


class CrossEntropy:
    """Saves logits, targets and the log-sum-exp of each row."""

    def __init__(self, logits: Tensor, targets: Buffer, lse: Buffer) -> None:
        self.logits = logits
        self.targets = targets
        self.lse = lse

    def backward(self, grad: Buffer) -> Grads:
        dlogits = _dlogits(self.logits, self.targets, self.lse, 1.0, self.lse.numel)
        device = grad.device
        device.kernel(dlogits.numel, device.backend.multiply, dlogits.array, grad.array, dlogits.array)
        return (dlogits,)


def cross_entropy(logits: Tensor, targets: Buffer) -> Tensor:
    """The mean over rows of -log softmax(logits)[target].

    Shapes: logits (..., V), targets (...) int64 in [0, V); result (1), in the compute dtype.
    """
    total, lse = _cross_entropy_sum(logits, targets)
    device = total.device
    device.kernel(1, device.backend.divide, total.array, float(lse.numel), total.array)
    return apply(CrossEntropy(logits, targets, lse), total, logits)


def cross_entropy_and_grad(logits: Tensor, targets: Buffer, *, scale: float, count: int) -> tuple[Buffer, Buffer]:
    """The SUM of the rows' losses (1), and `scale / count` times its gradient (..., V): a training step's.

    The gradient is made at once, so that logits can die before backward begins. The loss stays a
    sum because its mean is taken on the host, in fp64, when the step is over.
    """
    total, lse = _cross_entropy_sum(logits, targets)
    return total, _dlogits(logits, targets, lse, scale, count)


def _cross_entropy_sum(logits: Tensor, targets: Buffer) -> tuple[Buffer, Buffer]:
    device, rows = logits.device, _rows(logits.array)
    stats = compute_dtype(logits.dtype)
    losses = device.alloc((rows.shape[0],), stats, Kind.TEMP)
    lse = device.alloc((rows.shape[0],), stats, Kind.ACTIVATION)
    ids = targets.array.reshape(-1)
    device.kernel(4 * rows.size, device.backend.cross_entropy, rows, ids, losses.array, lse.array)
    total = device.alloc((1,), stats, Kind.TEMP)
    device.kernel(rows.shape[0], device.backend.sum_to, losses.array, total.array)
    return total, lse


def _dlogits(logits: Tensor, targets: Buffer, lse: Buffer, scale: float, count: int) -> Buffer:
    dlogits = logits.new_grad()
    logits.device.kernel(
        4 * dlogits.numel,
        logits.device.backend.cross_entropy_backward,
        _rows(logits.array),
        targets.array.reshape(-1),
        lse.array,
        scale,
        count,
        _rows(dlogits.array),
    )
    return dlogits


class Dropout:
    """Saves its 1-byte mask."""

    def __init__(self, mask: Buffer, keep: float) -> None:
        self.mask = mask
        self.keep = keep

    def backward(self, grad: Buffer) -> Grads:
        dx = _grad_like(grad)
        grad.device.kernel(
            2 * grad.numel,
            grad.device.backend.dropout,
            grad.array,
            self.mask.array,
            self.keep,
            dx.array,
        )
        return (dx,)


def _mask(x: Tensor, shape: tuple[int, ...], probability: float, key: tuple[int, int]) -> Buffer | None:
    if not 0.0 <= probability < 1.0:
        raise InputError(f"dropout {probability}: expected a chance in [0, 1)")
    if probability == 0.0:
        return None
    mask = x.device.alloc(shape, uint8, Kind.ACTIVATION)
    x.device.kernel(0, x.device.backend.dropout_mask, key, probability, mask.array)
    return mask


def dropout(x: Tensor, probability: float, key: tuple[int, int]) -> Tensor:
    """x with each element dropped by chance `probability`, the rest divided by 1 - probability.

    Which ones is a function of `key` and the position alone (`rng.py`). Probability 0 is x itself.
    """
    mask = _mask(x, x.shape, probability, key)
    if mask is None:
        return x
    out = _like(x)
    keep = 1.0 - probability
    x.device.kernel(2 * out.numel, x.device.backend.dropout, x.array, mask.array, keep, out.array)
    return apply(Dropout(mask, keep), out, x)
