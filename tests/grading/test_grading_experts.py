"""Exercises 39 to 42: typical mistakes, and what is said of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from forty import solution as text_of_solution
from grading_here import assert_told, grade

from zerosim.grading import find_exercise


def right(name: str) -> Any:
    """The published solution."""
    names: dict[str, Any] = {}
    exec(text_of_solution(name), names)
    return names[find_exercise(name).given.__name__]


def softmax(x: Any) -> Any:
    return np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)


def routed(at: Any = None, *, centred: bool = True, normed: bool | None = None, term: bool = True) -> Any:
    def answer(logits: Any, ids: Any, grad: Any, is_normed: bool) -> Any:
        p = softmax(logits)
        chosen = np.take_along_axis(p, ids, 1)
        total = chosen.sum(axis=1, keepdims=True)
        if is_normed if normed is None else normed:
            grad = (grad - term * (grad * chosen).sum(axis=1, keepdims=True) / total) / total
        dp = np.zeros_like(p)
        np.put_along_axis(dp, ids if at is None else np.broadcast_to(at(ids.shape[1]), ids.shape), grad, 1)
        return p * (dp - centred * (dp * p).sum(axis=1, keepdims=True))

    return answer


def overflowing(logits: Any, *of: Any) -> Any:
    with np.errstate(all="ignore"):
        return right("router")(logits, *of) + 0 * softmax(logits)


def of_chosen_alone(logits: Any, ids: Any, grad: Any, normed: bool) -> Any:
    found, mask = right("router")(logits, ids, grad, normed), np.zeros_like(logits)
    np.put_along_axis(mask, ids, 1.0, 1)
    return found * mask


def moved(change: Any) -> Any:
    return lambda counts, rank: change(*right("dispatch")(counts, rank), counts, rank)


def strided(sends: Any, receives: Any, order: Any, counts: Any, rank: int) -> Any:
    return [int(counts[rank, one :: len(counts)].sum()) for one in range(len(counts))], receives, order


def averaged(group: Any, by: Any) -> Any:
    def answer(grads: Any, ep: int) -> Any:
        dense, ranks = sum(one for one, _ in grads) / len(grads), len(grads)
        each = [[grads[one][1] for one in range(ranks) if group(one, rank, ep, ranks)] for rank in range(ranks)]
        return [(dense, sum(own) / by(len(own), ranks)) for own in each]

    return answer


def same(one: int, rank: int, ep: int, ranks: int) -> bool:
    return one % ep == rank % ep


def biased(change: Any) -> Any:
    return lambda scores, bias, k, rate: change(*right("bias")(scores, bias, k, rate), scores, bias, k, rate)


def signs(by: Any, k: int) -> Any:
    load = np.bincount(np.argsort(-by)[..., :k].reshape(-1), minlength=by.shape[-1])
    return np.sign(load.mean() - load)


def with_bias(weights: Any, new: Any, scores: Any, bias: Any, k: int, rate: float) -> Any:
    return right("bias")(scores + bias, 0 * bias, k, rate)[0], new


def proportional(weights: Any, new: Any, scores: Any, bias: Any, k: int, rate: float) -> Any:
    load = np.bincount(np.argsort(-(scores + bias))[..., :k].reshape(-1), minlength=len(bias))
    return weights, bias + rate * (load.mean() - load)


def of_each_rank(weights: Any, new: Any, scores: Any, bias: Any, k: int, rate: float) -> Any:
    return weights, bias + rate * np.mean([signs(one + bias, k) for one in scores], axis=0)


MISTAKES = [
    ("router", of_chosen_alone, "not normed: dlogits[", "that was not chosen has a gradient too"),
    ("router", routed(term=False), "top 3 of 8, normed: dlogits[", "have a sum under them"),
    ("router", routed(normed=False), "top 3 of 8, normed", "through the division"),
    ("router", routed(normed=True), "top 2 of 4, not normed", "nothing is divided"),
    ("router", routed(centred=False), "dlogits[", "every score depends on every logit"),
    ("router", routed(at=np.arange), "dlogits[", "put it into that column"),
    ("router", lambda *of: 2 * right("router")(*of), "all of dlogits is 2 times", "backwards: through"),
    ("router", overflowing, "large logits: dlogits[", "exp of such a number"),
    ("router", lambda logits, ids, grad, normed: grad, "expected (3, 4)", "for each logit"),
    ("dispatch", moved(strided), "sends is [", "divided in their order"),
    ("dispatch", moved(lambda a, b, c, *_: (b, a, c)), "sends is [", "in the columns of its experts"),
    ("dispatch", moved(lambda a, b, c, *_: (a, a, c)), "receives is [", "in the columns of its experts"),
    ("dispatch", moved(lambda a, b, c, *_: ([0, *a[1:]], b, c)), "sends is [0", "this rank's counts"),
    ("dispatch", moved(lambda a, b, c, *_: (a, [0, *b[1:]], c)), "receives is [0", "rank r's counts"),
    ("dispatch", moved(lambda a, b, c, *_: (a, b, sorted(c))), "order is [0, 1", "do not lie together yet"),
    ("dispatch", moved(lambda a, b, c, *_: (a, b, np.argsort(c))), "order is [", "the way back"),
    ("dispatch", moved(lambda a, b, c, *_: (a, b, c[::-1])), "order is [", "stand before its rows from rank 1"),
    ("dispatch", lambda counts, rank: 3, "expected sends, receives, order", "for each received row"),
    ("divisor", averaged(same, lambda group, ranks: group), "all of experts is 2 times", "is not the divisor"),
    ("divisor", averaged(same, lambda group, ranks: 1), "all of experts is 4 times", "nobody has divided"),
    ("divisor", averaged(lambda *_: True, lambda group, ranks: ranks), "rank 0: experts[", "ranks of other experts"),
    ("divisor", averaged(lambda a, b, ep, n: a // ep == b // ep, lambda g, n: g), "rank 0: experts[", "ep ranks apart"),
    ("divisor", averaged(lambda a, b, *_: a == b, lambda group, ranks: ranks), "experts[", "their tokens count too"),
    ("divisor", lambda grads, ep: grads, "rank 0: dense[", "the mean of all"),
    ("divisor", lambda grads, ep: grads[0], "4 ranks, ep 2", "for each of 4 ranks"),
    ("bias", biased(with_bias), "weights[", "does not weigh"),
    ("bias", lambda s, b, k, rate: right("bias")(s, 0 * b, k, rate), "weights[", "choose by score plus bias"),
    ("bias", biased(lambda w, new, s, b, k, r: (w * 2, new)), "all of weights is 2 times", "k largest"),
    ("bias", biased(lambda w, new, s, b, *_: (w, 2 * b - new)), "bias[", "less likely"),
    ("bias", biased(proportional), "bias[", "has one size"),
    ("bias", biased(of_each_rank), "2 x 12 tokens", "all ranks first"),
    ("bias", biased(lambda w, new, s, b, k, r: (w, b + r * signs(s, k))), "bias[", "the choices by score plus bias"),
    ("bias", biased(lambda w, new, s, b, k, r: (w, b)), "bias[", "add rate where"),
    ("bias", lambda s, b, k, rate: b, "expected weights, bias", "best choice first"),
]  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize(("name", "answer", "words", "hint"), MISTAKES)
def test_a_typical_mistake_is_told_what_it_is(name: str, answer: Any, words: str, hint: str) -> None:
    assert_told(grade(answer, name), words, hint)
