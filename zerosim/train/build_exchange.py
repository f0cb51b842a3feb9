"""Build a rank's exchange from a RunConfig: the collectives of gradients and parameters, and hpZ's row."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zerosim.config import RunConfig
from zerosim.parallel.compression import COMPRESSED
from zerosim.parallel.exchange import AllReduce, KeepSlice, Owners, Slices
from zerosim.parallel.gathers import NODE, TwoHops
from zerosim.parallel.quantized import QuantizedGather, QuantizedReduction
from zerosim.parallel.secondary import STATE
from zerosim.placement.layout import Row, Rows, RowsOf
from zerosim.placement.neighbours import NeighbouringSlices
from zerosim.placement.spec import FlatSpec, is_block

EXCHANGES: Mapping[str, type[Slices]] = MappingProxyType({"reduce_scatter": Slices, "all_reduce": KeepSlice})


def make_exchange(config: RunConfig) -> Slices:
    """Build the exchange of gradients and parameters."""
    exchange = _reductions(config)
    if config.gathering.quantized_weights:
        exchange.gathers = QuantizedGather()
    elif config.gathering.hierarchical_gather:
        exchange.gathers = TwoHops()
    return exchange


def _reductions(config: RunConfig) -> Slices:
    stage, how = config.parallel.zero_stage, config.reduction
    if how.quantized_gradients:
        return QuantizedReduction(how.allgather_bucket)
    if how.compress in COMPRESSED:
        return COMPRESSED[how.compress](config, how.allgather_bucket)
    if stage == 0:
        return AllReduce(how.allgather_bucket)
    kind = Owners if config.parallel.partition == "owner" else EXCHANGES[how.grad_reduction] if stage < 3 else Slices
    return kind(how.allgather_bucket)


def with_second(config: RunConfig, rows: Rows) -> RowsOf:
    """Return the rows of trained flats, with hpZ's second shard if a microbatch gathers a flat twice at stage 3. A rank
    holds as many neighbouring primary slices as there are nodes."""
    if not config.mesh.secondary_shard:
        return lambda flat: rows
    choices, second = config.gathering, Row(NeighbouringSlices(config.mesh.axes.nodes), axes=(NODE,))
    twice = {**rows, STATE: second}

    def of_flat(flat: FlatSpec) -> Rows:
        is_root = choices.keep_root_units and not is_block(flat.unit)
        return rows if is_root or choices.stays(flat.num_parameters) else twice

    return of_flat
