"""The head and the loss in one op, an eighth of the tokens at a time: at most an eighth of the logits is ever live.
With a `tile`, so many tokens at a time: then no more logits are live for a longer sequence.

Forward saves the log-sum-exp of each row. Backward recomputes a chunk's logits, overwrites them with their gradient,
and accumulates the head's weight gradient, with a temporary share of the same size. This costs one more product
with the head's weight than other modes.

Source: torchtune's chunked cross-entropy (8 chunks), Liger's fused linear cross-entropy; sums are in another order than
in the other modes, so losses and gradients agree within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zerosim.device.device import Buffer, Kind
from zerosim.device.work import DGRAD, WGRAD
from zerosim.dtypes import compute_dtype
from zerosim.functional.common import Grads, rows_of, spans
from zerosim.functional.linear import linear_result
from zerosim.functional.loss import LogitsGrad
from zerosim.tensor.discarded import Readable
from zerosim.tensor.tensor import Operand, Tensor

CHUNKS = 8
"""torchtune's num_output_chunks."""
SumsOf = Callable[[Buffer, Buffer], tuple[Buffer, Buffer]]
"""From logits and targets of some rows to the sum of their losses and the log-sum-exp of each."""


@dataclass(frozen=True, slots=True)
class ChunkedLoss:
    """The loss of x (B, T, D) under a head of a weight (V, D) and possibly a bias (V): a column-parallel map with a
    result of one number."""

    weights: Sequence[Operand]
    sums_of: SumsOf
    grad_of: LogitsGrad
    lse: list[Buffer]
    """Saved for each chunk, from forward to backward."""
    draw: Callable[[Buffer, Buffer, int], None] | None = None
    """Fills a chunk's targets from its logits; the number is its first row's."""
    tile: int = 0
    """The tokens of a chunk; 0: an eighth of all."""

    def run(self, x: Tensor) -> Buffer:
        """Return the sum of the losses (1)."""
        device, total = x.device, self.zero(x)
        for rows in self.chunks(x):
            share, lse = self._sums(x, rows)
            device.kernel(1, device.backend.add, total.array, share.array, total.array)
            self.lse.append(lse)
        return total

    @staticmethod
    def zero(x: Tensor) -> Buffer:
        """Return the sum of no losses (1), in the compute dtype."""
        total = x.device.alloc((1,), compute_dtype(x.dtype), Kind.TEMP)
        x.device.kernel(0, x.device.backend.fill, total.array, 0.0)
        return total

    def _sums(self, x: Readable, rows: slice) -> tuple[Buffer, Buffer]:
        logits, targets = self.logits(x, rows), self.targets(rows)
        if self.draw is not None:
            self.draw(logits, targets, rows.start)
        return self.sums_of(logits, targets)

    def rule(self, x: Readable) -> ChunkedLossRule:
        """Return the backward rule for the same x."""
        return ChunkedLossRule(x, self)

    def chunks(self, x: Readable) -> list[slice]:
        """Return the rows of each chunk: equally many, except for fewer in the last ones."""
        count = x.buffer.numel // x.shape[-1]
        return spans(count, self.tile or -(-count // CHUNKS))

    def logits(self, x: Readable, rows: slice) -> Buffer:
        """Compute the logits of some rows of x."""
        flat = x.buffer.reshape(-1, x.shape[-1])
        return linear_result(Tensor(flat[rows]), *self.weights, transposed=True)

    def targets(self, rows: slice) -> Buffer:
        """Return the targets of some rows."""
        return self.grad_of.targets.reshape(-1)[rows]

    def logits_grad(self, x: Readable, rows: slice) -> Buffer:
        """Recompute a chunk's logits, and overwrite them with their gradient."""
        logits = self.logits(x, rows)
        logits.device.retag(logits, Kind.ACTIVATION_GRAD)
        return replace(self.grad_of, targets=self.targets(rows)).write(logits, self.lse.pop(0), logits)


@dataclass(frozen=True, slots=True)
class ChunkedLossRule:
    """Saves x and the handle of the head's weight. The incoming gradient is 1, because scale and count were given."""

    x: Readable
    loss: ChunkedLoss

    def backward(self, grad: Buffer) -> Grads:
        device, k, (weight, *biases) = grad.device, grad.device.backend, self.loss.weights
        x, dx = rows_of(self.x.array), self.x.new_grad() if self.x.requires_grad else None
        sums, share = [_Sum(one) for one in self.loss.weights if one.requires_grad], None
        for rows in self.loss.chunks(self.x):
            dlogits = self.loss.logits_grad(self.x, rows)
            if dx is not None:
                device.product(DGRAD, k.matmul, dlogits.array, weight.array, rows_of(dx.array)[rows])
            for total in sums:
                share = total.of.new_grad()  # the weight's own view first, then buffers to add to it
                if total.of is weight:
                    device.product(WGRAD, k.matmul, dlogits.array.T, x[rows], share.array)
                else:
                    device.kernel(dlogits.numel, k.column_sum, dlogits.array, share.array)
                total.add(share)
            del dlogits  # before the next logits are computed
            share = None
        found = {id(total.of): total.grad for total in sums}
        return dx, *(found.get(id(one)) for one in (weight, *biases))


class _Sum:
    """A head's gradient, added chunk by chunk."""

    def __init__(self, of: Operand) -> None:
        self.of = of
        self.grad: Buffer | None = None

    def add(self, share: Buffer) -> None:
        if self.grad is None:
            self.grad = share
        else:
            k = share.device.backend
            share.device.kernel(share.numel, k.add, self.grad.array, share.array, self.grad.array)
