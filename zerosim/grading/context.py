"""Exercises on context parallelism: two softmax blocks merged, the ring's work balanced, Ulysses' exchange."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np

from zerosim.grading.arrays import Output, wrong_arrays
from zerosim.grading.asking import Wrong
from zerosim.grading.plain import shown

# -- two blocks of a softmax -------------------------------------------------------------------------
_UNREAD = "a block that some queries do not read"


def blocks(seed: int) -> list[tuple[Any, ...]]:
    """Return results and log-sum-exps of two blocks: of usual scores, of large ones of both signs, and of a block that
    some queries do not read."""
    draw, found = np.random.default_rng(15 + seed), []
    for words, rows, width, size in (("usual scores", 5, 3, 1.0), ("large scores", 6, 4, 800.0), (_UNREAD, 7, 2, 2.0)):
        out_a, out_b = draw.standard_normal((2, rows, width))
        lse_a = size * draw.uniform(0.9, 1.1, rows) * (-1.0) ** np.arange(rows)
        lse_b = lse_a + draw.choice([-1.0, 1.0], rows) * draw.uniform(0.5, 2.0, rows)
        if words == _UNREAD:
            out_b[::2], lse_b[::2] = 0.0, -np.inf
        found.append((f"{words}: {rows} queries, {width} columns", out_a, lse_a, out_b, lse_b))
    return found


def wrong_merge(asked: str, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, came: Any) -> Wrong | None:
    lse = np.logaddexp(lse_a, lse_b)
    a, b = (np.exp(one - lse)[:, None] for one in (lse_a, lse_b))
    with np.errstate(all="ignore"):
        by_lse = (lse_a[:, None] * out_a + lse_b[:, None] * out_b) / (lse_a + lse_b)[:, None]
        out = [
            ("the blocks do not count alike: each has its own sum of exp(score)", (out_a + out_b) / 2),
            ("out is an average over all keys: the weights of both blocks add up to 1", out_a + out_b),
            ("the weights have changed places", b * out_a + a * out_b),
            ("lse is a logarithm: a block's weight is a share of exp(lse), not of lse", by_lse),
        ]
        sums = [
            ("sums of exp(score) are added, not their logarithms", lse_a + lse_b),
            ("the maximum leaves the smaller block out", np.maximum(lse_a, lse_b)),
            ("return the logarithm of the sum, not the sum", np.exp(lse)),
        ]
    outputs = Output("out", a * out_a + b * out_b, _SHARE, out), Output("lse", lse, _SUM, sums)
    missing = "return out, one row per query, and lse, one number per query"
    return wrong_arrays(asked, came, outputs, missing, _NOT_READ if asked.startswith(_UNREAD) else _LARGE)


_SHARE = "a block's weight is its share of the sum over both: exp(lse_a - lse) and exp(lse_b - lse)"
_SUM = "lse is the logarithm of exp(lse_a) + exp(lse_b)"
_LARGE = "exp of such a number is inf or 0: subtract the larger of both lse before you take exp"
_NOT_READ = "lse_b is -inf where a query reads no key: exp(-inf) is 0, but -inf times or minus something is not"


# -- which pieces of a row a rank has ----------------------------------------------------------------
def rings(seed: int) -> list[tuple[str, int]]:
    draw = random.Random(16 + seed)
    sizes = (2, 4, 8, 1) if not seed else (2, draw.randint(3, 5), draw.randint(6, 9), draw.randint(10, 16))
    return [(f"my_pieces({ranks})", ranks) for ranks in sizes]


def wrong_pieces(asked: str, ranks: int, came: Any) -> Wrong | None:
    """Return the error in an assignment: pieces that nobody has, or two ranks; unequal tokens; unequal work."""
    if not isinstance(came, list | tuple) or len(came) != ranks:
        return f"{asked} is {shown(came)[:80]}", f"return {ranks} lists, one for each rank"
    for rank, pieces in enumerate(came):
        if not isinstance(pieces, list | tuple) or not all(type(piece) is int for piece in pieces):
            return f"{asked}: rank {rank} has {shown(pieces)[:80]}", "a rank's pieces are a list of whole numbers"
    times = Counter(piece for pieces in came for piece in pieces)
    if others := sorted(times.keys() - set(range(2 * ranks))):
        return f"{asked}: there is no piece {others[0]}", f"pieces are numbered from 0 to {2 * ranks - 1}"
    for piece in range(2 * ranks):
        if times[piece] != 1:
            who = "no rank" if not times[piece] else f"{times[piece]} ranks"
            return f"{asked}: piece {piece} is on {who}", "every token is on one rank: hand out each piece once"
    for rank, pieces in enumerate(came):
        if len(pieces) != 2:
            words = f"{asked}: rank {rank} has {len(pieces)} piece{'s' * (len(pieces) != 1)}"
            return words, "each rank has as many tokens: two pieces. Maps and norms work token by token"
    work = [sum(piece + 0.5 for piece in pieces) for pieces in came]
    if len(set(work)) == 1:
        return None
    low, high = work.index(min(work)), work.index(max(work))
    words = f"{asked}: rank {low} computes {work[low]:g} blocks of scores, rank {high} {work[high]:g}"
    gaps = {abs(first - second) for first, second in came}
    hint = _NEIGHBOURS if gaps == {1} else _EQUAL_GAPS if gaps == {ranks} else _SUMS
    return f"{words}, and the mean is {2 * ranks}", hint


_NEIGHBOURS = "neighbouring pieces are all early or all late: give each rank an early and a late one"
_EQUAL_GAPS = "one early and one late piece each, but the rank with the later early piece also has the later late one"
_SUMS = "piece i reads the i pieces before it and half of itself: pair pieces whose numbers have the same sum"


# -- tokens for heads --------------------------------------------------------------------------------
def rows(seed: int) -> list[tuple[str, list[Any], bool]]:
    """Return the parts of all ranks, in both directions. Each element is its own number in the whole row."""
    draw, found = random.Random(17 + seed), []
    for ranks in (2, 3, draw.choice((4, 5))):
        tokens, heads, width = 2 * ranks * draw.randint(1, 2), ranks * draw.randint(1, 3), draw.randint(2, 3)
        whole = np.arange(tokens * heads * width).reshape(tokens, heads, width)
        for back in (False, True):
            parts = np.split(whole, ranks, axis=int(back))
            words = f"{ranks} ranks, {tokens} tokens, {heads} heads, {'back' if back else 'before attention'}"
            found.append((words, parts, back))
    return found


def wrong_exchange(asked: str, parts: list[Any], back: bool, came: Any) -> Wrong | None:
    ranks = len(parts)
    whole = np.concatenate(parts, axis=int(back))
    wanted = np.split(whole, ranks, axis=int(not back))
    if not isinstance(came, list | tuple) or len(came) != ranks:
        return f"{asked}: no list of {ranks} arrays", "return an array for each rank"
    for rank, (got, right) in enumerate(zip(map(np.asarray, came), wanted, strict=True)):
        if got.shape != right.shape:
            words = f"{asked}: rank {rank} has {got.shape}, expected {right.shape}"
            hint = _ALL if got.shape == whole.shape else _UNMOVED if got.shape == parts[rank].shape else _AXES
            return words, hint
        if not np.array_equal(got, right):
            return f"{asked}: {_first(rank, got, right, whole.shape)}", _order(rank, got, parts, whole, back)
    return None


def _first(rank: int, got: Any, right: Any, shape: tuple[int, ...]) -> str:
    """Return the first wrong element in words, by the token and head that it comes from."""
    at = tuple(int(i) for i in np.argwhere(got != right)[0])

    def words(value: Any) -> str:
        if not 0 <= value < np.prod(shape) or value != int(value):
            return f"{value:g}, which no rank sent"
        token, head, _ = np.unravel_index(int(value), shape)
        return f"of token {token}, head {head}"

    return f"rank {rank}'s {list(at)} is {words(got[at])}, expected {words(right[at])}"


def _order(rank: int, got: Any, parts: list[Any], whole: Any, back: bool) -> str:
    axis = int(not back)
    if set(np.unique(got)) <= set(np.unique(parts[rank])):
        return "a reshape moves no element to another rank: this rank has only elements that it had before"
    if np.array_equal(got, np.take(whole, range(rank, whole.shape[axis], len(parts)), axis=axis)):
        return f"{'tokens' if back else 'heads'} of a rank are neighbours: 0 to n-1 are rank 0's"
    return "what comes from rank 0 stands first, then rank 1's: along which axis do they follow each other?"


_ALL = "this is an all-gather: every rank has everything. A rank needs only its own heads, or its own tokens"
_UNMOVED = "nothing was exchanged: cut each part along one axis and join along the other"
_AXES = "before attention heads are cut and tokens joined; back, tokens are cut and heads joined"
