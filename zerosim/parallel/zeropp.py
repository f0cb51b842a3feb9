"""ZeRO++ (arXiv 2306.10209): weights gathered and gradients reduced as codes (`quantized.py`), and a second shard
within each node (`secondary.py`)."""

from __future__ import annotations

from zerosim.config import RunConfig
from zerosim.parallel.gathering import gathered, residency_of
from zerosim.parallel.gathers import NODE
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.quantized import QuantizedGather, QuantizedReduction
from zerosim.parallel.secondary import STATE, Secondary
from zerosim.placement.neighbours import NeighbouringSlices
from zerosim.placement.rows import Row, Rows
from zerosim.placement.spec import FlatSpec


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add qwZ, qgZ and hpZ."""
    if config.gathering.quantized_weights:
        made = made._replace(gathers=QuantizedGather())
    if config.reduction.quantized_gradients:
        made = made._replace(exchange=QuantizedReduction)
    return _with_second(made, config) if config.mesh.secondary_shard else made


def _with_second(made: Pieces, config: RunConfig) -> Pieces:
    """Add the second shard of flats that a microbatch gathers twice. A rank holds as many neighbouring primary slices
    as there are nodes."""
    stays, before = residency_of(config.gathering), made.beside
    second = Row(NeighbouringSlices(config.mesh.axes.nodes), axes=(NODE,))

    def beside(flat: FlatSpec) -> Rows:
        once = stays.is_root(flat.unit) or stays.persistent(flat.num_parameters)
        return before(flat) if once else {**before(flat), STATE: second}

    return made._replace(beside=beside, published=gathered(Secondary, config.gathering))
