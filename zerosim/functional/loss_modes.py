"""How a training step holds its logits, as in several frameworks. All modes give the same loss and gradient.

Live bytes per logit of a half type:

                      forward   until backward   backward
    in-place             2            2              2     the gradient overwrites the logits; Transformer Engine's
                                                           kernel before its #3193 (July 2026)
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
    hf-half              6            2              6     to 4.48 models such as GPT-2 copy their half-type logits
                                                           without the last position, and cast nothing (one row: 4)
    hf-half-autocast    12            4             12     the same under autocast, whose log-softmax is in fp32
    unsloth-half         4            2              4     Unsloth's kernel in such a model
    unsloth-half-autocast  8          2              4     the same; accelerate casts the outputs when the model returns
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
from types import MappingProxyType

from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import compute_dtype
from zerosim.functional import torch_losses
from zerosim.functional.common import grad_like
from zerosim.functional.loss import LogitsGrad, MakeGrad, Sums, cast

CHUNKED = "chunked"
OF_CALLER = ("hf-", "unsloth")
"""How modes begin in which the head's input lives until the loss is computed, a local of transformers' forward."""
AFTER_MODEL = "unsloth-half-autocast"
"""The mode that holds most after transformers' forward has returned."""
FUSED = ("megatron-fused", "megatron-compiled")
"""Modes in which a tensor-parallel group exchanges the target's logit and the sum of exponentials together."""
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
        "torch": torch_losses.torch,
        "torch-kept": torch_losses.torch_kept,
        "torch-fp32-kept": torch_losses.torch_fp32_kept,
        "torch-half": torch_losses.torch_half,
        "torch-half-kept": torch_losses.torch_half_kept,
        "hf-4.45": torch_losses.hf_4_45,
        "hf-4.45-kept": torch_losses.hf_4_45_kept,
        "hf-4.48": torch_losses.hf_4_48,
        "hf-4.48-kept": torch_losses.hf_4_48_kept,
        "hf-5": torch_losses.torch,
        "hf-5-kept": torch_losses.torch_kept,
        "unsloth-4.45": torch_losses.unsloth_4_45,
        "unsloth-4.48": torch_losses.unsloth_4_48,
        "hf-half": torch_losses.hf_half,
        "hf-half-autocast": torch_losses.hf_half_autocast,
        "unsloth-half": torch_losses.unsloth_half,
        "unsloth-half-autocast": torch_losses.unsloth_half_autocast,
        "torchtune": torch_losses.torchtune,
        "litgpt": torch_losses.litgpt,
    }
)
