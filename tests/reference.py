"""The reference that every stage must equal to the bit: no collectives, no strategy, plain NumPy.

Each rank's gradient is finished in its own buffer, rounded to the gradient's dtype; the ranks' are
added in rank order in float32 (float64 for fp64), divided by N, rounded. Then Adam, written out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.config import RunConfig
from zerosim.device.device import Device, Kind
from zerosim.dtypes import compute_dtype, dtype
from zerosim.models.model import Model, initial_values
from zerosim.nn import Unit
from zerosim.parallel.schedule import Forward, Timetable
from zerosim.placement.partition import nothing
from zerosim.placement.rows import Held
from zerosim.train.build_model import build_model
from zerosim.train.engine import backward_pass, forward_loss


class NoStrategy:
    """The hooks, all empty."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.timetable = Timetable()

    def pre_forward(self, unit: Unit) -> None: ...
    def post_forward(self, unit: Unit) -> None: ...
    def pre_backward(self, unit: Unit) -> None: ...
    def post_backward(self, unit: Unit) -> None: ...


def array_type(name: str) -> Any:
    return NumpyBackend().empty((0,), dtype(name)).dtype


def place(model: Model) -> None:
    """All of every flat, unpadded, on one device."""
    for flat in model.flats:
        flat.held = Held(nothing(flat.numel), flat.numel)
        flat.param = flat.device.alloc((flat.numel,), flat.dtype, Kind.PARAM)


def rank_gradients(config: RunConfig, weights: dict[str, Any], batch: Any, rank: int, step: int, scale: float) -> Any:
    """One rank's finished gradient of one microbatch, by flat name, in the gradient's dtype."""
    device = Device(0, NumpyBackend())
    model = build_model(config, device, first_micro_batch=rank)
    place(model)
    for flat in model.flats:
        for index, spec in enumerate(flat.spec.weights):
            flat.write(index, weights[spec.name], exact_master=False)
    strategy: Any = NoStrategy(device)
    rows = batch.shape[0] // config.mesh.ranks
    own = batch[rank * rows : (rank + 1) * rows]
    with device.scope(step=step):
        loss, make_grad = forward_loss(model, Forward(0), own, strategy, scale, rows * config.model.seq)
        backward_pass(model.units, [make_grad()], strategy)
    return float(loss.array[0]) / (rows * config.model.seq), {flat.name: flat.take_grad().array for flat in model.flats}


def train(
    config: RunConfig, batches: Any, scale: float | Sequence[float] = 1.0, *, late: int = 0
) -> tuple[dict[str, Any], list[list[float]]]:
    """Final weights by name (masters where there are any) and losses [step][rank]; Adam, A = 1. `scale` is the loss
    scale, or each step's. A step whose gradients are not finite changes no weight.

    `late`: behind this step, counted from 1, forward and backward run on weights that are late by one update.
    """
    layout = build_model(config, Device(0, NumpyBackend()))
    stored, grad_type = (
        array_type(config.precision.param_dtype),
        array_type(config.precision.grad_dtype),
    )
    wide = array_type(compute_dtype(dtype(config.precision.param_dtype)).name)
    master = {
        spec.name: initial_values(spec, config.data.seed).astype(stored).astype(wide)
        for f in layout.flats
        for spec in f.spec.weights
    }
    moments = {flat.name: [np.zeros(flat.numel, wide), np.zeros(flat.numel, wide)] for flat in layout.flats}
    losses, updates, before = [], 0, master
    scales = [scale] * len(batches) if isinstance(scale, float) else scale
    for step, (batch, scale) in enumerate(zip(batches, scales, strict=True)):
        used, before = before if 0 < late <= step else master, dict(master)
        rounded = {name: value.astype(stored).astype(wide) for name, value in used.items()}
        ranks = [rank_gradients(config, rounded, batch, rank, step, scale) for rank in range(config.mesh.ranks)]
        losses.append([loss for loss, _ in ranks])
        grads = {}
        for flat in layout.flats:
            total = ranks[0][1][flat.name].astype(wide)
            for _, other in ranks[1:]:
                total = total + other[flat.name].astype(wide)
            grads[flat.name] = (total / config.mesh.ranks).astype(grad_type)
        if not all(np.isfinite(grad.astype(wide)).all() for grad in grads.values()):
            continue
        factor, updates = clip_factor(config, grads, scale), updates + 1
        for flat in layout.flats:
            flat_weights = np.concatenate([master[spec.name].reshape(-1) for spec in flat.spec.weights])
            adam(flat_weights, grads[flat.name].astype(wide) * wide.type(factor), *moments[flat.name], updates, config)
            for spec, offset in zip(flat.spec.weights, flat.spec.offsets, strict=True):
                master[spec.name] = flat_weights[offset : offset + spec.numel].reshape(spec.shape)
    return master, losses


def clip_factor(config: RunConfig, grads: dict[str, Any], scale: float) -> float:
    if not config.optim.clip_norm:
        return 1.0 / scale
    total = 0.0
    for grad in grads.values():
        size = -(-grad.size // config.mesh.ranks)
        for start in range(0, grad.size, size):
            cut = grad[start : start + size].astype(np.float64)
            total += float(np.dot(cut, cut))
    return min(1.0, config.optim.clip_norm / (math.sqrt(total) / scale + 1e-6)) / scale


def adam(w: Any, g: Any, m: Any, v: Any, step: int, config: RunConfig) -> None:
    beta1, beta2 = config.optim.betas
    m += (g - m) * (1.0 - beta1)
    v *= beta2
    v += (g * (1.0 - beta2)) * g
    denominator = np.sqrt(v) / math.sqrt(1.0 - beta2**step) + config.optim.eps
    w -= (m * (config.optim.lr / (1.0 - beta1**step))) / denominator
