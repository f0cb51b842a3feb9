"""ZeRO++'s codes, by DeepSpeed's rules: groups of fp16 values, each with an fp32 scale (arXiv 2306.10209, 3.1 and 3.3).

    scale    2^k / (2 max|x|) of a group in fp32, 1 if all are 0; its inverse is sent
    code     x scale, rounded to even, cut to [-2^(k-1), 2^(k-1) - 1]: the positive maximum returns as 127/128 or 7/8
    value    code / scale, rounded to fp16

Two 4-bit codes share a byte, the first in the high half. A buffer of int8 codes is viewed as uint8.

Source: microsoft/DeepSpeed, csrc/includes/quantization_utils.h (0c1913d), csrc/quantization/swizzled_quantize.cu
(3c9c91a) and quant_reduce.cu (303f96c); deepspeed/runtime/zero/partition_parameters.py (CUDAQuantizer),
deepspeed/runtime/comm/coalesced_collectives.py (03aecee, all_to_all_quant_reduce).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from zerosim.backends.kernels import Array
from zerosim.parallel.compression.codecs import InFormat

ALIGNED = 8
"""Elements that a kernel loads at a time: the number of groups of weights is a multiple of it."""
TARGET = 8000


@lru_cache(maxsize=1024)
def weight_groups(numel: int) -> int:
    """Return the groups of a shard of `numel` weights, a multiple of 8: about 8,000 elements in each."""
    groups = -(-numel // TARGET)
    while numel % (ALIGNED * groups):
        groups += 1
    while numel % (2 * ALIGNED * groups) == 0 and numel / groups > TARGET:
        groups *= 2
    return groups


@lru_cache(maxsize=1024)
def grad_groups(shapes: Sequence[tuple[int, ...]], numel: int, ranks: int) -> int:
    """Return the groups of a gradient of `numel` elements, padding included, that `ranks` reduce; 0: it is reduced
    exactly.

    DeepSpeed's rule for one tensor: as many groups as it has rows or columns, whichever are more, and at least one per
    rank; a tensor of one dimension is reduced exactly. A flat buffer of several tensors has the most groups that any of
    them would have. Here that is raised to the next number that cuts each rank's slice into groups of an even size; the
    smallest groups have two elements.
    """
    wanted = max((max(shape[:2]) for shape in shapes if len(shape) > 1), default=0)
    if not wanted or numel % (2 * ranks):
        return 0
    own = numel // ranks
    each = min(-(-max(wanted, ranks) // ranks), own // 2)
    while own % each or own // each % 2:
        each += 1
    return each * ranks


class Groups(InFormat):
    """Codes of fp16 values; the scales that are sent are steps, so that a value is its code times its scale."""

    __slots__ = ()

    def encode(self, xp: Any, values: Array, *sent: Array) -> None:
        """Fill codes and scales of values (any shape), group by group."""
        codes, scales = sent
        bits, rows = self.format.bits, values.reshape(scales.size, -1).astype(xp.float32)
        half, most = 2 ** (bits - 1), xp.abs(rows).max(axis=1)
        scale = xp.float32(2**bits) / (2 * xp.where(most == 0, xp.float32(half), most))
        steps = xp.clip(xp.rint(rows * scale[:, None]), -half, half - 1)
        steps = xp.where(xp.isnan(steps), 0, steps).astype(xp.int8).reshape(-1)
        scales[...] = 1 / scale
        codes[...] = steps.view(xp.uint8) if bits == 8 else (steps[::2] << 4 | (steps[1::2] & 15)).view(xp.uint8)

    def decode(self, xp: Any, codes: Array, scales: Array) -> Array:
        """Return the fp16 values, in one dimension."""
        steps = codes.view(xp.int8)
        if self.format.bits == 4:
            steps = xp.stack([steps >> 4, (steps << 4) >> 4], axis=1)
        rows = steps.reshape(scales.size, -1).astype(xp.float32)
        return (rows * scales[:, None]).astype(xp.float16).reshape(-1)

    def add(self, xp: Any, total: Array, *arrived: Array) -> None:
        """Add the values to total (n), fp16, rounding after the addition."""
        total += self.decode(xp, *arrived)
