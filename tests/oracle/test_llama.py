"""Llama beside a plain PyTorch one, weights by Hugging Face's names: losses, gradients, and weights after training.

The PyTorch model knows nothing of zerosim. It is written as Llama's papers are: one projection each
for q, k, v, gate and up, keys and values repeated for the query heads that share them, and PyTorch's
own attention. Positions are turned as in Hugging Face's modelling code (halves, not neighbours).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zerosim.config import RunConfig
from zerosim.train.result import RunResult
from zerosim.train.run import run

from .compare import weights_within, within

LR = 1e-3
STEPS, ROWS = 12, 8
SIZES: dict[str, int] = dict(layers=2, hidden=32, heads=4, ffn=56, seq=16, vocab=48)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, base: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head, self.base = heads, kv_heads, width // heads, base
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def turned(self, x: Tensor) -> Tensor:
        """x (B, heads, T, E)."""
        rates = self.base ** -(torch.arange(0, self.head, 2, dtype=x.dtype) / self.head)
        angles = torch.outer(torch.arange(x.shape[2], dtype=x.dtype), rates).repeat(1, 2)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        def cut(y: Tensor, heads: int) -> Tensor:
            return y.unflatten(-1, (heads, self.head)).transpose(1, 2)

        q = self.turned(cut(self.q_proj(x), self.heads))
        k, v = self.turned(cut(self.k_proj(x), self.kv_heads)), cut(self.v_proj(x), self.kv_heads)
        share = self.heads // self.kv_heads
        y = F.scaled_dot_product_attention(
            q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), is_causal=True
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, wide, bias=False)
        self.up_proj = nn.Linear(width, wide, bias=False)
        self.down_proj = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, wide: int, base: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.self_attn = Attention(width, heads, kv_heads, base)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = MLP(width, wide)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, kv_heads: int, base: float) -> None:
        super().__init__()
        width = SIZES["hidden"]
        self.embed_tokens = nn.Embedding(SIZES["vocab"], width)
        blocks = (Block(width, SIZES["heads"], kv_heads, SIZES["ffn"], base) for _ in range(SIZES["layers"]))
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, kv_heads: int, base: float, tied: bool) -> None:
        super().__init__()
        self.model = Body(kv_heads, base)
        self.lm_head = None if tied else nn.Linear(SIZES["hidden"], SIZES["vocab"], bias=False)

    def token_losses(self, tokens: Tensor) -> Tensor:
        """-log p of each target: (B, T) from ids (B, T + 1)."""
        x = self.model(tokens[:, :-1])
        logits = F.linear(x, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)


@dataclass(frozen=True)
class Task:
    """A shape of Llama with its first weights and the tokens of every step."""

    kv_heads: int
    tied: bool
    base: float = 10000.0
    seed: int = 0
    weights: dict[str, Any] = field(default_factory=dict)

    def tokens(self) -> Any:
        return np.random.default_rng(self.seed).integers(0, SIZES["vocab"], (STEPS, ROWS, SIZES["seq"] + 1))

    def llama(self, dtype: torch.dtype) -> Llama:
        """Random weights of a size that makes every part matter, float32 values in any dtype."""
        model = Llama(self.kv_heads, self.base, self.tied)
        random = np.random.default_rng(self.seed + 1)
        for name, parameter in model.named_parameters():
            values = 0.15 * random.standard_normal(tuple(parameter.shape)) + ("norm" in name)
            self.weights[name] = values.astype(np.float32)
            parameter.data = torch.from_numpy(self.weights[name].copy())
        return model.to(dtype)


@dataclass(frozen=True)
class Trace:
    losses: list[float]
    gradients: dict[str, Any]
    weights: dict[str, Any]


def train_torch(task: Task, dtype: torch.dtype) -> Trace:
    model = task.llama(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    losses, gradients = [], {}
    for batch in torch.from_numpy(task.tokens()):
        loss = model.token_losses(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trace(losses, gradients, {name: p.detach().numpy() for name, p in model.named_parameters()})


def train_zerosim(task: Task, folder: Path, *, ranks: int, **settings: Any) -> RunResult:
    np.savez(folder / "in.npz", **task.weights)
    np.savez(folder / "tokens.npz", tokens=task.tokens())
    config = RunConfig(
        model="llama",
        **SIZES,
        kv_heads=task.kv_heads,
        tie_embeddings=task.tied,
        rope_base=task.base,
        ranks=ranks,
        micro_batch=ROWS // ranks,
        weights=str(folder / "in.npz"),
        tokens=str(folder / "tokens.npz"),
        **{"lr": LR, **settings},
    )
    return run(config)


def first_gradients(task: Task, folder: Path, **settings: Any) -> Mapping[str, Any]:
    """Of step 0, off one step of SGD with a large power of two for lr, as `runs.first_gradients`."""
    lr = 2.0**12
    after = train_zerosim(task, folder, optimizer="sgd", steps=1, **{**settings, "lr": lr}).weights
    return {name: (np.float64(before) - np.float64(after[name])) / lr for name, before in task.weights.items()}


def check(what: str, task: Task, folder: Path, trace: Trace, atol: float, grad_atol: float, **settings: Any) -> None:
    result = train_zerosim(task, folder, **settings)
    within(f"{what}, losses", result.mean_losses, trace.losses, atol=atol)
    gradients = first_gradients(task, folder, **settings)
    assert gradients.keys() == trace.gradients.keys()
    for name, expected in trace.gradients.items():
        within(f"{what}, first gradient of {name}", gradients[name], expected, atol=grad_atol)
    weights_within(f"{what}, weights", result.weights, trace.weights, atol)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (2, 4), (3, 4)])
def test_float64(tied: bool, kv_heads: int, stage: int, ranks: int, tmp_path: Path) -> None:
    """Rounding is the only difference there is."""
    task = Task(kv_heads, tied)
    trace = train_torch(task, torch.float64)
    check("fp64", task, tmp_path, trace, 2e-12, 1e-15, stage=stage, ranks=ranks, precision="fp64")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("stage", "ranks"), [(0, 4), (3, 1), (3, 4)])
def test_float32(tied: bool, kv_heads: int, stage: int, ranks: int, tmp_path: Path) -> None:
    """The best seed of 30, chosen by PyTorch alone as `runs.SEEDS` are: its float32 runs end 4e-7 from float64."""
    task = Task(kv_heads, tied, seed=16)
    trace = train_torch(task, torch.float32)
    check("fp32", task, tmp_path, trace, 2e-6, 2e-7, stage=stage, ranks=ranks, precision="fp32")


@pytest.mark.parametrize(
    "settings",
    [{"attention": "flash"}, {"recompute": "full"}, {"recompute": "selective"}, {"saves": "megatron"}],
    ids=str,
)
def test_every_way_to_keep_activations(settings: dict[str, str], tmp_path: Path) -> None:
    task = Task(2, False, base=500000.0, seed=7)
    trace = train_torch(task, torch.float64)
    check(str(settings), task, tmp_path, trace, 2e-12, 1e-15, stage=3, ranks=2, precision="fp64", **settings)
