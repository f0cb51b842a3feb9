"""What a rank of a run is made of: each capability adds its pieces to the paper's, in this order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce

from zerosim.config import RunConfig
from zerosim.functional.policy import DEFAULT
from zerosim.nn.group import ONE_RANK
from zerosim.optim.by_name import make_optimizer
from zerosim.optim.updater import Updater
from zerosim.parallel import (
    activations,
    compression,
    context,
    delayed,
    experts,
    experts_balance,
    fp8,
    gathering,
    host_buffers,
    hybrid,
    in_backward,
    offload,
    offload_pinned,
    paging,
    pipeline,
    reductions,
    sequence,
    tensor,
    tuning,
    zeropp,
)
from zerosim.parallel.exchange import Slices
from zerosim.parallel.gathers import AllGather
from zerosim.parallel.pieces import Add, Pieces, Place
from zerosim.parallel.published import Published
from zerosim.parallel.reducer import AtOnce
from zerosim.parallel.shards import HERE
from zerosim.placement.zero import zero_rows

ADDS: tuple[Add, ...] = (
    reductions.add,
    gathering.add,
    compression.add,
    hybrid.add,
    zeropp.add,
    offload.add,
    host_buffers.add,
    offload_pinned.add,
    delayed.add,
    in_backward.add,
    paging.add,
    tensor.add,
    sequence.add,
    context.add,
    experts.add,
    experts_balance.add,
    fp8.add,
    tuning.add,
    activations.add,
    pipeline.add,
)
"""The capabilities. A later one may replace what an earlier one set."""


def pieces_of(config: RunConfig, place: Place = Place()) -> Pieces:  # noqa: B008  frozen
    """Return the pieces of the rank at a place."""
    first = Pieces(
        exchange=Slices,
        gathers=AllGather(),
        reducer=AtOnce,
        published=Published,
        rows=zero_rows,
        beside=lambda flat: {},
        group=replace(ONE_RANK, device_mesh=config.mesh.axes),
        policy=DEFAULT,
        wrap=lambda number, unit: unit,
        by_module=False,
        tiles=1,
        repeats=True,
        optimizer=partial(make_optimizer, config.optim, config.tokens),
        shards=lambda updater: HERE,
        cpu_steps=False,
        sub_group=config.optim.sub_group,
        updater=Updater,
        casts=None,
    )
    return reduce(lambda made, add: add(made, config, place), ADDS, first)
