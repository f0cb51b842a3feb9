"""Norms of queries and keys between the map that makes them and attention (Qwen3's, Gemma 3's, OLMo 2's)."""

from __future__ import annotations

from zerosim import functional as F
from zerosim.nn.context import LayerContext
from zerosim.tensor.tensor import Parameter, Tensor


class HeadNorms:
    """RMS norms of q and k in q|k|v, named q_norm and k_norm. Shapes: x and y (B, T, columns of q|k|v).

    By head a weight has `head_dim` numbers, the same on every rank, each of which computes its heads' share of the
    gradient. Over all heads a weight is cut like the heads.
    """

    def __init__(self, here: LayerContext, num_heads: int, num_kv_heads: int) -> None:
        sizes, maps = here.sizes, here.group.maps
        self.heads = num_heads, num_kv_heads
        self.plus_one, self.eps = here.block.norm == "rms + 1", sizes.norm_eps
        self.group = maps if here.block.qk_norm == "all" else None
        self.weights = list[Parameter]()
        for name, heads, pieces in (("q_norm", sizes.heads, maps.size), ("k_norm", sizes.kv_heads, sizes.kv_heads)):
            shape, split = (sizes.head_dim,), None
            if self.group is not None:
                shape = (heads * sizes.head_dim,)
                split = maps.split(shape, 0, pieces=min(pieces, maps.size))
            summed, fill = self.group is None and maps.size > 1, 0.0 if self.plus_one else 1.0
            self.weights.append(here.beside(name).declare("weight", shape, fill=fill, split=split, summed=summed))

    def __call__(self, qkv: Tensor) -> Tensor:
        q, k = self.weights
        heads, kv_heads = self.heads
        return F.head_norm(qkv, q, k, heads, kv_heads, self.eps, plus_one=self.plus_one, group=self.group)
