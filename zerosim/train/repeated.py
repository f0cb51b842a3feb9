"""On shapes identical blocks need not run: the calls of one are repeated.

Every block's forward and backward record the same events, in every microbatch and step, except for their ids, unit and
microbatch. So one block is rehearsed on a separate device that is not counted, and its record is written down in
steps:

    a stretch   events that always come one after the other: one event, for readers that fold it (`device/stretches.py`)
    a call      something that depends on the rank: a buffer that outlives the pass, a gradient's buffer, a hook

A `Repeated` unit takes these steps on the rank's own device, and the record equals that of a run, event by event. Only
an allocator that counts bytes (`Exact`) takes a stretch at once. Any other one serves each request, and so does another
memory. Then the record has single events. Nothing else is repeated: strategies, reductions, pipelines and other units
run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from zerosim.comm.collectives import Comm
from zerosim.device.device import Buffer, Device, Kind, Storage
from zerosim.device.events import Alloc, Copy, Event, Free, Kernel, Launch, Message, Retag, Save, Scope, Wait
from zerosim.device.memory import Exact
from zerosim.device.stretches import SEVERAL, Repeat, Stretch
from zerosim.dtypes import DType
from zerosim.nn import Unit
from zerosim.nn.leaf import Hooks, LeafModule
from zerosim.placement.memories import DEVICE
from zerosim.tensor.tensor import Tensor
from zerosim.verbs import MESSAGES


class Call(NamedTuple):
    """A method of `Player` and its arguments, in a module of the block: something that depends on the rank."""

    module: str
    do: Callable[..., None]
    how: tuple[Any, ...] = ()


Step = Stretch | Call
Leaving = Mapping[int, tuple[tuple[int, ...], DType]]
"""Buffers that outlive a block's pass, by id: shape and dtype."""


Line = tuple[tuple[int, ...], int]
"""The members of a group that count their calls together, as distances from this rank; 1 for messages between two,
which have no tag."""


class Rehearsed(NamedTuple):
    """A block's forward and backward in steps, and its weights' gradients if they are deferred (None: they are part of
    backward). `x`, `y`, `grad`, `dx`: the pass's numbers of the block's input and output, of the output's gradient and
    the input's. `keeps`: which of the first two the block holds from forward to backward. `lines`: of its calls."""

    forward: Sequence[Step]
    backward: Sequence[Step]
    weights: Sequence[Step] | None
    x: int
    y: int
    grad: int
    dx: int | None
    keeps: frozenset[int]
    lines: tuple[Line, ...]


Rehearsals = dict[tuple[Any, ...], Rehearsed]
"""The rehearsals of one configuration, whatever its number of microbatches, by the properties in which blocks
differ."""


@cache  # a rank repeats few passes, thousands of times
def _at(rank: int, lines: tuple[Line, ...]) -> Sequence[Line]:
    """Return lines by the ranks of their members."""
    return [(tuple(rank + member for member in members), pair) for members, pair in lines]


class Player:
    """Takes the steps of one block's pass on a rank's own device. `ids` are the device's by the numbers of the pass;
    `held` are the buffers with other handles too."""

    def __init__(self, unit: Unit, device: Device, comm: Comm, lines: tuple[Line, ...]) -> None:
        self.device, self.comm, self.lines = device, comm, _at(device.rank, lines)
        self.name, self.flats, self.leaves = unit.name, unit.all_flats, unit.leaves
        self.recorder = device.recorder
        self.ids: list[int] = []
        self.held: dict[int, Buffer] = {}

    def play(self, steps: Sequence[Step]) -> None:
        """Take the steps. Raises: OutOfMemory, Aborted."""
        device, before = self.device, self.device.where
        number, phase, _, slot = before
        device.look_up()
        allocator, block = device.allocator, Scope(number, phase, self.name, slot)
        try:
            for step in steps:
                if isinstance(step, Call):
                    device.move(block._replace(unit=self.name + step.module) if step.module else block)
                    step.do(self, *step.how)
                    device.move(before)
                elif isinstance(allocator, Exact) and step.on_device:
                    self.repeat(step, allocator)
                else:
                    self.one_by_one(step)
        finally:
            device.move(before)

    def repeat(self, stretch: Stretch, allocator: Exact) -> None:
        """Record a stretch as one event, where the allocator only counts bytes. Raises: OutOfMemory at the first
        request that does not fit."""
        if not allocator.fits(stretch.highest):
            at = next(at for at, total in stretch.totals() if not allocator.fits(total))
            self.repeat(stretch.until(at), allocator)
            self.one_by_one(Stretch(stretch.events[at : at + 1], {}))
        allocator.used_bytes += stretch.nbytes
        self.recorder.repeat(self._placed(stretch, stretch.begins))

    def one_by_one(self, stretch: Stretch) -> None:
        """Record each event, with what the allocator does at each request. Raises: OutOfMemory."""
        before = self.device.where
        for event in self._placed(stretch, 0).events():
            self.device.move(event.scope)
            if isinstance(event, Alloc):
                _, reserved = self.device.reserve(event.nbytes, Kind(event.kind), event.memory)
                event = event._replace(reserved_bytes=reserved)
            elif isinstance(event, Free):
                self.recorder.release(event.id, event.memory)
            elif isinstance(event, Launch):
                self.device.next_id()
            self.recorder.put(event)
        self.device.move(before)

    def _placed(self, stretch: Stretch, taken: int) -> Repeat:
        """Return a stretch with the next ids, so many of which are taken now."""
        first, calls, placed = self.device.next_id(taken), stretch.calls, []
        self.ids.extend(range(first, first + stretch.begins))
        for line, (group, pair) in enumerate(self.lines) if calls else ():
            placed.append((group, self.comm.next_number(group, pair, calls[line])))
        return Repeat(self.device.where, stretch, self.ids, self.device.rank, placed)

    # -- what depends on the rank ---------------------------------------------------------------------
    def hold(self, buffer: Buffer) -> None:
        """Give a buffer the next number."""
        self.held[len(self.ids)] = buffer
        self.ids.append(buffer.storage.id)

    def know(self, buffers: Iterable[Buffer | None]) -> None:
        """Give the next numbers to buffers that others hold."""
        self.ids += [buffer.storage.id for buffer in buffers if buffer is not None]

    def make(self, shape: tuple[int, ...], dtype: DType, kind: Kind) -> None:
        """Allocate a buffer that outlives the pass."""
        self.hold(self.device.alloc(shape, dtype, kind))

    def let_go(self, number: int) -> None:
        """Drop a handle: the buffer is freed with its last one, which may be elsewhere."""
        del self.held[number]

    def retag(self, number: int, kind: str) -> None:
        self.recorder.put(Retag(self.device.where, self.ids[number], kind))

    def open_grad(self, flat: int) -> None:
        self.flats[flat].open_grad()

    def keep(self, flat: int, number: int, name: str, how: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Bring up to date what a map keeps from step to step."""
        getattr(self.flats[flat].kept[number], name)(self.device, *how, **named)

    def dummy(self, flat: int, packed: Sequence[tuple[int, ...]], place: int) -> None:
        self.flats[flat].map_grad_window(0, packed, place)

    def collected(self, *gradients: tuple[int, int]) -> None:
        for flat, index in gradients:
            self.flats[flat].collector.note(index)

    def entered(self, *modules: tuple[()]) -> None:
        for _ in modules:
            self._hooks(0).timetable.enter()

    def hook(self, name: str, leaf: int) -> None:
        getattr(self._hooks(leaf), name)(self.leaves[leaf])

    def _hooks(self, leaf: int) -> Hooks:
        module = self.leaves[leaf]
        assert isinstance(module, LeafModule)
        assert module.hooks is not None
        return module.hooks


class Repeated(Unit):
    """A unit that repeats another unit's record; `rehearsed` returns the record for an input's shape and dtype, and
    whether its maps have brought up to date what they keep: a whole pass of the step has."""

    def __init__(
        self, unit: Unit, comm: Comm, rehearsed: Callable[[Unit, tuple[int, ...], DType, bool], Rehearsed]
    ) -> None:
        super().__init__(unit.name, unit, unit.function, reduces=unit.reduces, reads=unit.reads)
        self.unit, self.comm, self.rehearsed = unit, comm, rehearsed
        self._passes: dict[int, tuple[Player, Rehearsed]] = {}
        self._ready_in: int | None = None  # the last step with a whole pass

    def reach(self, sends_back: bool, trained: Collection[str]) -> None:
        super().reach(sends_back, trained)
        self.unit.reach(sends_back, trained)

    def turns_back(self) -> Sequence[Unit]:
        return self.unit.turns_back() if self.leaves else super().turns_back()

    def forward(self, x: Tensor, slot: int = 0, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        if function is not None or not x.device.grad_enabled or not self.goes_back:
            return self.unit.forward(x, slot, function)
        is_ready = self._ready_in == x.device.where.step
        calls = self.rehearsed(self.unit, x.shape, x.dtype, is_ready)
        player = Player(self, x.device, self.comm, calls.lines)
        player.hold(x.buffer)
        player.know(one.buffer for one in self.reads)
        player.play(calls.forward)
        y = player.held[calls.y]
        for number in (calls.x, calls.y):
            if number not in calls.keeps:
                del player.held[number]
        self._passes[slot] = player, calls
        return Tensor(y)

    def backward(self, grads: list[Buffer], slot: int = 0, *, defers: bool = False) -> None:
        player, calls = self._passes[slot] if defers else self._passes.pop(slot)
        assert defers == (calls.weights is not None), "a block's backward is rehearsed whole, or in two"
        self.open_asides()
        player.hold(grads.pop())
        player.know(one.leaf.grad for one in self.reads if one.leaf is not None)
        player.play(calls.backward)
        if calls.dx is not None:
            grads.append(player.held.pop(calls.dx))
        if not defers:
            self._ready_in = player.device.where.step

    def backward_weights(self, slot: int = 0) -> None:
        player, calls = self._passes.pop(slot)
        player.play(calls.weights or ())
        self._ready_in = player.device.where.step


class Script:
    """Writes down a rehearsed pass in steps: its record, cut where something depends on the rank. Its flats and hooks
    note their requests to the rank (`write`). `is_ready`: its maps have brought up to date what they keep."""

    def __init__(self, block: str, device: Device, *, is_ready: bool) -> None:
        self.block, self.device, self.is_ready = block, device, is_ready
        self.lines: dict[Line, int] = {}  # of calls, with their numbers
        self.numbers: dict[int, int] = {}  # of the pass's buffers and works, by their ids here
        self._asked: deque[tuple[int, Call]] = deque()  # requests, each after so many events
        self._elsewhere: set[int] = set()  # buffers that a rank has already
        self._held: set[int] = set()
        self._began = 0  # how many events are no part of the present steps
        self._steps: list[Step] = []
        self._allocs: dict[int, Alloc] = {}  # of live buffers that are not held, by number
        self._quiet: dict[Callable[..., None], list[tuple[Any, ...]]] = {}  # requests without events, not yet told
        # The present stretch:
        self._events: list[Event] = []
        self._before: dict[int, Alloc] = {}
        self._first = 0
        self._calls = Counter[int]()

    def write(self, do: Callable[..., None], *how: Any) -> None:
        module = self.device.where.unit.removeprefix(self.block)
        self._asked.append((len(self.device.recorder.events), Call(module, do, how)))

    def buffer(self, shape: tuple[int, ...], dtype: DType) -> Buffer:
        """Return a buffer that is not recorded: a rank has its own."""
        array = self.device.backend.empty(shape, dtype)
        id, _ = self.device.reserve(int(array.nbytes), Kind.UNSHARDED_GRAD)
        self._elsewhere.add(id)
        return Buffer(Storage(array, self.device, id), array, dtype)

    def hold(self, buffer: Buffer) -> int:
        """Give a buffer of the rank the next number, and begin there."""
        self._held.add(buffer.storage.id)
        self._began = len(self.device.recorder.events)
        return self._number(buffer.storage.id)

    def steps(self, leaving: Leaving | None = None) -> Sequence[Step]:
        """Return the pass since the last steps."""
        events = self.device.recorder.events
        for at in range(self._began, len(events) + 1):
            while self._asked and self._asked[0][0] == at:
                self._ask(self._asked.popleft()[1])
            if at < len(events):
                self._add(events[at], leaving or {})
        self._cut()
        self._tell()
        self._began = len(events)
        steps, self._steps = self._steps, []
        return steps

    def _ask(self, call: Call) -> None:
        if call.do in (Player.collected, Player.entered):  # they leave no event, so they need not cut
            self._quiet.setdefault(call.do, []).append(call.how)
            return
        self._cut()
        if call.do is Player.hook:
            self._tell()
        self._steps.append(call)

    def _tell(self) -> None:
        """Tell the rank of quiet requests, before anybody can look."""
        self._steps += [Call("", do, tuple(asked)) for do, asked in self._quiet.items()]
        self._quiet = {}

    def _cut(self) -> None:
        """End the present stretch."""
        if self._events:
            self._steps.append(Stretch(self._events, self._before))
        self._events, self._before, self._first, self._calls = [], {}, len(self.numbers), Counter()

    def _add(self, event: Event, leaving: Leaving) -> None:
        module = event.scope.unit.removeprefix(self.block)
        id, scope = getattr(event, "id", -1), Scope(unit=module)
        if id in self._elsewhere:
            return
        if isinstance(event, Alloc) and id in leaving:
            self._ask(Call(module, Player.make, (*leaving[id], Kind(event.kind))))
            self._held.add(event.id)
            self._number(event.id)
        elif id in self._held and isinstance(event, Free):
            self._ask(Call(module, Player.let_go, (self.numbers[event.id],)))
        elif id in self._held and isinstance(event, Retag):
            self._ask(Call(module, Player.retag, (self.numbers[event.id], event.kind)))
        elif getattr(event, "memory", DEVICE) == DEVICE:
            self._events.append(self._numbered(event)._replace(scope=scope))
        else:  # another memory counts it
            self._cut()
            self._events.append(self._numbered(event)._replace(scope=scope))
            self._cut()

    def _numbered(self, event: Event) -> Event:
        """Return an event with numbers for ids."""
        match event:
            case Alloc():
                alloc = event._replace(scope=Scope(unit=event.scope.unit.removeprefix(self.block)))
                self._allocs[self._number(event.id)] = alloc
            case Free():
                self._change(event.id)
            case Retag():
                number = self._change(event.id)
                self._allocs[number] = self._allocs[number]._replace(kind=event.kind)
            case Launch():
                members = tuple(member - self.device.rank for member in event.group)
                line = self.lines.setdefault((members, int(event.op in MESSAGES)), len(self.lines))
                self._calls[line] += 1
                number = self._calls[line] - 1
                return event._replace(work=self._number(event.work), group=(line,), sequence=number)
            case Message():
                peer = 0 if event.peer == SEVERAL else event.peer - self.device.rank
                return event._replace(work=self.numbers[event.work], peer=peer)
            case Wait():
                return event._replace(work=self.numbers[event.work])
            case Kernel():
                return event if event.work is None else event._replace(work=self.numbers[event.work])
            case Save():
                pass
            case Copy(work=None):
                return event
            case _:
                raise AssertionError(f"a block does not {type(event).__name__.lower()}")
        return event._replace(id=self.numbers[event.id])

    def _number(self, id: int) -> int:
        return self.numbers.setdefault(id, len(self.numbers))

    def _change(self, id: int) -> int:
        """Note the allocation of a buffer that is older than the stretch."""
        number = self.numbers[id]
        if number < self._first:
            self._before.setdefault(number, self._allocs[number])
        return number
