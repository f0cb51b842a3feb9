"""Cross-entropy over the vocabulary (V): an op, and the building blocks of a training step's loss (`loss_modes.py`).

`form` changes logits before the softmax: a factor (Cohere's, Granite's), a cap (Gemma 2's). The kernels apply it to
what they read, so that it costs no buffer. Gradients are those of the logits before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zerosim.backends.forms import PLAIN, LogitForm
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType, compute_dtype
from zerosim.errors import InputError
from zerosim.functional.common import Grads, rows_of
from zerosim.tensor.tensor import Saved, Tensor, apply

MakeGrad = Callable[[], Buffer]
"""A function called when backward begins. It returns the gradient of the logits, of their shape and dtype."""
Sums = Callable[[Buffer], tuple[Buffer, Buffer]]
"""From logits to the sum of the losses and the log-sum-exp of each row. A group of ranks may compute it together."""


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Saves logits, targets and the log-sum-exp of each row."""

    logits: Tensor
    targets: Buffer
    lse: Buffer
    form: LogitForm

    def backward(self, grad: Buffer) -> Grads:
        dlogits = self.logits.new_grad()
        of = LogitsGrad(self.targets, 1.0, self.lse.numel, form=self.form)
        of.write(self.logits.buffer, self.lse, dlogits)
        device = grad.device
        device.kernel(dlogits.numel, device.backend.multiply, dlogits.array, grad.array, dlogits.array)
        return (dlogits,)


def cross_entropy(logits: Tensor, targets: Buffer, form: LogitForm = PLAIN) -> Tensor:
    """Return the mean over rows of -log softmax(logits)[target], of logits as `form` changes them.

    Shapes: logits (..., V), targets (...) int64 in [0, V); result (1), in the compute dtype.
    """
    total, lse = cross_entropy_sum(logits.buffer, targets, form)
    device = total.device
    device.kernel(1, device.backend.divide, total.array, float(lse.numel), total.array)
    saved: Saved = {"logits": logits, "targets": targets, "log-sum-exp": lse}
    return apply(CrossEntropy(logits, targets, lse, form), total, logits, op="cross_entropy", saved=saved)


def cross_entropy_sum(logits: Buffer, targets: Buffer, form: LogitForm = PLAIN) -> tuple[Buffer, Buffer]:
    """Return the SUM of the rows' losses (1), and the log-sum-exp of each row (M), both in the compute dtype.

    Shapes: logits (..., V), M rows of them; targets (...) int64 in [0, V).
    """
    device, rows = logits.device, rows_of(logits.array)
    stats = compute_dtype(logits.dtype)
    losses = device.alloc((rows.shape[0],), stats, Kind.TEMP)
    lse = device.alloc((rows.shape[0],), stats, Kind.ACTIVATION)
    ids = targets.array.reshape(-1)
    flops = (4 + form.flops) * rows.size
    device.kernel(flops, device.backend.cross_entropy, rows, ids, losses.array, lse.array, form)
    total = device.alloc((1,), stats, Kind.TEMP)
    device.kernel(rows.shape[0], device.backend.sum_to, losses.array, total.array)
    return total, lse


@dataclass(frozen=True, slots=True)
class LogitsGrad:
    """The inputs, besides logits, of `scale / count` times the gradient of the summed losses.

    The logits are the whole's columns from `first` on. `columns` of them are words; the rest is padding. `outputs`
    takes the buffers that the loss's caller keeps through backward.
    """

    targets: Buffer
    scale: float
    count: float
    first: int = 0
    columns: int | None = None
    form: LogitForm = PLAIN
    outputs: list[Buffer] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.form.factor <= 0 or self.form.cap < 0:
            raise InputError(f"loss: {self.form}: expected a factor of more than 0, and a cap of more than 0 or none")

    def write(self, logits: Buffer, lse: Buffer | None, out: Buffer) -> Buffer:
        """Write the gradient into `out`, which may be the logits' own buffer. Without `lse` the logits are
        log-probabilities."""
        device, own, into = logits.device, rows_of(logits.array), rows_of(out.array)
        columns = own.shape[1] if self.columns is None else self.columns
        if columns < own.shape[1]:
            device.kernel(0, device.backend.fill, into[:, columns:], 0.0)
        if lse is None:
            lse = device.alloc((own.shape[0],), compute_dtype(logits.dtype), Kind.TEMP)
            device.kernel(0, device.backend.fill, lse.array, 0.0)
        ids = self.targets.array.reshape(-1)
        flops = (4 + 2 * self.form.flops) * own.shape[0] * columns
        sources = own[:, :columns], ids, lse.array, self.scale, self.count
        backward = device.backend.cross_entropy_backward
        device.kernel(flops, backward, *sources, into[:, :columns], self.first, self.form)
        return out


def form_rows(logits: Buffer, form: LogitForm) -> None:
    """Change logits in place, as the loss's kernels change those that they read."""
    k, array = logits.device.backend, logits.array
    if form.factor != 1.0:
        logits.device.kernel(logits.numel, k.multiply, array, form.factor, array)
    if form.cap:
        logits.device.kernel(logits.numel, k.divide, array, form.cap, array)
        logits.device.kernel(logits.numel, k.tanh, array, array)
        logits.device.kernel(logits.numel, k.multiply, array, form.cap, array)


def cast(source: Buffer, dtype: DType, kind: Kind) -> Buffer:
    """Cast to another dtype; return the buffer itself if it has that dtype, as `Tensor.to` does."""
    if source.dtype == dtype:
        return source
    device = source.device
    result = device.alloc(source.shape, dtype, kind)
    device.kernel(0, device.backend.copy, source.array, result.array)
    return result
