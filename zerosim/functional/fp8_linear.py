"""Linear maps in 8 bits, by their recipe's products (`fp8_recipes.py`).

                temporary bytes            saved from forward to backward
torchao         x's codes, the weight's    x in 2 bytes
te, deepseek    the same                   x's codes for the weights' gradients: 1 byte, and scales
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.work import DGRAD, LINEAR, WGRAD
from zerosim.errors import InputError
from zerosim.functional.common import Grads, bias_grad, map_grad, ready_map_grads, rows_of, weight_grad
from zerosim.functional.fp8 import Coded, Wanted, cast, multiply
from zerosim.functional.fp8_kept import Kept
from zerosim.functional.fp8_recipes import Products
from zerosim.tensor.coded_flat import CodedFlat
from zerosim.tensor.discarded import Readable
from zerosim.tensor.tensor import Operand, Outline, Parameter, Tensor, outline


class Map8(NamedTuple):
    """A linear map of one input: its weights side by side, (O, I) if `transposed`, else (I, O), and their biases or
    none."""

    kept: Kept
    weights: Sequence[Operand]
    biases: Sequence[Operand]
    transposed: bool

    @property
    def products(self) -> Products:
        return self.kept.products

    @property
    def saves_codes(self) -> bool:
        """Whether x's codes are saved."""
        return self.products.saves_codes and any(weight.requires_grad for weight in self.weights)

    def casts_of_x(self, *, saves: bool, turned: bool = False) -> list[Wanted]:
        """Return what is made of x in forward: its codes, and those for the weights' gradients."""
        wanted = [Wanted(self.products.forward.left)]
        if saves and self.products.wgrad is not None:
            wanted.append(Wanted(self.products.wgrad.right, across=True, turned=turned, kind=Kind.ACTIVATION))
        return wanted

    def run(self, x: Tensor) -> tuple[Buffer, list[Coded]]:
        """Return the result, and the codes of x to save."""
        device, first = x.device, self.products.forward.left
        self.kept.begin(device, len(self.weights))
        saves = self.saves_codes and device.grad_enabled
        seen = self.kept.of(device, "x", first)
        coded, *kept = cast(device, rows_of(x.array), self.casts_of_x(saves=saves), seen)
        return self.run_codes(coded, outline(x)), kept

    def run_codes(self, x: Coded, shape: Outline) -> Buffer:
        """Return the result for codes of x, which has this shape."""
        self.check(shape.shape[-1])
        ready_map_grads(self.weights)
        device = shape.device
        out = device.alloc((*shape.shape[:-1], sum(self.widths)), shape.dtype, Kind.ACTIVATION)
        name, rows = f"{LINEAR}_{self.products.name}", rows_of(out.array)
        for at, columns in enumerate(self.spans):
            bias = self.biases[at].array if self.biases else None
            multiply(device, name, x, self.weight_codes(device, at, across=False), rows[:, columns], bias)
        return out

    @property
    def widths(self) -> list[int]:
        """The number of each weight's outputs."""
        return [weight.shape[0 if self.transposed else 1] for weight in self.weights]

    @property
    def spans(self) -> Iterator[slice]:
        """Yield each weight's range of the result's columns."""
        start = 0
        for wide in self.widths:
            yield slice(start, start + wide)
            start += wide

    def check(self, width: int) -> None:
        """Check that the weights take so many columns. Raises: InputError."""
        for weight in self.weights:
            if weight.shape[1 if self.transposed else 0] != width:
                raise InputError(f"linear: x has {width} columns, its weight of shape {weight.shape} takes another")

    def weight_codes(self, device: Device, at: int, *, across: bool) -> Coded:
        """Return a weight's codes for forward or, `across`, for the input's gradient."""
        if (stored := self._stored(at)) is not None:
            turned = self._turned(device, at, stored)  # also in the first forward, so that all steps are alike
            return turned if across else stored
        kind = Kind.PARAM if self.products.caches else Kind.TEMP
        ways = [
            Wanted(self.products.forward.right, kind=kind),
            Wanted(self.products.dgrad.right, across=True, kind=kind),
        ]
        array = self.weights[at].buffer.array
        values = array if self.transposed else array.T
        if self.products.caches and device.is_training:
            return self.kept.weight(device, at, values, ways)[across]
        seen = self.kept.of(device, f"weight {at}", ways[0].casting)
        [coded] = cast(device, values, [ways[across]], seen)
        return coded

    def _stored(self, at: int) -> Coded | None:
        """Return a weight's own codes, for forward, if it is stored as codes."""
        weight = self.weights[at]
        if not isinstance(weight, Parameter) or not isinstance(weight.flat, CodedFlat):
            return None
        casting, codes, scales = weight.flat.stored(weight.index)
        return Coded(casting, codes, scales, turned=not self.transposed)

    def _turned(self, device: Device, at: int, stored: Coded) -> Coded:
        """Return a stored weight's codes for the input's gradient: its transpose or, where codes stay, that of a copy,
        which is made once a step."""
        turned = stored._replace(turned=not stored.turned)
        if not self.products.caches or not device.is_training:
            return turned
        return turned._replace(codes=self.kept.copy(device, at, stored.codes))


@dataclass(frozen=True, slots=True)
class Linear8:
    """Saves x, or its codes for the weights' gradients (`kept`), and the handles of weights and biases.

    x: the input; without its bytes if its codes are given or no weight is trained.
    kept: its codes for the weights' gradients, or nothing.
    """

    x: Readable | Outline
    map: Map8
    kept: Sequence[Coded] = ()

    def backward(self, grad: Buffer) -> Grads:
        of, products, device = self.map, self.map.products, grad.device
        dx = self.x.new_grad() if self.x.requires_grad else None
        share = None
        dweights = list[Buffer | None]()
        for at, columns in enumerate(of.spans):
            rows = rows_of(grad.array)[:, columns]
            weight = of.weights[at]
            wanted = [Wanted(products.dgrad.left)] if dx is not None else []
            if weight.requires_grad and products.wgrad is not None:
                wanted.append(Wanted(products.wgrad.left, across=True))
            seen = of.kept.of(device, f"grad {at}", products.dgrad.left)
            coded = cast(device, rows, wanted, seen) if wanted else []
            if dx is not None:
                into = dx
                if at:
                    share = share or device.alloc(dx.shape, dx.dtype, Kind.TEMP)
                    into = share
                values = of.weight_codes(device, at, across=True)
                multiply(device, f"{DGRAD}_{products.name}", coded.pop(0), values, rows_of(into.array))
                del values
                if at:
                    device.kernel(dx.numel, device.backend.add, dx.array, into.array, dx.array)
            make = partial(self._weight_grad, at, coded[0] if coded else grad)
            dweights.append(weight_grad(weight, make, self.x if not isinstance(self.x, Outline) else None))
            del coded, make
        dbiases = [bias_grad(bias, grad, columns) for bias, columns in zip(of.biases, of.spans, strict=False)]
        return dx, *dweights, *dbiases

    def _weight_grad(self, at: int, grad: Coded | Buffer) -> Buffer:
        """Return a weight's gradient: of codes of the result's, or of the whole gradient in high precision."""
        of, device = self.map, self.x.device
        dweight = map_grad(of.weights[at], of.weights if len(of.weights) > 1 else (), at)
        if isinstance(grad, Buffer):
            assert not isinstance(self.x, Outline)
            columns, x = rows_of(grad.array)[:, list(of.spans)[at]], rows_of(self.x.array)
            left, right = (columns.T, x) if of.transposed else (x.T, columns)
            device.product(WGRAD, device.backend.matmul, left, right, dweight.array)
            return dweight
        x_codes = self.kept[0] if self.kept else self._coded_x()
        left8, right8 = (grad, x_codes) if of.transposed else (x_codes, grad)
        multiply(device, f"{WGRAD}_{of.products.name}", left8, right8, dweight.array)
        return dweight

    def _coded_x(self) -> Coded:
        """Make the codes of x for the weights' gradients."""
        products, device = self.map.products, self.x.device
        assert products.wgrad is not None
        assert not isinstance(self.x, Outline)
        casting = products.wgrad.right
        seen = self.map.kept.of(device, "x", casting)
        [coded] = cast(device, rows_of(self.x.array), [Wanted(casting, across=True)], seen)
        return coded
