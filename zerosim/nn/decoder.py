"""The layers of a decoder's block, from its row (`placement/block.py`): norms, maps, attention, feed-forward.

Each declares its parameters in its context, under its family's names, and is then a function of tensors: from x
(..., D), D the model's width, to y of the same shape unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from types import MappingProxyType

from zerosim import functional as F
from zerosim.functional.linear import Linear as LinearRule
from zerosim.functional.linear import PackedLinear, linear_result, packed_linear_result
from zerosim.nn.context import LayerContext
from zerosim.nn.layers import Dropout
from zerosim.nn.lora import Adaptable, Adapters
from zerosim.placement.block import Branch, Map, Role, Width
from zerosim.tensor.tensor import Parameter, Tensor

Layer = Callable[[Tensor], Tensor]
BETWEEN = MappingProxyType({"gelu_tanh": F.gelu, "swiglu": F.swiglu})
"""The functions between a feed-forward's maps, by the row's word."""


class Norm:
    """The row's norm of the last dim: `functional.layer_norm` or `rms_norm`. weight (D) starts at 1, bias (D) at 0."""

    def __init__(self, here: LayerContext) -> None:
        shape, summed = (here.sizes.hidden,), here.group.rows.is_cut
        self.weight = here.declare("weight", shape, fill=1.0, summed=summed)
        self.bias = here.declare("bias", shape, summed=summed) if here.block.norm == "layer" else None
        self.eps = here.sizes.norm_eps
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight, self.bias, self.eps, policy=self.policy)
        return F.rms_norm(x, self.weight, self.eps, policy=self.policy)


def pieces_of(here: LayerContext, wide: Width) -> int:
    """Return into how many pieces a group cuts outputs. With fewer key-value heads than ranks, neighbours hold copies
    of one."""
    size = here.group.maps.size
    return min(here.sizes.kv_heads, size) if wide == "kv_heads" else size


class ColumnMap:
    """A map of D inputs whose outputs are cut over a group: one weight of them all, whose parts, such as q|k|v, are cut
    separately; or a weight for each, with results side by side."""

    def __init__(self, here: LayerContext, row: Map) -> None:
        self.maps, self.row = here.group.maps, row
        self.weights, self.biases = list[Parameter](), list[Parameter]()
        wide, rank, parts = [here.sizes.width(out.wide) for out in row.outs], here.tuning.lora_rank, len(row.outs)
        may, first = list[Adaptable](), 0
        if row.fused:
            self._declare(here, sum(wide), parts=parts)
            split = self.maps.split((sum(wide), rank), 0, parts=parts)
            words = row.outs[0].words if parts == 1 else ()
            may.append(Adaptable(here.name, here.sizes.hidden, sum(wide), words=words, split_b=split))
        for out, each in zip(row.outs, wide, strict=True):
            at, pieces = here.beside(out.name), pieces_of(here, out.wide)
            if not row.fused:
                self._declare(at, each, pieces=pieces)
            if out.name:
                split = self.maps.split((each, rank), 0, pieces=pieces)
                is_part = row.fused
                may.append(Adaptable(at.name, here.sizes.hidden, each, first, out.words, is_part, split_b=split))
            first += each // pieces
        self.adapters = Adapters(here, may)

    def _declare(self, at: LayerContext, wide: int, *, parts: int = 1, pieces: int | None = None) -> None:
        hidden, dim = at.sizes.hidden, 1 if self.row.layout == "in_out" else 0
        shape = (hidden, wide) if dim else (wide, hidden)
        split = self.maps.split(shape, dim, parts=parts, pieces=pieces)
        self.weights.append(at.declare("weight", shape, outputs=dim, std=at.std, split=split))
        if self.row.bias:
            split = self.maps.split((wide,), 0, parts=parts, pieces=pieces)
            self.biases.append(at.declare("bias", (wide,), outputs=0, reads_input=False, split=split))

    def __call__(self, x: Tensor) -> Tensor:
        weights = self.weights
        if not self.row.fused:
            if not self.adapters:
                return self.maps.packed_linear(x, weights)
            packed, packed_rule = partial(packed_linear_result, weights=weights), partial(PackedLinear, weights=weights)
            return self.adapters.columns(x, weights, packed, packed_rule)
        weight, bias, transposed = weights[0], self.biases[0] if self.biases else None, self.row.layout == "out_in"
        if not self.adapters:
            return self.maps.column_linear(x, weight, bias, transposed=transposed)
        run = partial(linear_result, weight=weight, bias=bias, transposed=transposed)
        rule = partial(LinearRule, weight=weight, bias=bias, transposed=transposed)
        return self.adapters.columns(x, [*weights, *self.biases], run, rule)


class RowMap:
    """A map back to the width, whose `inner` inputs are cut over a group. The bias is whole."""

    def __init__(self, here: LayerContext, row: Map, inner: int) -> None:
        self.maps, self.transposed = here.group.maps, row.layout == "out_in"
        hidden, cut = here.sizes.hidden, 1 if self.transposed else 0
        shape = (hidden, inner) if self.transposed else (inner, hidden)
        split = self.maps.split(shape, cut)
        self.weight = here.declare("weight", shape, outputs=1 - cut, std=here.std_out, split=split)
        self.bias = None
        if row.bias:
            summed = here.group.rows.is_cut
            self.bias = here.declare("bias", (hidden,), outputs=0, reads_input=False, summed=summed)
        split = self.maps.split((here.tuning.lora_rank, inner), 1)
        self.adapters = Adapters(
            here, [Adaptable(here.name, inner, hidden, words=row.words, split_a=split)], by_rows=True
        )

    def __call__(self, x: Tensor) -> Tensor:
        if not self.adapters:
            return self.maps.row_linear(x, self.weight, self.bias, transposed=self.transposed)
        return self.adapters.rows(x, self.weight, self.bias, transposed=self.transposed)


def maps_of(here: LayerContext, at: int, branch: Branch, inner: int) -> tuple[Layer, Layer]:
    """Declare the two maps of a block's branch number `at`, with `inner` columns between them."""
    columns, rows = branch.columns, branch.rows
    into = here.taking(Role(at, "columns", columns.part)).map(columns.name, ColumnMap, columns)
    return into, here.taking(Role(at, "rows", rows.part)).map(rows.name, RowMap, rows, inner)


class Attention:
    """Causal self-attention between two maps: q|k|v side by side, rotated where the row says so, and back.

    H query heads share K key and value heads, H/K neighbours each. A group divides both; if it has more members
    than K, neighbours hold copies of one key-value head. Shapes: x and y (B, T, D).
    """

    def __init__(self, here: LayerContext, branch: Branch) -> None:
        sizes, maps = here.sizes, here.group.maps
        self.columns, self.proj = maps_of(here, 0, branch, sizes.width("heads"))
        self.core, self.rows = here.group.attention, here.group.rows
        self.whole_heads, self.num_heads = sizes.heads, sizes.heads // maps.size
        self.num_kv_heads = sizes.kv_heads // pieces_of(here, "kv_heads")
        self.first_head = maps.index * self.num_heads
        self.rope_base = sizes.rope_base if here.decoder.positions == "rotary" else None
        self.chance, self.keys, self.policy = sizes.dropout, here.keys, here.policy

    def __call__(self, x: Tensor) -> Tensor:
        dropout = self.chance if x.device.is_training else 0.0
        y = self.core(
            self._rotated(self.columns(x)),  # no name for q|k|v, so that they are freed when attention has read them
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            first_head=self.first_head,
            whole_heads=self.whole_heads,
            dropout=dropout,
            key=self.keys("attn") if dropout else (0, 0),
            policy=self.policy,
        )
        return self.policy.run("attn_proj", self.proj, y)

    def _rotated(self, qkv: Tensor) -> Tensor:
        if self.rope_base is None:
            return qkv
        return self.rows.rotary(qkv, self.num_heads, self.num_kv_heads, base=self.rope_base)


class FeedForward:
    """A map into the feed-forward's width, a function, a map back."""

    def __init__(self, here: LayerContext, branch: Branch) -> None:
        self.columns, self.proj = maps_of(here, 1, branch, here.sizes.ffn)
        self.between = BETWEEN[here.block.between]
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        run = self.policy.run
        return self.proj(run("mlp_act", self.between, run("fc1", self.columns, x)))


class DecoderBlock:
    """x + attention(norm(x)), then x + feed-forward(norm(x)), as the row arranges it. Shapes: x and y (B, T, D)."""

    def __init__(self, here: LayerContext) -> None:
        row = here.block
        keep_mask = "dropout" not in here.policy.again.parts

        def norm(name: str, role: Role) -> list[Layer]:
            return [here.taking(role).leaf(name, Norm)] if name else []

        def drop(op: str) -> list[Layer]:
            return [Dropout(here, op, keep_mask=keep_mask)] if row.dropout else []

        one, two = row.branches
        self.before_1 = norm(one.before, Role(0, "before", "layernorm"))
        self.attention = Attention(here / one.name, one)
        self.after_1 = [*norm(one.after, Role(0, "after", one.rows.part)), *drop("resid_1")]
        self.before_2 = norm(two.before, Role(1, "before", "layernorm"))
        self.mlp = FeedForward(here / two.name, two)
        self.after_2 = [*norm(two.after, Role(1, "after", two.rows.part)), *drop("resid_2")]
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        run = self.policy.run  # no name for a branch, so that it is freed when it is added
        of_norm, of_attention = partial(run, "layernorm"), partial(run, "attn_proj")
        branch = [self.attention(through(self.before_1, of_norm, [x]))]
        x = of_attention(add, x, through(self.after_1, of_attention, branch))
        branch.append(self.mlp(through(self.before_2, of_norm, [x])))
        return x + through(self.after_2, plainly, branch)


def through(layers: Sequence[Layer], run: Callable[[Layer, Tensor], Tensor], holder: list[Tensor]) -> Tensor:
    """Pass a tensor through layers. `holder` has its only reference, so that it is freed when the next layer has read
    it."""
    for layer in layers:
        holder.append(run(layer, holder.pop()))
    return holder.pop()


def plainly(layer: Layer, x: Tensor) -> Tensor:
    return layer(x)
