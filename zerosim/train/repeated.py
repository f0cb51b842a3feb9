"""On shapes identical blocks need not run: the calls of one are repeated.

Every block's forward and backward record the same events, in every microbatch and step, except for their ids, unit and
microbatch. So one block is rehearsed on a separate device that is not counted, and its actions are written down as
calls. A `Repeated` unit makes these calls on the rank's own device. Its allocator serves each request, its
tensor-parallel group numbers each collective, and its flat buffer says where each gradient goes. So the record equals
that of a run, event by event. Nothing else is repeated: strategies, reductions, pipelines and other units run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from zerosim.comm.collectives import Comm
from zerosim.device.device import Buffer, Device, Kind, Phase, Storage
from zerosim.device.events import Alloc, Copy, Event, Free, Kernel, Launch, Message, Retag, Save, Wait
from zerosim.dtypes import DType
from zerosim.nn import Unit, led_by
from zerosim.nn.leaf import Hooks, LeafModule
from zerosim.placement.memories import DEVICE
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Tensor

Call = tuple[Callable[..., None], tuple[Any, ...]]
"""A method of `Player`, and its arguments."""


Leaving = Mapping[int, tuple[tuple[int, ...], DType]]
"""Buffers that outlive a block's pass, by id: shape and dtype."""


class Rehearsed(NamedTuple):
    """A block's forward and backward as calls, and its weights' gradients if they are deferred (None: they are part of
    backward). The ids are those of the rehearsal: of the block's input and output, of the output's gradient and the
    input's. `keeps`: which of the first two the block holds from forward to backward."""

    forward: Sequence[Call]
    backward: Sequence[Call]
    weights: Sequence[Call] | None
    x: int
    y: int
    grad: int
    dx: int | None
    keeps: frozenset[int]


Rehearsals = dict[tuple[Any, ...], Rehearsed]
"""The rehearsals of one configuration, whatever its number of microbatches, by the properties in which blocks
differ."""


class Player:
    """Makes the calls of one block's pass on a rank's own device. `ids` maps the rehearsal's ids to the device's;
    `held` are the buffers with other handles too."""

    def __init__(self, unit: Unit, device: Device, comm: Comm | None) -> None:
        self.device, self.comm = device, comm
        self.name, self.flats, self.leaves = unit.name, unit.all_flats, unit.leaves
        self.recorder = device.recorder
        self.where = device.where
        self.ids: dict[int, int] = {}
        self.held: dict[int, Buffer] = {}

    def play(self, calls: Sequence[Call]) -> None:
        """Make the calls. Raises: OutOfMemory, Aborted."""
        self.where = before = self.device.where
        self.device.look_up()
        self.recorder.settle()
        try:
            for do, how in calls:
                do(self, *how)
        finally:
            self.device.move(before)

    def go_to(self, module: str) -> None:
        """Enter a module of the block, such as '.attn.c_proj'; '' is the block."""
        self.where = self.where._replace(unit=self.name + module)
        self.device.move(self.where)

    def hold(self, id: int, buffer: Buffer) -> None:
        self.held[id], self.ids[id] = buffer, buffer.storage.id

    def kernel(self, *work: Any) -> None:
        self.recorder.put(tuple.__new__(Kernel, (self.where, *work)))

    def sums(self, id: int, *work: Any) -> None:
        self.recorder.put(Kernel._make((self.where, *work, self.ids[id], DEVICE)))

    def alloc(self, id: int, nbytes: int, kind: Kind, padding: int, memory: str) -> None:
        self.ids[id], reserved = self.device.reserve(nbytes, kind, memory)
        self.recorder.put(Alloc(self.where, self.ids[id], nbytes, reserved, kind.value, padding, "", memory))

    def make(self, id: int, shape: tuple[int, ...], dtype: DType, kind: Kind) -> None:
        """Allocate a buffer that outlives the pass."""
        self.hold(id, self.device.alloc(shape, dtype, kind))

    def free(self, id: int, memory: str) -> None:
        if id in self.held:  # it is freed with its last handle, which may be elsewhere
            del self.held[id]
            self.recorder.settle()
        else:
            real = self.ids.pop(id)
            self.recorder.release(real, memory)
            self.recorder.put(tuple.__new__(Free, (self.where, real, memory)))

    def retag(self, id: int, kind: str) -> None:
        self.recorder.put(Retag(self.where, self.ids[id], kind))

    def save(self, op: str, what: str, id: int, nbytes: int) -> None:
        self.recorder.put(Save(self.where, op, what, self.ids[id], nbytes))

    def copy(self, *how: Any) -> None:
        self.recorder.put(Copy(self.where, *how))

    # -- collectives of the tensor-parallel group -----------------------------------------------------
    def launch(self, id: int, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        assert self.comm is not None
        number, self.ids[id] = self.comm.next_number(self.comm.ranks), self.device.next_id()
        self.recorder.put(Launch._make((self.where, self.ids[id], *before, self.comm.ranks, number, *after)))

    def message(self, id: int, member: int, nbytes: int, count: int) -> None:
        assert self.comm is not None
        peer = member if member < 0 else self.comm.ranks[member]
        self.recorder.put(Message(self.where, self.ids[id], peer, nbytes, count))

    def wait(self, id: int) -> None:
        self.recorder.put(Wait(self.where, self.ids[id]))

    # -- gradients of the weights, and hooks of leaf modules ------------------------------------------
    def window(self, id: int, flat: int, index: int) -> None:
        self.held[id] = self.flats[flat].grad_window(index)

    def map_window(self, id: int, flat: int, index: int, packed: Sequence[tuple[int, ...]], place: int) -> None:
        self.held[id] = self.flats[flat].map_grad_window(index, packed, place)

    def collect(self, id: int, flat: int, index: int) -> None:
        self.flats[flat].collect_grad(index, self.held[id])

    def enter(self) -> None:
        self._hooks(0).timetable.enter()

    def hook(self, name: str, leaf: int) -> None:
        getattr(self._hooks(leaf), name)(self.leaves[leaf])

    def _hooks(self, leaf: int) -> Hooks:
        module = self.leaves[leaf]
        assert isinstance(module, LeafModule)
        assert module.hooks is not None
        return module.hooks


class Repeated(Unit):
    """A unit that repeats another unit's record; `rehearsed` returns the record for an input's shape and dtype."""

    def __init__(
        self, unit: Unit, comm: Comm | None, rehearsed: Callable[[Unit, tuple[int, ...], DType], Rehearsed]
    ) -> None:
        super().__init__(unit.name, unit, unit.function, reduces=unit.reduces)
        self.unit, self.comm, self.rehearsed = unit, comm, rehearsed
        self._passes: dict[int, tuple[Player, Rehearsed]] = {}

    def reach(self, sends_back: bool, trained: Collection[str]) -> None:
        super().reach(sends_back, trained)
        self.unit.reach(sends_back, trained)

    def turns_back(self) -> Sequence[Unit]:
        return self.unit.turns_back() if self.leaves else super().turns_back()

    def forward(self, x: Tensor, slot: int = 0, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        if function is not None or not x.device.grad_enabled or not self.goes_back:
            return self.unit.forward(x, slot, function)
        calls, player = self.rehearsed(self.unit, x.shape, x.dtype), Player(self, x.device, self.comm)
        player.hold(calls.x, x.buffer)
        player.play(calls.forward)
        y = player.held[calls.y]
        for id in (calls.x, calls.y):
            if id not in calls.keeps:
                del player.held[id]
        self._passes[slot] = player, calls
        return Tensor(y)

    def backward(self, grads: list[Buffer], slot: int = 0, *, defers: bool = False) -> None:
        player, calls = self._passes[slot] if defers else self._passes.pop(slot)
        assert defers == (calls.weights is not None), "a block's backward is rehearsed whole, or in two"
        player.hold(calls.grad, grads.pop())
        for flat in self.flats:
            flat.later = deque() if defers else None
        player.play(calls.backward)
        for flat in self.flats:
            flat.later = None
        if calls.dx is not None:
            grads.append(player.held.pop(calls.dx))

    def backward_weights(self, slot: int = 0) -> None:
        player, calls = self._passes.pop(slot)
        player.play(calls.weights or ())


class Script:
    """A rehearsal's requests to its flats and hooks, each with the record's length and the place at that time. `ranks`
    are those of its tensor-parallel group."""

    def __init__(self, device: Device, ranks: Sequence[int]) -> None:
        self.device, self.ranks = device, ranks
        self.asked: list[tuple[int, str, Call]] = []

    def write(self, do: Callable[..., None], *how: Any) -> None:
        self.asked.append((len(self.device.recorder.events), self.device.where.unit, (do, how)))


class RehearsedFlat(Flat):
    """A rehearsal's flat buffer, always resident. Requests to it go into the script, under its `number`."""

    script: Script
    number: int

    def open(self, script: Script, number: int, like: Flat) -> None:
        """Allocate memory for the parameters; gradients have the format of the gradients in `like`."""
        self.script, self.number = script, number
        self.local_dtype, self.dummies, self.is_trained = like.local_dtype, like.dummies, like.is_trained
        self.param = self.device.alloc((self.numel,), self.dtype, Kind.PARAM)

    def grad_window(self, index: int) -> Buffer:
        return self._window(index, Player.window)

    def map_grad_window(self, index: int, packed: Sequence[tuple[int, ...]], place: int) -> Buffer:
        return self._window(index, Player.map_window, tuple(packed), place)

    def collect_grad(self, index: int, grad: Buffer) -> None:
        if self.later is None:
            self.script.write(Player.collect, grad.storage.id, self.number, index)
        else:
            self.postpone(index, lambda: grad)

    def _window(self, index: int, do: Callable[..., None], *how: Any) -> Buffer:
        """Return a buffer that is not recorded: the rank's flat has its own."""
        array = self.device.backend.empty(self.spec.weights[index].shape, self.local_dtype)
        id, _ = self.device.reserve(int(array.nbytes), Kind.UNSHARDED_GRAD)
        self.script.write(do, id, self.number, index, *how)
        return Buffer(Storage(array, self.device, id), array, self.local_dtype)


class RehearsedHooks:
    """A strategy's stand-in for a rehearsal: calls of leaf modules' hooks go into the script."""

    def __init__(self, script: Script, leaves: Sequence[Unit], *, defers: bool) -> None:
        self.defers, self.script, self.numbers = (
            defers,
            script,
            {id(leaf): number for number, leaf in enumerate(leaves)},
        )

    @property
    def timetable(self) -> RehearsedHooks:
        return self

    def enter(self) -> None:
        self.script.write(Player.enter)

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
        self.script.write(Player.hook, name, self.numbers[id(unit)])


def rehearse(
    unit: Unit,
    like: Unit,
    device: Device,
    shape: tuple[int, ...],
    dtype: DType,
    *,
    ranks: Sequence[int] = (),
    defers: bool = False,
) -> Rehearsed:
    """Rehearse forward and backward of `unit`, a block over rehearsed flats on a device without a limit, and return the
    calls; its input has this shape. The result serves blocks `like` that one. `ranks` are those of its tensor-parallel
    group; `defers`: backward leaves the weights' gradients for later."""
    script = Script(device, ranks)
    for number, (flat, other) in enumerate(zip(unit.all_flats, like.all_flats, strict=True)):
        assert isinstance(flat, RehearsedFlat)
        flat.open(script, number, other)
    x, keeps = device.alloc(shape, dtype, Kind.ACTIVATION), set[int]()
    x_id = x.storage.id
    with led_by(RehearsedHooks(script, unit.leaves, defers=defers), unit.leaves):
        with device.scope(phase=Phase.FORWARD, unit=unit.name):
            began = len(device.recorder.events)
            y = unit.forward(Tensor(x)).buffer
            y_id, like_y = y.storage.id, (y.shape, y.dtype)
            forward = _calls(unit.name, script, began, {y_id: like_y})
        del x
        keeps |= {x_id} - _freed(device)
        del y
        keeps |= {y_id} - _freed(device)
        grads = [device.alloc(*like_y, Kind.ACTIVATION_GRAD)]
        grad_id = grads[0].storage.id
        with device.scope(phase=Phase.BACKWARD, unit=unit.name):
            began = len(device.recorder.events)
            unit.backward(grads, defers=defers)
            dx_id = grads[0].storage.id if grads else None
            backward = _calls(
                unit.name, script, began, {dx_id: (grads[0].shape, grads[0].dtype)} if dx_id is not None else {}
            )
            began, weights = len(device.recorder.events), None
            if defers:
                unit.backward_weights()
                weights = _calls(unit.name, script, began, {})
    return Rehearsed(forward, backward, weights, x_id, y_id, grad_id, dx_id, frozenset(keeps))


def _freed(device: Device) -> set[int]:
    """Return the buffers freed last."""
    last = device.recorder.events[-1]
    return {last.id} if isinstance(last, Free) else set()


def _calls(block: str, script: Script, began: int, leaving: Leaving) -> list[Call]:
    """Return the events since `began` as calls, with the requests to flats and hooks between them."""
    events, asked, calls, here = script.device.recorder.events, script.asked, list[Call](), block
    for at in range(began, len(events) + 1):
        found = [(unit, call) for position, unit, call in asked if position == at]
        if at < len(events):
            found.append((events[at].scope.unit, _call(events[at], leaving, script.ranks)))
        for unit, call in found:
            if unit != here:
                here = unit
                calls.append((Player.go_to, (unit.removeprefix(block),)))
            calls.append(call)
    return calls


def _call(event: Event, leaving: Leaving, ranks: Sequence[int]) -> Call:
    """Return the call that makes such an event."""
    match event:
        case Kernel(work=None):
            return Player.kernel, event[1:]
        case Kernel():
            assert event.work is not None
            return Player.sums, (event.work, *event[1:7])
        case Alloc() if event.id in leaving:
            return Player.make, (event.id, *leaving[event.id], Kind(event.kind))
        case Alloc():
            return Player.alloc, (event.id, event.nbytes, Kind(event.kind), event.padding_bytes, event.memory)
        case Free():
            return Player.free, (event.id, event.memory)
        case Retag():
            return Player.retag, (event.id, event.kind)
        case Save():
            return Player.save, event[1:]
        case Copy():
            return Player.copy, event[1:]
        case Launch():
            return Player.launch, (event.work, event[2:6], event[8:])
        case Message():  # to a member of the group, whose ranks differ elsewhere
            member = event.peer if event.peer < 0 else ranks.index(event.peer)
            return Player.message, (event.work, member, event.nbytes, event.count)
        case Wait():
            return Player.wait, (event.work,)
    raise AssertionError(f"a block does not {type(event).__name__.lower()}")
