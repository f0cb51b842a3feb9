"""Variants of kernels, as values: what families of models change in attention, in rotary positions and in the loss.

Every default is neutral: a kernel that gets none of these does what GPT-2's and Llama's do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple


class Scores(NamedTuple):
    """What becomes of attention's scores q kᵀ before the softmax, in this order.

    scale    their factor; 0: 1 / sqrt(d)
    cap      cap * tanh(scores / cap); 0: none
    alibi    this times each head's slope times (key - query) is added (2108.12409); 0: nothing
    window   a query reads the last `window` keys up to itself; 0: every key up to itself
    causal   without it a query reads every key, later ones too
    """

    scale: float = 0.0
    cap: float = 0.0
    alibi: float = 0.0
    window: int = 0
    causal: bool = True

    def factor(self, width: int) -> float:
        """Return the factor of the scores of heads of `width` columns."""
        return self.scale or float(width**-0.5)

    def reach(self, tokens: int) -> int:
        """Return the window, or 0 if it holds all tokens."""
        return self.window if self.window < tokens else 0

    def read(self, queries: range, keys: range, tokens: int) -> range:
        """Return the keys that some of these queries read, of neighbours in a row of `tokens`."""
        window = self.reach(tokens)
        first = max(keys.start, queries.start - window + 1) if window else keys.start
        return range(first, min(keys.stop, queries.stop) if self.causal else keys.stop)

    def pairs(self, tokens: int) -> int:
        """Return how many scores of a head count as work: T², masked ones included, as GPUs' formulas have it; with a
        window those that a query reads, the sum of min(i + 1, window)."""
        window = self.reach(tokens)
        return window * (window + 1) // 2 + (tokens - window) * window if window else tokens * tokens


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of a model's heads: 2^(-8 i / n) of n heads, a power of two. Heads beyond it take those that
    2n heads would have besides, every second one (BLOOM's rule)."""
    near = 1 << (heads.bit_length() - 1)
    return [2.0 ** (-8.0 * (i + 1) / near if i < near else -4.0 * (2 * (i - near) + 1) / near) for i in range(heads)]


class Rope(NamedTuple):
    """Rotary positions: the pairs of columns in a head, and the angle of each pair per position.

    base          pair i turns by base^(-2i/R) a position, R columns in all
    turned        R: the columns of a head that turn, its first ones; 0: all
    interleaved   a pair is columns 2i and 2i + 1 (GPT-J, Cohere); without, columns i and i + R/2
    frequencies   the angle of each pair, in place of base's (`functional/rope_scaling.py`)
    factor        a factor of cosines and sines
    first         the position of the first token
    """

    base: float = 10000.0
    turned: int = 0
    interleaved: bool = False
    frequencies: tuple[float, ...] = ()
    factor: float = 1.0
    first: int = 0


class LogitForm(NamedTuple):
    """What becomes of logits before the softmax of the loss: their factor, then cap * tanh(logits / cap); 0: no cap.

    Part of the loss, not an op before it: another buffer of logits would double the largest one.
    """

    factor: float = 1.0
    cap: float = 0.0

    @property
    def flops(self) -> int:
        """Return the operations an element."""
        return (self.factor != 1.0) + 3 * (self.cap != 0.0)


class Buckets(NamedTuple):
    """T5's buckets of distances between a query and a key. Half of them hold one distance each, the others wider and
    wider ranges, and the last one all from `largest` on. Without `causal` half are those of later keys."""

    number: int
    largest: int
    causal: bool

    @property
    def later(self) -> int:
        """The first bucket of later keys."""
        return 0 if self.causal else self.number // 2

    @property
    def starts(self) -> tuple[int, ...]:
        """The first distance of each bucket of one direction."""
        each = self.number - self.later
        exact = each // 2
        whole = math.log(self.largest / exact)
        last = [exact + int(math.log(d / exact) / whole * (each - exact)) for d in range(exact, self.largest + 1)]
        return *range(exact + 1), *(bisect_left(last, bucket) + exact for bucket in range(exact + 1, each))


SCORES, ROPE, PLAIN = Scores(), Rope(), LogitForm()
"""The neutral ones."""


class Choice(NamedTuple):
    """How a router chooses a token's experts and weighs them, in this order.

    scores  'softmax' or 'sigmoid' of the logits, or 'softmax of chosen': of the k largest logits alone
    groups  neighbours are in so many groups, and only experts of the `chosen` best groups may be taken. A group counts
            for the sum of its `best` largest scores
    normed  the k weights are divided by their sum
    scale   their factor at the end
    given   not by scores: tokens choose so that each expert has so many rows
    """

    scores: str = "softmax"
    groups: int = 1
    chosen: int = 1
    best: int = 1
    normed: bool = False
    scale: float = 1.0
    given: tuple[int, ...] = ()
