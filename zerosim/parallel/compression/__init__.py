"""Exchanges that compress gradients, by their names in `--compress`. ZeRO itself has none.

              stages    sent for n elements of fp32               kept on each rank
fp16, bf16    0 to 3    2n bytes                                  nothing
int8, int4    0 to 3    n or n/2, and 4 bytes a block             nothing
top-k         0 to 3    8 ratio n: values and places              4 Psi
random-k      0 to 3    4 ratio n: values, places are drawn       4 Psi
dgc           0 to 3    8 ratio n                                 8 Psi, SGD's momentum among them
powersgd      0         4 r (rows + columns) for each matrix      4 Psi, and Q
onebit-adam   0         n/8 and scales, twice                     4 Psi + 4 Psi / N
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from zerosim.config import RunConfig
from zerosim.optim.onebit_adam import OneBitAdamStep
from zerosim.optim.sgd import SGD
from zerosim.parallel.compression.casts import Cast, CastToBf16
from zerosim.parallel.compression.codecs import Blocks, TopK
from zerosim.parallel.compression.dgc import DGC
from zerosim.parallel.compression.encoded import Encoded, RandomK
from zerosim.parallel.compression.onebit import OneBitAdam
from zerosim.parallel.compression.powersgd import PowerSGD
from zerosim.parallel.exchange import Slices
from zerosim.parallel.gathers import AllGather
from zerosim.parallel.pieces import Pieces, Place
from zerosim.placement.formats import blocks

Make = Callable[[RunConfig, AllGather], Slices]
COMPRESSED: Mapping[str, Make] = MappingProxyType(
    {
        "fp16": lambda c, gathers: Cast(gathers),
        "bf16": lambda c, gathers: CastToBf16(gathers),
        "int8": lambda c, gathers: Encoded(gathers, Blocks(blocks(8, c.reduction.block))),
        "int4": lambda c, gathers: Encoded(gathers, Blocks(blocks(4, c.reduction.block))),
        "top-k": lambda c, gathers: Encoded(gathers, TopK(c.reduction.ratio)),
        "random-k": lambda c, gathers: RandomK(gathers, c.reduction.ratio, c.data.seed),
        "dgc": lambda c, gathers: DGC(gathers, c.reduction.ratio, c.optim.momentum, c.reduction.warmup),
        "powersgd": lambda c, gathers: PowerSGD(gathers, c.reduction.rank, c.reduction.warmup, c.data.seed),
        "onebit-adam": lambda c, gathers: OneBitAdam(gathers, c.optim.betas[0], c.reduction.warmup),
    }
)


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the exchange of a compression, and the update step that goes with it."""
    optim, how = config.optim, config.reduction
    if how.compress == "none":
        return made
    made = made._replace(exchange=partial(COMPRESSED[how.compress], config))
    if how.compress == "onebit-adam":
        step = partial(OneBitAdamStep, *optim.betas, optim.eps, optim.weight_decay, how.warmup)
        return made._replace(optimizer=step)
    if how.compress == "dgc":  # the exchange applies the momentum
        return made._replace(optimizer=partial(SGD, 0.0, optim.weight_decay))
    return made
