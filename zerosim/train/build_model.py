"""Build a run's model from a RunConfig, declared and not yet placed: the whole, or what a rank holds of it."""

from __future__ import annotations

from collections.abc import Collection

from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.device.device import Device
from zerosim.dtypes import dtype
from zerosim.models.builder import FLATS, Builder, Flats
from zerosim.models.decoder import build_decoder, build_encoder_decoder
from zerosim.models.flat import build_flat
from zerosim.models.mlp import build_mlp
from zerosim.models.model import Model
from zerosim.parallel.pieces import Pieces
from zerosim.placement.families import DECODERS
from zerosim.tensor.rng import DropoutKeys, LabelKeys
from zerosim.train.pieces import pieces_of

BUILDERS = {**dict.fromkeys(DECODERS, build_decoder), "t5": build_encoder_decoder, "mlp": build_mlp, "flat": build_flat}


def build_model(
    config: RunConfig,
    device: Device,
    made: Pieces | None = None,
    *,
    first_micro_batch: int = 0,
    only: Collection[str] | None = None,
    flats: Flats = FLATS,
    builds_all: bool = True,
    whole: Model | None = None,
) -> Model:
    """Build the model of a run, declared on `device` and not yet placed; of its blocks `only` these.
    Unless it `builds_all`, only the first block of a kind can run. It shares the specs of the `whole` model.

    Without a rank's pieces it has the first tensor-parallel rank's cut. Then it cannot run if the run has such a group.
    """
    block = OPTIMIZERS[config.optim.optimizer].block
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
        flats,
        config.tuning,
        made.tiles,
        only,
        made.wrap,
        config.memory.loss,
        LabelKeys(device, seed, first_micro_batch),
        block,
        made.group.device_mesh.shards if block > 1 else 1,
        made.casts,
        config.experts,
        config.mtp,
        builds_all,
        {} if whole is None or builds_all else {flat.name: flat.spec for flat in whole.flats},
    )
    return BUILDERS[config.model.family](new)
