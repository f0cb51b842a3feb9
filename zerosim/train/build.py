"""Build a run from a RunConfig: its whole model, and what each rank has of it. All ranks have the same parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.comm.runtime import Context, make_backend
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.models.model import Model
from zerosim.nn import Group
from zerosim.optim.updater import Updater
from zerosim.parallel import activations
from zerosim.parallel.base import Strategy
from zerosim.parallel.pieces import Place
from zerosim.parallel.pipeline import Pipeline, Schedule, pipeline_of
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import DATA, STATES
from zerosim.tensor.flat import Flat
from zerosim.train.build_model import build_model
from zerosim.train.build_strategy import build_strategy, layout_of, stage_chunks
from zerosim.train.check_model import check_model
from zerosim.train.pieces import pieces_of
from zerosim.train.repeated import Rehearsals
from zerosim.train.repeats import repeating


class Whole(NamedTuple):
    """A run's whole model, declared without memory, and its layout. Each rank builds what it holds of it."""

    model: Model
    layout: Layout


def declare(config: RunConfig) -> Whole:
    """Declare the whole model of a run. Raises: InputError if its buffers do not suit the configuration."""
    model = build_model(config, Device(0, make_backend("meta")), builds_all=False)
    check_model(config, model)
    model.reach({flat.name for flat in model.flats if flat.spec.is_trained})
    return Whole(model, layout_of(config, model))


MakeStrategy = Callable[[RunConfig, Model, Comm, Device, Updater], Strategy]


class Built(NamedTuple):
    """A rank's objects for training: its share of the model, the strategy that places it, its pipeline stage."""

    model: Model
    strategy: Strategy
    pipeline: Pipeline


def build_rank(
    ctx: Context,
    config: RunConfig,
    updater: Updater,
    make_strategy: MakeStrategy | None = None,
    schedule: Schedule | None = None,
    *,
    whole: Whole | None = None,
    repeats: Rehearsals | None = None,
) -> Built:
    """Build what one rank holds of the `whole` model, and the strategy that will place it, without allocating memory.

    `make_strategy` and a pipeline's `schedule` replace those of the configuration. `repeats`: on
    shapes, identical blocks run once (`repeated.py`), and their calls are stored there.
    """
    declared, layout = whole or declare(config)
    mesh, groups = config.mesh.axes, Groups(config.mesh.axes, ctx.comm)
    place = Place(ctx.rank, groups)
    made = pieces_of(config, place)
    builds_all = repeats is None or not made.repeats
    if repeats is not None and made.repeats:
        made = repeating(made, config, ctx, repeats)
    made = activations.retaining(made, config)
    chunks = stage_chunks(config, declared)[mesh.index(ctx.rank, "pp")]
    only = {declared.units[i].name for chunk in chunks for i in chunk}
    first = mesh.index(ctx.rank, *DATA) * config.data.accumulate
    model = build_model(
        config, ctx.device, made, first_micro_batch=first, only=only, builds_all=builds_all, whole=declared
    )
    model = model.cut(declared, chunks)
    strategy = (make_strategy or build_strategy)(config, model, groups(*STATES), ctx.device, updater)
    layout = layout if make_strategy is None else layout_of(config, declared, strategy)
    strategy.join(groups, layout, config.grads, made.shards(updater))
    return Built(model, strategy, pipeline_of(config, place, schedule))


def place_rank(
    ctx: Context,
    model: Model,
    strategy: Strategy,
    write: Callable[[Flat, Group], None],
    loaded: AbstractContextManager[None] = nullcontext(),  # noqa: B008  has no state
) -> None:
    """Allocate memory for the weights and the optimizer's states, and write the weights, which are `loaded`
    meanwhile."""
    with loaded:
        strategy.place(model.flats, lambda flat: write(flat, model.group))
    ctx.device.mark("after_init")
