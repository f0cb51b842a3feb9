"""Mixed precision beside PyTorch's own half types: 16-bit weights, activations and gradients, float32 masters.

PyTorch's kernels round at other places (inside softmax and bias additions, say), so runs agree only
as far as two ways to round do; how far, is measured against the distance that the weights have gone.
Without masters a bf16 LayerNorm weight of 1 would not get anywhere: its neighbour is 4e-3 away and a
step is 1e-3.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from .compare import compared, within
from .runs import Task, tiny, train_zerosim

LR = 1e-3
SCALE = 1024.0
LOSS_ATOL = {"bf16": 1e-3, "fp16": 4e-4}
APART = {"bf16": 0.03, "fp16": 0.01}  # of the mean distance that weights have moved


def train_with_masters(task: Task, kind: torch.dtype, scale: float) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses, and the masters at the end."""
    model = task.gpt().to(kind)
    names, parameters = zip(*model.named_parameters(), strict=True)
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.Adam(masters, lr=LR)
    losses = []
    for batch in torch.from_numpy(task.tokens):
        loss = model.token_losses(batch).mean()
        model.zero_grad()
        (loss * scale).backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
        losses.append(float(loss.detach()))
    return losses, {name: master.numpy() for name, master in zip(names, masters, strict=True)}


@pytest.mark.parametrize(("precision", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_masters(precision: str, kind: torch.dtype, tied: bool, tmp_path: Path) -> None:
    task = tiny(tied)
    scale = {"loss_scale": SCALE} if precision == "fp16" else {}
    losses, masters = train_with_masters(task, kind, scale.get("loss_scale", 1.0))
    expected, start = compared(masters), compared(task.weights)
    moved = np.mean(np.concatenate([np.abs(expected[name] - start[name]).reshape(-1) for name in expected]))
    for stage, ranks in ((0, 1), (3, 4)):
        result = train_zerosim(task, tmp_path, stage=stage, ranks=ranks, lr=LR, precision=precision, **scale)
        what = f"{precision} stage {stage} x {ranks}"
        within(f"{what}, losses", result.mean_losses, losses, atol=LOSS_ATOL[precision])
        ours = compared(result.weights)
        apart = np.mean(np.concatenate([np.abs(ours[name] - expected[name]).reshape(-1) for name in expected])) / moved
        print(f"{what}, masters: apart by {apart:.2%} of the way they went, allowed {APART[precision]:.0%}")
        assert apart <= APART[precision]
