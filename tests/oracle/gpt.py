"""GPT-2 in plain PyTorch: pre-LN blocks, learned positions, tanh GELU, LayerNorm eps 1e-5.

Parameter names and layouts are GPT-2's, hence zerosim's: `load` takes zerosim's weights by name. Knows
nothing of zerosim. One thread, so that PyTorch's sums have one order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

torch.set_num_threads(1)


class Conv1D(nn.Module):
    """GPT-2's linear map: y = x @ weight + bias, weight (I, O)."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, wide))
        self.bias = nn.Parameter(torch.zeros(wide))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = Conv1D(width, 3 * width)
        self.c_proj = Conv1D(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (part.view(rows, tokens, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(rows, tokens, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = Conv1D(width, 4 * width)
        self.c_proj = Conv1D(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-5)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width, eps=1e-5)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, seq: int, vocab: int, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(seq, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, eps=1e-5)
        self.lm_head = None if tied else nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, T, V) of token ids (B, T)."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        return F.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)

    def token_losses(self, tokens: Tensor) -> Tensor:
        """-log p of each target, in at least float32: (B, T) from ids (B, T + 1)."""
        logits = self(tokens[:, :-1])
        if logits.dtype.itemsize == 2:
            logits = logits.float()
        targets = tokens[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)

    def load(self, weights: Mapping[str, Any]) -> GPT:
        """Take full NumPy weights by name, all of them and no others."""
        own = dict(self.named_parameters())
        assert own.keys() == weights.keys(), own.keys() ^ weights.keys()
        with torch.no_grad():
            for name, parameter in own.items():
                assert parameter.shape == weights[name].shape, name
                parameter.copy_(torch.from_numpy(weights[name]))
        return self
