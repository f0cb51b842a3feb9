"""Exercises on fine-tuning and compression: functions of arrays, each compared with its formula in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.backends.numpy.nf4 import NF4
from zerosim.grading.asking import Wrong, by_calls
from zerosim.grading.plain import shown
from zerosim.units import few


def arrays_of(pair: Any, shapes: list[tuple[str, tuple[int, ...]]]) -> tuple[list[Any], str]:
    """Return a reply's arrays in float64; or what is missing, in words."""
    names = ", ".join(name for name, _ in shapes)
    if not isinstance(pair, tuple | list) or len(pair) != len(shapes):
        return [], f"{shown(pair)[:80]}, expected {names}"
    found = [np.asarray(one) for one in pair]
    for (name, shape), array in zip(shapes, found, strict=True):
        if array.dtype.kind not in "fiu" or array.shape != shape:
            return [], f"{name} is {array.dtype} {array.shape}, expected {shape}"
    return [array.astype(np.float64) for array in found], ""


def gap_of(name: str, got: Any, wanted: Any) -> str:
    """Return where two arrays differ by more than rounding, in words; '' if nowhere."""
    gaps = np.abs(got - wanted)
    if np.isfinite(got).all() and gaps.max(initial=0) <= 1e-5 * max(1.0, np.abs(wanted).max(initial=0)):
        return ""
    at = tuple(int(i) for i in np.unravel_index(np.nan_to_num(gaps, nan=np.inf).argmax(), gaps.shape))
    words = f"{name}{list(at)} is {got[at]:.6g}, expected {wanted[at]:.6g}"
    ratio = got[at] / wanted[at] if wanted[at] else 0.0
    is_multiple = ratio and np.isfinite(ratio) and np.allclose(got, ratio * wanted, rtol=1e-6, atol=1e-9)
    return f"{words}: all of {name} is {ratio:.4g} times the expected" if is_multiple else words


# -- an adapter's forward and backward ---------------------------------------------------------------
def _adapters(seed: int) -> list[tuple[Any, ...]]:
    random, found = np.random.default_rng(11 + seed), []
    for rows, inner, wide, rank, scale in ((3, 5, 4, 2, 1.0), (6, 8, 8, 1, 2.0), (4, 7, 9, 3, 0.25)):
        sizes = (rows, inner), (wide, inner), (rank, inner), (wide, rank)
        x, w, a, b = (random.standard_normal(shape) for shape in sizes)
        words = f"x ({rows}, {inner}), W ({wide}, {inner}), rank {rank}, scale {scale:g}"
        found.append((words, x, w, a, b, scale, random.standard_normal((rows, wide))))
    return found


def _wrong_adapter(asked: str, x: Any, w: Any, a: Any, b: Any, scale: float, dy: Any, came: Any) -> Wrong | None:
    names = ("y", (len(x), len(w))), ("dx", x.shape), ("da", a.shape), ("db", b.shape)
    found, words = arrays_of(came, list(names))
    if words:
        return f"{asked}: {words}", "return y, dx, da, db"
    low = x @ a.T
    back = scale * dy @ b
    wanted = x @ w.T + scale * low @ b.T, dy @ w + back @ a, back.T @ x, scale * dy.T @ low
    hints = (
        "compare y with the formula in the question, term by term: W, A, B and the scale each have a place",
        "two paths lead from x to y. A frozen W has no gradient, but it passes on the gradient of x",
        "follow dy back to x Aᵀ first: which factors are on the path, and is the scale one of them?",
        "B is multiplied by x Aᵀ and by the scale: both belong in its gradient",
    )
    for (name, _), got, right, hint in zip(names, found, wanted, hints, strict=True):
        if off := gap_of(name, got, right):
            return f"{asked}: {off}", hint
    return None


# -- NF4 ---------------------------------------------------------------------------------------------
def _nf4_blocks(seed: int) -> list[tuple[Any, ...]]:
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


def _wrong_nf4(asked: str, values: Any, table: Any, pair: Any) -> Wrong | None:
    packed = -(-len(values) // 2)
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], int | float)):
        return f"{asked}: {shown(pair)[:80]}, expected codes and absmax", "return an array and a number: codes, absmax"
    codes, absmax = np.asarray(pair[0]), float(pair[1])
    if codes.dtype != np.uint8 or codes.shape != (packed,):
        return f"{asked}: codes of {codes.dtype} {codes.shape}, expected uint8 ({packed},)", _PAIRS
    if absmax != float(np.abs(values).max()):
        return f"{asked}: absmax is {absmax:.9g}, expected {float(np.abs(values).max()):.9g}", _ABSMAX
    unit = values.astype(np.float64) / (absmax or 1.0)
    gaps = np.abs(unit[:, None] - table.astype(np.float64))
    high, low = codes >> 4, codes & 15

    def bad(first: Any, second: Any) -> Any:
        each = np.stack([first, second], axis=1).reshape(-1)[: len(values)]
        return np.flatnonzero(gaps[np.arange(len(values)), each] > gaps.min(axis=1) + 1e-7), each

    wrong, each = bad(high, low)
    if not wrong.size:
        return None
    if not bad(low, high)[0].size:
        return (
            f"{asked}: the two codes of each byte have changed places",
            "which value of a pair goes into the high half?",
        )
    at = int(wrong[0])
    words = f"{asked}: value {at} is {unit[at]:.4g} of absmax and became {table[each[at]]:.4g}, nearest is "
    hint = "0/0 has no nearest entry: treat a block of zeros separately" if not absmax else _NEAREST
    return words + f"{table[gaps[at].argmin()]:.4g}", hint


_ABSMAX = "absmax is the largest magnitude: a block's most negative value counts as well"
_NEAREST = "is the code that of the nearest entry or of the next one above? Is each pair packed as the question says?"


# -- top-k with error feedback -----------------------------------------------------------------------
def _gradients(seed: int) -> list[tuple[Any, ...]]:
    random, found = np.random.default_rng(13 + seed), []
    for numel, k in ((6, 2), (40, 1), (40, 40), (100, 7)):
        grad, residual = random.standard_normal(numel), 2 * random.standard_normal(numel)
        found.append((f"{numel} elements, k = {k}", grad, residual, k))
    return found


def _wrong_top_k(asked: str, grad: Any, residual: Any, k: int, came: Any) -> Wrong | None:
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
        return (
            f"{asked}: {off}",
            "values keep their sign" if is_bare else "the residual is sent along with the gradient",
        )
    sent = np.zeros_like(grad)
    sent[at] = values
    if off := gap_of("residual", left, wanted - sent):
        stays = np.abs(left[at]).max() > 0
        hint = (
            "remove the sent values from the residual: they would be sent twice"
            if stays
            else "nothing may be lost: does the old residual stay?"
        )
        return f"{asked}: {off}", hint
    return None


def _largest(sizes: Any, k: int) -> Any:
    return np.argsort(-sizes, kind="stable")[:k].astype(float)


def _listed(places: Any) -> str:
    return few([f"{place:g}" for place in sorted(places)], 8)


# -- PowerSGD's two products -------------------------------------------------------------------------
def _matrices(seed: int) -> list[tuple[Any, ...]]:
    random, found = np.random.default_rng(14 + seed), []
    for ranks, rows, columns, rank in ((1, 6, 5, 1), (2, 8, 6, 2), (3, 12, 4, 3)):
        m = [random.standard_normal((rows, columns)) for _ in range(ranks)]
        words = f"{ranks} rank{'s' * (ranks > 1)}, {rows} x {columns}, approximated at rank {rank}"
        found.append((words, m, random.standard_normal((columns, rank))))
    return found


def _wrong_powersgd(asked: str, m: Any, q: Any, came: Any) -> Wrong | None:
    mean = np.mean(m, axis=0)
    found, words = arrays_of(came, [("approximation", mean.shape), ("q", q.shape)])
    if words:
        return f"{asked}: {words}", "return the approximation and the new Q"
    p, _ = np.linalg.qr(mean @ q)
    if off := gap_of("approximation", found[0], p @ (p.T @ mean)):
        bare = mean @ q
        is_bare = not gap_of("", found[0], bare @ (bare.T @ mean))
        hint = "P's columns must be orthonormal before M is multiplied by them" if is_bare else _PRODUCTS
        return f"{asked}: {off}", hint
    # P may be any orthonormal basis of its columns' span, and turns Q's columns with it. q qᵀ is the same for all.
    if off := gap_of("q qᵀ", found[1] @ found[1].T, mean.T @ p @ (p.T @ mean)):
        return f"{asked}: {off}", _NEW_Q
    return None


_PRODUCTS = "average over ranks twice: M Q, and Mᵀ P. From which Q and which P is the approximation made?"
_NEW_Q = "the next step starts from the new Q, averaged over all ranks: the Q from which the approximation is made"

ADAPTER = by_calls("adapter", "an adapter's forward and backward", "3 maps", _adapters, _wrong_adapter)
NEAREST = by_calls("codes", "the nearest of NF4's 16 values, two a byte", "8 blocks", _nf4_blocks, _wrong_nf4)
FEEDBACK = by_calls(
    "sent", "the largest elements of gradient plus residual; the rest stays", "4 rows", _gradients, _wrong_top_k
)
POWERSGD = by_calls("products", "the mean, projected on r directions", "3 matrices", _matrices, _wrong_powersgd)
