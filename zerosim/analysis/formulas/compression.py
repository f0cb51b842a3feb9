"""Bytes of compressed gradients: sent for one flat buffer, and stored beside it on a rank.

The rules are the papers', as `parallel/compression` cites them. N ranks; a buffer is cut into N slices of n elements,
or each of N ranks sends it whole (ZeRO stage 0). g is the bytes of a gradient element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

SCALE_BYTES, INDEX_BYTES = 4, 4
CASTS = ("none", "fp16", "bf16")
REDUCED = ("random-k", "powersgd")
"""Compressions whose parts a plain reduction adds up."""


def count_of(ratio: float, numel: int) -> int:
    """Return how many of n elements top-k and random-k send: ceil(ratio n)."""
    return max(1, math.ceil(ratio * numel)) if numel else 0


def encoded_bytes(
    name: str, numel: int, ranks: int, grad_bytes: int, *, block: int, ratio: float, whole: bool = False
) -> int:
    """Return the bytes of one call for a buffer of that many elements, over all ranks: N parts, one for each slice or,
    with `whole`, one from each rank."""
    each = numel if whole else -(-numel // ranks)
    if name in ("int8", "int4"):
        one = -(-each * int(name[3:]) // 8) + SCALE_BYTES * -(-each // block)
    elif name in ("top-k", "dgc"):
        one = count_of(ratio, each) * (grad_bytes + INDEX_BYTES)
    elif name == "random-k":
        one = count_of(ratio, each) * grad_bytes
        return one if whole else ranks * one
    else:
        one = -(-each // 8) + SCALE_BYTES
    return ranks * one


def powersgd_numel(shapes: Iterable[Sequence[int]], rank: int) -> tuple[int, int]:
    """Return the elements that PowerSGD reduces for tensors of these shapes, and the elements of Q that it stores. A
    matrix is sent uncompressed if r (rows + columns) is at least half of it (torch's min_compression_rate)."""
    sent = kept = 0
    for shape in shapes:
        numel = math.prod(shape)
        rows, columns = shape[0], numel // shape[0]
        thin = min(rank, rows, columns)
        if len(shape) > 1 and 2 * thin * (rows + columns) < numel:
            sent, kept = sent + thin * (rows + columns), kept + thin * columns
        else:
            sent += numel
    return sent, kept


def kept_numel(name: str, numel: int, ranks: int) -> int:
    """Return the elements that an exchange stores for a padded buffer: a residual, DGC's momentum, 1-bit Adam's
    errors."""
    if name == "onebit-adam":
        return (ranks + 1) * -(-numel // ranks)
    return {"top-k": 1, "random-k": 1, "powersgd": 1, "dgc": 2}.get(name, 0) * numel
