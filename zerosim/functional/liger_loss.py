"""Liger's fused linear cross-entropy: the head and the loss in one op, whose forward computes all gradients.

Of T tokens it takes the power of two from T / ceil(V / D) on at a time: about as many bytes of logits as of the input.
Forward keeps the gradients of the input (T, D) and of a trained head (V, D), and backward hands them on.

                chunk's logits   head's gradient
    liger        2 bytes          in the weight's dtype   Liger 0.8: the gradient overwrites the logits
    liger-fp32   2 bytes          added in fp32, then cast: its accum_dtype
    liger-foak   6 bytes, 8       in the weight's dtype   logits in fp32, and the gradient cast back and scaled: Liger
                 from the second                          0.3, and its copy in fms-acceleration's foak. Its variables
                 chunk on                                 keep the gradient of the chunk before. The input is a copy
                                                          without the last position, unless there is one row

Sources: linkedin/Liger-Kernel 0.8.5, ops/fused_linear_cross_entropy.py; foundation-model-stack/fms-acceleration
19f7253, fms_acceleration_foak/kernels/liger/fused_linear_cross_entropy_loss.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from zerosim.device.device import Buffer, Kind
from zerosim.device.work import DGRAD, WGRAD
from zerosim.dtypes import compute_dtype
from zerosim.functional.chunked_loss import ChunkedLoss
from zerosim.functional.common import Grads, grad_like, like, rows_of, spans
from zerosim.functional.loss import cast
from zerosim.tensor.tensor import Operand, Tensor

INPUT = "gradient of the input"


@dataclass(frozen=True, slots=True)
class Version:
    """What is in fp32: each chunk's logits, or the head's gradient until forward ends."""

    wide_logits: bool = False
    wide_sums: bool = False


LIGER: Mapping[str, Version] = MappingProxyType(
    {"liger": Version(), "liger-fp32": Version(wide_sums=True), "liger-foak": Version(wide_logits=True)}
)


@dataclass(frozen=True, slots=True)
class LigerLoss:
    """The loss of x (B, T, D) as a column-parallel map with a result of one number, as `of` is.

    `saved` are the gradients from forward to backward, by their roles.
    """

    of: ChunkedLoss
    version: Version
    saved: dict[str, Buffer]

    def run(self, x: Tensor) -> Buffer:
        """Return the sum of the losses (1)."""
        device, total, wants = x.device, self.of.zero(x), x.device.grad_enabled
        given = _without_the_last(x) if self.version.wide_logits else x
        dx = given.new_grad() if x.requires_grad and wants else None
        sums = [self._sum(one) for one in self.of.weights if one.requires_grad and wants]
        before: list[Buffer] = []  # what a chunk's variables still hold when the next one begins
        for rows in self._chunks(x):
            logits, targets = self.of.logits(given, rows), self.of.targets(rows)
            del before[:1]
            if self.of.draw is not None:
                self.of.draw(logits, targets, rows.start)
            if self.version.wide_logits:
                logits = cast(logits, compute_dtype(x.dtype), Kind.ACTIVATION)
            share, lse = self.of.sums_of(logits, targets)
            device.kernel(1, device.backend.add, total.array, share.array, total.array)
            device.retag(logits, Kind.ACTIVATION_GRAD)
            replace(self.of.grad_of, targets=targets).write(logits, lse, logits)
            logits = cast(logits, x.dtype, Kind.ACTIVATION_GRAD)
            if self.version.wide_logits:  # the chunk's share of the mean, which is in the gradient here
                scaled = grad_like(logits)
                device.kernel(logits.numel, device.backend.multiply, logits.array, 1.0, scaled.array)
                before[:] = logits, scaled
                del scaled
            self._add(given, rows, logits, dx, sums)
            del logits
        self._keep(dx, sums)
        return total

    def _chunks(self, x: Tensor) -> list[slice]:
        count, (words, width) = x.buffer.numel // x.shape[-1], self.of.weights[0].shape
        each = 1 << (-(-count // -(-words // width)) - 1).bit_length()
        return spans(count, each)

    def _sum(self, one: Operand) -> Buffer:
        """Allocate the sum of a trained weight's gradients, 0 so far."""
        dtype = compute_dtype(one.dtype) if self.version.wide_sums else one.dtype
        total = one.device.alloc(one.shape, dtype, Kind.UNSHARDED_GRAD)
        total.device.kernel(0, total.device.backend.fill, total.array, 0.0)
        return total

    def _add(self, x: Tensor, rows: slice, dlogits: Buffer, dx: Buffer | None, sums: list[Buffer]) -> None:
        device, k, weight = dlogits.device, dlogits.device.backend, self.of.weights[0]
        if dx is not None:
            device.product(DGRAD, k.matmul, dlogits.array, weight.array, rows_of(dx.array)[rows])
        for total in sums:
            if len(total.shape) == 2:
                device.product(WGRAD, k.matmul_add, dlogits.array.T, rows_of(x.array)[rows], total.array)
            else:
                share = device.alloc(total.shape, dlogits.dtype, Kind.TEMP)
                device.kernel(dlogits.numel, k.column_sum, dlogits.array, share.array)
                device.kernel(share.numel, k.add, total.array, share.array, total.array)

    def _keep(self, dx: Buffer | None, sums: list[Buffer]) -> None:
        if dx is not None:
            self.saved[INPUT] = dx
        for one in (one for one in self.of.weights if one.requires_grad and sums):
            self.saved[_role(one)] = cast(sums.pop(0), one.dtype, Kind.UNSHARDED_GRAD)

    def rule(self, _: object) -> LigerRule:
        """Return the backward rule."""
        return LigerRule(self)


@dataclass(frozen=True, slots=True)
class LigerRule:
    """Hands on the gradients. The incoming gradient is 1, because scale and count were given."""

    loss: LigerLoss

    def backward(self, grad: Buffer) -> Grads:
        saved = self.loss.saved
        dx = saved.pop(INPUT, None)
        if dx is not None and self.loss.version.wide_logits:  # the slice's backward pads it
            padded = grad_like(dx)
            grad.device.kernel(0, grad.device.backend.copy, dx.array, padded.array)
            dx = padded
        return dx, *(saved.pop(_role(one), None) for one in self.loss.of.weights)


def _role(one: Operand) -> str:
    return "gradient of the weight" if len(one.shape) == 2 else "gradient of the bias"


def _without_the_last(x: Tensor) -> Tensor:
    """Copy, as `hidden[:, :-1].contiguous()` does; for one row that is no copy."""
    if x.shape[0] == 1:
        return x
    copy = like(x)
    x.device.kernel(0, x.device.backend.copy, x.array, copy.array)
    return Tensor(copy)
