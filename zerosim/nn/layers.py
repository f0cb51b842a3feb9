"""GPT-2's layers: each declares its parameters in its context, under GPT-2's names, and is then a function of
tensors: from x (..., D), D the model's width, to y of the same shape unless stated otherwise.
"""

from __future__ import annotations

from functools import partial
from operator import add

from zerosim import functional as F
from zerosim.functional.linear import Linear as LinearRule
from zerosim.functional.linear import linear_result
from zerosim.nn.context import LayerContext
from zerosim.nn.lora import Adapters, Target
from zerosim.tensor.tensor import Tensor


class Linear:
    """y = x @ weight + bias. Shapes: x (..., D), weight (D, O), bias (O), y (..., O); O is `wide`.

    `std` belongs to the weight's initial normals; the bias starts at 0.
    """

    def __init__(self, here: LayerContext, wide: int, *, std: float) -> None:
        self.weight = here.declare("weight", (here.sizes.hidden, wide), std=std)
        self.bias = here.declare("bias", (wide,))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ColumnLinear:
    """A map of D inputs whose `wide` outputs are cut over a group; `parts` of them, such as q|k|v, are cut
    separately."""

    def __init__(self, here: LayerContext, wide: int, *, parts: int = 1) -> None:
        self.maps = here.group.maps
        shape = here.sizes.hidden, wide
        split = self.maps.split(shape, 1, parts=parts)
        self.weight = here.declare("weight", shape, outputs=1, std=here.std, split=split)
        self.bias = here.declare("bias", (wide,), outputs=0, split=self.maps.split((wide,), 0, parts=parts))
        rank = here.tuning.lora_rank
        targets = [Target(here.name, shape[0], wide, split_b=self.maps.split((wide, rank), 0, parts=parts))]
        each = wide // parts
        for at, name in enumerate("qkv" if parts == 3 else ""):
            split = self.maps.split((each, rank), 0)
            targets.append(Target(here.beside(name).name, shape[0], each, at * each // self.maps.size, split_b=split))
        self.adapters = Adapters(here, targets)

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if not self.adapters:
            return self.maps.column_linear(x, weight, bias)
        run, rule = partial(linear_result, weight=weight, bias=bias), partial(LinearRule, weight=weight, bias=bias)
        return self.adapters.columns(x, (weight, bias), run, rule)


class RowLinear:
    """A map back to the width, whose `inner` inputs are cut over a group. The bias is whole."""

    def __init__(self, here: LayerContext, inner: int) -> None:
        self.maps = here.group.maps
        shape = inner, here.sizes.hidden
        self.weight = here.declare("weight", shape, outputs=1, std=here.std_out, split=self.maps.split(shape, 0))
        self.bias = here.declare("bias", shape[1:], outputs=0, summed=here.group.rows.is_cut)
        split = self.maps.split((here.tuning.lora_rank, inner), 1)
        self.adapters = Adapters(here, [Target(here.name, inner, shape[1], split_a=split)], by_rows=True)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.adapters:
            return self.maps.row_linear(x, self.weight, self.bias)
        return self.adapters.rows(x, self.weight, self.bias)


class LayerNorm:
    """`functional.layer_norm` of the last dim; weight (D) starts at 1, bias (D) at 0."""

    def __init__(self, here: LayerContext) -> None:
        shape, summed = (here.sizes.hidden,), here.group.rows.is_cut
        self.weight = here.declare("weight", shape, fill=1.0, summed=summed)
        self.bias = here.declare("bias", shape, summed=summed)
        self.eps = here.sizes.norm_eps
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight, self.bias, self.eps, policy=self.policy)


class Dropout:
    """Drops elements with the model's chance in training, and nothing otherwise; `op` names its random numbers within
    the unit.

    Without `keep_mask` backward recomputes the mask.
    """

    def __init__(self, here: LayerContext, op: str, *, keep_mask: bool = True) -> None:
        self.op = op
        self.chance = here.sizes.dropout
        self.keys = here.keys
        self.rows = here.group.rows
        self.keep_mask = keep_mask

    def __call__(self, x: Tensor) -> Tensor:
        if self.chance == 0.0 or not x.device.is_training:
            return x
        return self.rows.dropout(x, self.chance, self.keys(self.op), self.op, keep_mask=self.keep_mask)


class TokenTable:
    """A table (V, D), cut by rows over a group: as an embedding it maps token ids to rows (..., D); as a head it
    computes `logits`."""

    def __init__(self, here: LayerContext, *, embedding: bool = True) -> None:
        self.maps = here.group.maps
        shape = here.sizes.vocab, here.sizes.hidden
        self.split = self.maps.split_vocabulary(shape)
        self.weight = here.declare("weight", shape, std=here.std, split=self.split, embedding=embedding)

    def __call__(self, ids: Tensor) -> Tensor:
        return self.maps.embedding(ids.buffer, self.weight, self.split)

    def logits(self, x: Tensor) -> Tensor:
        """Return x @ weightᵀ. Shapes: x (..., D), result (..., this rank's columns of V)."""
        return self.maps.column_linear(x, self.weight, transposed=True)


class Positions:
    """x (B, T, D) + a learned row for each position, then dropout. The table has `positions` rows."""

    def __init__(self, here: LayerContext) -> None:
        self.rows = here.group.rows
        shape = here.sizes.positions, here.sizes.hidden
        self.weight = here.declare("weight", shape, std=here.std, summed=self.rows.is_cut, embedding=True)
        self.dropout = Dropout(here, "embd")

    def __call__(self, x: Tensor) -> Tensor:
        return self.dropout(self.rows.add_positions(x, self.weight))


class Attention:
    """Causal self-attention between two linear maps: c_attn (D, 3D), columns q|k|v, and c_proj (D, D).

    A group divides the heads. Shapes: x and y (B, T, D).
    """

    def __init__(self, here: LayerContext) -> None:
        maps, sizes = here.group.maps, here.sizes
        self.c_attn = here.map("c_attn", ColumnLinear, 3 * sizes.hidden, parts=3)
        self.c_proj = here.map("c_proj", RowLinear, sizes.hidden)
        self.core = here.group.attention
        self.whole_heads = sizes.heads
        self.num_heads = sizes.heads // maps.size
        self.first_head = maps.index * self.num_heads
        self.chance = sizes.dropout
        self.keys = here.keys
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        dropout = self.chance if x.device.is_training else 0.0
        y = self.core(
            self.c_attn(x),
            self.num_heads,
            first_head=self.first_head,
            whole_heads=self.whole_heads,
            dropout=dropout,
            key=self.keys("attn") if dropout else (0, 0),
            policy=self.policy,
        )
        return self.policy.run("attn_proj", self.c_proj, y)


class FeedForward:
    """c_fc (D, F), GELU, c_proj (F, D); F is the sizes' `ffn`, 4D in GPT-2."""

    def __init__(self, here: LayerContext) -> None:
        self.c_fc = here.map("c_fc", ColumnLinear, here.sizes.ffn)
        self.c_proj = here.map("c_proj", RowLinear, here.sizes.ffn)
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        return self.c_proj(self.policy.run("mlp_act", F.gelu, self.policy.run("fc1", self.c_fc, x)))


class Block:
    """GPT-2's pre-LN block: x + attn(ln_1(x)), then x + mlp(ln_2(x)), dropout on both branches.

    Shapes: x and y (B, T, D).
    """

    def __init__(self, here: LayerContext) -> None:
        self.ln_1 = here.leaf("ln_1", LayerNorm)
        self.attn = Attention(here / "attn")
        self.ln_2 = here.leaf("ln_2", LayerNorm)
        self.mlp = FeedForward(here / "mlp")
        keep_mask = "dropout" not in here.policy.again.parts
        self.drop_1 = Dropout(here, "resid_1", keep_mask=keep_mask)
        self.drop_2 = Dropout(here, "resid_2", keep_mask=keep_mask)
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        run = self.policy.run  # no name for a branch, so that it is freed when it is added
        x = run("attn_proj", add, x, run("attn_proj", self.drop_1, self.attn(run("layernorm", self.ln_1, x))))
        return x + self.drop_2(self.mlp(run("layernorm", self.ln_2, x)))
