"""Exchanges that compress gradients, by what `--compress` calls them. ZeRO itself has none."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zerosim.parallel.compression.casts import Cast, CastToBf16
from zerosim.parallel.exchange import Slices

COMPRESSED: Mapping[str, type[Slices]] = MappingProxyType({"fp16": Cast, "bf16": CastToBf16})
