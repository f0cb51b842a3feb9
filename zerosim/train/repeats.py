"""Which blocks of a run repeat the record of another one, and how such a block is rehearsed (`repeated.py`)."""

from __future__ import annotations

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.comm.runtime import Context
from zerosim.comm.transports.fake import FakeTransport
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.dtypes import DType
from zerosim.models.builder import Flats
from zerosim.nn import Recompute, Unit
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.pipeline import defers
from zerosim.placement.mesh import BLOCK, EXPERT_CUTS
from zerosim.train.build_model import build_model
from zerosim.train.pieces import pieces_of
from zerosim.train.rehearse import RehearsedCodes, RehearsedFlat, rehearse
from zerosim.train.repeated import Rehearsals, Rehearsed, Repeated


def repeating(made: Pieces, config: RunConfig, ctx: Context, found: Rehearsals) -> Pieces:
    """Return a rank's pieces with a unit around each block that repeats a block rehearsed on a separate device."""
    mesh, inner = config.mesh.axes, made.wrap
    place = mesh.index(ctx.rank, *BLOCK), mesh.index(ctx.rank, *EXPERT_CUTS) if mesh.is_folded else 0

    def wrap(number: int, unit: Unit) -> Unit:
        unit = inner(number, unit)
        kind = made.policy.again.parts_of(number), made.group.products(number) is None, *_kind(config, number, unit)

        def rehearsed(unit: Unit, shape: tuple[int, ...], dtype: DType, is_ready: bool) -> Rehearsed:
            dummies = [flat.collector.dummies for flat in unit.all_flats]
            flats = [(flat.adds_at_once, one and one.shapes) for flat, one in zip(unit.all_flats, dummies, strict=True)]
            reads = tuple((one.read().shape, one.leaf is None) for one in unit.reads)
            is_ready = is_ready or not any(flat.kept for flat in unit.all_flats)
            key = place, isinstance(unit, Recompute), unit.sends_back, shape, dtype.name, *flats, kind, reads, is_ready
            if (one := found.get(key)) is None:
                one = found[key] = _rehearsed(config, ctx, unit, shape, dtype, is_ready)
            return one

        return Repeated(unit, ctx.comm, rehearsed)

    return made._replace(wrap=wrap)


def _kind(config: RunConfig, number: int, unit: Unit) -> tuple[object, ...]:
    """Return what makes a block another one: what it has of its own, its parameters by their places in it, buffer by
    buffer, and whether the buffer is trained."""
    weights = [[weight.name.partition(f"{unit.name}.")[2] for weight in flat.spec.weights] for flat in unit.all_flats]
    trained = (flat.spec.is_trained for flat in unit.all_flats)
    return config.model.kind(number), *map(tuple, weights), *trained


def _rehearsed(
    config: RunConfig, ctx: Context, unit: Unit, shape: tuple[int, ...], dtype: DType, is_ready: bool
) -> Rehearsed:
    """Rehearse a block like this one, on a device that is not counted."""
    device, world = Device(ctx.rank, ctx.device.backend), ctx.comm
    alone = Comm(device, FakeTransport(), world.ranks, algorithm=world.algorithm, bucket_bytes=world.bucket_bytes)
    groups = Groups(config.mesh.axes, alone)
    made = pieces_of(config, Place(ctx.rank, groups))
    model = build_model(config, device, made, flats=Flats(RehearsedFlat, RehearsedCodes), only={unit.name})
    block = next(one for one in model.units if one.name == unit.name)
    pairs = zip(block.all_flats, unit.all_flats, strict=True)
    block.reach(unit.sends_back, {own.name for own, flat in pairs if flat.spec.is_trained})
    return rehearse(block, unit, device, shape, dtype, defers=defers(config), is_ready=is_ready)
