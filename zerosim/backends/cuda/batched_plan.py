"""A flash attention cut into groups of sequences and key-value heads, and each group into tiles of queries, for
strided-batched products (`batched.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from zerosim.backends.cuda.batched_rows import Rows
from zerosim.backends.cuda.heads_first import from_heads, to_heads
from zerosim.backends.kernels import Array, Dropout, Heads, Met, Tile

SCORES = 32 * 1024 * 1024
"""The maximum of scores in scratch at a time: 128 MB in float32. Eight sequences of 12 heads and 1,024 tokens are four
tiles."""

QUERIES = 256
"""Queries in a tile of a short row. Fewer skip more of the future half; more take fewer launches."""

Packed = tuple[Array, Array, Array]
"""q, k and v: views (B, T, columns) of packed heads."""


class Group(NamedTuple):
    """Sequences and key-value heads that go together; several sequences only with all their heads."""

    batch: slice
    heads: slice

    def of(self, packed: Sequence[Array], keys: int) -> list[Array]:
        """Return the group's part of arrays whose columns are those of `keys` key-value heads."""
        each = (x.shape[2] // keys for x in packed)
        return [x[self.batch, :, self.heads.start * n : self.heads.stop * n] for x, n in zip(packed, each, strict=True)]


@dataclass(frozen=True, slots=True)
class Plan:
    """An attention cut into groups, and each of them into tiles, in the order of the queries."""

    heads: Heads
    tokens: int
    dropout: Dropout
    scale: float
    groups: tuple[Group, ...]
    tiles: tuple[Tile, ...]

    @property
    def chance(self) -> float:
        """The factor of what dropout keeps."""
        return 1.0 / (1.0 - self.dropout.chance)

    def to_heads(self, group: Group, *packed: Array) -> list[Array]:
        count = group.heads.stop - group.heads.start
        return to_heads(group.of(packed, self.heads.keys), count, self.heads.sharing)

    def from_heads(self, group: Group, first: Sequence[Array], packed: Sequence[Array], *, add: bool = False) -> None:
        count = group.heads.stop - group.heads.start
        from_heads(first, group.of(packed, self.heads.keys), count, self.heads.sharing, add=add)

    def by_head(self, group: Group, a: Array) -> Array:
        """Return the group's part of (B, H, T)."""
        sharing = self.heads.sharing
        return a[group.batch, group.heads.start * sharing : group.heads.stop * sharing]

    def rows(self, group: Group, tile: Tile) -> Rows:
        return Rows(self.heads, self.dropout, self.tokens, group.batch, group.heads, tile)

    def queries(self, tile: Tile) -> slice:
        """Return a tile's rows of queries heads first."""
        return slice(tile.rows.start * self.heads.sharing, tile.rows.stop * self.heads.sharing)

    def rooms(self, n: int, compute: np.dtype[Any], stored: np.dtype[Any], count: int) -> list[Array]:
        """Return `count` flat arrays for a tile of n sequences times key-value heads in the compute dtype, and as many
        in the stored one; the same memory if the dtypes are equal."""
        largest = max(((t.rows.stop - t.rows.start) * (t.keys.stop - t.keys.start) for t in self.tiles), default=0)
        numel = n * self.heads.sharing * largest
        wide_rooms = [cp.empty((numel,), compute) for _ in range(count)]
        return wide_rooms + (wide_rooms if stored == compute else [cp.empty((numel,), stored) for _ in range(count)])


def plan_of(packed: Packed, heads: Heads, met: Met, dropout: Dropout) -> Plan:
    """Cut an attention: a group has as many sequences and heads as leave room for a tile of QUERIES, a tile QUERIES
    queries or a quarter of a long run, fewer if its scores would exceed SCORES."""
    q, k, v = packed
    queries, keys = (max(map(len, runs)) for runs in (met.queries, met.keys))
    width, value = q.shape[2] // heads.queries, v.shape[2] // heads.keys
    operand = max(q.shape[1] * heads.sharing, k.shape[1]) * max(width, value)
    together = max(1, SCORES // max(operand, heads.sharing * min(queries, QUERIES) * keys))
    groups = tuple(_groups(len(q), heads.keys, together))
    largest = max((b.stop - b.start) * (some.stop - some.start) for b, some in groups)
    step = min(max(QUERIES, queries // 4), max(1, SCORES // (largest * heads.sharing * keys)))
    tiles = tuple(met.tiles(heads.form, step // 64 * 64 or step))
    return Plan(heads, met.tokens, dropout, heads.form.factor(width), groups, tiles)


def _groups(batches: int, keys: int, together: int) -> Iterator[Group]:
    """Yield groups of at most `together` sequences times key-value heads."""
    some, sequences = min(keys, together), max(1, together // keys)
    for batch in range(0, batches, sequences):
        for head in range(0, keys, some):
            yield Group(slice(batch, min(batch + sequences, batches)), slice(head, min(head + some, keys)))


def columns_of(q: Array, heads: Heads, kv: Array | None = None) -> Packed:
    """View packed q|k|v, or q and the k|v of a block, as q, k and v."""
    first, keys = heads.cuts(q.shape[2], q_alone=kv is not None)
    q, pairs = (q[..., :first], q[..., first:]) if kv is None else (q, kv)
    return q, pairs[..., :keys], pairs[..., keys:]
