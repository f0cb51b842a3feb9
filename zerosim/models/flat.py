"""Exactly so many parameters and next to no activations: what tables of model states are counted on.

Every parameter belongs to one column of the vocabulary, in turn; a unit adds the sums of its columns
to the logits, which are the same at every place. So all units together learn how often each token
occurs, every parameter has a gradient, and nothing is kept for backward but handles: at 1e12
parameters there is no buffer of that order beside the units' own.

The sums are divided by the parameters in a column and multiplied by `GAIN`, so that a step of Adam
moves a logit by GAIN * lr, however many parameters there are. Units: units.0 .. units.U-1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType, compute_dtype
from zerosim.errors import InputError
from zerosim.functional.common import Grads, rows_of
from zerosim.models.model import Model
from zerosim.nn import Unit
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Operand, Parameter, Tensor, apply

GAIN = 32.0
STD = 0.02


@dataclass(frozen=True, slots=True)
class FlatConfig:
    """`params` in `units` as equal as can be: the first ones hold one more where it does not divide.

    Raises: InputError for sizes below 1, and for more units than parameters.
    """

    params: int = 1_000_000
    units: int = 8
    vocab: int = 256

    def __post_init__(self) -> None:
        for name in ("params", "units", "vocab"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: expected at least 1")
        if self.units > self.params:
            raise InputError(f"units {self.units}: expected at most params = {self.params}, so that none is empty")

    @property
    def unit_sizes(self) -> list[int]:
        """Parameters of each unit."""
        size, more = divmod(self.params, self.units)
        return [size + (i < more) for i in range(self.units)]

    @property
    def scale(self) -> float:
        """What a column's sum is multiplied by."""
        return GAIN / max(1.0, self.params / self.vocab)


def build_flat(config: FlatConfig, device: Device, dtype: DType, grad_dtype: DType) -> Model:
    """The units, declared and not yet placed: no memory is taken."""
    units = []
    for i, size in enumerate(config.unit_sizes):
        flat = Flat(f"units.{i}", device, dtype, grad_dtype)
        weight = flat.declare(f"units.{i}.weight", (size,), std=STD)
        units.append(Unit(flat.name, flat, _unit(weight, config)))
    return Model(units)


def _unit(weight: Parameter, config: FlatConfig) -> Callable[[Tensor], Tensor]:
    return lambda x: add_columns(x, weight, config.vocab, config.scale)


class AddColumns:
    """Saves the handle of the weight. A column's gradient goes to each of its parameters, x's is handed on."""

    def __init__(self, weight: Operand, scale: float, starts: bool) -> None:
        self.weight = weight
        self.scale = scale
        self.starts = starts

    def backward(self, grad: Buffer) -> Grads:
        device, k = grad.device, grad.device.backend
        dweight = self.weight.new_grad()
        total = device.alloc(grad.shape[-1:], compute_dtype(grad.dtype), Kind.TEMP)
        device.kernel(grad.numel, k.column_sum, rows_of(grad.array), total.array)
        whole, rest = _columns(dweight.array, total.numel)
        device.kernel(whole.size, k.multiply, total.array, self.scale, whole)
        device.kernel(rest.size, k.multiply, total.array[: rest.size], self.scale, rest)
        return (dweight,) if self.starts else (grad, dweight)


def add_columns(x: Tensor, weight: Operand, vocab: int, scale: float) -> Tensor:
    """x (B, T, V) + scale * (sums of weight's columns); x may be token ids (B, T), which stand for zeros.

    Shapes: weight (P), its element i in column i % V; result (B, T, V).
    """
    device, k, dtype = x.device, x.device.backend, weight.dtype
    total = device.alloc((vocab,), compute_dtype(dtype), Kind.TEMP)
    whole, rest = _columns(weight.array, vocab)
    device.kernel(whole.size, k.sum_to, whole, total.array)
    device.kernel(rest.size, k.add, total.array[: rest.size], rest, total.array[: rest.size])
    device.kernel(vocab, k.multiply, total.array, scale, total.array)
    starts = x.dtype.name == "int64"
    out = device.alloc((*x.shape, vocab) if starts else x.shape, dtype, Kind.ACTIVATION)
    if starts:
        device.kernel(0, k.fill, out.array, 0.0)
    device.kernel(out.numel, k.add, out.array if starts else x.array, total.array, out.array)
    inputs = (weight,) if starts else (x, weight)
    return apply(AddColumns(weight, scale, starts), out, *inputs, op="add_columns")


def _columns(array: Array, vocab: int) -> tuple[Array, Array]:
    """(P) as windows: the whole rows of V, (P // V, V), and what is left over, fewer than V."""
    whole = array.shape[0] // vocab * vocab
    return array[:whole].reshape(whole // vocab, vocab), array[whole:]
