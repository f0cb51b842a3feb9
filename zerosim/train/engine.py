"""The main loop: a step's actions, then the update. It calls the strategy's hooks, and does nothing else.

An optimizer that estimates curvature has every k-th step followed by a second forward and backward, on labels that the
model draws, and an `estimate` in place of the update.

B microbatch rows, T tokens. A batch is token ids (B, T + 1): all but the last are the input, all but the first the
targets. Of masked tokens it is (B, 2T), the input, then the targets (`masked.py`). Of an encoder and a decoder of S
tokens it is (B, T + 2S): the encoder's input, the decoder's, the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from zerosim.device.device import Buffer, Device, Phase
from zerosim.functional.common import one_like
from zerosim.functional.loss import MakeGrad
from zerosim.functional.loss_modes import AFTER_MODEL, MODES, OF_CALLER
from zerosim.models.model import Model
from zerosim.nn import Unit, led_by
from zerosim.parallel.base import Strategy
from zerosim.parallel.pipeline import ONE_STAGE, Pipeline
from zerosim.parallel.schedule import Action, WeightGrad, uses_of
from zerosim.tensor.tensor import Tensor
from zerosim.train.next_step import NextStep
from zerosim.train.uploads import open_further, upload


class Pass(NamedTuple):
    """Forward and backward of a step's microbatches: how they are recorded, and whether the model draws the labels."""

    forward: Phase
    backward: Phase
    draws: bool = False


TRAINING = Pass(Phase.FORWARD, Phase.BACKWARD)
ESTIMATE = Pass(Phase.CURVATURE_FORWARD, Phase.CURVATURE_BACKWARD, draws=True)


def edge(units: Sequence[Unit], at: int) -> str:
    """Return the name of a chunk's first or last unit; '' for a chunk of no units, which passes on what it receives."""
    return units[at].name if units else ""


def forward_pass(
    units: Sequence[Unit],
    x: Tensor,
    strategy: Strategy,
    slot: int = 0,
    last: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the output of the last unit. Each unit's graph waits under `slot` for its backward. A block of leaf
    modules is not gathered itself: its leaves are.

    `last`: in place of the last unit's own function.
    """
    for unit in units:
        function = last if unit is units[-1] else None
        with x.device.scope(unit=unit.name, slot=slot), led_by(strategy, unit.leaves):
            if unit.leaves:
                x = unit.forward(x, slot, function)
            else:
                strategy.timetable.enter()
                strategy.pre_forward(unit)
                x = unit.forward(x, slot, function)
                strategy.post_forward(unit)
    return x


def backward_pass(
    units: Sequence[Unit], grads: list[Buffer], strategy: Strategy, slot: int = 0, *, defers: bool = False
) -> None:
    """Run backward through the units. `grads` holds the gradient of the last unit's output, then that of the first
    unit's input (none for ids).

    `defers`: weights' gradients are left for a `weights_pass`, save those of units that make theirs at once.
    """
    for unit in reversed([unit for unit in units if unit.goes_back]):
        with strategy.device.scope(unit=unit.name, slot=slot), led_by(strategy, unit.leaves):
            if unit.leaves:
                unit.backward(grads, slot, defers=defers)
            else:
                later = defers and unit.defers
                strategy.timetable.enter()
                strategy.pre_backward(unit)
                unit.backward(grads, slot, defers=later)
                (strategy.post_input_grad if later else strategy.post_backward)(unit)


def weights_pass(units: Sequence[Unit], strategy: Strategy, slot: int = 0) -> None:
    """Compute the weight gradients that a `backward_pass` has left."""
    for turn in WeightGrad.turns(units):
        with strategy.device.scope(unit=turn.name, slot=slot):
            strategy.timetable.enter()
            turn.backward_weights(slot)
            strategy.post_backward(turn)


def forward_loss(
    model: Model,
    action: Action,
    batch: Any,
    strategy: Strategy,
    scale: float,
    count: float,
    pipeline: Pipeline = ONE_STAGE,
    *,
    draws: bool = False,
) -> tuple[Buffer, MakeGrad]:
    """Return the sum of the tokens' losses, and a function that makes scale / count times the logits' gradient.
    `draws`: on labels drawn from the model."""
    device, slot = strategy.device, action.slot
    inputs = _input(model, action, batch, device, pipeline)
    targets = upload(model.parted(batch)[1], device, model.group.rows)  # drawn ones overwrite them
    units = model.chunks[action.chunk]
    open_further(model, batch, device, scale, count)
    if model.loss_mode not in MODES:
        head = model.chunked_loss(targets, scale=scale, count=count, drawn=draws)
        total = forward_pass(units, Tensor(inputs), strategy, slot, head).buffer
        return total, lambda: one_like(total)
    hidden = list[Buffer]()  # of the caller, to the end of this call

    def head_of(x: Tensor) -> Tensor:
        hidden.append(x.buffer)
        return units[-1].function(x)

    last = head_of if model.loss_mode.startswith(OF_CALLER) and model.loss_mode != AFTER_MODEL else None
    logits = [forward_pass(units, Tensor(inputs), strategy, slot, last).buffer]
    del inputs
    with device.scope(unit="loss", slot=slot):
        if draws:
            model.draw_labels(logits[0], targets)
        return model.loss(logits, targets, scale=scale, count=count)


def _input(model: Model, action: Action, batch: Any, device: Device, pipeline: Pipeline) -> Buffer:
    """Token ids, or what the previous stage made of them."""
    if pipeline.is_first(action.chunk):
        return upload(model.parted(batch)[0], device, model.group.rows)
    with device.scope(unit=edge(model.chunks[action.chunk], 0), slot=action.slot):
        return pipeline.receive(action, model.border(batch.shape[0], batch.shape[1] - 1), model.dtype)


def train_step(
    model: Model, micro_batches: Sequence[Any], strategy: Strategy, device: Device, pipeline: Pipeline = ONE_STAGE
) -> list[float]:
    """Run one step on this rank's microbatches, host arrays (B, T + 1) of one shape. Return their mean losses on the
    last stage of a pipeline, else nothing."""
    losses = _gradients(TRAINING, model, micro_batches, strategy, pipeline)
    with device.phase(Phase.BACKWARD):
        device.mark("end_of_backward")
    with device.phase(Phase.OPTIMIZER):
        strategy.step()
        device.mark("after_step")
    each = model.count(micro_batches) / len(micro_batches)
    means = [float(values()[0]) / each for _, values in losses]
    del losses
    if strategy.updater.estimate_is_due:
        _gradients(ESTIMATE, model, micro_batches, strategy, pipeline)
        with device.phase(Phase.CURVATURE):
            strategy.estimate()
    return means


def _gradients(
    of: Pass, model: Model, micro_batches: Sequence[Any], strategy: Strategy, pipeline: Pipeline
) -> list[tuple[Buffer, Callable[[], Any]]]:
    """Forward and backward of all microbatches; every rank holds its part of the averaged gradients. Gives the losses
    as `_run` does."""
    actions = pipeline.actions(len(micro_batches))
    strategy.begin(uses_of(actions, *model.chunks))
    losses = _run(of, actions, model, micro_batches, strategy, pipeline)
    with strategy.device.phase(of.backward):
        pipeline.finish()
        strategy.finish_backward()
    return losses


def _run(
    of: Pass,
    actions: Sequence[Action],
    model: Model,
    micro_batches: Sequence[Any],
    strategy: Strategy,
    pipeline: Pipeline,
) -> list[tuple[Buffer, Callable[[], Any]]]:
    """Every action in its turn; by microbatch the sum of the losses, and how to read it. On drawn labels nobody asks.

    It is asked for at once and read after the step, which waits for the norm anyway: one wait for the device, not two.
    """
    device, scale = strategy.device, strategy.updater.control.loss_scale
    count = model.count(micro_batches)
    losses: list[tuple[Buffer, Callable[[], Any]]] = []
    grads: dict[int, MakeGrad] = {}
    for action in actions:
        slot, batch, units = action.slot, micro_batches[action.slot], model.chunks[action.chunk]
        model.see(batch)
        is_last = pipeline.is_last(action.chunk)
        early = pipeline.early.get(action, ())
        for later in (one for one in early if one.sends > 0 or model.goes_back(one.chunk)):
            phase, unit = (of.forward, 0) if later.sends > 0 else (of.backward, -1)
            with device.scope(phase=phase, unit=edge(model.chunks[later.chunk], unit), slot=later.slot):
                pipeline.expect(later, model.border(batch.shape[0], batch.shape[1] - 1), model.dtype)
        if action.sends > 0:
            with device.scope(phase=of.forward, slot=slot):
                strategy.open_forward()
                if is_last:
                    sizes = scale, count, pipeline
                    loss, grads[slot] = forward_loss(model, action, batch, strategy, *sizes, draws=of.draws)
                else:
                    y = forward_pass(units, Tensor(_input(model, action, batch, device, pipeline)), strategy, slot)
                    with device.scope(unit=edge(units, -1), slot=slot):
                        pipeline.send(action, y.buffer)
                    del y
                model.end_forward()
                if not of.draws:
                    device.mark("end_of_forward")
            if is_last and not of.draws:
                losses.append((loss, device.backend.to_host_later(loss.array)))
            continue
        completes = bool(units) and (action.completes or not all(unit.defers for unit in units))
        with device.scope(phase=of.backward, slot=slot):
            if completes:
                strategy.open_backward()
            if action.sends and not model.goes_back(action.chunk):
                grads.pop(slot, None)
            elif action.sends:
                if is_last:
                    with device.scope(unit="loss", slot=slot):
                        grad = [grads.pop(slot)()]  # a list: backward lets go of it as soon as it can
                else:
                    shape = model.border(batch.shape[0], batch.shape[1] - 1)
                    with device.scope(unit=edge(units, -1), slot=slot):
                        grad = [pipeline.receive(action, shape, model.dtype)]
                backward_pass(units, grad, strategy, slot, defers=not action.completes)
                model.forget()
                if model.sends_back(action.chunk):
                    with device.scope(unit=edge(units, 0), slot=slot):
                        pipeline.send(action, grad.pop())
            else:
                weights_pass(units, strategy, slot)
            if completes:
                strategy.close_backward()
    return losses


def train(
    model: Model,
    batches: Iterator[Sequence[Any]],
    strategy: Strategy,
    device: Device,
    first_step: int = 0,
    pipeline: Pipeline = ONE_STAGE,
    alike: NextStep | None = None,
) -> Iterator[list[float]]:
    """Train on each of `batches`, a rank's microbatches of a step; yields their losses. `alike` may repeat a step."""
    for step, micro_batches in enumerate(batches, first_step):
        if alike is None or not alike.recorded(strategy.updater.control):
            with device.scope(step=step):
                losses = train_step(model, micro_batches, strategy, device, pipeline)
        device.recorder.drain()
        yield losses
