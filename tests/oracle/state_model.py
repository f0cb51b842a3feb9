"""The tiny model whose checkpoints frameworks write for `test_state_*.py`: a tied head, a buffer, a frozen layer."""

from __future__ import annotations

import torch
from torch.nn import functional as F

ROWS, SEQ, VOCAB = 4, 5, 11


class Tiny(torch.nn.Module):
    """Sizes are odd, so that no tensor divides evenly among ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = torch.nn.Embedding(VOCAB, 6)
        self.a, self.b = torch.nn.Linear(6, 7), torch.nn.Linear(7, 6)
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.head = torch.nn.Linear(6, VOCAB, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("buf", torch.arange(3.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        x = self.frozen(x + self.b(torch.relu(self.a(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def tokens(step: int, rank: int, ranks: int) -> torch.Tensor:
    """A rank's rows of a step's batch."""
    batch = torch.randint(0, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(step))
    return batch.chunk(ranks)[rank]


def groups(model: Tiny, split: bool) -> list[dict[str, object]]:
    """The optimizer's groups: all trained weights, or those that decay and those that do not."""
    trained = [one for one in model.parameters() if one.requires_grad]
    if not split:
        return [{"params": trained}]
    decayed, rest = [one for one in trained if one.ndim > 1], [one for one in trained if one.ndim < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
