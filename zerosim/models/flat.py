"""A model with an exact number of parameters and almost no activations, for tables of model states.

Every parameter belongs to one column of the vocabulary, in turn; a unit adds the sums of its columns
to the logits, which are the same at every position. So all units together learn how often each token
occurs, every parameter has a gradient, and backward saves only handles. At 1e12
parameters no buffer of that size exists besides the units' own.

The sums are divided by the parameters in a column and multiplied by `GAIN`, so that a step of Adam
moves a logit by GAIN * lr, however many parameters there are. Units: units.0 .. units.U-1.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import compute_dtype
from zerosim.functional.common import Grads, rows_of, weight_grad
from zerosim.models.builder import Builder
from zerosim.models.model import Model
from zerosim.nn import Unit
from zerosim.nn.group import WHOLE_MAPS, WholeMaps
from zerosim.nn.halves import buffers_of
from zerosim.tensor.tensor import Operand, Tensor, apply

GAIN = 32.0
STD = 0.02


def build_flat(new: Builder) -> Model:
    """Build the units of a flat model: `params` in `units` of nearly equal size, the first ones longer by one if the
    number does not divide. A group cuts each of them. A unit is one tensor, and so one module."""
    sizes, maps, units = new.sizes, new.group.maps, []
    assert sizes.params is not None  # the configuration has filled them in
    assert sizes.units is not None
    each, more = divmod(sizes.params, sizes.units)
    for i in new.numbers("units", sizes.units):
        numel, name = each + (i < more), f"units.{i}"
        flat = buffers_of(name, new.buffer, new.tuning)
        splits = maps.split((numel,), 0, padding=-numel % maps.size)
        weight = flat.declare(f"{name}.weight", (numel,), std=STD, splits=splits)
        part = Part(*splits[0].span(maps.index, maps.size)) if splits else Part(0, numel)
        scale = GAIN / max(1.0, sizes.params / sizes.vocab)
        function = partial(add_columns, weight=weight, vocab=sizes.vocab, scale=scale, part=part, maps=maps)
        units.append(Unit(name, flat, function))
    return new.model(units, width=sizes.vocab)


class Part(NamedTuple):
    """The range of a unit's parameters on this rank: `numel` from `first` on, without padding."""

    first: int
    numel: int


class AddColumns:
    """Saves the handle of the weight. A column's gradient goes to each of its parameters; x's gradient is passed on."""

    def __init__(self, weight: Operand, scale: float, starts: bool, part: Part) -> None:
        self.weight = weight
        self.scale = scale
        self.starts = starts
        self.part = part

    def backward(self, grad: Buffer) -> Grads:
        dweight = weight_grad(self.weight, partial(self._grad_of_weight, grad))
        return (dweight,) if self.starts else (grad, dweight)

    def _grad_of_weight(self, grad: Buffer) -> Buffer:
        device, k = grad.device, grad.device.backend
        dweight = self.weight.new_grad()
        total = device.alloc(grad.shape[-1:], compute_dtype(grad.dtype), Kind.TEMP)
        device.kernel(grad.numel, k.column_sum, rows_of(grad.array), total.array)
        if self.part.numel < dweight.numel:
            device.kernel(0, k.fill, dweight.array[self.part.numel :], 0.0)
        for run, first in _runs(dweight.array, self.part, total.numel):
            columns = total.array[first : first + run.shape[-1]]
            device.kernel(run.size, k.multiply, columns, self.scale, run)
        return dweight


def add_columns(
    x: Tensor, weight: Operand, vocab: int, scale: float, part: Part | None = None, maps: WholeMaps = WHOLE_MAPS
) -> Tensor:
    """Return x (B, T, V) + scale * (sums of weight's columns); x may be token ids (B, T), which stand for zeros.

    Shapes: weight (P), its element i in column i % V; result (B, T, V). If `maps` cut the weight, this rank has `part`.
    """
    part = part or Part(0, weight.shape[0])
    device, k, dtype = x.device, x.device.backend, weight.dtype
    total = device.alloc((vocab,), compute_dtype(dtype), Kind.TEMP)
    whole, *rest = _runs(weight.array, part, vocab)
    device.kernel(whole[0].size, k.sum_to, whole[0], total.array)
    for run, first in rest:
        columns = total.array[first : first + run.size]
        device.kernel(run.size, k.add, columns, run, columns)
    maps.sum_over(total)
    device.kernel(vocab, k.multiply, total.array, scale, total.array)
    starts = x.dtype.name == "int64"
    out = device.alloc((*x.shape, vocab) if starts else x.shape, dtype, Kind.ACTIVATION)
    if starts:
        device.kernel(0, k.fill, out.array, 0.0)
    device.kernel(out.numel, k.add, out.array if starts else x.array, total.array, out.array)
    inputs = (weight,) if starts else (x, weight)
    return apply(AddColumns(weight, scale, starts, part), out, *inputs, op="add_columns")


def _runs(array: Array, part: Part, vocab: int) -> list[tuple[Array, int]]:
    """Return this rank's elements as views with their first columns: the whole rows of V, (k, V), and the elements
    before and after them, fewer than V each."""
    before = min(-part.first % vocab, part.numel)
    stop = before + (part.numel - before) // vocab * vocab
    runs = [(array[before:stop].reshape((stop - before) // vocab, vocab), 0)]
    if before:
        runs.append((array[:before], part.first % vocab))
    runs.append((array[stop : part.numel], 0))
    return runs
