"""Pipeline parallelism: layers are cut into stages, and microbatches pass through them one after another.

A schedule is a pure list of one stage's actions in a step (m microbatches, p stages, stage i from 0):

    gpipe         all forwards, then all backwards; m microbatches are live    (arXiv 1811.06965)
    1f1b          p-i-1 forwards, then one forward, one backward; min(m, p-i)  (PipeDream-flush, 2104.04473, 2.2.1)
    interleaved   a rank has v chunks of layers, stages i, p+i, 2p+i ...; chunks of a layer live at once, for m >= 2p:
                  2(p-i-1) + (v-1)p + 1                                        (2104.04473, 2.2.2)
                  Groups of p microbatches pass through a chunk before the next chunk's turn. In groups of n > p
                  (v-1)n are live in place of (v-1)p         (Megatron-Core's get_schedule_table; 2407.21783, 3.3.2)
    zb-h1         1F1B whose weight gradients come i microbatches later and fill the last stages' waits; live are
                  (p-i) M_B + i M_W                                            (2401.10241, 2.2; m >= p)
    zb-v          two chunks a rank, back and forth, stages i and 2p-1-i: 2p chunks on every stage
                                                                               (2401.10241, 6; m >= 2p)

    bubble, in slots        (p-1)/m of the time that the slots take; interleaved (p-1)/(v m), zb-h1 (p-1)/(3m),
                            zb-v (p-1)/(6m)
    volume per microbatch   b s h elements over each border and direction; v times as many borders with v chunks, save
                            zb-v's turn on the last stage

M_B are all activations of a chunk and microbatch, M_W those that its weight gradients read: inputs of linear maps and
gradients of their outputs, recomputed ones included. The head's weight gradient comes at once, in the input gradient: p
- 1 pending ones would each hold the logits' gradient, b s V.

With `keeps_last` a stage stores each chunk's last input, and the gradient that was sent back for it, until the next
input comes: 2 b s h elements a chunk from one step to the next, none for token ids. Megatron's model has a name for its
input (set_input_tensor), whose gradient is retained (core/pipeline_parallel/schedules.py, forward_step).

A stage sends its output on and receives the next one's gradient. At most one of its messages in each direction is in
flight: the stage waits for that message before it sends the next. In groups of n > p the first stage is n forwards
ahead of the last one's messages to it. It receives n - p inputs before it uses them, and the last stage as many
gradients (Megatron-Core's fwd_recv_buffer_size and bwd_recv_buffer_size).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.config import RunConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.tuning import ALL_TRAINED
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType, int64
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.reducer import AfterDrain
from zerosim.parallel.schedule import (
    Action,
    Backward,
    Forward,
    InputGrad,
    WeightGrad,
    check_step,
    schedule,
)
from zerosim.placement.stages import Chunks, smallest_group

PURPOSE = "activations"


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add that reductions of whole gradients wait until the pipeline has drained, unless they overlap. Where weight
    gradients of leaf modules come later, or those of adapters, no block's record can be repeated."""
    if config.mesh.pp == 1:
        return made
    is_partly_later = defers(config) and (made.by_module or config.tuning != ALL_TRAINED)
    made = made._replace(repeats=made.repeats and not is_partly_later)
    if config.parallel.zero_stage > 1 or config.parallel.overlaps_reductions:
        return made
    reducer = made.reducer
    return made._replace(reducer=lambda exchange: AfterDrain(reducer(exchange)))


def defers(config: RunConfig) -> bool:
    """Return whether weights' gradients are computed separately from their inputs' gradients."""
    return config.mesh.pp > 1 and config.parallel.pipeline_schedule in ("zb-h1", "zb-v")


FORWARD, BACKWARD = 0, 1
"""Directions of messages. Each has its own order, even where both go between the same two ranks."""


def gpipe(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    slots = range(micro_batches)
    return [*(Forward(slot) for slot in slots), *(Backward(slot) for slot in slots)]


def one_f_one_b(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    warm_up = min(num_stages - stage - 1, micro_batches)
    return _one_by_one([Forward(k) for k in range(micro_batches)], [Backward(k) for k in range(micro_batches)], warm_up)


def interleaved(num_stages: int, stage: int, micro_batches: int, chunks: int = 1, group: int = 0) -> list[Action]:
    """Return the interleaved schedule. A `group` of microbatches passes through one chunk before the next chunk's turn;
    the last group may be smaller. 0: the smallest group that fits, `num_stages` if that divides `micro_batches`."""
    group = group or smallest_group(num_stages, micro_batches)
    forwards: list[Action] = []
    backwards: list[Action] = []
    for first in range(0, micro_batches, group):
        for chunk in range(chunks):
            for slot in range(first, min(first + group, micro_batches)):
                forwards.append(Forward(slot, chunk))
                backwards.append(Backward(slot, chunks - 1 - chunk))
    warm_up = min(2 * (num_stages - stage - 1) + (chunks - 1) * group, len(forwards))
    return _one_by_one(forwards, backwards, warm_up)


def zb_h1(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    """Return the zb-h1 schedule. Weight gradients begin after `stage` input gradients; the remaining ones come at the
    end."""
    actions: list[Action] = []
    for action in one_f_one_b(num_stages, stage, micro_batches):
        if isinstance(action, Forward):
            actions.append(action)
            continue
        actions.append(InputGrad(action.slot))
        if action.slot >= stage:
            actions.append(WeightGrad(action.slot - stage))
    return actions + [WeightGrad(slot) for slot in range(max(micro_batches - stage, 0), micro_batches)]


def zb_v(num_stages: int, stage: int, micro_batches: int, chunks: int = 2) -> list[Action]:
    """Return the list of PyTorch's ScheduleZBVZeroBubble (2.13). Forward warms up until chunk 1 has a gradient; then
    chunks take turns, forward, input gradient and weight gradient; at the end input gradients go first."""
    actions: list[Action] = []
    counts: Counter[tuple[str, int]] = Counter()

    def add(times: int, *turns: tuple[type[Action], int]) -> None:
        for _ in range(times):
            for kind, chunk in turns:
                actions.append(kind(counts[kind.letter, chunk], chunk))
                counts[kind.letter, chunk] += 1

    (f0, i0, w0), (f1, i1, w1) = ([(kind, chunk) for kind in (Forward, InputGrad, WeightGrad)] for chunk in (0, 1))
    rest = num_stages - stage
    add(2 * rest - 1, f0)
    add(stage, f1, f0)
    add(rest, f1, i1, w1)
    add(micro_batches - num_stages - rest + 1, f0, i0, w0, f1, i1, w1)
    add(rest - 1, i0, w0, f1, i1, w1)
    add(stage, i0, i1)
    add(rest, i0, w0)
    add(stage, w1)
    add(stage, w0)
    return actions


def _one_by_one(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Return `warm_up` forwards, then forward and backward in turns, then the remaining backwards."""
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - warm_up :]


ONE_CHUNK = Chunks()
Schedule = Callable[[int, int, int, int], list[Action]]
SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1, "zb-v": zb_v}
)


def schedule_of(parallel: ParallelConfig) -> Schedule:
    """Return the schedule of a configuration, with its groups of microbatches."""
    group = parallel.micro_batch_group
    return SCHEDULES[parallel.pipeline_schedule] if group is None else partial(interleaved, group=group)


def received_early(actions: Sequence[Action], stage: int, chunks: Chunks) -> dict[Action, list[Action]]:
    """Return by action the later actions whose inputs a stage begins to receive there. The first stage is
    `chunks.stages` forwards ahead of the last one, which sends to it; the last stage is as many backwards ahead of the
    first."""
    early: dict[Action, list[Action]] = {}
    for ahead, receiver in ((1, 0), (-1, chunks.stages - 1)):
        own = [action for action in actions if action.sends == ahead and stage == receiver and not chunks.turns_back]
        places = {(action.slot, action.chunk): at for at, action in enumerate(own)}
        for at, action in enumerate(own):
            sent = places.get((action.slot, action.chunk - ahead), at) + chunks.stages
            if sent < at:
                early.setdefault(own[sent], []).append(action)
    return early


class Pipeline:
    """One rank's place in a pipeline: the stage `index`, which holds `chunks`, and its boundaries with other stages."""

    def __init__(
        self,
        chunks: Chunks = ONE_CHUNK,
        index: int = 0,
        comm: Comm | None = None,
        *,
        order: Schedule = one_f_one_b,
        keeps_last: bool = False,
    ) -> None:
        self.chunks = chunks
        self.index = index
        self._order = order
        self._comm = comm
        self._sent: dict[tuple[int, int], Work[Any]] = {}
        self._coming: dict[Action, Work[Buffer]] = {}
        self.early: Mapping[Action, Sequence[Action]] = {}
        self.keeps_last = keeps_last
        self._last: dict[int, tuple[int, list[Buffer]]] = {}  # by chunk: the last input's slot, the input, its gradient
        self._kept: dict[str, Buffer] = {}  # messages from one chunk of this stage to another

    def actions(self, micro_batches: int) -> list[Action]:
        """Return this rank's actions in a step. Raises: InputError if its schedule's list is no step."""
        size, each = self.chunks.stages, self.chunks.each
        if size == 1:
            return schedule(1, 0, micro_batches)
        actions = self._order(size, self.index, micro_batches, each)
        check_step(actions, f"stage {self.index} of {size}", micro_batches, each)
        self.early = received_early(actions, self.index, self.chunks)
        return actions

    def is_first(self, chunk: int) -> bool:
        """Return whether this stage receives token ids."""
        return self._number(chunk) == 0

    def is_last(self, chunk: int) -> bool:
        """Return whether this stage computes the loss."""
        return self._number(chunk) == self.chunks.last

    def receive(self, action: Action, shape: tuple[int, ...], dtype: DType) -> Buffer:
        """Receive an action's input: the previous chunk's output, or the gradient of the next chunk's input."""
        source, direction, name = self._input(action)
        if source == self.index:
            received = self._kept.pop(name)
        else:
            coming = self._coming.pop(action, None)
            received = (coming or self._expect(shape, dtype, source, direction, name)).wait()
        if self.keeps_last and direction == FORWARD:
            self._last[action.chunk] = action.slot, [received]
        return received

    def expect(self, action: Action, shape: tuple[int, ...], dtype: DType) -> None:
        """Begin to receive an action's input."""
        self._coming[action] = self._expect(shape, dtype, *self._input(action))

    def _expect(self, shape: tuple[int, ...], dtype: DType, source: int, direction: int, name: str) -> Work[Buffer]:
        kind = Kind.ACTIVATION if direction == FORWARD else Kind.ACTIVATION_GRAD
        return self.comm.launch_recv(shape, dtype, source, kind, PURPOSE, tag=direction, name=name)

    def _input(self, action: Action) -> tuple[int, int, str]:
        number = self._number(action.chunk)
        return self._message(action, number - action.sends, number)

    def send(self, action: Action, buffer: Buffer) -> None:
        """Send an action's result on; the buffer lives until it has arrived."""
        number = self._number(action.chunk) + action.sends
        target, direction, name = self._message(action, number, number)
        last, kept = self._last.get(action.chunk, (None, []))
        if direction == BACKWARD and last == action.slot:
            kept.append(buffer)
        if target == self.index:
            self._kept[name] = buffer
            return
        self._wait(target, direction)
        work = self.comm.launch_send(buffer, target, PURPOSE, tag=direction, name=name)
        self._sent[target, direction] = work

    def finish(self) -> None:
        """Wait until all messages have arrived."""
        for target, direction in list(self._sent):
            self._wait(target, direction)

    def tell(self, token: int | None, device: Device) -> int:
        """Tell every stage the token that the last stage has chosen."""
        if self.chunks.stages == 1:
            assert token is not None
            return token
        told = device.alloc((1,), int64, Kind.TEMP)
        device.kernel(0, device.backend.fill, told.array, float(token or 0))
        self.comm.broadcast(told, self.chunks.last_stage, purpose="control")
        return int(device.backend.to_host(told.array)[0])

    @property
    def comm(self) -> Comm:
        assert self._comm is not None, "a pipeline of one stage has no boundaries"
        return self._comm

    def _number(self, chunk: int) -> int:
        return self.chunks.number(self.index, chunk)

    def _message(self, action: Action, other: int, into: int) -> tuple[int, int, str]:
        """Return the stage of the `other` chunk, the direction of a message between them, and its name on both ends.
        Stages that are not at the same microbatch fail then, instead of training on another microbatch's data."""
        back = " back" if action.sends < 0 else ""
        name = f"microbatch {action.slot}{back} into chunk {into}"
        return self.chunks.stage(other), BACKWARD if back else FORWARD, name

    def _wait(self, target: int, direction: int) -> None:
        if (target, direction) in self._sent:
            self._sent.pop((target, direction)).wait()


ONE_STAGE = Pipeline()
"""No pipeline."""


def pipeline_of(config: RunConfig, place: Place, schedule: Schedule | None = None) -> Pipeline:
    """Return a rank's pipeline stage, under the run's schedule or a custom one."""
    assert place.groups is not None
    if config.mesh.pp == 1:
        return ONE_STAGE
    stage, keeps = config.mesh.axes.index(place.rank, "pp"), config.parallel.keep_last_inputs
    order = schedule or schedule_of(config.parallel)
    return Pipeline(config.chunks, stage, place.groups("pp"), order=order, keeps_last=keeps)
