"""Adapters of linear maps (LoRA): y += s B A x, of rank r, beside a map whose own weight is frozen.

    forward    t = s A x (M, r);  y += B t
    backward   dB = dyᵀ t;  dt = s dy B;  dA = dtᵀ x;  dx += dt A

Source: arXiv 2106.09685, section 4.1. The scale s = alpha / r multiplies t, which has r columns, and not
y. I, O are the map's widths, M = product of the leading dims, D is x after dropout.

A and B may be fp32 beside a map of a half type: D, t and the gradients are fp32 then, cast from x and dy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerosim.backends.kernels import Array, Window
from zerosim.device.device import Buffer, Kind
from zerosim.device.work import DGRAD, LINEAR, WGRAD
from zerosim.dtypes import DType
from zerosim.functional.common import Grads, rows_of, weight_grad
from zerosim.functional.dropout import dropout_mask
from zerosim.tensor.autograd import Rule
from zerosim.tensor.discarded import Readable
from zerosim.tensor.tensor import Operand, Outline, Tensor


@dataclass(frozen=True, slots=True)
class Drop:
    """Dropout of an adapter's input: its chance, the key of its mask, and its window of the whole's mask."""

    chance: float
    key: tuple[int, int]
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A (r, I) and B (o, r), whose o outputs are the map's columns from `first` on."""

    a: Operand
    b: Operand
    first: int
    scale: float

    def of(self, packed: Array) -> Array:
        """Return this adapter's columns (M, o) of the map's result or of its gradient."""
        return rows_of(packed)[:, self.first : self.first + self.b.shape[0]]


@dataclass(frozen=True, slots=True)
class Down:
    """An adapter's saved buffers from forward to backward: t = s A D, dropout's mask and, if it keeps it, D."""

    adapter: Adapter
    t: Buffer
    mask: Buffer | None
    chance: float
    source: Buffer | None = None

    def dropped(self, source: Array, like: Buffer, kind: Kind = Kind.TEMP) -> Buffer:
        """Apply the mask to `source` (M, I), in a new buffer."""
        assert self.mask is not None
        out, device = like.device.alloc(like.shape, like.dtype, kind), like.device
        device.kernel(2 * out.numel, device.backend.dropout, source, self.mask.array, 1.0 - self.chance, out.array)
        return out


def add_adapters(
    x: Tensor, out: Buffer, adapters: Sequence[Adapter], drops: Sequence[Drop | None], *, keeps_inputs: bool = False
) -> list[Down]:
    """Add each adapter's B A x to its columns of `out`, the map's result. Shapes: x (..., I), out (..., O).

    With `keeps_inputs` each saves its cast or dropped input, else all of them save x.
    """
    return [_add(x, out, adapter, drop, keeps_inputs) for adapter, drop in zip(adapters, drops, strict=True)]


def _in(dtype: DType, source: Buffer, kind: Kind = Kind.TEMP) -> Buffer:
    """Return the same values in `dtype`: the buffer itself, or a new one."""
    if source.dtype == dtype:
        return source
    out = source.device.alloc(source.shape, dtype, kind)
    source.device.kernel(0, source.device.backend.copy, source.array, out.array)
    return out


def _add(x: Tensor, out: Buffer, adapter: Adapter, drop: Drop | None, keeps_input: bool) -> Down:
    device, k, rank, dtype = x.device, x.device.backend, adapter.a.shape[0], adapter.a.buffer.dtype
    rows, kind = rows_of(x.array).shape[0], Kind.ACTIVATION if keeps_input else Kind.TEMP
    mask = None if drop is None else dropout_mask(x, x.shape, drop.chance, drop.key, drop.window)
    t = device.alloc((rows, rank), dtype, Kind.ACTIVATION)
    source = _in(dtype, x.buffer, kind if mask is None else Kind.TEMP)
    down = Down(adapter, t, mask, 0.0 if drop is None else drop.chance)
    if mask is not None:
        source = down.dropped(source.array, source, kind)
    if keeps_input:
        down = replace(down, source=source)
    device.product(LINEAR, k.linear, rows_of(source.array), adapter.a.array.T, None, t.array)
    del source
    _scale(t, adapter.scale)
    columns = adapter.of(out.array)
    share = device.alloc((rows, adapter.b.shape[0]), dtype, Kind.TEMP)
    device.product(LINEAR, k.linear, t.array, adapter.b.array.T, None, share.array)
    device.kernel(share.numel, k.add, columns, share.array, columns)
    return down


def _scale(t: Buffer, scale: float) -> None:
    if scale != 1.0:
        t.device.kernel(t.numel, t.device.backend.multiply, t.array, scale, t.array)


@dataclass(frozen=True, slots=True)
class Adapted:
    """A linear map with adapters: the map's own rule, then theirs. Saves x or each adapter's own input, t and dropout's
    masks."""

    rule: Rule
    x: Readable | Outline
    downs: Sequence[Down]

    def backward(self, grad: Buffer) -> Grads:
        dx, *dweights = self.rule.backward(grad)
        for down in self.downs:
            dweights += self._of(down, grad, dx)
        return dx, *dweights

    def _of(self, down: Down, grad: Buffer, dx: Buffer | None) -> tuple[Buffer | None, Buffer | None]:
        """Return dA and dB of one adapter, and add its share of x's gradient to dx."""
        adapter, device, k, dtype = down.adapter, grad.device, grad.device.backend, down.t.dtype
        columns = adapter.of(grad.array)
        if dtype != grad.dtype:
            wide = device.alloc(columns.shape, dtype, Kind.TEMP)
            device.kernel(0, k.copy, columns, wide.array)
            columns = wide.array
        dt = device.alloc(down.t.shape, dtype, Kind.TEMP)
        device.product(DGRAD, k.matmul, columns, adapter.b.array, dt.array)
        _scale(dt, adapter.scale)
        if dx is not None:
            share = device.alloc(dx.shape, dtype, Kind.TEMP)
            device.product(DGRAD, k.matmul, dt.array, adapter.a.array, rows_of(share.array))
            if down.mask is not None:
                share = down.dropped(share.array, share)
            share = _in(dx.dtype, share)
            device.kernel(dx.numel, k.add, dx.array, share.array, dx.array)
            del share

        def make_a() -> Buffer:
            source = down.source
            if source is None:
                assert not isinstance(self.x, Outline)
                source = self.x.buffer if down.mask is None else down.dropped(self.x.array, self.x.buffer)
            da = adapter.a.new_grad()
            device.product(WGRAD, k.matmul, dt.array.T, rows_of(source.array), da.array)
            return da

        def make_b() -> Buffer:
            db = adapter.b.new_grad()
            device.product(WGRAD, k.matmul, columns.T, down.t.array, db.array)
            return db

        return weight_grad(adapter.a, make_a, self.x), weight_grad(adapter.b, make_b)
