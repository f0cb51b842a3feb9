"""How tokens spread over a layer's experts where nobody computes it: on shapes, or where a router is overruled."""

from __future__ import annotations

from math import ceil, gcd
from typing import NamedTuple


class Spread(NamedTuple):
    """The experts' shares of all choices, in the order of their numbers; none: all are equal."""

    shares: tuple[float, ...] = ()

    def counts(self, tokens: int, top_k: int, experts: int) -> tuple[int, ...]:
        """Return the rows of each expert, of so many tokens with `top_k` choices each. A token chooses an expert at
        most once: what is beyond goes to the others, by their shares. What the shares do not divide goes to the first
        ones."""
        shares = self.shares or (1.0,) * experts
        left, open_, found = tokens * top_k, list(range(experts)), [0] * experts
        while open_:
            total = sum(shares[expert] for expert in open_)
            full = [expert for expert in open_ if shares[expert] * left >= tokens * total > 0]
            if not full:
                break
            for expert in full:
                found[expert] = tokens
                open_.remove(expert)
            left -= tokens * len(full)
        exact = {expert: left * (shares[expert] / total if total else 1 / len(open_)) for expert in open_}
        for expert, numel in exact.items():
            found[expert] = int(numel)
        more = tokens * top_k - sum(found)
        for expert in sorted(open_, key=lambda one: (found[one] - exact[one], one))[:more]:
            found[expert] += 1
        return tuple(found)


EVEN = Spread()


def zipf(experts: int, exponent: float) -> Spread:
    """Return shares 1 / r ** exponent of the experts, r their place from the most popular one on. Popular ones do not
    lie side by side: the places go round in steps of about .618 E."""
    step = max(1, round(experts * 0.618))
    while gcd(step, experts) > 1:
        step += 1
    shares = [0.0] * experts
    for place in range(experts):
        shares[place * step % experts] = (place + 1) ** -exponent
    return Spread(tuple(shares))


def fullest(experts: int, times: float) -> Spread:
    """Return shares: the first expert has `times` the mean, and the others equal parts of the rest."""
    others = (experts - times) / (experts - 1) if experts > 1 else 0.0
    return Spread((times, *(max(0.0, others),) * (experts - 1)))


class Capacity(NamedTuple):
    """The most rows of an expert: `factor` times those of an even choice, rounded up. Of more the first ones are kept,
    or those `by_weight`. `padded`: fewer are padded to it with zeros."""

    factor: float
    by_weight: bool = False
    padded: bool = False

    def rows(self, choices: int, experts: int) -> int:
        """Return the most rows of an expert."""
        return ceil(choices / experts * self.factor)

    def kept(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rows of each expert, of those that chose it."""
        most = self.rows(sum(chosen), len(chosen))
        return tuple(most if self.padded else min(one, most) for one in chosen)
