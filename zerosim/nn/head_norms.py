"""Norms of queries and keys between their map and attention (Qwen3's, Gemma 3's, OLMo 2's, Command R+'s)."""

from __future__ import annotations

from zerosim import functional as F
from zerosim.nn.context import LayerContext
from zerosim.tensor.tensor import Parameter, Tensor


class HeadNorms:
    """Norms of q and k in q|k|v. Shapes: x and y (B, T, columns of q|k|v).

    With one weight for every head (head_dim) each rank computes its heads' share of the gradient. Weights over all
    heads, and weights of each head (heads, head_dim), are cut like the heads.
    """

    def __init__(self, here: LayerContext, num_heads: int, num_kv_heads: int) -> None:
        sizes, maps, self.kind = here.sizes, here.group.maps, here.block.qk_norm
        self.heads = num_heads, num_kv_heads
        self.plus_one, self.eps = here.block.norm == "rms + 1", sizes.norm_eps
        self.rounds_last = here.block.rounds_last
        self.group, self.policy = maps if self.kind == "all" else None, here.policy
        self.weights = list[Parameter]()
        if self.kind == "plain":
            return
        each = sizes.head_dim
        fill, summed = 0.0 if self.plus_one else 1.0, maps.axes if self.kind == "head" else ()
        for name, heads in zip(here.block.qk_names, (sizes.heads, sizes.kv_heads), strict=True):
            shape = {"head": (each,), "all": (heads * each,), "heads": (heads, each)}[self.kind]
            splits = () if self.kind == "head" else maps.split(shape, 0, pieces=min(heads, maps.size))
            self.weights.append(here.beside(name).declare("weight", shape, fill=fill, splits=splits, summed=summed))

    def __call__(self, qkv: Tensor) -> Tensor:
        q, k = self.weights or (None, None)
        heads, kv_heads = self.heads
        if self.kind == "heads" and q is not None and k is not None:
            return F.head_layer_norm(qkv, q, k, heads, kv_heads, self.eps)
        return F.head_norm(
            qkv, q, k, heads, kv_heads, self.eps, plus_one=self.plus_one, rounds_last=self.rounds_last,
            group=self.group, policy=self.policy,
        )  # fmt: skip
