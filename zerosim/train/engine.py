"""The main loop: a step's actions, then the update. The strategy is called at its points; nothing else happens.

B micro-batch rows, T tokens. A batch is token ids (B, T + 1): all but the last are the input, all
but the first the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zerosim.device.device import Buffer, Device, Kind, Phase
from zerosim.dtypes import int64
from zerosim.models.model import Model
from zerosim.nn import Unit
from zerosim.parallel.base import Strategy
from zerosim.parallel.schedule import Action, Forward, schedule, uses_of
from zerosim.tensor.tensor import Tensor


def forward_pass(units: Sequence[Unit], x: Tensor, strategy: Strategy, slot: int = 0) -> Tensor:
    """The output of the last unit. Each unit's graph waits under `slot` for its backward."""
    for unit in units:
        with x.device.scope(unit=unit.name, slot=slot):
            strategy.enter()
            strategy.pre_forward(unit)
            x = unit.forward(x, slot)
            strategy.post_forward(unit)
    return x


def backward_pass(units: Sequence[Unit], grads: list[Buffer], strategy: Strategy, slot: int = 0) -> None:
    """`grads` holds the gradient of the last unit's output, then that of the first unit's input (none for ids)."""
    for unit in reversed(units):
        with strategy.device.scope(unit=unit.name, slot=slot):
            strategy.enter()
            strategy.pre_backward(unit)
            unit.backward(grads, slot)
            strategy.post_backward(unit)


def forward_loss(
    model: Model, batch: Any, strategy: Strategy, scale: float, count: int, slot: int = 0
) -> tuple[Buffer, Buffer]:
    """The sum of the tokens' losses, and scale / count times its gradient. Logits die in here."""
    device = strategy.device
    inputs, targets = upload(batch[:, :-1], device), upload(batch[:, 1:], device)
    logits = forward_pass(model.units, Tensor(inputs), strategy, slot)
    del inputs
    with device.scope(unit="loss", slot=slot):
        return model.loss_and_grad(logits, targets, scale=scale, count=count)


def train_step(model: Model, micro_batches: Sequence[Any], strategy: Strategy, device: Device) -> list[float]:
    """One step on this rank's micro-batches, host arrays (B, T + 1) of one shape; their mean losses."""
    actions = schedule(1, 0, len(micro_batches))
    strategy.begin(uses_of(actions, model.units))
    losses = _run(actions, model, micro_batches, strategy)
    with device.phase(Phase.BACKWARD):
        strategy.end_backward()
        strategy.land()
        strategy.reduce_replicas()
        strategy.reduce_shares()
        device.mark("end_of_backward")
    with device.phase(Phase.OPTIMIZER):
        strategy.step()
        device.mark("after_step")
    tokens = _tokens(micro_batches)
    return [float(values()[0]) / tokens for _, values in losses]


def _run(
    actions: Sequence[Action], model: Model, micro_batches: Sequence[Any], strategy: Strategy
) -> list[tuple[Buffer, Callable[[], Any]]]:
    """Every action in its turn; by micro-batch the sum of the losses, and how to read it.

    It is asked for at once and read after the step, which waits for the norm anyway: one wait for the device, not two.
    """
    device, scale = strategy.device, strategy.updater.control.loss_scale
    # The mean over tokens and micro-batches is one true division, by their product.
    count = _tokens(micro_batches) * len(micro_batches)
    losses: list[tuple[Buffer, Callable[[], Any]]] = []
    grads: dict[int, list[Buffer]] = {}
    for action in actions:
        slot = action.slot
        if isinstance(action, Forward):
            with device.phase(Phase.FORWARD):
                loss, grad = forward_loss(model, micro_batches[slot], strategy, scale, count, slot)
                device.mark("end_of_forward")
            losses.append((loss, device.backend.to_host_later(loss.array)))
            grads[slot] = [grad]
            del grad  # backward lets go of it as soon as it can
        else:
            with device.phase(Phase.BACKWARD):
                backward_pass(model.units, grads.pop(slot), strategy, slot)
    return losses


def _tokens(micro_batches: Sequence[Any]) -> int:
    """Targets of one micro-batch."""
    rows, columns = micro_batches[0].shape
    return int(rows * (columns - 1))


def train(
    model: Model, batches: Iterator[Sequence[Any]], strategy: Strategy, device: Device, first_step: int = 0
) -> Iterator[list[float]]:
    """Train on each element of `batches` (one rank's micro-batches of one step); yields their losses."""
    for step, micro_batches in enumerate(batches, first_step):
        with device.scope(step=step):
            losses = train_step(model, micro_batches, strategy, device)
        device.recorder.drain()
        yield losses


def generate(
    model: Model, prompt: list[int], count: int, context: int, strategy: Strategy, device: Device, choose: Any
) -> list[int]:
    """`count` tokens that follow `prompt`, each chosen from its logits by `choose(logits) -> id`.

    Every rank runs it on the same prompt, because stage 3 gathers for it.
    """
    import numpy as np

    ids = list(prompt)
    with device.phase(Phase.EVALUATE), device.no_grad():
        for _ in range(count):
            shown = ids[-context:]
            padding = -len(shown) % model.group.size if model.group.cuts_rows else 0  # what follows changes nothing
            window = upload(np.array([[*shown, *[0] * padding]], np.int64), device)
            logits = model.whole_logits(forward_pass(model.units, Tensor(window), strategy))
            ids.append(choose(device.backend.to_host(logits.array)[0, len(shown) - 1]))
            device.recorder.drain()
    return ids[len(prompt) :]


def upload(tokens: Any, device: Device) -> Buffer:
    """Token ids on the device."""
    ids = device.alloc(tuple(tokens.shape), int64, Kind.ACTIVATION)
    device.backend.from_host(tokens, ids.array)
    return ids
