"""Build a run's model from a RunConfig, declared and not yet placed: the whole, or what a rank holds of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.device.device import Device
from zerosim.dtypes import dtype
from zerosim.models.builder import Builder
from zerosim.models.decoder import build_decoder
from zerosim.models.flat import build_flat
from zerosim.models.mlp import build_mlp
from zerosim.models.model import Model
from zerosim.parallel.pieces import Pieces
from zerosim.placement.families import DECODERS
from zerosim.placement.spec import FlatSpec
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import DropoutKeys, LabelKeys
from zerosim.train.pieces import pieces_of

BUILDERS = {**dict.fromkeys(DECODERS, build_decoder), "mlp": build_mlp, "flat": build_flat}


def is_trained(config: RunConfig, flat: FlatSpec) -> bool:
    """Return whether a flat buffer is trained: all of its parameters are, or none (`nn/halves.py`)."""
    return config.tuning.trains(flat.weights[0].name)


def build_model(
    config: RunConfig,
    device: Device,
    made: Pieces | None = None,
    *,
    first_micro_batch: int = 0,
    only: Sequence[int] | None = None,
    flat: type[Flat] = Flat,
) -> Model:
    """Build the model of a run, declared on `device` and not yet placed; of its blocks `only` these numbers.

    Without a rank's pieces it has the first tensor-parallel rank's cut. Then it cannot run if the run has such a group.
    """
    precision, seed, made = config.precision, config.data.seed, made or pieces_of(config)
    new = Builder(
        config.model,
        device,
        dtype(precision.stored),
        dtype(precision.grad_dtype),
        DropoutKeys(device, seed, first_micro_batch),
        made.policy,
        made.group,
        made.by_module,
        flat,
        config.tuning,
        made.tiles,
        only,
        made.wrap,
        config.memory.loss,
        LabelKeys(device, seed, first_micro_batch),
    )
    model = BUILDERS[config.model.family](new)
    if (block := OPTIMIZERS[config.optim.optimizer].block) > 1:
        for one in (one for one in model.flats if is_trained(config, one.spec)):
            one.spec = replace(one.spec, block=block, members=config.mesh.shards)
    return model
