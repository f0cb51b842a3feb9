"""gpt-oss's kernels on every backend, against plain float64 formulas: sinks, its function, biases of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from kernel_cases import Case, Values, check, every_case, room_for

from zerosim.backends.forms import Scores
from zerosim.backends.kernels import Backend, Beside, Dropout, Heads, Probs
from zerosim.dtypes import FLOATING, DType

ROWS, TOKENS, WIDTH, KEYS, SHARING = 2, 70, 4, 2, 3
OF = Heads(KEYS * SHARING, KEYS, form=Scores(window=40))
QUERIES = KEYS * SHARING * WIDTH


def by_head(qkv: Values) -> list[Values]:
    """q, k and v, (B, H, T, d)."""
    parts = np.split(qkv, [QUERIES, QUERIES + KEYS * WIDTH], axis=2)
    q, k, v = (part.reshape(ROWS, TOKENS, -1, WIDTH).transpose(0, 2, 1, 3) for part in parts)
    return [q, np.repeat(k, SHARING, axis=1), np.repeat(v, SHARING, axis=1)]


def attended(qkv: Values, sinks: Values) -> tuple[Values, Values, Values]:
    """The probabilities of keys, the log-sum-exp, and the result, (B, T, H d)."""
    q, k, v = by_head(qkv)
    ahead = np.arange(TOKENS) - np.arange(TOKENS)[:, None]
    scores = np.where((ahead > 0) | (ahead <= -40), -np.inf, q @ k.swapaxes(-1, -2) * WIDTH**-0.5)
    lse = np.log(np.exp(scores).sum(-1) + np.exp(sinks)[:, None])
    p = np.exp(scores - lse[..., None])
    return p, lse, (p @ v).transpose(0, 2, 1, 3).reshape(ROWS, TOKENS, -1)


def backward(grad: Values, qkv: Values, p: Values) -> tuple[Values, Values]:
    """The gradient of q|k|v and, from the probabilities, that of sinks."""
    q, k, v = by_head(qkv)
    g = grad.reshape(ROWS, TOKENS, -1, WIDTH).transpose(0, 2, 1, 3)
    dp = g @ v.swapaxes(-1, -2)
    delta = (dp * p).sum(-1)
    ds = p * (dp - delta[..., None]) * WIDTH**-0.5
    shared = (ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g)
    dk, dv = (a.reshape(ROWS, KEYS, SHARING, TOKENS, WIDTH).sum(2) for a in shared)
    parts = [a.transpose(0, 2, 1, 3).reshape(ROWS, TOKENS, -1) for a in (ds @ k, dk, dv)]
    return np.concatenate(parts, axis=2), -((1 - p.sum(-1)) * delta).sum((0, 2))


def cases() -> Iterator[Case]:
    rng, none = np.random.default_rng(0), Dropout((1, 2), 0.0)
    qkv = rng.standard_normal((ROWS, TOKENS, QUERIES + 2 * KEYS * WIDTH))
    grad, sinks = rng.standard_normal((ROWS, TOKENS, QUERIES)), rng.standard_normal(KEYS * SHARING) + 1
    p, lse, out = attended(qkv, sinks)
    delta = (grad * out).reshape(ROWS, TOKENS, -1, WIDTH).sum(-1).transpose(0, 2, 1)
    loose: dict[str, Any] = {"tolerance": 400.0, "halves": 3.0}

    def merged(y: Values, z: Values, s: Values) -> list[Values]:
        both = np.logaddexp(z, s[:, None])
        factor = np.exp(z - both).transpose(0, 2, 1)[..., None]
        return [(y.reshape(ROWS, TOKENS, -1, WIDTH) * factor).reshape(y.shape), both]

    yield Case(
        "attention with sinks",
        lambda k, x, s, o, a: k.attention(x, OF, Probs(a), o, Beside(sinks=s)),
        lambda x, s: [attended(x, s)[2], attended(x, s)[0]],
        [qkv, sinks],
        [grad.shape, p.shape],
        **loose,
    )
    yield Case(
        "attention_backward with sinks",
        lambda k, g, x, s, a, d, ds: k.attention_backward(
            g, x, OF, Probs(a), room_for(k, a), d, Beside(sinks=s), Beside(sinks=ds)
        ),
        lambda g, x, s, a: [*backward(g, x, a)],
        [grad, qkv, sinks, p],
        [qkv.shape, sinks.shape],
        tolerance=400.0,
        halves=30.0,  # rows of the scores' gradient, as stored, add up to a small number
    )
    yield Case(
        "flash_attention with sinks",
        lambda k, x, s, o, z: k.flash_attention(x, OF, none, o, z, s),
        lambda x, s: [attended(x, s)[2], attended(x, s)[1]],
        [qkv, sinks],
        [grad.shape, lse.shape],
        compute=(1,),
        **loose,
    )
    yield Case(
        "add_sinks",
        lambda k, y, z, s: k.add_sinks(y, z, s),
        merged,
        [out, lse, sinks],
        in_place=(0, 1),
        states=(0, 1),
    )
    yield Case(
        "sinks_backward",
        lambda k, z, d, s, ds: k.sinks_backward(z, d, s, ds),
        lambda z, d, s: -(np.exp(s[:, None] - z) * d).sum((0, 2)),
        [lse, delta, sinks],
        [sinks.shape],
        states=(0, 1),
        **loose,
    )


def clamped_cases() -> Iterator[Case]:
    """gpt-oss's function of neighbouring columns, and biases of experts, one of which has no rows."""
    rng, counts = np.random.default_rng(1), (20, 0, 33)
    x, grad = 4 * rng.standard_normal((53, 14)), rng.standard_normal((53, 7))
    bias, rows = rng.standard_normal((3, 5)), rng.standard_normal((53, 5))
    experts = np.repeat(np.arange(3), counts)

    def halves(x: Values) -> tuple[Values, Values, Values]:
        gate, up = np.minimum(x[:, ::2], 3.0), np.clip(x[:, 1::2], -3.0, 3.0)
        return gate, up, 1 / (1 + np.exp(-1.7 * gate))

    def forward(x: Values) -> Values:
        gate, up, share = halves(x)
        return gate * share * (up + 1)

    def back(g: Values, x: Values) -> Values:
        (gate, up, share), dx = halves(x), np.empty_like(x)
        dx[:, ::2] = np.where(x[:, ::2] > 3, 0, g * (up + 1) * share * (1 + 1.7 * gate * (1 - share)))
        dx[:, 1::2] = np.where(np.abs(x[:, 1::2]) > 3, 0, g * gate * share)
        return dx

    yield Case("clamped_swiglu", lambda k, x, o: k.clamped_swiglu(x, 1.7, 3.0, o), forward, [x], [grad.shape])
    yield Case(
        "clamped_swiglu_backward",
        lambda k, g, x, d: k.clamped_swiglu_backward(g, x, 1.7, 3.0, d),
        back,
        [grad, x],
        [x.shape],
        tolerance=100.0,
    )
    yield Case(
        "add_biases",
        lambda k, r, b: k.add_biases(r, b, counts),
        lambda r, b: r + b[experts],
        [rows, bias],
        in_place=(0,),
    )
    yield Case(
        "sum_biases",
        lambda k, r, o: k.sum_biases(r, counts, 0.5, o),
        lambda r: np.stack([r[experts == e].sum(0) / 2 for e in range(3)]),
        [rows],
        [bias.shape],
        tolerance=100.0,
    )


CASES = [*cases(), *clamped_cases()]


@every_case(FLOATING, FLOATING, CASES)
def test_kernel_computes_its_formula(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype))
