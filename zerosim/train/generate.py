"""Generate text with a model, token by token, on the ranks that trained it."""

from __future__ import annotations

from typing import Any

from zerosim.device.device import Buffer, Device, Kind, Phase
from zerosim.models.model import Model
from zerosim.parallel.base import Strategy
from zerosim.parallel.pipeline import ONE_STAGE, Pipeline
from zerosim.parallel.schedule import Forward
from zerosim.placement.mesh import SHARES
from zerosim.tensor.tensor import Tensor
from zerosim.train.engine import forward_pass
from zerosim.train.uploads import upload


def generate(
    model: Model,
    prompt: list[int],
    count: int,
    context: int,
    strategy: Strategy,
    device: Device,
    choose: Any,
    pipeline: Pipeline = ONE_STAGE,
) -> list[int]:
    """Return `count` tokens after `prompt`, each chosen from its logits by `choose(logits) -> id`.

    Every rank runs it on the same prompt, because ZeRO-3 gathers parameters for it and each pipeline stage has its
    layers.
    """
    import numpy as np

    ids = list(prompt)
    if model.group.documents is not None:
        model.group.documents.starts = None
    with device.phase(Phase.EVALUATE), device.no_grad():
        for _ in range(count):
            shown = ids[-context:]
            rows, padding = model.group.rows, model.group.rows.padding(len(shown))  # later tokens change nothing
            window = np.array([[*shown, *[0] * padding]], np.int64)
            shape, chosen = model.border(1, window.shape[1]), None
            for chunk, units in enumerate(model.chunks):
                if pipeline.is_first(chunk):
                    x = Tensor(upload(window, device, rows))
                else:
                    x = Tensor(pipeline.receive(Forward(0, chunk), shape, model.dtype))
                y = forward_pass(units, x, strategy)
                if not pipeline.is_last(chunk):
                    pipeline.send(Forward(0, chunk), y.buffer)
                    continue
                chosen = choose(_row_of(model.whole_logits(y), len(shown) - 1, model, strategy))
            pipeline.finish()
            ids.append(pipeline.tell(chosen, device))
            device.recorder.drain()
    return ids[len(prompt) :]


def _row_of(logits: Buffer, token: int, model: Model, strategy: Strategy) -> Any:
    """Return the logits of a token on the host, (V), from the rank that has it among those that share its row."""
    context, device = model.group.rows.context, logits.device
    holder, at = context.holder(logits.shape[1] * context.ranks, token)
    if context.ranks == 1:
        return device.backend.to_host(logits.array)[0, at]
    row = device.alloc(logits.shape[2:], logits.dtype, Kind.TEMP)
    if holder == model.group.rows.place:
        device.kernel(0, device.backend.copy, logits.array[0, at], row.array)
    strategy.groups(*SHARES).broadcast(row, holder, "control")
    return device.backend.to_host(row.array)
