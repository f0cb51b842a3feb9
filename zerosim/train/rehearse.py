"""The rehearsal of a block: it runs on a separate device that is not counted, and leaves its steps (`repeated.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind, Phase
from zerosim.device.events import Free
from zerosim.dtypes import DType, fp32
from zerosim.functional.fp8 import Coded, Seen, Wanted, empty
from zerosim.functional.fp8_kept import Kept
from zerosim.nn import Unit, led_by
from zerosim.nn.leaf import LeafModule
from zerosim.parallel.base import Strategy
from zerosim.tensor.coded_flat import CodedFlat
from zerosim.tensor.collector import Collector
from zerosim.tensor.flat import Flat
from zerosim.tensor.float8 import Casting
from zerosim.tensor.tensor import Tensor
from zerosim.train.repeated import Player, Rehearsed, Script


class RehearsedFlat(Flat):
    """A rehearsal's flat buffer, always resident. Its requests to the rank's own go into the script, under its
    `number`."""

    script: Script
    number: int

    def open(self, script: Script, number: int, like: Flat) -> None:
        """Allocate memory for the parameters; gradients are treated as those of `like`."""
        self.script, self.number = script, number
        self.collector = Collector(like.collector.dtype, like.adds_at_once, like.collector.dummies)
        self.param = self.device.alloc((self.numel,), self.dtype, Kind.PARAM)
        self.place_scales()
        self.kept = [RehearsedKept(one, script, number, at) for at, one in enumerate(self.kept)]
        if like.adds_at_once:
            self.collector.lasting = self.grad_whole = script.buffer((self.numel,), self.grad_dtype)

    def open_grad(self) -> Buffer:
        if self.collector.grad is None and not self.adds_at_once:
            self.script.write(Player.open_grad, self.number)
            self.collector.grad = self.script.buffer((self.numel,), self.collector.dtype)
        return super().open_grad()

    def map_grad_window(self, index: int, packed: Sequence[tuple[int, ...]], place: int) -> Buffer:
        dummies, dtype = self.collector.dummies, self.collector.dtype
        if dummies is None:
            return super().map_grad_window(index, packed, place)
        if not dummies.holds(packed, dtype):
            self.script.write(Player.dummy, self.number, tuple(packed), place)
        return self.script.buffer(self.spec.weights[index].shape, dtype)

    def collect_grad(self, index: int, grad: Buffer) -> None:
        if self.collector.later is None:
            self.script.write(Player.collected, self.number, index)
        super().collect_grad(index, grad)


class RehearsedCodes(RehearsedFlat, CodedFlat):
    """A rehearsal's flat buffer of codes."""


class RehearsedKept(Kept):
    """What a rehearsed map keeps. It is never recorded: the rank brings its own up to date, where a pass may be its
    step's first."""

    def __init__(self, like: Kept, script: Script, flat: int, number: int) -> None:
        super().__init__(like.products, like.share)
        self.script, self.flat, self.number = script, flat, number

    def begin(self, device: Device, weights: int) -> None:
        self._ask("begin", weights)

    def of(self, device: Device, name: str, casting: Casting, *, shared: bool = False) -> Seen | None:
        if self.products.history is None:
            return None
        self._ask("of", name, casting, shared=shared)
        buffer = self.script.buffer
        return Seen(buffer((self.products.history.length, 1), fp32), buffer((1,), fp32))

    def weight(self, device: Device, at: int, values: Array, ways: Sequence[Wanted]) -> Sequence[Coded]:
        self._ask("weight", at, values, ways)
        return [empty(self.script.buffer, one, *values.shape) for one in ways]

    def copy(self, device: Device, at: int, codes: Buffer) -> Buffer:
        self._ask("copy", at, codes)
        return self.script.buffer(codes.shape, codes.dtype)

    def _ask(self, name: str, *how: Any, **named: Any) -> None:
        if not self.script.is_ready:
            self.script.write(Player.keep, self.flat, self.number, name, how, named)


class RehearsedHooks:
    """A strategy's stand-in for a rehearsal: calls of leaf modules' hooks go into the script, unless the rank's own
    hook is empty. `like` are the rank's own leaves."""

    def __init__(self, script: Script, leaves: Sequence[Unit], like: Sequence[Unit], *, defers: bool) -> None:
        self.defers, self.script = defers, script
        self.numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        self.hooks = {type(leaf.hooks) for leaf in like if isinstance(leaf, LeafModule)}

    @property
    def timetable(self) -> RehearsedHooks:
        return self

    def enter(self) -> None:
        self.script.write(Player.entered)

    def pre_forward(self, unit: Unit) -> None:
        self._write("pre_forward", unit)

    def post_forward(self, unit: Unit) -> None:
        self._write("post_forward", unit)

    def pre_backward(self, unit: Unit) -> None:
        self._write("pre_backward", unit)

    def post_backward(self, unit: Unit) -> None:
        self._write("post_backward", unit)

    def post_input_grad(self, unit: Unit) -> None:
        self._write("post_input_grad", unit)

    def _write(self, name: str, unit: Unit) -> None:
        if any(getattr(hooks, name) is not getattr(Strategy, name) for hooks in self.hooks):
            self.script.write(Player.hook, name, self.numbers[id(unit)])


def rehearse(
    unit: Unit,
    like: Unit,
    device: Device,
    shape: tuple[int, ...],
    dtype: DType,
    *,
    defers: bool = False,
    is_ready: bool = False,
) -> Rehearsed:
    """Rehearse forward and backward of `unit`, a block over rehearsed flats on a device without a limit, and return its
    steps; its input has this shape. The result serves blocks `like` that one. `defers`: backward leaves the weights'
    gradients for later."""
    script = Script(unit.name, device, is_ready=is_ready)
    for number, (flat, other) in enumerate(zip(unit.all_flats, like.all_flats, strict=True)):
        assert isinstance(flat, RehearsedFlat)
        flat.open(script, number, other)
    x, keeps, weights, numbers = device.alloc(shape, dtype, Kind.ACTIVATION), set[int](), None, script.numbers
    x_id = x.storage.id
    script.hold(x)
    for aside, its in zip(unit.reads, like.reads, strict=True):
        aside.like(its, device)
        script.hold(aside.read().buffer)
    with led_by(RehearsedHooks(script, unit.leaves, like.leaves, defers=defers), unit.leaves):
        with device.scope(phase=Phase.FORWARD, unit=unit.name):
            y = unit.forward(Tensor(x)).buffer
            y_id, like_y = y.storage.id, (y.shape, y.dtype)
            forward = script.steps({y_id: like_y})
        del x
        keeps |= {x_id} - _freed(device)
        del y
        keeps |= {y_id} - _freed(device)
        unit.open_asides()
        grads = [device.alloc(*like_y, Kind.ACTIVATION_GRAD)]
        grad = script.hold(grads[0])
        for leaf in (one.leaf for one in unit.reads):
            if leaf is not None and leaf.grad is not None:
                script.hold(leaf.grad)
        with device.scope(phase=Phase.BACKWARD, unit=unit.name):
            unit.backward(grads, defers=defers)
            dx_id = grads[0].storage.id if grads else None
            backward = script.steps({} if dx_id is None else {dx_id: (grads[0].shape, grads[0].dtype)})
            if defers:
                unit.backward_weights()
                weights = script.steps()
    dx = None if dx_id is None else numbers[dx_id]
    held = frozenset(numbers[id] for id in keeps)
    return Rehearsed(forward, backward, weights, numbers[x_id], numbers[y_id], grad, dx, held, tuple(script.lines))


def _freed(device: Device) -> set[int]:
    """Return the buffers freed last."""
    last = device.recorder.events[-1]
    return {last.id} if isinstance(last, Free) else set()
