"""A block's linear map in 8 bits: whole, or cut over a group.

Sequence parallelism gathers x's codes where the recipe does, in forward and again for the weights' gradients: a byte
for each number, its scales, and first the amax of all rows if one scale is for all of them. Else x is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zerosim.device.device import Buffer
from zerosim.functional.common import rows_of
from zerosim.functional.fp8 import Coded, cast
from zerosim.functional.fp8_kept import Kept
from zerosim.functional.fp8_linear import Linear8, Map8
from zerosim.nn.context import LayerContext
from zerosim.nn.group import WholeMaps
from zerosim.tensor.autograd import Rule
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Holder, Operand, Outline, Saved, Tensor, outline


class Applied(NamedTuple):
    """One use of a map: what runs it, what makes its rule, and the buffers for backward, which `run` fills in."""

    run: Callable[..., Buffer]
    rule: Callable[..., Rule]
    saved: dict[str, Buffer]


def in_8_bits(here: LayerContext, flat: Holder, *, transposed: bool) -> InEight | None:
    """Return how a map of this block, with weights in this flat buffer, multiplies in 8 bits; None if it does not."""
    products, maps = here.group.products(here.number), here.group.maps
    if products is None:
        return None
    flat.kept.append(Kept(products, maps.largest))
    return InEight(flat, maps, transposed=transposed)


class InEight:
    """What is common to all uses of one map."""

    def __init__(self, flat: Holder, maps: WholeMaps, *, transposed: bool) -> None:
        self.flat, self.number, self.maps, self.transposed = flat, len(flat.kept) - 1, maps, transposed
        self.products = self.kept.products

    @property
    def kept(self) -> Kept:
        """Return what the map keeps from step to step: its flat buffer has it."""
        kept: Kept = self.flat.kept[self.number]
        return kept

    def reads_x(self, weights: Sequence[Operand]) -> Sequence[Operand]:
        """Return the weights for whose gradients x itself is saved."""
        return () if self.products.saves_codes else weights

    def apply(self, weights: Sequence[Operand], biases: Sequence[Operand]) -> Applied:
        """Return the map of these weights. A rule that is given no bytes of x has its codes."""
        run, rule, saved = self._applied(weights)
        return Applied(lambda x: run(x, biases), lambda x: rule(x, biases), saved)

    def columns(self, x: Tensor, weights: Sequence[Operand], biases: Sequence[Operand], op: str) -> Tensor:
        """Apply a column-parallel map."""
        if self.maps.cuts_rows and self.products.gathers_codes:
            return self._gathering(x, weights, biases, op)
        run, rule, saved = self.apply(weights, biases)
        return self.maps.linear_columns(x, [*weights, *biases], run, rule, op, saved, self.reads_x(weights))

    def rows(self, x: Tensor, weight: Operand, bias: Operand | None, op: str) -> Tensor:
        """Apply a row-parallel map."""
        applied = self.of_row(weight)
        return self.maps.linear_rows(x, weight, bias, *applied[:2], op, (), applied.saved, self.reads_x([weight]))

    def of_row(self, weight: Operand) -> Applied:
        """Return a row-parallel map, whose bias is given in each use."""
        run, rule, saved = self._applied([weight])
        return Applied(lambda x, bias: run(x, _as_list(bias)), lambda x, bias: rule(x, _as_list(bias)), saved)

    def _applied(self, weights: Sequence[Operand]) -> Applied:
        """Return the map of these weights, whose biases are given in each use."""
        kept, saved = list[Coded](), dict[str, Buffer]()

        def run(x: Tensor, biases: Sequence[Operand]) -> Buffer:
            out, made = self._map(weights, biases).run(x)
            kept.extend(made)
            saved.update(_buffers(made))
            return out

        return Applied(run, lambda x, biases: Linear8(x, self._map(weights, biases), tuple(kept)), saved)

    def _map(self, weights: Sequence[Operand], biases: Sequence[Operand]) -> Map8:
        return Map8(self.kept, weights, biases, self.transposed)

    def _gathering(self, x: Tensor, weights: Sequence[Operand], biases: Sequence[Operand], op: str) -> Tensor:
        """Apply a column-parallel map of all ranks' rows, whose codes are gathered."""
        of, maps, device = self._map(weights, biases), self.maps, x.device
        saves = of.saves_codes and device.grad_enabled
        self.kept.begin(device, len(weights))
        whole = replace(outline(x), shape=(x.shape[0], x.shape[1] * maps.size, *x.shape[2:]))
        seen = self.kept.of(device, "x", self.products.forward.left, shared=True)
        wanted = of.casts_of_x(saves=saves, turned=True)
        coded, *kept = cast(device, rows_of(x.array), wanted, seen, maps.largest)
        out = of.run_codes(gathered(coded, maps), whole)
        del coded
        entering: Readable | Outline | Entering = whole
        if kept:
            entering = Entering(maps, kept[0], None, of)
        elif any(weight.requires_grad for weight in weights):
            entering = Entering(maps, None, held(x), of)

        def rule(entered: Outline | Coded) -> Rule:
            return Linear8(whole, of, (entered,) if isinstance(entered, Coded) else ())

        saved: Saved = _buffers(kept) if kept or isinstance(entering, Outline) else {"input": held(x)}
        return maps.behind(x, out, [*weights, *biases], entering, rule, op, saved)


@dataclass(frozen=True, slots=True)
class Entering:
    """This rank's rows of a map's input, until backward: codes, or values that are cast again."""

    maps: WholeMaps
    codes: Coded | None
    x: Readable | None
    map: Map8

    def entered(self) -> Coded:
        """Return codes of all ranks' rows, for the weights' gradients."""
        own = self.codes
        if own is None:
            assert self.x is not None
            device, [_, wanted] = self.x.device, self.map.casts_of_x(saves=True, turned=True)
            seen = self.map.kept.of(device, "x", wanted.casting, shared=True)
            [own] = cast(device, rows_of(self.x.array), [wanted], seen, self.maps.largest)
        return gathered(own, self.maps)


def gathered(own: Coded, maps: WholeMaps) -> Coded:
    """Gather all ranks' codes and scales, by rows. One scale for all rows is every rank's already."""
    codes, scales = maps.all_rows(own.codes), own.scales
    if own.casting.block != (0, 0):
        scales = maps.all_rows(own.scales)
    return own._replace(codes=codes, scales=scales)


def _buffers(made: Sequence[Coded]) -> dict[str, Buffer]:
    return {what: one for coded in made for what, one in (("input codes", coded.codes), ("input scales", coded.scales))}


def _as_list(bias: Operand | None) -> list[Operand]:
    return [] if bias is None else [bias]
