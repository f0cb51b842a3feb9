"""A block's linear maps, from its row (`placement/block.py`): into columns that a group cuts, and back to the width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from zerosim import functional as F
from zerosim.functional.linear import Linear as LinearRule
from zerosim.functional.linear import PackedLinear, linear_result, packed_linear_result
from zerosim.nn.context import LayerContext
from zerosim.nn.fp8 import InEight, in_8_bits
from zerosim.nn.lora import Adaptable, Adapters, as_4bit, in_autocast, row_of
from zerosim.placement.block import Map, Role, Width
from zerosim.tensor.tensor import Operand, Parameter, Tensor, layer_of

Layer = Callable[[Tensor], Tensor]


def pieces_of(here: LayerContext, wide: Width) -> int:
    """Return into how many pieces a group cuts outputs. With fewer key-value heads than ranks, neighbours hold copies
    of one."""
    size = here.group.maps.size
    return min(here.sizes.kv_heads, size) if wide == "kv_heads" else size


def _cuts(here: LayerContext, row: Map, wide: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return how the parts of a fused weight, side by side, are cut: equal ones by their number. If neighbours hold
    copies of keys and values, but not of queries, these are two cuts."""
    runs = dict[int, list[int]]()
    for out, each in zip(row.outs, wide, strict=True):
        runs.setdefault(pieces_of(here, out.wide), []).append(each)
    if len(runs) == 1:
        return [{"parts": len(wide)} if len(set(wide)) == 1 else {"lengths": wide}]
    (q, kv), (_, copied) = map(sum, runs.values()), runs
    return [
        {"lengths": (q,), "around": (0, kv)},
        {"lengths": tuple(runs[copied]), "around": (q, 0), "pieces": copied},
    ]


class ColumnMap:
    """A map of D inputs whose outputs are cut over a group: one weight of them all, whose parts, such as q|k|v, are cut
    separately; or a weight for each, with results side by side."""

    def __init__(self, here: LayerContext, row: Map) -> None:
        self.maps, self.row, self.here = here.group.maps, row, here
        self.inner = here.sizes.width(row.inner) if row.inner else here.sizes.hidden
        self.weights, self.biases = list[Parameter](), list[Parameter]()
        wide = tuple(here.sizes.width(out.wide) for out in row.outs)
        cuts = _cuts(here, row, wide) if row.fused else []
        for cut in cuts:
            self._declare(here, sum(wide), **cut)
        if not row.fused:
            for out, each in zip(row.outs, wide, strict=True):
                self._declare(here.beside(out.name), each, pieces=pieces_of(here, out.wide))
        self.is_one = len(cuts) == 1
        self.in_8 = in_8_bits(here, self.weights[0].flat, transposed=row.layout == "out_in")
        self.adapters = Adapters(here, self._adaptable(here, wide, cuts))

    def _adaptable(self, here: LayerContext, wide: tuple[int, ...], cuts: list[dict[str, Any]]) -> Iterator[Adaptable]:
        """Yield what may have an adapter: the whole of a fused map, and each of its outputs that has a name."""
        row, hidden, first = self.row, self.inner, 0
        if row.fused:
            words = row.outs[0].words if len(wide) == 1 else ()
            yield Adaptable(here.name, hidden, sum(wide), words=words, cut=cuts[0] if self.is_one else None)
        for out, each in zip(row.outs, wide, strict=True):
            pieces = pieces_of(here, out.wide)
            if out.name:
                name = here.beside(out.name).name
                yield Adaptable(name, hidden, each, first, out.words, row.fused, cut={"pieces": pieces})
            first += each // pieces

    def _declare(self, at: LayerContext, wide: int, **cut: Any) -> None:
        hidden, dim = self.inner, 1 if self.row.layout == "in_out" else 0
        shape, summed = (hidden, wide) if dim else (wide, hidden), self.maps.summed(at.group.rows)
        splits = self.maps.split(shape, dim, **cut)
        self.weights.append(at.declare("weight", shape, outputs=dim, std=at.std, splits=splits, summed=summed))
        if self.row.bias:
            splits = self.maps.split((wide,), 0, **cut)
            bias = at.declare("bias", (wide,), outputs=0, reads_input=False, splits=splits, summed=summed)
            self.biases.append(bias)

    def __call__(self, x: Tensor) -> Tensor:
        (x, *more), (weights, biases) = in_autocast(self.here, x, self.weights, self.biases)
        transposed = self.row.layout == "out_in"
        if self.in_8 is not None:
            out = self._in_8_bits(self.in_8, x, weights, biases)
            kept = [] if self.in_8.products.saves_codes or self.adapters else [one.buffer for one in more]
            return F.keeping(out, kept, layer_of(self.weights[0], "packed_linear"))
        if not self.is_one:
            if not self.adapters:
                out, op = self.maps.packed_linear(x, weights, biases), layer_of(self.weights[0], "packed_linear")
                return F.keeping(out, [one.buffer for one in more], op)
            packed = partial(packed_linear_result, weights=weights, biases=biases)
            packed_rule = partial(PackedLinear, weights=weights, biases=biases)
            return self.adapters.columns(x, [*weights, *biases], packed, packed_rule)
        weight, bias = weights[0], biases[0] if biases else None
        if not self.adapters:
            return self.maps.column_linear(x, weight, bias, transposed=transposed)
        run = partial(linear_result, weight=weight, bias=bias, transposed=transposed)
        rule = partial(LinearRule, weight=weight, bias=bias, transposed=transposed)
        return self.adapters.columns(x, [*weights, *biases], run, rule)

    def _in_8_bits(self, way: InEight, x: Tensor, weights: Sequence[Operand], biases: Sequence[Operand]) -> Tensor:
        op = layer_of(self.weights[0], "linear" if self.is_one else "packed_linear")
        if not self.adapters:
            return way.columns(x, weights, biases, op)
        run, rule, saved = way.apply(weights, biases)
        return self.adapters.columns(x, [*weights, *biases], run, rule, saved, way.reads_x(weights))


class RowMap:
    """A map back to the width, whose `inner` inputs are cut over a group. The bias is whole."""

    def __init__(self, here: LayerContext, row: Map, inner: int) -> None:
        self.maps, self.transposed, self.here = here.group.maps, row.layout == "out_in", here
        hidden, cut = here.sizes.hidden, 1 if self.transposed else 0
        shape = (hidden, inner) if self.transposed else (inner, hidden)
        splits = self.maps.split(shape, cut)
        self.weight = here.declare("weight", shape, outputs=1 - cut, std=here.std_out, splits=splits)
        self.bias = None
        if row.bias:
            summed = here.group.rows.axes
            self.bias = here.declare("bias", (hidden,), outputs=0, reads_input=False, summed=summed)
        own = Adaptable(here.name, inner, hidden, words=row.words)
        self.adapters = Adapters(here, [own], by_rows=True)
        self.in_8 = in_8_bits(here, self.weight.flat, transposed=self.transposed)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.adapters:
            [x], ([weight], bias) = in_autocast(self.here, x, [self.weight], [] if self.bias is None else [self.bias])
            if self.in_8 is not None:
                return self.in_8.rows(x, weight, bias[0] if bias else None, layer_of(self.weight, "linear"))
            return self.maps.row_linear(x, weight, bias[0] if bias else None, transposed=self.transposed)
        if self.in_8 is not None:
            run, rule, saved = self.in_8.of_row(self.weight)
            return self.adapters.rows(x, self.weight, self.bias, run, rule, saved, self.in_8.reads_x([self.weight]))
        return self.adapters.rows(x, self.weight, self.bias, *row_of(self.weight, transposed=self.transposed))


def into_columns(here: LayerContext, at: int, row: Map, place: Literal["columns", "memory"] = "columns") -> Layer:
    """Declare the first map of a block's branch number `at`, or its map of what cross-attention reads."""
    return as_4bit(here.taking(Role(at, place, row.part)).map(row.name, ColumnMap, row), here, row.name)


def back_to_width(here: LayerContext, at: int, row: Map, inner: int) -> Layer:
    """Declare its last map, of `inner` columns."""
    return as_4bit(here.taking(Role(at, "rows", row.part)).map(row.name, RowMap, row, inner), here, row.name)
