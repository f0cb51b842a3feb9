"""Exercises on fine-tuning and compression: functions of arrays, each compared with its formula in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.backends.numpy.nf4 import NF4
from zerosim.grading.arrays import Output, arrays_of, gap_of, wrong_arrays, wrong_codes, wrong_nearest
from zerosim.grading.asking import Wrong
from zerosim.units import few


# -- an adapter's forward and backward ---------------------------------------------------------------
def adapters(seed: int) -> list[tuple[Any, ...]]:
    random, found = np.random.default_rng(11 + seed), []
    for rows, inner, wide, rank, scale in ((3, 5, 4, 2, 1.0), (6, 8, 8, 1, 2.0), (4, 7, 9, 3, 0.25)):
        sizes = (rows, inner), (wide, inner), (rank, inner), (wide, rank)
        x, w, a, b = (random.standard_normal(shape) for shape in sizes)
        words = f"x ({rows}, {inner}), W ({wide}, {inner}), rank {rank}, scale {scale:g}"
        found.append((words, x, w, a, b, scale, random.standard_normal((rows, wide))))
    return found


def wrong_adapter(asked: str, x: Any, w: Any, a: Any, b: Any, scale: float, dy: Any, came: Any) -> Wrong | None:
    low, back = x @ a.T, scale * dy @ b
    outputs = (
        Output("y", x @ w.T + scale * low @ b.T, _FORMULA),
        Output("dx", dy @ w + back @ a, _FROZEN),
        Output(
            "da",
            back.T @ x,
            "follow dy back to x Aᵀ first: which factors are on the path, and is the scale one of them?",
        ),
        Output("db", scale * dy.T @ low, "B is multiplied by x Aᵀ and by the scale: both belong in its gradient"),
    )
    return wrong_arrays(asked, came, outputs, "return y, dx, da, db")


_FORMULA = "compare y with the formula in the question, term by term: W, A, B and the scale each have a place"
_FROZEN = "two paths lead from x to y. A frozen W has no gradient, but it passes on the gradient of x"


# -- NF4 ---------------------------------------------------------------------------------------------
def nf4_blocks(seed: int) -> list[tuple[Any, ...]]:
    random = np.random.default_rng(12 + seed)
    middle = ((NF4[:-1] + NF4[1:]) / 2)[:8]
    blocks = {
        "a block of 64 normal values": random.standard_normal(64),
        "a block of values of many sizes": random.standard_normal(64) * 10.0 ** random.uniform(-4, 1, 64),
        "a last block of 9 values": random.standard_normal(9),
        "a last block of 10 values": random.standard_normal(10),
        "a block with one large value": np.concatenate([[50.0], np.full(63, -1.0)]),
        "a block with one large negative value": np.concatenate([[-50.0], np.full(63, 1.0)]),
        "a block of zeros": np.zeros(64),
        "a block of values just above the middles": np.concatenate([[1.0], np.nextafter(middle, np.float32(2))]),
    }
    return [(name, block.astype(np.float32), NF4.copy()) for name, block in blocks.items()]


_PAIRS = "two codes a byte; an odd last code has the high half of one more byte"


def wrong_nf4(asked: str, values: Any, table: Any, pair: Any) -> Wrong | None:
    packed = "two codes a byte; an odd last code has the high half of one more byte"
    if wrong := wrong_codes(asked, values, pair, -(-len(values) // 2), "absmax", packed):
        return wrong
    halves = np.asarray(pair[0]) >> 4, np.asarray(pair[0]) & 15

    def far(*halves: Any) -> Wrong | None:
        codes = np.stack(halves, axis=1).reshape(-1)[: len(values)]
        return wrong_nearest(asked, values, table, codes, float(pair[1]), "absmax", _NEAREST, least=1.0)

    if (wrong := far(*halves)) and not far(*halves[::-1]):
        words = f"{asked}: the two codes of each byte have changed places"
        return words, "which value of a pair goes into the high half?"
    return wrong


_NEAREST = "is the code that of the nearest entry or of the next one above? Is each pair packed as the question says?"


# -- top-k with error feedback -----------------------------------------------------------------------
def gradients(seed: int) -> list[tuple[Any, ...]]:
    random, found = np.random.default_rng(13 + seed), []
    for numel, k in ((6, 2), (40, 1), (40, 40), (100, 7)):
        grad, residual = random.standard_normal(numel), 2 * random.standard_normal(numel)
        found.append((f"{numel} elements, k = {k}", grad, residual, k))
    return found


def wrong_top_k(asked: str, grad: Any, residual: Any, k: int, came: Any) -> Wrong | None:
    found, words = arrays_of(came, [("places", (k,)), ("values", (k,)), ("residual", grad.shape)])
    if words:
        return f"{asked}: {words}", "return places, values, residual: k places, k values, and one residual per element"
    places, values, left = found
    wanted = grad + residual
    chosen = _largest(np.abs(wanted), k)
    if sorted(places) != sorted(chosen):
        words = f"{asked}: sends {_listed(places)}, the largest are {_listed(chosen)}"
        for other, hint in (
            (wanted, "largest means of largest magnitude: a large negative element counts as well"),
            (np.abs(grad), "elements that were not sent before count too: rank the sum of gradient and residual"),
        ):
            if sorted(places) == sorted(_largest(other, k)):
                return words, hint
        return words, "name each place once, counted from 0, by the magnitude of gradient plus residual"
    at = places.astype(int)
    if off := gap_of("values", values, wanted[at]):
        is_bare = not gap_of("", np.abs(values), np.abs(wanted[at]))
        return f"{asked}: {off}", "values keep their sign" if is_bare else _ALONG
    sent = np.zeros_like(grad)
    sent[at] = values
    if off := gap_of("residual", left, wanted - sent):
        return f"{asked}: {off}", _TWICE if np.abs(left[at]).max() > 0 else _LOST
    return None


_ALONG = "the residual is sent along with the gradient"
_TWICE = "remove the sent values from the residual: they would be sent twice"
_LOST = "nothing may be lost: does the old residual stay?"


def _largest(sizes: Any, k: int) -> Any:
    return np.argsort(-sizes, kind="stable")[:k].astype(float)


def _listed(places: Any) -> str:
    return few([f"{place:g}" for place in sorted(places)], 8)


# -- PowerSGD's two products -------------------------------------------------------------------------
def matrices(seed: int) -> list[tuple[Any, ...]]:
    random, found = np.random.default_rng(14 + seed), []
    for ranks, rows, columns, rank in ((1, 6, 5, 1), (2, 8, 6, 2), (3, 12, 4, 3)):
        m = [random.standard_normal((rows, columns)) for _ in range(ranks)]
        words = f"{ranks} rank{'s' * (ranks > 1)}, {rows} x {columns}, approximated at rank {rank}"
        found.append((words, m, random.standard_normal((columns, rank))))
    return found


def wrong_powersgd(asked: str, m: Any, q: Any, came: Any) -> Wrong | None:
    mean = np.mean(m, axis=0)
    found, words = arrays_of(came, [("approximation", mean.shape), ("q", q.shape)])
    if words:
        return f"{asked}: {words}", "return the approximation and the new Q"
    p, _ = np.linalg.qr(mean @ q)
    bare = mean @ q
    usual = ("P's columns must be orthonormal before M is multiplied by them", bare @ (bare.T @ mean))
    approximation = Output("approximation", p @ (p.T @ mean), _PRODUCTS, [usual])
    if wrong := wrong_arrays(asked, [found[0]], [approximation], ""):
        return wrong
    # P may be any orthonormal basis of its columns' span, and turns Q's columns with it. q qᵀ is the same for all.
    if off := gap_of("q qᵀ", found[1] @ found[1].T, mean.T @ p @ (p.T @ mean)):
        return f"{asked}: {off}", _NEW_Q
    return None


_PRODUCTS = "average over ranks twice: M Q, and Mᵀ P. From which Q and which P is the approximation made?"
_NEW_Q = "the next step starts from the new Q, averaged over all ranks: the Q from which the approximation is made"
