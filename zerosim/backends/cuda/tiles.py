"""Attention's scores on the device, a part at a time: some queries of several heads and sequences, and their keys.

A part's scores are in scratch of bounded size: as many sequences as it has room for, since on an H100 one sequence at a
time left a GPU waiting for launches for three quarters of a step. FlashAttention is one kernel that iterates over keys
in on-chip memory; this is three calls for each part: cuBLAS, a row kernel, cuBLAS. As in FlashAttention, tensor cores
multiply probabilities rounded to the half type.

Scratch: forward 4 bytes for each of SCORES scores (8 in fp64), half types 2 more, dropout 1 more; backward twice that
(one mask).

Layouts are those of `numpy/attention.py`: queries (B, K, H/K, T, d), keys and values (B, K, 1, U, d).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np

from zerosim.backends.cuda.attention import within
from zerosim.backends.cuda.fused import mask_rows
from zerosim.backends.cuda.products import product
from zerosim.backends.cuda.scores import FORM, form_of, softmax
from zerosim.backends.cuda.types import NULL, raw, run_rows
from zerosim.backends.kernels import Array, Dropout, Heads, Met, Tile

SCORES = 16 * 1024 * 1024
"""The maximum of scores in scratch at a time, unless one query of one key-value head has more."""

QUERIES = 128
"""Queries in a part for short sequences. Fewer skip more of the future half; more keep the matrices large."""

_BACKWARD = (
    FORM
    + r"""
// Of each score, once it is capped and has its slope: p = exp(score - lse), dropped = p * mask, ds = p * (dp * mask -
// delta) times the derivative of the cap; 0 where a query does not read a key. `queries` rows a head from query `first`
// on. lse and delta (heads, tokens) have them from `place` on. dropped may lie over the scores, ds over dp; mask may be
// null.
template <class S, class P> __global__ void flash_backward_rows(
    const S* scores, const unsigned char* mask, const S* lse, const S* delta, const S* dp, P* dropped, P* ds,
    long long rows, long long queries, long long first, long long columns, long long tokens, long long place,
    FORM_ARGUMENTS) {
    FORM_MADE
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long start = row * columns, query = first + row % queries;
    const long long at = row / queries * tokens + place + row % queries;
    const long long begin = form.first(query), live = form.stop(query, columns);
    const S steepness = form.slope(row, queries);
    for (long long j = threadIdx.x; j < columns; j += blockDim.x) {
        S after = 0, slope = 0;
        if (j >= begin && j < live) {
            const S score = scores[start + j], p = exp(form.formed(score, steepness, j - query) - lse[at]);
            const S kept = mask ? S(mask[start + j]) : S(1);
            after = p * kept;
            slope = p * (dp[start + j] * kept - delta[at]);
            if (cap != 0) slope *= S(1) - form.capped(score) * form.capped(score);
        }
        store(after, dropped[start + j]);
        store(slope, ds[start + j]);
    }
}
"""
)


@dataclass(frozen=True, slots=True)
class Part:
    """A tile of some sequences and key-value heads."""

    batch: slice
    group: slice
    tile: Tile

    @property
    def queries(self) -> tuple[slice, ...]:
        return self.batch, self.group, slice(None), self.tile.rows

    @property
    def keys(self) -> tuple[slice, ...]:
        return self.batch, self.group, slice(None), self.tile.keys


@dataclass(frozen=True, slots=True)
class Cut:
    """An attention cut into parts, and the scratch of the largest.

    groups   sequences and key-value heads that go together; several sequences only with all their heads, so that
             their part of an array (B, H, T) is contiguous
    tiles    of each group, in the order of the queries
    rooms    flat scratch: scores, as many operands of the products (the same memory if the dtypes are equal), and with
             dropout a mask
    """

    heads: Heads
    tokens: int
    dropout: Dropout
    scale: float
    groups: tuple[tuple[slice, slice], ...]
    tiles: tuple[Tile, ...]
    rooms: tuple[Array, ...]

    @property
    def chance(self) -> float:
        """The factor of what dropout keeps."""
        return 1.0 / (1.0 - self.dropout.chance)

    def query_heads(self, batch: slice, group: slice) -> tuple[slice, slice]:
        """Return the place of a group in (B, H, ...)."""
        return batch, slice(group.start * self.heads.sharing, group.stop * self.heads.sharing)

    def parts(self) -> Iterator[Part]:
        return (Part(*group, tile) for group in self.groups for tile in self.tiles)

    def attend(
        self, at: Part, q: Array, k: Array, v: Array, out: Array, lse: Array, place: int, sinks: Array | None = None
    ) -> None:
        """Write a part's result to `out`, and the log-sum-exp of its queries to the group's lse, from `place` on. sinks
        (K, H/K), in the scores' dtype."""
        scores, after = (self._room(room, at, q) for room in self.rooms[:2])
        product(q[at.queries], k[at.keys].swapaxes(-1, -2), scores, scale=self.scale)
        mask, form = (
            self._mask(at, scores),
            form_of(self.heads, scores.shape[1] * scores.shape[2], at.group, self.tokens),
        )
        own, first = None if sinks is None else sinks[at.group], at.tile.query - at.tile.key
        softmax(scores, mask, form, dropped=after, lse=lse, sinks=own, first=first, place=place)
        product(after, v[at.keys], out, scale=self.chance)

    def gradients(
        self, at: Part, q: Array, k: Array, v: Array, grad: Array, lse: Array, delta: Array
    ) -> tuple[Array, Array]:
        """Return a part's probabilities after dropout and the gradient of its scores, without their factors `chance`
        and `scale`. lse and delta (B, H, T) are contiguous."""
        tile, own = at.tile, self.query_heads(at.batch, at.group)
        scores, dp, after, ds = (self._room(room, at, q) for room in self.rooms[:4])
        product(q[at.queries], k[at.keys].swapaxes(-1, -2), scores, scale=self.scale)
        product(grad[at.queries], v[at.keys].swapaxes(-1, -2), dp, scale=self.chance)
        mask, form = (
            self._mask(at, scores),
            form_of(self.heads, scores.shape[1] * scores.shape[2], at.group, self.tokens),
        )
        kernel, columns = raw(_BACKWARD, "flash_backward_rows", (scores.dtype, ds.dtype)), scores.shape[-1]
        arrays = scores, NULL if mask is None else mask, lse[own], delta[own], dp, after, ds
        places = scores.shape[-2], tile.query - tile.key, columns, lse.shape[-1], tile.rows.start
        run_rows(kernel, scores.size // columns, columns, *arrays, scores.size // columns, *places, *form)
        return after, ds

    def _room(self, room: Array, at: Part, q: Array) -> Array:
        return within(room, (*q[at.queries].shape[:4], at.tile.keys.stop - at.tile.keys.start))

    def _mask(self, at: Part, scores: Array) -> Array | None:
        """Return the parts of `dropout_mask` over (B, H, tokens, tokens) for `scores`."""
        if not self.dropout.chance:
            return None
        sequences, kv_heads, sharing, queries, columns = scores.shape
        mask = within(self.rooms[-1], (sequences, kv_heads * sharing, queries, columns))
        for i in range(sequences):
            head = self.heads.number(at.batch.start + i, at.group.start * sharing)
            first = (head * self.tokens + at.tile.query) * self.tokens + at.tile.key
            mask_rows(self.dropout, mask[i], first, self.tokens * self.tokens, self.tokens)
        return mask


def cut(
    q: Array, heads: Heads, met: Met, dropout: Dropout, count: int, compute: np.dtype[Any], stored: np.dtype[Any]
) -> Cut:
    """Cut the attention of q (B, K, H/K, T, d), with scratch for `count` arrays of scores.

    A tile has QUERIES queries, or a quarter of a long run; fewer if the scores would exceed SCORES.
    """
    queries, keys = (max(map(len, runs)) for runs in (met.queries, met.keys))
    groups = tuple(_groups(q.shape[0], heads, queries, keys))
    together = heads.sharing * max((b.stop - b.start) * (group.stop - group.start) for b, group in groups)
    step = min(max(QUERIES, queries // 4), max(1, SCORES // (together * keys)))
    tiles = tuple(met.tiles(heads.form, step // 64 * 64 or step))
    largest = max(((t.rows.stop - t.rows.start) * (t.keys.stop - t.keys.start) for t in tiles), default=0)
    wide_rooms = [cp.empty((together * largest,), compute) for _ in range(count)]
    rooms = wide_rooms if stored == compute else [cp.empty((together * largest,), stored) for _ in range(count)]
    masks = [cp.empty((together * largest,), np.dtype(np.uint8))] if dropout.chance else []
    scale = heads.form.factor(q.shape[-1])
    return Cut(heads, met.tokens, dropout, scale, groups, tiles, (*wide_rooms, *rooms, *masks))


def _groups(batches: int, heads: Heads, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Yield as many sequences, and as many of their key-value heads, as leave room for a tile of QUERIES."""
    scores = heads.sharing * min(queries, QUERIES) * keys
    some = min(heads.keys, max(1, SCORES // scores))
    sequences = max(1, SCORES // (scores * heads.keys)) if some == heads.keys else 1
    for batch in range(0, batches, sequences):
        for head in range(0, heads.keys, some):
            yield slice(batch, min(batch + sequences, batches)), slice(head, min(head + some, heads.keys))
