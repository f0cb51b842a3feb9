"""One training run, by zerosim and by PyTorch: same weights, same tokens, through files as a program would."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerosim.config import RunConfig
from zerosim.train.result import RunResult
from zerosim.train.run import run

from .gpt import GPT

SEEDS = {True: 10, False: 66}
"""Seeds of the tiny task by whether its head is tied, chosen by PyTorch alone.

Adam's first step is lr * g / (|g| + eps): where a gradient is as small as rounding errors are, these
decide which way a weight goes. That is so for key biases (always: their true gradient is 0), and by
chance, in one task of four, for one weight or another, which PyTorch itself then moves by some 1e-5
more or less when the rows of a batch change places. With these seeds, the best of 80, no float32 run of PyTorch (12
steps, lr 1e-3, six orders of the rows) ends farther than 3e-7 from its float64 run.
"""


@dataclass(frozen=True)
class Task:
    """A model, its first weights, and the tokens of every step (steps, global batch, seq + 1)."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    tied: bool
    weights: dict[str, Any]
    tokens: Any

    def gpt(self) -> GPT:
        return GPT(self.layers, self.hidden, self.heads, self.seq, self.vocab, self.tied).load(self.weights)

    def write(self, folder: Path) -> None:
        np.savez(folder / "in.npz", **self.weights)
        np.savez(folder / "tokens.npz", tokens=self.tokens)

    def config(self, folder: Path, *, ranks: int, accumulate: int = 1, **changes: Any) -> RunConfig:
        """The run of zerosim on this task's files."""
        each = math.prod(changes.get(axis, 1) for axis in ("tp", "cp", "pp"))
        return RunConfig(
            ranks=ranks,
            accumulate=accumulate,
            micro_batch=self.tokens.shape[1] * each // (ranks * accumulate),
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            seq=self.seq,
            vocab=self.vocab,
            tie_embeddings=self.tied,
            weights=str(folder / "in.npz"),
            tokens=str(folder / "tokens.npz"),
            **{"precision": "fp32", **changes},
        )


def make_task(
    layers: int, hidden: int, heads: int, seq: int, vocab: int, tied: bool, *, steps: int, rows: int, seed: int = 0
) -> Task:
    """GPT-2's initialisation but for biases and LayerNorms, which are random too: a mistake must not hide behind a 0.

    Tokens have something to learn: most follow from the one before.
    """
    random = np.random.default_rng(seed)
    weights = {}
    for name, parameter in GPT(layers, hidden, heads, seq, vocab, tied).named_parameters():
        size = 0.02 / (2 * layers) ** 0.5 if name.endswith("c_proj.weight") else 0.02
        values = size * random.standard_normal(tuple(parameter.shape))
        weights[name] = (values + (".ln_" in f".{name}" and name.endswith("weight"))).astype(np.float32)
    follower = random.permutation(vocab)
    tokens = np.empty((steps, rows, seq + 1), np.int64)
    tokens[..., 0] = random.integers(0, vocab, (steps, rows))
    for place in range(1, seq + 1):
        surprise = random.random((steps, rows)) < 0.3
        drawn = random.integers(0, vocab, (steps, rows))
        tokens[..., place] = np.where(surprise, drawn, follower[tokens[..., place - 1]])
    return Task(layers, hidden, heads, seq, vocab, tied, weights, tokens)


def tiny(tied: bool, seed: int | None = None) -> Task:
    """12 steps of 2 layers, hidden 32, on 8 rows."""
    return make_task(2, 32, 4, 16, 48, tied, steps=12, rows=8, seed=SEEDS[tied] if seed is None else seed)


@dataclass(frozen=True)
class Trace:
    """What PyTorch saw: losses [step][rank], the norm before clipping, the first gradients, the last weights."""

    losses: list[list[float]]
    grad_norm: list[float]
    gradients: dict[str, Any]
    weights: dict[str, Any]


def train_torch(
    task: Task,
    ranks: int,
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    clip_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Trace:
    """One process on the whole global batch; a rank's loss is the mean over its rows."""
    model = task.gpt().to(dtype)
    optimizer = make(model.parameters())
    losses, norms = [], []
    gradients: dict[str, Any] = {}
    for batch in torch.from_numpy(task.tokens):
        token_losses = model.token_losses(batch)
        optimizer.zero_grad()
        token_losses.mean().backward()
        if not gradients:
            gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
        limit = float("inf") if clip_norm is None else clip_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        losses.append(token_losses.detach().double().reshape(ranks, -1).mean(1).tolist())
    return Trace(losses, norms, gradients, {name: p.detach().numpy() for name, p in model.named_parameters()})


def train_zerosim(task: Task, folder: Path, **settings: Any) -> RunResult:
    task.write(folder)
    return run(task.config(folder, **settings))


def first_gradients(task: Task, folder: Path, **settings: Any) -> dict[str, Any]:
    """The gradients of step 0, read off one step of plain SGD: (before - after) / lr.

    A large power of two for lr makes the step so much larger than the weight that what comes out is
    the gradient to its own last place: lr * g is exact, and w - lr * g is rounded at the size of lr * g
    (or, where g is tiny, at 2**-24 w / lr).
    """
    lr = 2.0**12
    after = train_zerosim(task, folder, optimizer="sgd", lr=lr, steps=1, **settings).weights
    return {name: (np.float64(before) - np.float64(after[name])) / lr for name, before in task.weights.items()}
