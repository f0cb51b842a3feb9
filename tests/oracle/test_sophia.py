"""Sophia-G beside the authors' training loop in PyTorch: twenty steps, an estimate of curvature after every fifth.

Both draw the same labels: zerosim's sampler is a function of the logits, the seed and the step, and is given PyTorch's
logits. Until the first estimate h is 0 and a weight moves by the sign of its average, which rounding decides where that
is 0: key biases are not compared (`compare.compared`), and the task's seed is one for which PyTorch's own float32 run
ends within 2e-7 of that with the rows of each batch the other way round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.optim.sophia import SophiaG
from zerosim.tensor.rng import key
from zerosim.train.run import run

from .compare import compared, weights_within, within
from .runs import Task, make_task

LR, EVERY, SEED = 1e-4, 5, 0
TASK = dict(steps=20, rows=8, seed=3)


def task() -> Task:
    return make_task(1, 16, 2, 8, 32, True, **TASK)


def update(p: Any, state: dict[str, Any], tokens: int) -> None:
    """sophia.py of the authors, _single_tensor_sophiag."""
    state["m"].mul_(0.965).add_(p.grad, alpha=1 - 0.965)
    p.mul_(1 - LR * 0.1)
    ratio = (state["m"].abs() / (0.04 * tokens * state["h"] + 1e-15)).clamp(None, 1)
    p.addcmul_(state["m"].sign(), ratio, value=-LR)


def train_torch(task: Task, dtype: torch.dtype, *, swap: bool = False) -> tuple[dict[str, Any], list[float]]:
    """train_sophiag.py of the authors on one process: weights by name, losses by step. `swap`: rows the other way."""
    model = task.gpt().to(dtype)
    states = [{"m": torch.zeros_like(p), "h": torch.zeros_like(p)} for p in model.parameters()]
    tokens, losses = task.tokens[0, :, 1:].size, []
    for step, batch in enumerate(torch.from_numpy(task.tokens)):
        rows = batch.flip(0) if swap else batch
        loss = model.token_losses(rows).mean()
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p, state in zip(model.parameters(), states, strict=True):
                update(p, state, tokens)
        if step % EVERY == EVERY - 1:
            logits = model(rows[:, :-1])
            logits = (logits.flip(0) if swap else logits).flatten(0, 1)
            labels = np.empty(tokens, np.int64)
            NumpyBackend().sample_labels(logits.detach().numpy(), key("labels", SEED, step), 0, labels)
            model.zero_grad()
            F.cross_entropy(logits, torch.from_numpy(labels)).backward()
            for p, state in zip(model.parameters(), states, strict=True):
                state["h"].mul_(0.99).addcmul_(p.grad, p.grad, value=1 - 0.99)
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, losses


def test_the_seed_is_chosen_by_pytorch_alone() -> None:
    one, other = (compared(train_torch(task(), torch.float32, swap=swap)[0]) for swap in (False, True))
    assert max(float(np.abs(one[name] - other[name]).max()) for name in one) < 2e-7


@pytest.mark.parametrize(("stage", "ranks", "accumulate"), [(0, 1, 1), (0, 2, 2), (1, 2, 1), (2, 4, 1), (3, 2, 2)])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-6), ("fp64", 1e-13)])
def test_twenty_steps(stage: int, ranks: int, accumulate: int, precision: str, bound: float, tmp_path: Path) -> None:
    """`bound` is of the largest weight."""
    dtype = torch.float32 if precision == "fp32" else torch.float64
    expected, losses = train_torch(task(), dtype)
    task().write(tmp_path)
    settings: dict[str, Any] = dict(stage=stage, ranks=ranks, accumulate=accumulate, precision=precision, seed=SEED)
    config = task().config(tmp_path, **settings, lr=LR)
    result = run(config, optimizer=SophiaG(task().tokens[0, :, 1:].size, estimates_every=EVERY))
    assert sum(report.estimated for report in result.steps) == 4
    largest = max(float(np.abs(values).max()) for values in expected.values())
    weights_within(f"stage {stage} x {ranks}, {precision}", result.weights, expected, bound * largest)
    within("losses", result.mean_losses, losses, rtol=bound)
