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
from types import MappingProxyType

from zerosim.config import RunConfig
from zerosim.parallel.compression.casts import Cast, CastToBf16
from zerosim.parallel.compression.codecs import Blocks, TopK
from zerosim.parallel.compression.dgc import DGC
from zerosim.parallel.compression.encoded import Encoded, RandomK
from zerosim.parallel.compression.onebit import OneBitAdam
from zerosim.parallel.compression.powersgd import PowerSGD
from zerosim.parallel.exchange import Slices

Make = Callable[[RunConfig, int], Slices]
COMPRESSED: Mapping[str, Make] = MappingProxyType(
    {
        "fp16": lambda c, bucket: Cast(bucket),
        "bf16": lambda c, bucket: CastToBf16(bucket),
        "int8": lambda c, bucket: Encoded(bucket, Blocks(8, c.reduction.block)),
        "int4": lambda c, bucket: Encoded(bucket, Blocks(4, c.reduction.block)),
        "top-k": lambda c, bucket: Encoded(bucket, TopK(c.reduction.ratio)),
        "random-k": lambda c, bucket: RandomK(bucket, c.reduction.ratio, c.data.seed),
        "dgc": lambda c, bucket: DGC(bucket, c.reduction.ratio, c.optim.momentum, c.reduction.warmup),
        "powersgd": lambda c, bucket: PowerSGD(bucket, c.reduction.rank, c.reduction.warmup, c.data.seed),
        "onebit-adam": lambda c, bucket: OneBitAdam(bucket, c.optim.betas[0], c.reduction.warmup),
    }
)
