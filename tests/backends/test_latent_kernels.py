"""Latent attention's kernels on every backend, against plain float64 formulas; attention whose values are of another
width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from kernel_cases import Case, Values, check, every_case, room_for

from zerosim.backends.forms import Rope
from zerosim.backends.kernels import Backend, Dropout, Heads, Met, Probs
from zerosim.dtypes import FLOATING, DType

HEADS, PLAIN, TURNED, VALUE, ROWS, TOKENS = 3, 4, 6, 5, 2, 70
WIDTH = PLAIN + TURNED
QKV = HEADS * (2 * WIDTH + VALUE)
ROPES = {
    "halves": Rope(100.0, TURNED),
    "neighbours": Rope(100.0, TURNED, interleaved=True, factor=1.25, first=3),
    "a table": Rope(turned=TURNED, frequencies=(0.9, 0.2, 0.03)),
}


def turned(x: Values, rope: Rope, sign: float) -> Values:
    """Rotate the last dim, (B, T, ..., R), by the token's position."""
    rates = np.array(rope.frequencies or rope.base ** -(np.arange(0, TURNED, 2) / TURNED))
    angles = (np.arange(TOKENS) + rope.first)[:, None] * rates
    cos, sin = (f(angles).reshape(1, TOKENS, *[1] * (x.ndim - 3), -1) * rope.factor for f in (np.cos, np.sin))
    half = slice(0, TURNED // 2), slice(TURNED // 2, None)
    one, other = (slice(0, None, 2), slice(1, None, 2)) if rope.interleaved else half
    out = np.empty_like(x)
    out[..., one] = x[..., one] * cos - sign * x[..., other] * sin
    out[..., other] = x[..., other] * cos + sign * x[..., one] * sin
    return out


def split(qkv: Values) -> list[Values]:
    """Heads of q, of k and of v, (B, T, H, columns)."""
    parts = np.split(qkv, [HEADS * WIDTH, 2 * HEADS * WIDTH], axis=2)
    return [part.reshape(*part.shape[:2], HEADS, -1) for part in parts]


def packed(*parts: Values) -> Values:
    return np.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=2)


def put_together(q: Values, kv: Values, shared: Values, rope: Rope) -> Values:
    q, kv = (a.reshape(*a.shape[:2], HEADS, -1) for a in (q, kv))
    of_all = np.repeat(turned(shared, rope, 1.0)[:, :, None], HEADS, axis=2)
    queries = np.concatenate([q[..., :PLAIN], turned(q[..., PLAIN:], rope, 1.0)], axis=3)
    return packed(queries, np.concatenate([kv[..., :PLAIN], of_all], axis=3), kv[..., PLAIN:])


def taken_apart(grad: Values, rope: Rope) -> list[Values]:
    q, k, v = split(grad)
    dq = np.concatenate([q[..., :PLAIN], turned(q[..., PLAIN:], rope, -1.0)], axis=3)
    return [packed(dq), packed(np.concatenate([k[..., :PLAIN], v], axis=3)), turned(k[..., PLAIN:].sum(2), rope, -1.0)]


def latent_cases() -> Iterator[Case]:
    normal = np.random.default_rng(0).standard_normal
    shapes = [(ROWS, TOKENS, columns) for columns in (HEADS * WIDTH, HEADS * (PLAIN + VALUE), TURNED)]
    for name, rope in ROPES.items():
        yield Case(
            f"latent_heads by {name}",
            lambda k, q, kv, s, o, r=rope: k.latent_heads(q, kv, s, HEADS, r, o),
            lambda q, kv, s, r=rope: put_together(q, kv, s, r),
            [normal(shape) for shape in shapes],
            [(ROWS, TOKENS, QKV)],
            tolerance=16.0 + 4 * TOKENS,
        )
        yield Case(
            f"latent_heads_backward by {name}",
            lambda k, g, q, kv, s, r=rope: k.latent_heads_backward(g, HEADS, r, q, kv, s),
            lambda g, r=rope: taken_apart(g, r),
            [normal((ROWS, TOKENS, QKV))],
            shapes,
            tolerance=16.0 + 4 * TOKENS,
        )


def attended(qkv: Values, lse: Values | None = None) -> tuple[list[Values], Values, Values]:
    """q, k and v, (B, H, T, columns), the probabilities and the log-sum-exp, or by a given one."""
    q, k, v = (part.transpose(0, 2, 1, 3) for part in split(qkv))
    scores = q @ k.swapaxes(-1, -2) * WIDTH**-0.5
    scores = np.where(np.triu(np.ones((TOKENS, TOKENS), bool), 1), -np.inf, scores)
    lse = np.log(np.exp(scores).sum(-1)) if lse is None else lse
    return [q, k, v], np.exp(scores - lse[..., None]), lse


def result(qkv: Values) -> Values:
    (_, _, v), p, _ = attended(qkv)
    return packed((p @ v).transpose(0, 2, 1, 3))


def backward(grad: Values, qkv: Values, p: Values, delta: Values | None = None) -> Values:
    q, k, v = attended(qkv)[0]
    g = grad.reshape(ROWS, TOKENS, HEADS, VALUE).transpose(0, 2, 1, 3)
    dp = g @ v.swapaxes(-1, -2)
    delta = (dp * p).sum(-1) if delta is None else delta
    ds = p * (dp - delta[..., None]) * WIDTH**-0.5
    return packed(*(a.transpose(0, 2, 1, 3) for a in (ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g)))


def width_cases() -> Iterator[Case]:
    """Heads of values with other columns than those of queries and keys: eager, flash, by blocks of keys."""
    of, rng = Heads(HEADS, HEADS, value=VALUE), np.random.default_rng(1)
    qkv, grad = rng.standard_normal((ROWS, TOKENS, QKV)), rng.standard_normal((ROWS, TOKENS, HEADS * VALUE))
    scores, out = (ROWS, HEADS, TOKENS, TOKENS), grad.shape
    parts, p, lse = attended(qkv)

    def delta_of(g: Values, o: Values) -> Values:
        return (g * o).reshape(ROWS, TOKENS, HEADS, VALUE).sum(-1).transpose(0, 2, 1)

    delta = delta_of(grad, result(qkv))
    met, none, at = Met((range(TOKENS),), (range(TOKENS),), TOKENS), Dropout((1, 2), 0.0), HEADS * WIDTH
    loose = {"tolerance": 200.0, "halves": 3.0}

    def by_blocks(k: Backend, q: Values, kv: Values, o: Values, z: Values) -> None:
        k.fill(o, 0.0)
        k.fill(z, -np.inf)
        k.attention_block(q, kv, of, met, none, o, z)

    def back_by_blocks(k: Backend, *a: Values) -> None:
        g, q, kv, z, d, dq, dkv = a
        k.fill(dq, 0.0)
        k.fill(dkv, 0.0)
        k.attention_block_backward(g, q, kv, of, met, none, z, d, dq, dkv)

    def both(*a: Values) -> list[Values]:
        whole = np.concatenate(a[1:3], axis=2)
        return np.split(backward(a[0], whole, attended(whole, a[3])[1], a[4]), [at], axis=2)

    def flash_back(g: Values, x: Values, o: Values, z: Values) -> list[Values]:
        own = delta_of(g, o)
        return [own, backward(g, x, attended(x, z)[1], own)]

    def of_both(q: Values, kv: Values) -> list[Values]:
        whole = np.concatenate([q, kv], axis=2)
        return [result(whole), attended(whole)[2]]

    yield Case(
        "attention",
        lambda k, x, o, s: k.attention(x, of, Probs(s), o),
        lambda x: [result(x), attended(x)[1]],
        [qkv],
        [out, scores],
        **loose,
    )
    yield Case(
        "attention_backward",
        lambda k, g, x, s, d: k.attention_backward(g, x, of, Probs(s), room_for(k, s), d),
        lambda g, x, s: backward(g, x, s),
        [grad, qkv, p],
        [qkv.shape],
        **loose,
    )
    yield Case(
        "flash_attention",
        lambda k, x, o, z: k.flash_attention(x, of, none, o, z),
        lambda x: [result(x), attended(x)[2]],
        [qkv],
        [out, scores[:3]],
        compute=(1,),
        **loose,
    )
    yield Case(
        "flash_attention_backward",
        lambda k, g, x, o, z, d, dx: k.flash_attention_backward(g, x, of, none, o, z, d, dx),
        flash_back,
        [grad, qkv, result(qkv), lse],
        [scores[:3], qkv.shape],
        compute=(0,),
        states=(3,),
        **loose,
    )
    yield Case(
        "attention_block",
        by_blocks,
        of_both,
        [qkv[..., :at], qkv[..., at:]],
        [out, scores[:3]],
        compute=(0, 1),
        **loose,
    )
    yield Case(
        "attention_block_backward",
        back_by_blocks,
        both,
        [grad, qkv[..., :at], qkv[..., at:], lse, delta],
        [qkv[..., :at].shape, qkv[..., at:].shape],
        compute=(0, 1),
        states=(3, 4),
        **loose,
    )
    assert [part.shape[-1] for part in parts] == [WIDTH, WIDTH, VALUE]


CASES = [*latent_cases(), *width_cases()]


@every_case(FLOATING, FLOATING, CASES)
def test_kernel_computes_its_formula(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype))
