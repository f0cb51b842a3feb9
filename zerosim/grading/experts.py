"""Exercises on experts: the router's backward, balance without a loss, rows to the ranks of their experts, and who
averages an expert's gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.grading.arrays import Output, arrays_of, wrong_arrays
from zerosim.grading.asking import Wrong
from zerosim.grading.plain import shown


def _best(scores: Any, count: int) -> Any:
    """Return the places of the largest scores along the last axis, the largest first."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :count]


# -- the router's backward ---------------------------------------------------------------------------
def routers(seed: int) -> list[tuple[Any, ...]]:
    draw, found = np.random.default_rng(18 + seed), []
    for tokens, experts, k, normed, more in ((3, 4, 2, False, 0), (5, 8, 3, True, 0), (2, 6, 2, False, 800)):
        logits, grad = draw.standard_normal((tokens, experts)) + more, draw.standard_normal((tokens, k))
        words = (
            f"{tokens} tokens, top {k} of {experts}, {'' if normed else 'not '}normed{', large logits' * bool(more)}"
        )
        found.append((words, logits, _best(logits, k), grad, normed))
    return found


def wrong_router(asked: str, logits: Any, ids: Any, grad: Any, normed: bool, came: Any) -> Wrong | None:
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    chosen = np.take_along_axis(p, ids, 1)
    total = chosen.sum(axis=1, keepdims=True)
    inner = (grad - (grad * chosen).sum(axis=1, keepdims=True) / total) / total

    def back(of_chosen: Any, *, centred: bool = True, at: Any = ids) -> Any:
        dp = np.zeros_like(p)
        np.put_along_axis(dp, at, of_chosen, 1)
        return p * (dp - (dp * p).sum(axis=1, keepdims=True) * centred)

    mask, own = np.zeros_like(p), inner if normed else grad
    np.put_along_axis(mask, ids, 1.0, 1)
    right = back(own)
    usual = (
        (_UNCHOSEN, mask * right),
        ("normed weights have a sum under them: its gradient is a term of its own", back(grad / total)),
        ("the weights are normed: follow the gradient through the division by their sum", back(grad)),
        ("not normed: the weights are the scores themselves, nothing is divided", back(inner)),
        (_CENTRED, back(own, centred=False)),
        (
            "grad[t, c] belongs to expert ids[t, c]: put it into that column",
            back(own, at=np.broadcast_to(np.arange(ids.shape[1]), ids.shape)),
        ),
    )
    missing = "return one array, a number for each logit"
    return wrong_arrays(asked, [came], [Output("dlogits", right, _BACKWARDS, usual)], missing, _INF)


_INF = "exp of such a number is inf: subtract each token's largest logit first"
_UNCHOSEN = (
    "an expert that was not chosen has a gradient too, if weights are not normed: its logit is in the softmax's sum"
)
_CENTRED = "every score depends on every logit: dlogit = p (dp - sum of p dp), with the sum over all experts"
_BACKWARDS = "backwards: through the division, then into the chosen columns of zeros, then through the softmax"


# -- balance without a loss --------------------------------------------------------------------------
_RATE = 0.125


def loads(seed: int) -> list[tuple[Any, ...]]:
    """Return scores of several ranks, and biases: an expert has the mean load, the last of 8 none, and one rank's load
    misleads."""
    draw, found = np.random.default_rng(21 + seed), []
    for ranks, tokens, experts, k in ((1, 8, 4, 2), (2, 12, 4, 2), (3, 16, 8, 2)):
        while True:
            scores = 1 / (1 + np.exp(-draw.standard_normal((ranks, tokens, experts))))
            bias = draw.permutation(np.linspace(-0.25, 0.25, experts))
            bias[-1] -= 2 * (experts > 4)  # nobody chooses it
            by, chosen = scores + bias, _best(scores, k)
            misleads = ranks == 1 or np.abs(_signs(by, k) - _mean_signs(by, k)).max() > 0
            if 0 in _signs(by, k) and misleads and (chosen != _best(by, k)).any():
                break
        found.append((f"{ranks} x {tokens} tokens, top {k} of {experts}", scores, bias, k, _RATE))
    return found


def _load(by: Any, k: int) -> Any:
    return np.bincount(_best(by, k).reshape(-1), minlength=by.shape[-1])


def _signs(by: Any, k: int) -> Any:
    return np.sign(_load(by, k).mean() - _load(by, k))


def _mean_signs(by: Any, k: int) -> Any:
    return np.mean([_signs(one, k) for one in by], axis=0)


def wrong_bias(asked: str, scores: Any, bias: Any, k: int, rate: float, came: Any) -> Wrong | None:
    def weighed(by: Any, of: Any) -> Any:
        chosen = np.take_along_axis(of, _best(by, k), -1)
        return chosen / chosen.sum(axis=-1, keepdims=True)

    by = scores + bias
    load, signs = _load(by, k), rate * _signs(by, k)
    weights = (
        ("the bias chooses, it does not weigh: take the weights from the scores alone", weighed(by, by)),
        ("choose by score plus bias", weighed(scores, scores)),
        ("divide the weights of a token by their sum", np.take_along_axis(scores, _best(by, k), -1)),
    )
    moved = (
        ("an expert with too many tokens must become less likely: its bias falls", bias - signs),
        ("the step has one size, however far the load is from the mean", bias + rate * (load.mean() - load)),
        ("count the tokens of all ranks first: signs are taken once", bias + rate * _mean_signs(by, k)),
        ("the load is that of the choices by score plus bias", bias + rate * _signs(scores, k)),
    )
    outputs = (
        Output("weights", weighed(by, scores), "choose the k largest of score plus bias, the largest first", weights),
        Output("bias", bias + signs, _BY_RATE, moved),
    )
    missing = "return weights, a number for each choice, the best choice first, and the new bias"
    return wrong_arrays(asked, came, outputs, missing)


_BY_RATE = "add rate where the load is below the mean over experts, subtract it above, and leave the others"


# -- rows to the ranks of their experts --------------------------------------------------------------
def counts(seed: int) -> list[tuple[str, Any, int]]:
    draw, found = np.random.default_rng(19 + seed), []
    for ranks, experts, rank in ((2, 4, 0), (3, 6, 1), (2, 8, 1)):
        counts = draw.integers(1, 4, (ranks, experts))
        counts[draw.integers(ranks), draw.integers(experts)] = 0
        found.append((f"{ranks} ranks, {experts} experts, rank {rank}", counts, rank))
    return found


def _moved(counts: Any, rank: int) -> tuple[list[int], list[int], list[int]]:
    ranks, experts = counts.shape
    of_rank = counts.reshape(ranks, ranks, -1)
    local = np.tile(np.arange(experts // ranks), ranks)
    order = np.argsort(np.repeat(local, of_rank[:, rank].reshape(-1)), kind="stable")
    return of_rank[rank].sum(axis=1).tolist(), of_rank[:, rank].sum(axis=1).tolist(), order.tolist()


def wrong_dispatch(asked: str, counts: Any, rank: int, came: Any) -> Wrong | None:
    sends, receives, order = _moved(counts, rank)
    ranks = len(counts)
    found, words = arrays_of(came, [("sends", (ranks,)), ("receives", (ranks,)), ("order", (len(order),))])
    if words:
        is_sent = isinstance(came, tuple | list) and len(came) == 3 and np.size(came[2]) == sum(sends)
        return f"{asked}: {words}", _SWAPPED if is_sent else _THREE
    got = [one.tolist() for one in found]
    strided = counts.reshape(ranks, -1, ranks).sum(axis=1)[rank].tolist()
    for name, one, right, hint in (
        ("sends", got[0], sends, _STRIDED if got[0] == strided else _SWAPPED if got[0] == receives else _SENDS),
        ("receives", got[1], receives, _SWAPPED if got[1] == sends else _RECEIVES),
    ):
        if one != right:
            return f"{asked}: {name} is {_listed(one)}, expected {_listed(right)}", hint
    if got[2] == order:
        return None
    words = f"{asked}: order is {_listed(got[2])}, expected {_listed(order)}"
    if got[2] == list(range(len(order))):
        return words, "rows come from rank 0 first, then from rank 1: an expert's rows do not lie together yet"
    if got[2] == np.argsort(order).tolist():
        return words, "this is the way back: order[i] is where row i of the sorted rows came in"
    return words, "an expert's rows from rank 0 stand before its rows from rank 1, each in the order in which they came"


def _listed(numbers: Any) -> str:
    text = str([int(one) if one == int(one) else one for one in numbers])
    return text if len(text) <= 70 else f"{text[:67]}..."


_THREE = "return sends and receives, a number for each rank, and order, a number for each received row"
_STRIDED = "experts are divided in their order: with 4 on 2 ranks, rank 0 has 0 and 1"
_SWAPPED = "a row of counts is what a rank has and sends; what it gets stands in the columns of its experts"
_SENDS = "sends[r] sums this rank's counts over the experts of rank r"
_RECEIVES = "receives[r] sums rank r's counts over the experts of this rank"


# -- who averages an expert's gradient ---------------------------------------------------------------
def gradients(seed: int) -> list[tuple[Any, ...]]:
    draw, found = np.random.default_rng(20 + seed), []
    for ranks, ep in ((4, 2), (8, 2), (4, 4), (2, 1)):
        grads = [(draw.standard_normal(3), draw.standard_normal(2)) for _ in range(ranks)]
        found.append((f"{ranks} ranks, ep {ep}", grads, ep))
    return found


def wrong_average(asked: str, grads: Any, ep: int, came: Any) -> Wrong | None:
    ranks = len(grads)
    dense, experts = (np.stack(one) for one in zip(*grads, strict=True))
    if not isinstance(came, list | tuple) or len(came) != ranks:
        return f"{asked}: {shown(came)[:80]}", f"return a pair for each of {ranks} ranks: dense, experts"
    alike = experts.reshape(-1, ep, 2).sum(axis=0)  # by ep index
    for rank, pair in enumerate(came):
        right, first = alike[rank % ep] / ranks, rank // ep * ep
        neighbours = experts[first : first + ep].sum(axis=0)
        blocks = experts.reshape(ep, -1, 2).sum(axis=1)[rank * ep // ranks]
        usual = (
            (_DIVISOR, right * ep),
            ("nobody has divided: the loss is a mean over the tokens of all ranks", right * ranks),
            ("ranks of other experts were added too: their weights are others", experts.mean(axis=0)),
            *((_NEIGHBOURS, one / by) for one in (neighbours, blocks) for by in (1, ep, ranks // ep, ranks)),
            *((_TOKENS, experts[rank] / by) for by in (1, ranks)),
        )
        outputs = (
            Output("dense", dense.mean(axis=0), _DENSE),
            Output("experts", right, "sum over the ranks with the same experts, divide by all", usual),
        )
        if wrong := wrong_arrays(f"{asked}: rank {rank}", pair, outputs, "return a pair for each rank: dense, experts"):
            return wrong
    return None


_DENSE = "every rank has the dense weights: their gradient is the mean of all"
_NEIGHBOURS = "neighbours have different experts: the same ones are ep ranks apart"
_TOKENS = "other ranks have the same experts, and their tokens count too"
_DIVISOR = (
    "the number of ranks in the group is not the divisor: this gradient already sums over the tokens of ep ranks, so "
    "it is divided by as many ranks as the dense one"
)
