"""Models that tests build by hand, and place whole on one rank."""

from __future__ import annotations

from typing import Any

from zerosim.config.parts.model import ModelConfig
from zerosim.device.device import Device, Kind
from zerosim.dtypes import DType, fp32, fp64
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.models.builder import Builder
from zerosim.models.decoder import build_decoder
from zerosim.models.model import Model, draw_flat
from zerosim.nn import Recompute, StoredInputs
from zerosim.placement.rows import Held
from zerosim.tensor.flat import whole
from zerosim.tensor.rng import DropoutKeys
from zerosim.tensor.tensor import cpu


def builder(
    device: Device,
    dtype: DType = fp64,
    *,
    keys: DropoutKeys | None = None,
    policy: ActivationPolicy = DEFAULT,
    **sizes: Any,
) -> Builder:
    """A small model's, whose sizes are GPT's and those given."""
    small = {"layers": 2, "hidden": 8, "heads": 2, "seq": 6, "vocab": 11, **sizes}
    inputs = StoredInputs()
    return Builder(
        ModelConfig(**small),
        device,
        dtype,
        dtype,
        keys or DropoutKeys(device, 0, 0),
        policy,
        wrap=lambda number, unit: Recompute(unit, inputs) if policy.again.wraps(number) else unit,
    )


def gpt(device: Device | None = None, dtype: DType = fp64, **given: Any) -> Model:
    """A small GPT, not yet placed; `given` as to `builder`."""
    return build_decoder(builder(device or cpu(), dtype, **given))


def place(model: Model, seed: int = 0, *, master: bool = False) -> Model:
    """All weights on one rank, drawn."""
    for flat in model.flats:
        flat.held = Held(whole(flat.numel), flat.numel)
        flat.param = flat.param_shard = flat.device.alloc((flat.numel,), flat.dtype, Kind.PARAM)
        if master:
            flat.master = flat.device.alloc((flat.numel,), fp32, Kind.OPTIM)
        draw_flat(flat, seed, exact_master=False)
    return model
