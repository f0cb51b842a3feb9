"""Multi-token prediction beside Megatron-Core's own, and beside one written by hand after DeepSeek-V3's section 2.2:
the loss, and the gradient of every weight."""

from __future__ import annotations

from collections.abc import Mapping
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

from .state_files import torchrun
from .test_llama import SIZES, Block, Llama

DEPTHS, FACTOR, BASE = 2, 0.3, 10000.0
CUTS: dict[str, dict[str, Any]] = {
    "one rank": dict(ranks=1, stage=0, micro_batch=4),
    "ZeRO-3": dict(ranks=2, stage=3, micro_batch=2, recompute="full"),
    "sequence parallel": dict(ranks=2, stage=1, micro_batch=4, tp=2, sequence_parallel=True),
    "last of two stages": dict(ranks=2, stage=0, micro_batch=2, accumulate=2, pp=2),
}


def trained(folder: Path, **settings: Any) -> RunResult:
    """Train one step of SGD with the weights and the tokens of a folder, without rounding."""
    files = {name: str(folder / f"{name}.npz") for name in ("weights", "tokens")}
    sizes = {**SIZES, "model": "llama", "kv_heads": 2, "mtp_layers": DEPTHS, "mtp_loss": FACTOR}
    return run(RunConfig(**sizes, **files, precision="fp64", optimizer="sgd", lr=1.0, steps=1, **settings))


def assert_gradients(result: RunResult, weights: Mapping[str, Any], expected: Mapping[str, Any], atol: float) -> None:
    assert result.weights.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.abs(weights[name] - result.weights[name] - gradient).max() <= atol, name
        assert np.abs(gradient).max() > 1e-4, name  # all of it matters


def test_megatron_cores(tmp_path: Path) -> None:
    """Megatron-Core computes the losses of a float64 model in float32."""
    pytest.importorskip("megatron.core", reason="pip install --no-deps megatron-core==0.16.1")
    torchrun(1, "mtp_worker", tmp_path)
    result = trained(tmp_path, ranks=1, stage=0, micro_batch=3)
    assert result.losses[0][0] == pytest.approx(float(np.load(tmp_path / "loss.npy")), rel=1e-6)
    with np.load(tmp_path / "weights.npz") as weights, np.load(tmp_path / "gradients.npz") as gradients:
        assert_gradients(result, dict(weights), dict(gradients), 1e-6)


class Depth(nn.Module):
    """A module of section 2.2, which knows nothing of zerosim. In the paper rows get shorter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enorm, self.hnorm = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = Block(width, SIZES["heads"], 2, SIZES["ffn"], BASE)
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        return self.norm(self.block(self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], -1))))


def by_hand(folder: Path, *, tied: bool) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients; leave the weights and the tokens in a folder."""
    model, random, width = Llama(2, BASE, tied), np.random.default_rng(3), SIZES["hidden"]
    depths = nn.ModuleList(Depth(width) for _ in range(DEPTHS))
    named = dict(model.named_parameters())
    for number, depth in enumerate(depths, SIZES["layers"]):
        for name, one in depth.named_parameters():
            name = f"shared_head.{name}" if name.startswith("norm.") else name.removeprefix("block.")
            named[f"model.layers.{number}.{name}"] = one
    for name, one in named.items():
        values = 0.15 * random.standard_normal(tuple(one.shape)) + ("norm" in name)
        one.data = torch.from_numpy(values.astype(np.float32)).double()
    tokens = random.integers(0, SIZES["vocab"], (1, 4, SIZES["seq"] + 1))
    np.savez(folder / "weights.npz", **{name: one.detach().numpy().astype(np.float32) for name, one in named.items()})
    np.savez(folder / "tokens.npz", tokens=tokens)
    ids = torch.from_numpy(tokens[0])
    table, head = model.model.embed_tokens, model.model.embed_tokens if model.lm_head is None else model.lm_head

    def loss_of(state: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(state, head.weight).flatten(0, 1), targets.flatten())

    state = model.model(ids[:, :-1])
    first = total = loss_of(state, ids[:, 1:])
    for k, depth in enumerate(depths, 1):
        state = depth(state[:, : SIZES["seq"] - k], table(ids[:, k : SIZES["seq"]]))
        total = total + FACTOR / DEPTHS * loss_of(state, ids[:, k + 1 :])
    total.backward()
    return float(first.detach()), {name: one.grad.numpy() for name, one in named.items() if one.grad is not None}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("cut", CUTS)
def test_the_papers(cut: str, tied: bool, tmp_path: Path) -> None:
    loss, gradients = by_hand(tmp_path, tied=tied)
    result = trained(tmp_path, tie_embeddings=tied, **CUTS[cut])
    assert np.mean(result.mean_losses) == pytest.approx(loss, rel=1e-12)
    with np.load(tmp_path / "weights.npz") as weights:
        assert_gradients(result, dict(weights), gradients, 1e-12)
