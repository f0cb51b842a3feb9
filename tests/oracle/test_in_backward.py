"""The optimizer in backward beside PyTorch's register_post_accumulate_grad_hook, as in torchtune: the same weights, and
one gradient at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .compare import weights_within, within
from .runs import tiny, train_zerosim

LR, RANKS = 1e-2, 2


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("stage", [0, 3])
def test_post_accumulate_grad_hooks(tied: bool, stage: int, tmp_path: Path) -> None:
    task, losses, live = tiny(tied), [], set[int]()
    model = task.gpt().to(torch.float64)
    optimizers = {p: torch.optim.Adam([p], lr=LR) for p in model.parameters()}

    def update(p: Any) -> None:
        live.add(sum(other.grad is not None for other in optimizers))
        optimizers[p].step()
        p.grad = None

    for p in optimizers:
        p.register_post_accumulate_grad_hook(update)
    for batch in torch.from_numpy(task.tokens):
        loss = model.token_losses(batch)
        loss.mean().backward()
        losses.append(loss.detach().reshape(RANKS, -1).mean(1).numpy())
    assert live == {1}
    settings: dict[str, Any] = dict(stage=stage, ranks=RANKS, lr=LR, precision="fp64", optimizer_in_backward=True)
    result = train_zerosim(task, tmp_path, **settings)
    within("losses", result.losses, np.array(losses), atol=2e-12)
    weights_within("weights", result.weights, {name: p.detach().numpy() for name, p in model.named_parameters()}, 2e-12)
