"""Formulas of operators as frameworks write them for eager PyTorch, after their sources."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """torchtitan 026e23a, models/norms.py, RMSNorm; Hugging Face's LlamaRMSNorm runs the same ops."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """torch.nn.LayerNorm."""
    return F.layer_norm(x, weight.shape, weight, bias)


def float8_amax(x: torch.Tensor) -> torch.Tensor:
    """torchao 0.18.0, float8/float8_utils.py: tensor_to_amax, then amax_to_scale, in fp64."""
    amax = torch.max(torch.abs(x)).to(torch.float64)
    return (torch.finfo(torch.float8_e4m3fn).max / torch.clamp(amax, min=1e-12)).to(torch.float32)


def float8_rows(x: torch.Tensor) -> torch.Tensor:
    """torchao 0.18.0: tensor_to_amax by rows, amax_to_scale with powers of two, then the cast."""
    amax = torch.amax(torch.abs(x), dim=-1, keepdim=True).to(torch.float64)
    scale = (torch.finfo(torch.float8_e4m3fn).max / torch.clamp(amax, min=1e-12)).to(torch.float32)
    return float8_cast(x, torch.exp2(torch.floor(torch.log2(scale))))


def float8_cast(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """torchao 0.18.0, float8/float8_training_tensor.py: the cast, and to_fp8_saturated."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return (x.to(torch.float32) * scale).clamp(min=-most, max=most).to(torch.float8_e4m3fn)


class Float8Linear(torch.autograd.Function):
    """torchao 0.18.0, float8/float8_linear.py, matmul_with_hp_or_float8_args; the products are fp32's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (_wide(x) @ _wide(weight).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return (_wide(grad) @ _wide(weight)).to(x.dtype), (_wide(grad).t() @ _wide(x)).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return float8_cast(x, float8_amax(x)).to(torch.float32)


def rotary(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torchtitan 0199cbc, models/llama/model.py, apply_rotary_emb: complex numbers in fp32. Shapes: q (B, T, H, E), k
    (B, T, K, E), table (T, E/2)."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table.view(1, table.shape[0], 1, -1)).flatten(3).type_as(x)

    return turned(q), turned(k)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """torchtitan's and Hugging Face's: F.silu(w1(x)) * w3(x)."""
    return F.silu(gate) * up


def gelu(x: torch.Tensor) -> torch.Tensor:
    """torch.nn.GELU(approximate="tanh"). Hugging Face's NewGELUActivation writes it out and launches eight."""
    return F.gelu(x, approximate="tanh")


def dropout(x: torch.Tensor) -> torch.Tensor:
    """F.dropout on a GPU (native/Dropout.cpp): one kernel that draws the mask too."""
    result: torch.Tensor = torch.ops.aten.native_dropout(x, 0.1, True)[0]
    return result


def scores_to_probabilities(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """transformers 5.23, models/llama/modeling_llama.py, eager_attention_forward, between its two products; on a GPU
    softmax(dtype=float32) reads half types itself (native/SoftMax.cpp, half_to_float)."""
    weights: torch.Tensor = torch.ops.aten._softmax(scores * 0.125 + mask, -1, True)
    return weights.to(scores.dtype)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """PyTorch's, of logits that are cast first."""
    return F.cross_entropy(logits.float(), targets)


class MegatronLoss(torch.autograd.Function):
    """Megatron-LM 00611e6, core/tensor_parallel/cross_entropy.py, _VocabParallelCrossEntropy, without its all-reduces.

    The caller has cast the logits (M, V), which are written over. Shapes: targets and result (M).
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits_max = torch.max(logits, dim=-1)[0]
        logits -= logits_max.unsqueeze(dim=-1)
        outside = (targets < 0) | (targets >= logits.shape[-1])
        masked = targets.clone() - 0
        masked[outside] = 0
        rows = torch.arange(start=0, end=logits.shape[0], device=logits.device)
        predicted = logits[rows, masked].clone().contiguous()
        predicted[outside] = 0.0
        torch.exp(logits, out=logits)
        sums = logits.sum(dim=-1)
        loss = torch.log(sums) - predicted
        logits.div_(sums.unsqueeze(dim=-1))
        ctx.save_for_backward(logits, outside, masked)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad, outside, masked = ctx.saved_tensors
        rows = torch.arange(start=0, end=grad.shape[0], device=grad.device)
        grad[rows, masked] -= 1.0 - outside.view(-1).float()
        grad.mul_(grads[0].unsqueeze(dim=-1))
        return grad, None


def adamw_step(numel: int) -> torch.optim.Optimizer:
    """torch.optim.AdamW(foreach=True), which has taken its first step: states are there."""
    weights = torch.empty(numel, device="meta", requires_grad=True)
    weights.grad = torch.empty_like(weights)
    optimizer = torch.optim.AdamW([weights], foreach=True)
    optimizer.step()
    return optimizer


def clip(numel: int) -> None:
    """torch.nn.utils.clip_grad_norm_ with foreach, written out, for it takes no meta tensors: the norm, then each
    gradient times a coefficient of at most 1."""
    grads = [torch.empty(numel, device="meta")]
    norms = torch._foreach_norm(grads, 2.0)
    total_norm = torch.linalg.vector_norm(torch.stack(norms), 2.0)
    torch._foreach_mul_(grads, torch.clamp(1.0 / (total_norm + 1e-6), max=1.0))
