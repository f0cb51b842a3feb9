"""Adapters of linear maps (LoRA): y += s B A x, of rank r, beside a map whose own weight is frozen.

    forward    t = s A x (M, r);  y += B t
    backward   dB = dyᵀ t;  dt = s dy B;  dA = dtᵀ x;  dx += dt A

Source: arXiv 2106.09685, section 4.1. The scale s = alpha / r multiplies t, which has r columns, and not
y. I, O are the map's widths, M = product of the leading dims, D is x after dropout.

A and B may be fp32 beside a map of a half type: D, t and the gradients are fp32 then, cast from x and dy. Under
torch.autocast products are in its dtype: D, A and B are cast once more, and t has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from zerosim.backends.kernels import Array, Window
from zerosim.device.device import Buffer, Kind
from zerosim.device.work import DGRAD, LINEAR, WGRAD
from zerosim.dtypes import DType
from zerosim.functional.common import Grads, rows_of, weight_grad
from zerosim.functional.dropout import dropout_mask
from zerosim.tensor.autograd import Rule
from zerosim.tensor.discarded import Readable
from zerosim.tensor.tensor import Operand, Outline, Tensor, record_saved


@dataclass(frozen=True, slots=True)
class Drop:
    """Dropout of an adapter's input: its chance, the key of its mask, and its windows of the whole's mask."""

    chance: float
    key: tuple[int, int]
    windows: Sequence[Window] = ()


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


@dataclass(slots=True)
class Casts:
    """Buffers that PyTorch holds longer than their ops: until the forward that made them ends (a graph holds its own),
    if `caches`, the casts of weights that torch.autocast caches, and keys and values that blocks return; `inputs` of
    4-bit maps until their graph dies and, if it `holds_rows`, a frozen table's rows before they are scaled; `outputs`
    that the caller keeps through backward or, if the model `returns` keys and values too, until the next forward
    returns."""

    caches: bool = True
    returns: bool = False
    holds_rows: bool = False
    outputs: list[Buffer] = field(default_factory=list)
    held: list[Buffer] = field(default_factory=list)
    inputs: list[Buffer] = field(default_factory=list)

    def keep(self, cast: Buffer) -> None:
        """Hold a cast, as `hold`, if they are cached."""
        if self.caches:
            self.hold(cast)

    def hold(self, buffer: Buffer) -> None:
        """Hold a buffer until forward ends, if this is a training step's forward without a graph."""
        if buffer.device.is_training and not buffer.device.grad_enabled:
            self.held.append(buffer)

    def keep_input(self, x: Tensor, op: str) -> None:
        """Hold a map's input, if there is a graph."""
        if x.device.grad_enabled:
            self.inputs.append(x.buffer)
            if x.device.recorder.enabled:
                record_saved(x.device, op, {"input": x})


@dataclass(frozen=True, slots=True)
class Way:
    """How adapters compute, and what they save for backward.

    keeps_inputs  each saves its cast or dropped input (PEFT), else all of them save x
    widens        the input is cast to the adapters' dtype before dropout
    fused         one op as unsloth's: products in x's dtype, and backward recomputes t, dropout's masks and the
                  casts of A and B; dropped inputs are saved beside x
    autocast      the dtype of products, if it is not the adapters'
    casts         holds the casts of A and B that autocast caches
    merged        adapters of one map drop and cast its input once (litgpt's of q, k and v)
    pads          each saves its result, a source of the copy into the map's width (litgpt's, if some have no adapter)
    """

    keeps_inputs: bool = False
    widens: bool = True
    fused: bool = False
    autocast: DType | None = None
    casts: Casts | None = None
    merged: bool = False
    pads: bool = False

    def dtypes(self, x: DType, stored: DType) -> tuple[DType, DType]:
        """Return the dtypes of dropout and of products."""
        return stored if self.widens and not self.fused else x, x if self.fused else self.autocast or stored

    def weights(self, adapter: Adapter, dtype: DType, kind: Kind = Kind.TEMP) -> tuple[Buffer, Buffer]:
        """Return A and B in the dtype of products."""
        return _in(dtype, adapter.a.buffer, kind), _in(dtype, adapter.b.buffer, kind)


PLAIN = Way()
PEFT = Way(keeps_inputs=True)


@dataclass(frozen=True, slots=True)
class Down:
    """An adapter's saved buffers from forward to backward: t = s A D, dropout's mask and, if it keeps them, D and the
    casts of A and B."""

    adapter: Adapter
    way: Way
    drop: Drop | None
    t: Buffer | None
    mask: Buffer | None
    source: Buffer | None = None
    casts: tuple[Buffer, Buffer] | None = None
    result: Buffer | None = None

    def dropped(self, source: Array, like: Buffer, mask: Buffer, kind: Kind = Kind.TEMP) -> Buffer:
        """Apply the mask to `source` (M, I), in a new buffer."""
        assert self.drop is not None
        out, device, keep = like.device.alloc(like.shape, like.dtype, kind), like.device, 1.0 - self.drop.chance
        device.kernel(2 * out.numel, device.backend.dropout, source, mask.array, keep, out.array)
        return out

    def saved(self, name: str) -> dict[str, Buffer]:
        """Return what it holds, by names for the record."""
        held = {name: self.t, f"{name} mask": self.mask, f"{name} input": self.source, f"{name} result": self.result}
        held |= dict(zip((f"{name} cast", f"{name} cast of B"), self.casts or (), strict=False))
        return {key: one for key, one in held.items() if one is not None}


def add_adapters(
    x: Tensor, out: Buffer, adapters: Sequence[Adapter], drops: Sequence[Drop | None], way: Way = PLAIN
) -> list[Down]:
    """Add each adapter's B A x to its columns of `out`, the map's result. Shapes: x (..., I), out (..., O)."""
    downs = list[Down]()
    for adapter, drop in zip(adapters, drops, strict=True):
        first = downs[0] if downs and way.merged else None
        downs.append(_add(x, out, adapter, drop if first is None else first.drop, way, first))
    return downs


def _in(dtype: DType, source: Buffer, kind: Kind = Kind.TEMP) -> Buffer:
    """Return the same values in `dtype`: the buffer itself, or a new one."""
    if source.dtype == dtype:
        return source
    out = source.device.alloc(source.shape, dtype, kind)
    source.device.kernel(0, source.device.backend.copy, source.array, out.array)
    return out


def _mask(x: Tensor, drop: Drop | None) -> Buffer | None:
    return None if drop is None else dropout_mask(x, x.shape, drop.chance, drop.key, drop.windows)


def _add(x: Tensor, out: Buffer, adapter: Adapter, drop: Drop | None, way: Way, first: Down | None) -> Down:
    """Add one adapter's share. `first`: the map's first adapter, if they share its mask and input."""
    device, k, rows = x.device, x.device.backend, rows_of(x.array).shape[0]
    wide, dtype = way.dtypes(x.dtype, adapter.a.buffer.dtype)
    mask, keeps = _mask(x, drop) if first is None else first.mask, way.keeps_inputs or (way.fused and drop is not None)
    last = Kind.ACTIVATION if keeps else Kind.TEMP
    t = device.alloc((rows, adapter.a.shape[0]), dtype, Kind.TEMP if way.fused else Kind.ACTIVATION)
    shared = first.source if first is not None else None
    source = shared or _in(wide, x.buffer, last if mask is None and wide == dtype else Kind.TEMP)
    down = Down(adapter, way, drop, None, mask)
    if mask is not None and shared is None:
        source = down.dropped(source.array, source, mask, last if wide == dtype else Kind.TEMP)
    source = _in(dtype, source, last)
    a, b = way.weights(adapter, dtype, Kind.ACTIVATION)
    if way.autocast is not None and not way.fused:
        down = replace(down, casts=(a, b))
        if way.casts is not None:
            way.casts.keep(a)
            way.casts.keep(b)
    down = replace(down, mask=None) if way.fused else replace(down, t=t)
    if keeps:
        down = replace(down, source=source)
    device.product(LINEAR, k.linear, rows_of(source.array), a.array.T, None, t.array)
    del source, mask
    _scale(t, adapter.scale)
    columns = adapter.of(out.array)
    share = device.alloc((rows, adapter.b.shape[0]), dtype, Kind.ACTIVATION if way.pads else Kind.TEMP)
    device.product(LINEAR, k.linear, t.array, b.array.T, None, share.array)
    device.kernel(share.numel, k.add, columns, share.array, columns)
    return replace(down, result=share) if way.pads else down


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
        adapter, device, k = down.adapter, grad.device, grad.device.backend
        wide, dtype = down.way.dtypes(self.x.dtype, adapter.a.dtype)
        mask = _mask(Tensor(down.source), down.drop) if down.way.fused and down.source is not None else down.mask
        columns = adapter.of(grad.array)
        if dtype != grad.dtype:
            cast = device.alloc(columns.shape, dtype, Kind.TEMP)
            device.kernel(0, k.copy, columns, cast.array)
            columns = cast.array
        a, b = down.casts or down.way.weights(adapter, dtype)
        dt = device.alloc((columns.shape[0], adapter.a.shape[0]), dtype, Kind.TEMP)
        device.product(DGRAD, k.matmul, columns, b.array, dt.array)
        _scale(dt, adapter.scale)
        if dx is not None:
            share = device.alloc(dx.shape, dtype, Kind.TEMP)
            device.product(DGRAD, k.matmul, dt.array, a.array, rows_of(share.array))
            share = _in(wide, share)
            if mask is not None:
                share = down.dropped(share.array, share, mask)
            share = _in(dx.dtype, share)
            device.kernel(dx.numel, k.add, dx.array, share.array, dx.array)
            del share

        def read() -> Buffer:
            if down.source is not None:
                return down.source
            assert not isinstance(self.x, Outline)
            return self.x.buffer if mask is None else down.dropped(self.x.array, self.x.buffer, mask)

        def make(weight: Operand, left: Array, right: Array) -> Buffer:
            dweight = weight.new_grad()
            into = dweight if dweight.dtype == dtype else device.alloc(dweight.shape, dtype, Kind.TEMP)
            device.product(WGRAD, k.matmul, left, right, into.array)
            if into is not dweight:
                device.kernel(0, k.copy, into.array, dweight.array)
            return dweight

        def make_a() -> Buffer:
            source = read()
            return make(adapter.a, dt.array.T, rows_of(source.array))

        def make_b() -> Buffer:
            t = down.t
            if t is None:
                t = device.alloc(dt.shape, dtype, Kind.TEMP)
                device.product(LINEAR, k.linear, rows_of(read().array), a.array.T, None, t.array)
                _scale(t, adapter.scale)
            return make(adapter.b, columns.T, t.array)

        return weight_grad(adapter.a, make_a, self.x), weight_grad(adapter.b, make_b)
