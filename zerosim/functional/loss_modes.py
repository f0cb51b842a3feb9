"""How a training step holds its logits, as in several frameworks. All modes give the same loss and gradient.

Live bytes per logit of a half type:

                      forward   until backward   backward
    in-place             2            2              2     the gradient overwrites the logits
    lean                 4            2              2     a separate buffer; the logits are freed before backward
    megatron             6            4              6     an fp32 copy becomes probabilities, then their gradient
    megatron-fused       6            4              6     Transformer Engine's kernel: forward computes an fp32
                                                           gradient, then the logits are freed; backward casts it
    megatron-compiled   10            4             10     Megatron's own, compiled: probabilities and gradient each
                                                           go through a new buffer
    torch               10            4             12     fp32 logits, log-probabilities, and autograd's two gradients
    torch-kept          10            6             14     the same, if the caller keeps the half-type logits
    torch-fp32-kept      8            8             16     the same for a model that casts itself; the caller keeps
                                                           its output (torchtitan before its #391)
    torch-half           4            2              6     cross_entropy of the half-type logits themselves
    torch-half-kept      4            4              8     the same, if the caller keeps them
    hf-4.45             12            4             12     transformers to 4.45: the model casts its logits, the loss
                                                           copies them without the last position (one row: no copy, 8)
    hf-4.45-kept        12            8             16     the same, if the caller keeps the outputs
    hf-4.48             14            4             12     from 4.46: the loss casts (one row: 10)
    hf-4.48-kept        14            6             14
    hf-5                10            4             12     the labels are shifted, not the logits: as torch
    hf-5-kept           10            6             14     as torch-kept
    unsloth-4.45         8            4              8     Unsloth's kernel, in fms-acceleration's foak: the gradient
                                                           overwrites transformers' shifted copy, and the slice's
                                                           backward pads it (one row: no copy, 6 in forward)
    unsloth-4.48        10            4              8     (one row: 6 in forward)
    torchtune            6.5          4              5     CEWithChunkedOutputLoss: fp32 for one of 8 chunks at a time,
                                                           whose log-probabilities all stay
    litgpt               8            8              8     logits in fp32 (Fabric's convert_output), which the caller
                                                           keeps; log-probabilities of 128 positions at a time all stay
    chunked                                                an eighth of the tokens at a time: `chunked_loss.py`
    liger                                                  Liger's fused linear cross-entropy: `liger_loss.py`

Logits in fp32 are not cast: there the fp32 copy and the logits are one buffer. With a factor or a cap of logits
(`backends.forms.LogitForm`) no mode holds more: PyTorch's buffer of log-probabilities then holds a copy of the logits,
from which backward computes them again. So does it for `torch-half`, whose rounded log-probabilities would change the
gradient. transformers' copy has all positions here, one a row more than there.

Sources: Megatron-LM d98e8a6, core/tensor_parallel/cross_entropy.py and core/fusions/fused_cross_entropy.py (a comment
in later versions says what the compiler made of it: in-place steps that also reduce or scatter take a buffer of the
logits' size), which --cross-entropy-fusion-impl native takes; te takes Transformer Engine's
common/triton/cross_entropy.py ("FP32 tensor that stores the input gradient"); it gathers three numbers a row and rank
where here two are added and one is compared. PyTorch's cross_entropy is log_softmax, which saves its result, and
nll_loss, whose gradient is dense. fms-acceleration 47cf9e3, fms_acceleration_foak/kernels/unsloth/
cross_entropy_loss.py; torchtune 0.6.1, modules/loss/ce_chunked_output_loss.py; litgpt 0.5.13, utils.py
(chunked_cross_entropy) and finetune/lora.py.

Each mode takes the logits out of a list, so that no other reference holds them, and returns a function that computes
the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from zerosim.backends.forms import PLAIN
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType, compute_dtype
from zerosim.functional.common import grad_like, rows_of
from zerosim.functional.loss import LogitsGrad

CHUNKED = "chunked"
OF_CALLER = ("hf-", "unsloth")
"""How modes begin in which the head's input lives until the loss is computed, a local of transformers' forward."""
FUSED = ("megatron-fused", "megatron-compiled")
"""Modes in which a tensor-parallel group exchanges the target's logit and the sum of exponentials together."""
MakeGrad = Callable[[], Buffer]
"""A function called when backward begins. It returns the gradient of the logits, of their shape and dtype."""
Sums = Callable[[Buffer], tuple[Buffer, Buffer]]
"""From logits to the sum of the losses and the log-sum-exp of each row. A group of ranks may compute it together."""
Mode = Callable[[list[Buffer], Sums, LogitsGrad], tuple[Buffer, MakeGrad]]


def lean(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Compute the gradient at once, in a separate buffer."""
    own = logits.pop()
    total, lse = sums(own)
    made = [grad_of.write(own, lse, grad_like(own))]
    return total, made.pop


def in_place(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Compute the gradient at once, over the logits."""
    own = logits.pop()
    total, lse = sums(own)
    own.device.retag(own, Kind.ACTIVATION_GRAD)
    made = [grad_of.write(own, lse, own)]
    return total, made.pop


def megatron(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Use one fp32 buffer from the cast to the gradient; the caller holds the logits until forward ends."""
    return _in_fp32(logits, sums, grad_of, compiled=False)


def megatron_fused(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Compute the gradient at once, in fp32, beside the logits, and cast it when backward begins."""
    own = logits.pop()
    dtype = own.dtype
    total, lse = sums(own)
    wide = [own.device.alloc(own.shape, compute_dtype(dtype), Kind.ACTIVATION_GRAD)]
    grad_of.write(own, lse, wide[0])
    return total, lambda: cast(wide.pop(), dtype, Kind.ACTIVATION_GRAD)


def megatron_compiled(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad) -> tuple[Buffer, MakeGrad]:
    """Do as `megatron`, but send exponentials and gradient through a new buffer, and copy them back."""
    return _in_fp32(logits, sums, grad_of, compiled=True)


def _in_fp32(logits: list[Buffer], sums: Sums, grad_of: LogitsGrad, *, compiled: bool) -> tuple[Buffer, MakeGrad]:
    own = logits.pop()
    dtype, wide = own.dtype, [cast(own, compute_dtype(own.dtype), Kind.ACTIVATION)]
    total, lse = sums(wide[0])
    if compiled:
        _through_a_new_buffer(wide[0])

    def make_grad() -> Buffer:
        probabilities = wide.pop()
        probabilities.device.retag(probabilities, Kind.ACTIVATION_GRAD)
        grad = grad_of.write(probabilities, lse, probabilities)
        fresh = _through_a_new_buffer(grad) if compiled else None
        narrow = cast(grad, dtype, Kind.ACTIVATION_GRAD)
        del fresh
        return narrow

    return total, make_grad


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
    """Compute log-softmax. `kept` lives until the gradient exists, which has the logits' `dtype`."""
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
        kept.clear()
        return narrow

    return total, make_grad


def _float(logits: Buffer) -> Buffer:
    return cast(logits, compute_dtype(logits.dtype), Kind.ACTIVATION)


def cast(source: Buffer, dtype: DType, kind: Kind) -> Buffer:
    """Cast to another dtype; return the buffer itself if it has that dtype, as `Tensor.to` does."""
    if source.dtype == dtype:
        return source
    device = source.device
    result = device.alloc(source.shape, dtype, kind)
    device.kernel(0, device.backend.copy, source.array, result.array)
    return result


def _through_a_new_buffer(buffer: Buffer) -> Buffer:
    """Do as a compiler does with an in-place step that also reduces or scatters: use a new buffer, then copy back."""
    device = buffer.device
    fresh = device.alloc(buffer.shape, buffer.dtype, Kind.TEMP)
    device.kernel(0, device.backend.copy, buffer.array, fresh.array)
    device.kernel(0, device.backend.copy, fresh.array, buffer.array)
    return fresh


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        "in-place": in_place,
        "lean": lean,
        "megatron": megatron,
        "megatron-fused": megatron_fused,
        "megatron-compiled": megatron_compiled,
        "torch": torch,
        "torch-kept": torch_kept,
        "torch-fp32-kept": torch_fp32_kept,
        "torch-half": torch_half,
        "torch-half-kept": torch_half_kept,
        "hf-4.45": hf_4_45,
        "hf-4.45-kept": hf_4_45_kept,
        "hf-4.48": hf_4_48,
        "hf-4.48-kept": hf_4_48_kept,
        "hf-5": torch,
        "hf-5-kept": torch_kept,
        "unsloth-4.45": unsloth_4_45,
        "unsloth-4.48": unsloth_4_48,
        "torchtune": torchtune,
        "litgpt": litgpt,
    }
)
