"""What a rank is made of, as one value. Each capability adds its own to it (`add`, in a file of its name), in the order
of `train/pieces.py`.

There are no defaults: exchanges and gathers hold a rank's groups, so each rank has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zerosim.comm.groups import Groups
from zerosim.config import RunConfig
from zerosim.functional.lora import Casts
from zerosim.functional.policy import ActivationPolicy
from zerosim.nn import Group, Unit
from zerosim.optim.optimizer import Optimizer
from zerosim.optim.updater import Updater
from zerosim.parallel.exchange import Slices
from zerosim.parallel.gathers import AllGather
from zerosim.parallel.published import Published
from zerosim.parallel.reducer import Reducer
from zerosim.parallel.shards import Shards
from zerosim.placement.rows import Rows
from zerosim.placement.spec import FlatSpec


class Place(NamedTuple):
    """A rank's place in the world. Without `groups` its pieces describe how a model is cut, and run nothing."""

    rank: int = 0
    groups: Groups | None = None


class Pieces(NamedTuple):
    """What a rank is made of.

    exchange    makes the exchange of gradients and parameters, which gathers as it is told
    gathers     how stage 3 gathers a flat's parameters
    reducer     makes the reducer over an exchange: when gradients are reduced
    published   makes the gathered parameters over an exchange: when new parameters are gathered, and which stay
    rows        the rows of a trained flat, from a ZeRO stage and the exchange's partition
    beside      a trained flat's further rows
    group       the group that divides the layers: maps, rows, attention
    policy      the choices about buffers saved for backward
    wrap        puts a unit around a block, by the block's number
    by_module   whether each tensor has a flat buffer, and leaf modules are gathered
    tiles       the number of tiles of each linear map of a block, by module
    repeats     whether a plan may repeat the record of one block for another
    optimizer   makes the optimizer
    shards      makes the rank's local shards between their uses, given its updater
    cpu_steps   whether the host's CPU takes the optimizer step
    sub_group   flats are stepped together until they have this number of the rank's elements; 0: all of them
    updater     makes the optimizer's update of a rank's slices
    casts       holds adapters' weights that autocast has cast
    """

    exchange: Callable[[AllGather], Slices]
    gathers: AllGather
    reducer: Callable[..., Reducer]
    published: Callable[[Slices], Published]
    rows: Callable[..., Rows]
    beside: Callable[[FlatSpec], Rows]
    group: Group
    policy: ActivationPolicy
    wrap: Callable[[int, Unit], Unit]
    by_module: bool
    tiles: int
    repeats: bool
    optimizer: Callable[[], Optimizer]
    shards: Callable[..., Shards]
    cpu_steps: bool
    sub_group: int
    updater: Callable[..., Updater]
    casts: Casts | None


Add = Callable[[Pieces, RunConfig, Place], Pieces]
"""Adds one capability to the pieces of the run's rank at a place; returns them as they are if it is off."""
