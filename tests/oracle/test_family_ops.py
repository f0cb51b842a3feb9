"""Ops of other families than GPT-2's and Llama's, against transformers' own layers: results and gradients, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as neighbours
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as some_columns
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from zerosim import functional as F
from zerosim.backends.forms import LogitForm, Rope, Scores, alibi_slopes
from zerosim.functional.policy import ActivationPolicy
from zerosim.tensor.tensor import Tensor, cpu, tensor

B, T, H, K, E = 2, 9, 4, 2, 8


def ours(op: Callable[..., Tensor], inputs: Sequence[Any], seed: Any) -> list[Any]:
    device = cpu()
    leaves = [tensor(one, device, requires_grad=True) for one in inputs]
    out = op(*leaves)
    (out * tensor(seed, device)).sum().backward()
    return [out.numpy(), *(leaf.grad.numpy() for leaf in leaves if leaf.grad is not None)]


def theirs(op: Callable[..., torch.Tensor], inputs: Sequence[Any], seed: Any) -> list[Any]:
    leaves = [torch.tensor(one, dtype=torch.float32, requires_grad=True) for one in inputs]
    out = op(*leaves)
    (out * torch.tensor(seed, dtype=torch.float32)).sum().backward()
    return [out.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves if leaf.grad is not None)]


def with_weight(layer: torch.nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda x, weight: torch.func.functional_call(layer, {"weight": weight}, (x,))


def heads(x: torch.Tensor) -> list[torch.Tensor]:
    """q (B, H, T, E), k and v (B, K, T, E) of packed columns."""
    return [part.unflatten(-1, (-1, E)).transpose(1, 2) for part in x.split([H * E, K * E, K * E], dim=-1)]


def packed(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.transpose(1, 2).flatten(2) for part in parts], dim=-1)


def head_norms(x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> torch.Tensor:
    q, k, v = heads(x)
    norm = with_weight(Qwen3RMSNorm(E, 1e-5))
    return packed(norm(q, q_weight), norm(k, k_weight), v)


def head_layer_norms(x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> torch.Tensor:
    """Cohere's with use_qk_norm: weights of each head."""
    q, k, v = (part.transpose(1, 2) for part in heads(x))
    normed = [with_weight(CohereLayerNorm((len(w), E), 1e-5))(part, w) for part, w in ((q, q_weight), (k, k_weight))]
    return torch.cat([part.flatten(2) for part in (*normed, v)], dim=-1)


def turned(
    apply: Callable[..., Any], columns: int, *, repeat: bool, factor: float = 1.0
) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        q, k, v = heads(x)
        angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, columns, 2) / columns)
        angles = (angles.repeat_interleave(2, -1) if repeat else torch.cat([angles, angles], -1)).expand(B, -1, -1)
        return packed(*apply(q, k, angles.cos() * factor, angles.sin() * factor), v)

    return run


def attended(form: Scores) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        q, k, v = heads(x)
        k, v = (part.repeat_interleave(H // K, 1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) * (form.scale or E**-0.5)
        if form.cap:
            scores = torch.tanh(scores / form.cap) * form.cap  # Gemma 2's eager_attention_forward
        if form.alibi:
            scores = scores + form.alibi * build_alibi_tensor(torch.ones(B, T), H, torch.float32).view(B, H, 1, T)
        behind = torch.arange(T)[:, None] - torch.arange(T)
        hidden = (behind < 0) & form.causal
        if form.window:
            hidden |= behind >= form.window  # masking_utils.sliding_window_overlay
        return packed(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)

    return run


QKV, X = (B, T, (H + 2 * K) * E), (B, T, 2 * E)
CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "gelu_erf": (ACT2FN["gelu"], F.gelu_erf, [X]),
    "relu": (ACT2FN["relu"], F.relu, [X]),
    "geglu": (lambda x: ACT2FN["gelu_pytorch_tanh"](x[..., :E]) * x[..., E:], F.geglu, [X]),
    "1 + weight": (
        with_weight(GemmaRMSNorm(2 * E, 1e-5)), lambda x, w: F.rms_norm(x, w, plus_one=True), [X, (2 * E,)]
    ),
    "no bias": (with_weight(CohereLayerNorm(2 * E, 1e-5)), lambda x, w: F.layer_norm(x, w, None), [X, (2 * E,)]),
    "by head": (head_norms, lambda x, q, k: F.head_norm(x, q, k, H, K), [QKV, (E,), (E,)]),
    "by head, with weights of its own": (
        head_layer_norms, lambda x, q, k: F.head_layer_norm(x, q, k, H, K), [QKV, (H, E), (K, E)]
    ),
    "some columns": (
        turned(lambda q, k, cos, sin: some_columns(q, k, cos, sin), 4, repeat=False),
        lambda x: F.rotary(x, H, K, rope=Rope(turned=4)), [QKV],
    ),
    "neighbours": (
        turned(neighbours, E, repeat=True, factor=1.1),
        lambda x: F.rotary(x, H, K, rope=Rope(interleaved=True, factor=1.1)), [QKV],
    ),
}  # fmt: skip
for name, form in {
    "scale": Scores(scale=0.6), "cap": Scores(cap=1.5), "ALiBi": Scores(alibi=1.0), "scaled ALiBi": Scores(alibi=0.25),
    "window": Scores(window=4),
    "both ways": Scores(causal=False),
}.items():  # fmt: skip
    for policy in (ActivationPolicy(), ActivationPolicy("lean", "flash")):
        CASES[f"{name}, {policy.attention}"] = (
            attended(form),
            lambda x, form=form, policy=policy: F.attention(x, H, num_kv_heads=K, form=form, policy=policy),
            [QKV],
        )


@pytest.mark.parametrize("name", CASES)
def test_an_op_is_transformers(name: str) -> None:
    formula, op, shapes = CASES[name]
    rng = np.random.default_rng(0)
    inputs = [2 * rng.standard_normal(shape) for shape in shapes]
    expected = theirs(formula, inputs, 1.0)
    seed = rng.standard_normal(expected[0].shape)
    for own, other in zip(ours(op, inputs, seed), theirs(formula, inputs, seed), strict=True):
        assert np.abs(own - other).max() <= 2e-6 * max(1.0, np.abs(other).max())


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 16, 71, 112])
def test_slopes_are_blooms(heads: int) -> None:
    slopes = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    np.testing.assert_allclose(alibi_slopes(heads), slopes.numpy(), rtol=1e-6)


def test_a_loss_is_gemmas_and_coheres() -> None:
    rng, form = np.random.default_rng(0), LogitForm(0.5, 3.0)
    logits, targets = 4 * rng.standard_normal((6, 11)), rng.integers(0, 11, 6)
    device = cpu()
    x = tensor(logits, device, requires_grad=True)
    loss = F.cross_entropy(x, tensor(targets, device, dtype="int64").buffer, form)
    loss.backward()
    raw = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    other = torch.nn.functional.cross_entropy(torch.tanh(raw * 0.5 / 3.0) * 3.0, torch.tensor(targets))
    other.backward()
    assert loss.item() == pytest.approx(other.item(), rel=1e-6)
    assert x.grad is not None
    assert raw.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), raw.grad.numpy(), rtol=1e-5, atol=1e-7)
