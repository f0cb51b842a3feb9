"""Losses of PyTorch and of frameworks on it, as they hold their logits; `loss_modes.py` has their table and sources."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from zerosim.backends.forms import PLAIN
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType, compute_dtype
from zerosim.functional.common import grad_like, rows_of
from zerosim.functional.loss import LogitsGrad, MakeGrad, Sums, cast


def torch(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do `cross_entropy(logits.float(), targets)`; no other reference holds the logits."""
    own = logits.pop()
    return _log_softmax(_float(own), own.dtype, sums, grad_of, kept=[])


def torch_kept(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do as `torch`; the caller holds the logits until backward ends."""
    own = logits.pop()
    return _log_softmax(_float(own), own.dtype, sums, grad_of, kept=[own])


def torch_fp32_kept(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do as `torch` with a model that ends in `.float()`: the caller holds its output until backward ends."""
    dtype = logits[0].dtype
    wide = _float(logits.pop())
    return _log_softmax(wide, dtype, sums, grad_of, kept=[wide])


def torch_half(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do `cross_entropy(logits, targets)`, without a cast; no other reference holds the logits."""
    own = logits.pop()
    return _log_softmax(own, own.dtype, sums, grad_of, kept=[])


def torch_half_kept(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do as `torch_half`; the caller holds the logits until backward ends."""
    own = logits.pop()
    return _log_softmax(own, own.dtype, sums, grad_of, kept=[own])


def hf_4_45(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Cast the logits in the model, which drops them, then copy the shifted ones."""
    dtype, wide = logits[0].dtype, _float(logits.pop())
    return _log_softmax(_shifted(wide), dtype, sums, grad_of, kept=[])


def hf_4_45_kept(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do as `hf_4_45`; the caller holds the outputs until backward ends."""
    dtype, wide = logits[0].dtype, _float(logits.pop())
    return _log_softmax(_shifted(wide), dtype, sums, grad_of, kept=[wide])


def hf_4_48(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Cast the logits in the loss, beside the model's output, then copy the shifted ones."""
    own = logits.pop()
    wide = _float(own)
    return _log_softmax(_shifted(wide), own.dtype, sums, grad_of, kept=[])


def hf_4_48_kept(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do as `hf_4_48`; the caller holds the outputs until backward ends."""
    own = logits.pop()
    wide = _float(own)
    return _log_softmax(_shifted(wide), own.dtype, sums, grad_of, kept=[own])


def unsloth_4_45(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do as `hf_4_45`; the gradient overwrites the copy."""
    dtype, wide = logits[0].dtype, _float(logits.pop())
    return _overwritten(_shifted(wide), dtype, sums, grad_of)


def unsloth_4_48(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do as `hf_4_48`; the gradient overwrites the copy."""
    own = logits.pop()
    wide = _float(own)
    return _overwritten(_shifted(wide), own.dtype, sums, grad_of)


def _overwritten(copy: Buffer, dtype: DType, sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    total, lse = sums(copy)
    saved = [copy]

    def make_grad() -> Buffer:
        own = saved.pop()
        own.device.retag(own, Kind.ACTIVATION_GRAD)
        padded = grad_like(grad_of.write(own, lse, own))
        own.device.kernel(0, own.device.backend.copy, own.array, padded.array)
        del own
        return cast(padded, dtype, Kind.ACTIVATION_GRAD)

    return total, make_grad


def hf_half(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Copy the shifted logits in the model, beside its output, and cast nothing."""
    own = logits.pop()
    return _log_softmax(_shifted(own), own.dtype, sums, grad_of, kept=[])


def hf_half_autocast(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do as `hf_half`; autocast casts the copy, which lives on, for log-softmax."""
    own = logits.pop()
    copy = _shifted(own)  # live to the end of this call
    return _log_softmax(_float(copy), own.dtype, sums, grad_of, kept=[])


def unsloth_half(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do as `hf_half`; the gradient overwrites the copy."""
    own = logits.pop()
    return _overwritten(_shifted(own), own.dtype, sums, grad_of)


def unsloth_half_autocast(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do as `unsloth_half`; accelerate then casts the model's output, of which only the loss is used."""
    own = logits.pop()
    loss = _overwritten(_shifted(own), own.dtype, sums, grad_of)
    _float(own)
    return loss


def torchtune(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Cast one of 8 chunks at a time, beside the logits, and keep every chunk's log-probabilities."""
    own = logits.pop()
    rows = rows_of(own.array).shape[0]
    return _by_chunks(own, -(-rows // 8), own.dtype, sums, grad_of, kept=[])


def litgpt(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Cast the logits, which the caller holds until backward ends, then take 128 positions of all rows at a time."""
    dtype, wide = logits[0].dtype, _float(logits.pop())
    positions = wide.shape[-2]
    return _by_chunks(wide, 128 * (rows_of(wide.array).shape[0] // positions), dtype, sums, grad_of, kept=[wide])


def _by_chunks(
    whole: Buffer, each: int, dtype: DType, sums: Sums, grad_of: LogitsGrad, *, kept: list[Buffer]
) -> tuple[Buffer, MakeGrad]:
    """Do as `_log_softmax` with `each` rows at a time. The chunks' gradients are joined when all exist."""
    total, lse = sums(whole)
    shape, flat, chunks = whole.shape, whole.reshape(-1, whole.shape[-1]), list[MakeGrad]()
    for start in range(0, flat.shape[0], each):
        at = slice(start, min(start + each, flat.shape[0]))
        of, known = replace(grad_of, targets=grad_of.targets.reshape(-1)[at]), partial(_known, total, lse[at])
        chunks.append(_log_softmax(_float(flat[at]), whole.dtype, known, of, kept=[])[1])

    def make_grad() -> Buffer:
        grads = [chunks.pop()() for _ in range(len(chunks))]  # as autograd: all of the loss, then all casts
        grads = [cast(grads.pop(0), dtype, Kind.ACTIVATION_GRAD) for _ in range(len(grads))]
        joined = grads[0].device.alloc(shape, dtype, Kind.ACTIVATION_GRAD)
        into, start = joined.reshape(-1, shape[-1]), 0
        while grads:
            part = grads.pop()
            joined.device.kernel(0, joined.device.backend.copy, part.array, into[start : start + part.shape[0]].array)
            start += part.shape[0]
        grad_of.outputs.extend(kept)
        kept.clear()
        return joined

    return total, make_grad


def _known(total: Buffer, lse: Buffer, _: Buffer) -> tuple[Buffer, Buffer]:
    return total, lse


def _shifted(wide: Buffer) -> Buffer:
    """Copy, as `logits[:, :-1].contiguous()` does; for one row that is no copy."""
    if len(wide.shape) > 2 and wide.shape[0] == 1:
        return wide
    device = wide.device
    copy = device.alloc(wide.shape, wide.dtype, Kind.ACTIVATION)
    device.kernel(0, device.backend.copy, wide.array, copy.array)
    return copy


def _log_softmax(
    wide: Buffer, dtype: DType, sums: Sums, grad_of: LogitsGrad, *, kept: list[Buffer]
) -> tuple[Buffer, MakeGrad]:
    """Compute log-softmax. `kept` goes to the outputs of the caller when the gradient exists, which has the
    logits' `dtype`."""
    device = wide.device
    total, lse = sums(wide)
    saved = [device.alloc(wide.shape, wide.dtype, Kind.ACTIVATION)]
    rows = saved[0].array.reshape(-1, wide.shape[-1]), wide.array.reshape(-1, wide.shape[-1])
    of_logits: Buffer | None = None
    if grad_of.form == PLAIN and wide.dtype == compute_dtype(wide.dtype):
        device.kernel(wide.numel, device.backend.subtract, rows[1], lse.array.reshape(-1, 1), rows[0])
    else:
        of_logits = lse
        device.kernel(0, device.backend.copy, rows[1], rows[0])

    def make_grad() -> Buffer:
        log_probabilities = saved.pop()
        nll_grad = grad_like(log_probabilities)  # dense, although only the targets' columns are nonzero
        device.kernel(0, device.backend.fill, nll_grad.array, 0.0)
        grad = grad_of.write(log_probabilities, of_logits, grad_like(log_probabilities))
        del log_probabilities, nll_grad
        narrow = cast(grad, dtype, Kind.ACTIVATION_GRAD)
        grad_of.outputs.extend(kept)
        kept.clear()
        return narrow

    return total, make_grad


def _float(logits: Buffer) -> Buffer:
    return cast(logits, compute_dtype(logits.dtype), Kind.ACTIVATION)
