"""The layers of a decoder's block, from its row (`placement/block.py`): norms, maps, attention, feed-forward.

Each declares its parameters in its context, under its family's names, and is then a function of tensors: from x
(..., D), D the model's width, to y of the same shape unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from types import MappingProxyType
from typing import Any

from zerosim import functional as F
from zerosim.backends.forms import Scores
from zerosim.config.model import ModelConfig
from zerosim.config.numbers import Kind
from zerosim.functional.linear import Linear as LinearRule
from zerosim.functional.linear import PackedLinear, linear_result, packed_linear_result
from zerosim.nn.context import LayerContext
from zerosim.nn.head_norms import HeadNorms
from zerosim.nn.layers import Dropout
from zerosim.nn.lora import Adaptable, Adapters
from zerosim.nn.rope import rope_of
from zerosim.placement.block import Branch, Map, Role, Width
from zerosim.tensor.tensor import Parameter, Tensor

Layer = Callable[[Tensor], Tensor]
Run = Callable[..., Tensor]
"""Runs a layer on tensors, as a part of the block or plainly."""
BETWEEN = MappingProxyType(
    {"gelu_tanh": F.gelu, "gelu": F.gelu_erf, "relu": F.relu, "swiglu": F.swiglu, "geglu": F.geglu}
)
"""The functions between a feed-forward's maps, by the row's word."""


class Norm:
    """The row's norm of the last dim, `functional.layer_norm` or `rms_norm`, which changes nothing else at first."""

    def __init__(self, here: LayerContext) -> None:
        shape, summed, kind = (here.sizes.hidden,), here.group.rows.is_cut, here.block.norm
        self.is_rms, self.plus_one = kind in ("rms", "rms + 1"), kind == "rms + 1"
        self.weight = here.declare("weight", shape, fill=0.0 if self.plus_one else 1.0, summed=summed)
        self.bias = here.declare("bias", shape, summed=summed) if kind == "layer" else None
        self.eps = here.sizes.norm_eps
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_rms:
            return F.rms_norm(x, self.weight, self.eps, plus_one=self.plus_one, policy=self.policy)
        return F.layer_norm(x, self.weight, self.bias, self.eps, policy=self.policy)


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
        wide, rank = tuple(here.sizes.width(out.wide) for out in row.outs), here.tuning.lora_rank
        may, first = list[Adaptable](), 0
        if row.fused:
            cut: dict[str, Any] = {"parts": len(wide)} if len(set(wide)) == 1 else {"lengths": wide}
            self._declare(here, sum(wide), **cut)
            split = self.maps.split((sum(wide), rank), 0, **cut)
            words = row.outs[0].words if len(wide) == 1 else ()
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

    def _declare(self, at: LayerContext, wide: int, **cut: Any) -> None:
        hidden, dim = at.sizes.hidden, 1 if self.row.layout == "in_out" else 0
        shape = (hidden, wide) if dim else (wide, hidden)
        split = self.maps.split(shape, dim, **cut)
        self.weights.append(at.declare("weight", shape, outputs=dim, std=at.std, split=split))
        if self.row.bias:
            split = self.maps.split((wide,), 0, **cut)
            self.biases.append(at.declare("bias", (wide,), outputs=0, reads_input=False, split=split))

    def __call__(self, x: Tensor) -> Tensor:
        weights, biases, transposed = self.weights, self.biases, self.row.layout == "out_in"
        if not self.row.fused:
            if not self.adapters:
                return self.maps.packed_linear(x, weights, biases)
            packed = partial(packed_linear_result, weights=weights, biases=biases)
            packed_rule = partial(PackedLinear, weights=weights, biases=biases)
            return self.adapters.columns(x, [*weights, *biases], packed, packed_rule)
        weight, bias = weights[0], biases[0] if biases else None
        if not self.adapters:
            return self.maps.column_linear(x, weight, bias, transposed=transposed)
        run = partial(linear_result, weight=weight, bias=bias, transposed=transposed)
        rule = partial(LinearRule, weight=weight, bias=bias, transposed=transposed)
        return self.adapters.columns(x, [*weights, *biases], run, rule)


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
    """Causal self-attention between two maps: q|k|v side by side, normed and rotated where the row says so, and back.

    H query heads share K key and value heads, H/K neighbours each. A group divides both; if it has more members
    than K, neighbours hold copies of one key-value head. Shapes: x and y (B, T, D).
    """

    def __init__(self, here: LayerContext, branch: Branch) -> None:
        sizes, maps, row, kind = here.sizes, here.group.maps, here.decoder, here.sizes.kind(here.number)
        self.columns, self.proj = maps_of(here, 0, branch, sizes.width("heads"))
        self.core, self.rows = here.group.attention, here.group.rows
        self.whole_heads, self.num_heads = sizes.heads, sizes.heads // maps.size
        self.num_kv_heads = sizes.kv_heads // pieces_of(here, "kv_heads")
        self.first_head = maps.index * self.num_heads
        self.placed = [*self._norms(here), *self._rotary(sizes, kind)]
        numbers = sizes.numbers
        self.form = Scores(numbers.query_scale, numbers.attn_cap, row.positions == "alibi", kind.window)
        self.chance, self.keys, self.policy, self.part = sizes.dropout, here.keys, here.policy, branch.rows.part

    def _norms(self, here: LayerContext) -> list[Layer]:
        """Return the layer that norms q and k, if the row has one."""
        if not here.block.qk_norm:
            return []
        return [here.taking(Role(0, "between")).leaf("qk_norm", HeadNorms, self.num_heads, self.num_kv_heads)]

    def _rotary(self, sizes: ModelConfig, kind: Kind) -> list[Layer]:
        """Return the layer that rotates q and k, if the block has one."""
        if sizes.decoder.positions != "rotary" or not kind.rotates:
            return []
        rope = rope_of(sizes, kind)
        return [lambda qkv: self.rows.rotary(qkv, self.num_heads, self.num_kv_heads, rope=rope)]

    def __call__(self, x: Tensor) -> Tensor:
        dropout = self.chance if x.device.is_training else 0.0
        y = self.core(
            through(self.placed, plainly, [self.columns(x)]),  # no name, so that it is freed when attention has read it
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            first_head=self.first_head,
            whole_heads=self.whole_heads,
            dropout=dropout,
            key=self.keys("attn") if dropout else (0, 0),
            policy=self.policy,
            form=self.form,
        )
        return self.policy.run(self.part, self.proj, y)


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
        row, factor = here.block, here.sizes.numbers.residual_scale
        keep_mask = "dropout" not in here.policy.again.parts

        def norm(name: str, role: Role) -> list[Layer]:
            return [here.taking(role).leaf(name, Norm)] if name else []

        def last(op: str) -> list[Layer]:
            drops = [Dropout(here, op, keep_mask=keep_mask)] if row.dropout else []
            return [*drops, *([partial(F.scaled, factor=factor)] if factor != 1.0 else [])]

        one, two = row.branches
        self.is_parallel, shared = row.parallel, two.before == one.before
        self.part = one.rows.part
        self.before_1 = norm(one.before, Role(0, "before", "layernorm"))
        self.attention = Attention(here / one.name, one)
        self.after_1 = [*norm(one.after, Role(0, "after", self.part)), *last("resid_1")]
        self.before_2 = [] if shared else norm(two.before, Role(1, "before", "layernorm"))
        self.mlp = FeedForward(here / two.name if two.name else here, two)
        self.after_2 = [*norm(two.after, Role(1, "after", two.rows.part)), *last("resid_2")]
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        run = self.policy.run  # no name for a branch, so that it is freed when it is added
        of_norm, of_attention = partial(run, "layernorm"), partial(run, self.part)
        if self.is_parallel:
            return self._side_by_side(x, of_norm)
        branch = [self.attention(through(self.before_1, of_norm, [x]))]
        x = of_attention(add, x, through(self.after_1, of_attention, branch))
        branch.append(self.mlp(through(self.before_2, of_norm, [x])))
        return x + through(self.after_2, plainly, branch)

    def _side_by_side(self, x: Tensor, of_norm: Run) -> Tensor:
        """Return x + attention(norm(x)) + feed-forward(norm(x)). Without a norm of its own the second branch reads the
        first one's."""
        normed = [through(self.before_1, of_norm, [x])]
        branch = [self.attention(normed[0])]
        if self.before_2:
            normed = [through(self.before_2, of_norm, [x])]
        x = x + through(self.after_1, plainly, branch)
        branch.append(self.mlp(normed.pop()))
        return x + through(self.after_2, plainly, branch)


def through(layers: Sequence[Layer], run: Run, holder: list[Tensor]) -> Tensor:
    """Pass a tensor through layers. `holder` has its only reference, so that it is freed when the next layer has read
    it."""
    for layer in layers:
        holder.append(run(layer, holder.pop()))
    return holder.pop()


def plainly(layer: Layer, x: Tensor) -> Tensor:
    return layer(x)
