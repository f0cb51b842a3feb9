"""Build a rank's strategy from a RunConfig, and the layout of a run."""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.config import RunConfig
from zerosim.config.parts.tuning import casts_frozen, row_of
from zerosim.device.device import Device
from zerosim.models.model import Model
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.ddp import DDP
from zerosim.parallel.stage import Stage
from zerosim.parallel.tuning import cut_between
from zerosim.parallel.zero1 import Zero1
from zerosim.parallel.zero2 import Zero2
from zerosim.parallel.zero3 import Zero3
from zerosim.placement.layout import Layout, RowsOf
from zerosim.placement.mesh import Mesh
from zerosim.placement.rows import Rows, cut_over
from zerosim.placement.spec import FlatSpec, is_block
from zerosim.placement.stages import cut_units
from zerosim.placement.zero import frozen, rows_said, zero_rows
from zerosim.tensor.flat import Flat
from zerosim.train.pieces import pieces_of

STAGES: tuple[type[Stage], ...] = (DDP, Zero1, Zero2, Zero3)


def rows_of(config: RunConfig, strategy: Strategy | None = None) -> RowsOf:
    """Return the rows of each flat buffer in a run: those of its ZeRO stage, changed by a custom `strategy`."""
    made, stage = pieces_of(config), config.parallel.zero_stage
    exchange = strategy.exchange if isinstance(strategy, Stage) else made.exchange(made.gathers)
    if strategy is not None and strategy.stage is not None:
        stage = strategy.stage
    rows = made.rows(stage, exchange.partition)
    if strategy is not None:
        rows = rows_said(rows, keeps_params=strategy.keeps_params, keeps_grads=strategy.keeps_grads)
    trained, held = {**rows, **exchange.states}, frozen(rows, casts=casts_frozen(config.tuning))
    between = dict[tuple[int, tuple[str, ...]], Rows]()  # by a row's elements, and the axes

    def of_flat(flat: FlatSpec) -> Rows:
        if not flat.is_trained:
            return cut_over(held, flat.axes)
        if row := row_of(config.tuning, flat):
            return between.setdefault((row, flat.axes), cut_between(cut_over(trained, flat.axes), row))
        return {**cut_over(trained, flat.axes), **made.beside(flat)}

    return of_flat


def stage_chunks(config: RunConfig, whole: Model) -> list[list[range]]:
    """Return for each pipeline stage its runs of the whole model's units."""
    chunks = config.chunks
    names = [unit.name for unit in whole.units]
    sizes = config.layers_by_chunk(sum(is_block(name) for name in names))
    runs = cut_units(names, sizes, is_block)
    return [[runs[number] for number in chunks.of_stage(stage)] for stage in range(chunks.stages)]


def layout_of(config: RunConfig, model: Model, strategy: Strategy | None = None) -> Layout:
    """Return the layout of a run of the whole `model`, before any rank exists."""
    stages = None
    if config.mesh.pp > 1:
        units = [[model.units[i] for run in runs for i in run] for runs in stage_chunks(config, model)]
        stages = [list(dict.fromkeys(flat.name for unit in held for flat in unit.all_flats)) for held in units]
    flats = [flat.spec for flat in model.flats]
    return Layout(config.mesh.axes, flats, rows_of(config, strategy), stages)


def build_strategy(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
    """Build this rank's strategy: a ZeRO stage with its exchange, its reducer, and its gathered parameters."""
    made = pieces_of(config)
    exchange = made.exchange(made.gathers)
    stage = STAGES[config.parallel.zero_stage]
    return stage(comm, device, updater, made.reducer(exchange), made.published(exchange))


def join_by_itself(strategy: Strategy, flats: Sequence[Flat]) -> None:
    """Give a ZeRO stage that was built without a configuration its place in a mesh of one axis."""
    mesh = Mesh(dp_shard=strategy.comm.size)
    rows = zero_rows(strategy.stage or 0)
    strategy.join(Groups(mesh, strategy.comm), Layout(mesh, [flat.spec for flat in flats], rows))
