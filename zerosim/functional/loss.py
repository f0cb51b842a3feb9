"""Cross-entropy over the vocabulary (V), as an op and as the end of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import compute_dtype
from zerosim.functional.common import Grads, rows_of
from zerosim.tensor.tensor import Saved, Tensor, apply


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Saves logits, targets and the log-sum-exp of each row."""

    logits: Tensor
    targets: Buffer
    lse: Buffer

    def backward(self, grad: Buffer) -> Grads:
        dlogits = logits_grad(self.logits, self.targets, self.lse, 1.0, self.lse.numel)
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
    saved: Saved = {"logits": logits, "targets": targets, "log-sum-exp": lse}
    return apply(CrossEntropy(logits, targets, lse), total, logits, op="cross_entropy", saved=saved)


def cross_entropy_and_grad(logits: Tensor, targets: Buffer, *, scale: float, count: int) -> tuple[Buffer, Buffer]:
    """The SUM of the rows' losses (1), and `scale / count` times its gradient (..., V): a training step's.

    Shapes: logits (..., V), targets (...) int64 in [0, V). The sum is in the compute dtype, the gradient in logits'.

    The gradient is made at once, so that logits can die before backward begins. The loss stays a
    sum because its mean is taken on the host, in fp64, when the step is over.
    """
    total, lse = _cross_entropy_sum(logits, targets)
    return total, logits_grad(logits, targets, lse, scale, count)


def _cross_entropy_sum(logits: Tensor, targets: Buffer) -> tuple[Buffer, Buffer]:
    device, rows = logits.device, rows_of(logits.array)
    stats = compute_dtype(logits.dtype)
    losses = device.alloc((rows.shape[0],), stats, Kind.TEMP)
    lse = device.alloc((rows.shape[0],), stats, Kind.ACTIVATION)
    ids = targets.array.reshape(-1)
    device.kernel(4 * rows.size, device.backend.cross_entropy, rows, ids, losses.array, lse.array)
    total = device.alloc((1,), stats, Kind.TEMP)
    device.kernel(rows.shape[0], device.backend.sum_to, losses.array, total.array)
    return total, lse


def logits_grad(
    logits: Tensor,
    targets: Buffer,
    lse: Buffer,
    scale: float,
    count: int,
    first: int = 0,
    columns: int | None = None,
) -> Buffer:
    """scale / count times the gradient of the summed losses, given the log-sum-exp of each row.

    Of logits that are columns `first` and on of a whole; only so many of them as `columns` are no padding.
    """
    dlogits = logits.new_grad()
    device, own, out = logits.device, rows_of(logits.array), rows_of(dlogits.array)
    columns = own.shape[1] if columns is None else columns
    if columns < own.shape[1]:
        device.kernel(0, device.backend.fill, dlogits.array, 0.0)
    ids = targets.array.reshape(-1)
    device.kernel(
        4 * own.shape[0] * columns,
        device.backend.cross_entropy_backward,
        own[:, :columns],
        ids,
        lse.array,
        scale,
        count,
        out[:, :columns],
        first,
    )
    return dlogits
