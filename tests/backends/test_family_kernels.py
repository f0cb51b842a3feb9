"""Kernels of other families than GPT-2's and Llama's, on every backend, against plain float64 formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from kernel_cases import Case, Values, check, every_case, gelu, gelu_backward, heads, packed, room_for

from zerosim.backends.forms import LogitForm, Rope, Scores, alibi_slopes
from zerosim.backends.kernels import Backend, Dropout, Heads, Probs
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.dtypes import FLOATING, DType, bf16, fp32

KEY = (123, 456)


def erf(x: Values) -> Values:
    return np.vectorize(math.erf)(x)


def gated(x: Values) -> Values:
    gate, up = np.split(x, 2, axis=1)
    return gelu(gate) * up


def gated_backward(grad: Values, x: Values) -> Values:
    gate, up = np.split(x, 2, axis=1)
    return np.concatenate([gelu_backward(grad * up, gate), grad * gelu(gate)], axis=1)


def gelu_erf_backward(grad: Values, x: Values) -> Values:
    return grad * (0.5 * (1 + erf(x / math.sqrt(2))) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi))


def activation_cases() -> Iterator[Case]:
    normal = np.random.default_rng(0).standard_normal
    flat, grad, pair = 4 * normal(2003), normal(2003), 4 * normal((41, 2 * 23))
    flat[0] = 1.0  # a nan in the gradient comes out where ReLU lets it through
    yield Case(
        "gelu_erf", lambda k, *a: k.gelu_erf(*a), lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))), [flat], [flat.shape]
    )
    back = [grad, flat], [flat.shape]
    yield Case("gelu_erf_backward", lambda k, *a: k.gelu_erf_backward(*a), gelu_erf_backward, *back)
    yield Case("relu", lambda k, *a: k.relu(*a), lambda x: np.maximum(x, 0), [flat], [flat.shape])
    yield Case("relu_backward", lambda k, *a: k.relu_backward(*a), lambda g, x: g * (x > 0), *back)
    yield Case("geglu", lambda k, *a: k.geglu(*a), gated, [pair], [(41, 23)])
    inputs = [normal((41, 23)), pair]
    yield Case(
        "geglu_backward", lambda k, *a: k.geglu_backward(*a), gated_backward, inputs, [pair.shape], tolerance=100
    )


def normed(x: Values, w: Values, offset: float) -> list[Values]:
    """RMS norm of each `w.size` columns."""
    by_head = x.reshape(len(x), -1, w.size)
    rstd = 1 / np.sqrt((by_head**2).mean(-1) + 1e-5)
    return [(by_head * rstd[..., None] * (w + offset)).reshape(x.shape), rstd]


def normed_backward(g: Values, x: Values, w: Values, rstd: Values, offset: float) -> list[Values]:
    grad, n = (a.reshape(len(x), -1, w.size) for a in (g, x))
    n = n * rstd.reshape(len(x), -1, 1)
    gw = grad * (w + offset)
    dx = rstd.reshape(len(x), -1, 1) * (gw - n * (gw * n).mean(-1, keepdims=True))
    return [dx.reshape(x.shape), (grad * n).sum((0, 1))]


def norm_cases() -> Iterator[Case]:
    normal = np.random.default_rng(1).standard_normal
    x, g, w, w_head = 3 * normal((70, 24)) + 1, normal((70, 24)), normal(24), normal(8)
    for offset in (0.0, 1.0):
        note = f" of offset {offset}"
        for name, weight in (("rms_norm", w), ("head_norm", w_head), ("head_norm of one head", w)):
            kernel, rows = name.split()[0], (70,) if name == "rms_norm" else (70, 24 // weight.size)
            if name == "rms_norm" and not offset:
                continue  # Llama's own
            rstd = normed(x, weight, offset)[1].reshape(rows)

            def forward(x: Values, w: Values, rows: Any = rows, offset: float = offset) -> list[Values]:
                out, rstd = normed(x, w, offset)
                return [out, rstd.reshape(rows)]

            yield Case(
                name + note,
                lambda k, a, b, *o, of=kernel, p=offset: getattr(k, of)(a, b, 1e-5, *o, p),
                forward,
                [x, weight],
                [x.shape, rows],
                compute=(1,),
            )
            yield Case(
                f"{name} backward{note}",
                lambda k, *a, of=kernel, p=offset: getattr(k, f"{of}_backward")(*a, p),
                lambda g, x, w, s, p=offset: normed_backward(g, x, w, s, p),
                [g, x, weight, rstd],
                [x.shape, weight.shape],
                states=(3,),
            )
    yield Case(
        "layer_norm without a bias",
        lambda k, a, b, *o: k.layer_norm(a, b, None, 1e-5, *o),
        lambda a, b: [
            (a - a.mean(1, keepdims=True)) / np.sqrt(a.var(1, keepdims=True) + 1e-5) * b,
            a.mean(1),
            1 / np.sqrt(a.var(1) + 1e-5),
        ],
        [x, w],
        [x.shape, (70,), (70,)],
        compute=(1, 2),
    )


def turned(x: Values, head_dim: int, heads: int, rope: Rope, inverse: bool) -> Values:
    """Pairs as complex numbers, turned by multiplication."""
    out, columns = x.copy(), rope.turned or head_dim
    rates = rope.frequencies or rope.base ** (-2.0 * np.arange(columns // 2) / columns)
    angles = (rope.first + np.arange(x.shape[1]))[:, None] * np.array(rates)
    turn = rope.factor * np.exp((-1j if inverse else 1j) * angles)
    for start in range(0, heads * head_dim, head_dim):
        first, second = slice(start, start + columns // 2), slice(start + columns // 2, start + columns)
        if rope.interleaved:
            first, second = slice(start, start + columns, 2), slice(start + 1, start + columns, 2)
        pairs = (x[..., first] + 1j * x[..., second]) * turn
        out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


ROPES = {
    "some columns": Rope(100.0, 4),
    "neighbours": Rope(100.0, interleaved=True),
    "some neighbours": Rope(100.0, 4, True, factor=1.25),
    "a table": Rope(frequencies=(0.9, 0.2, 0.03), factor=1.5),
    "a later first token": Rope(100.0, first=7),
}


def rotary_cases() -> Iterator[Case]:
    x = np.random.default_rng(0).standard_normal((2, 40, 24))
    for name, rope in ROPES.items():
        for inverse in (False, True):
            yield Case(
                f"rotary of {name}, inverse={inverse}",
                lambda k, a, o, r=rope, i=inverse: k.rotary(a, 6, 3, r, i, o),
                lambda a, r=rope, i=inverse: turned(a, 6, 3, r, i),
                [x],
                [x.shape],
                tolerance=16.0 + 4 * 40,
            )


# -- the loss -------------------------------------------------------------------------------------------
FORMS = {"capped": LogitForm(1.0, 3.0), "multiplied": LogitForm(0.25), "both": LogitForm(1.5, 4.0)}


def formed(z: Values, form: LogitForm) -> Values:
    z = z * form.factor
    return form.cap * np.tanh(z / form.cap) if form.cap else z


def loss_cases() -> Iterator[Case]:
    rng = np.random.default_rng(4)
    logits, targets, rows = 5 * rng.standard_normal((90, 70)), rng.integers(0, 70, 90), np.arange(90)
    for name, form in FORMS.items():

        def of(z: Values, t: Values, form: LogitForm = form) -> list[Values]:
            y = formed(z, form)
            lse = np.log(np.exp(y).sum(1))
            return [lse - y[rows, t], lse]

        def shares(z: Values, t: Values, top: Values, form: LogitForm = form) -> list[Values]:
            y, here = formed(z, form), (t >= 20) & (t < 90)
            return [np.exp(y - top[:, None]).sum(1), np.where(here, y[rows, np.clip(t - 20, 0, 69)], 0)]

        def back(z: Values, t: Values, lse: Values, form: LogitForm = form) -> Values:
            y = formed(z, form)
            slope = form.factor * (1 - (y / form.cap) ** 2 if form.cap else 1)
            return (np.exp(y - lse[:, None]) - np.equal(t[:, None], np.arange(70))) * 64 / 7 * slope

        yield Case(
            f"cross_entropy {name}",
            lambda k, *a, f=form: k.cross_entropy(*a, f),
            of,
            [logits, targets],
            [(90,), (90,)],
            compute=(0, 1),
        )
        top = formed(logits, form).max(1)
        yield Case(
            f"cross_entropy_shares {name}",
            lambda k, z, t, top, s, p, f=form: k.cross_entropy_shares(z, t, 20, top, s, p, f),
            shares,
            [logits, targets, top],
            [(90,), (90,)],
            compute=(0, 1),
            states=(2,),
        )
        lse = of(logits, targets)[1]
        yield Case(
            f"cross_entropy_backward {name}",
            lambda k, z, t, s, o, f=form: k.cross_entropy_backward(z, t, s, 64.0, 7, o, 0, f),
            back,
            [logits, targets, lse],
            [logits.shape],
            states=(2,),
            tolerance=100.0,
        )
        yield Case(
            f"cross_entropy_backward {name} in place",
            lambda k, z, t, s, f=form: k.cross_entropy_backward(z, t, s, 64.0, 7, z, 0, f),
            back,
            [logits, targets, lse],
            in_place=(0,),
            states=(2,),
            tolerance=100.0,
        )


# -- attention --------------------------------------------------------------------------------------------
SCORES = {
    "scaled": Scores(scale=0.7),
    "capped": Scores(cap=2.0),
    "with slopes": Scores(alibi=True),
    "in windows": Scores(window=13),
    "both ways": Scores(causal=False),
    "all at once": Scores(0.4, 3.0, True, 70),
}


def attended(qkv: Values, of: Heads) -> tuple[Values, Values, Values, Values]:
    """The scores before their cap and after, the probabilities, and values, by head."""
    q, k, v = heads(qkv[..., : qkv.shape[2]], 1, of.packed)[0], None, None
    q, k, v = np.split(q, [of.queries, of.queries + of.keys], axis=1)
    k, v = (np.repeat(a, of.sharing, axis=1) for a in (k, v))
    form, tokens = of.form, qkv.shape[1]
    before = q @ k.swapaxes(-1, -2) * (form.scale or q.shape[-1] ** -0.5)
    after = form.cap * np.tanh(before / form.cap) if form.cap else before
    ahead = np.arange(tokens) - np.arange(tokens)[:, None]
    if form.alibi:
        slopes = alibi_slopes(of.whole or of.queries)[of.first :][: of.queries]
        after = after + np.array(slopes)[:, None, None] * ahead
    hidden = (ahead > 0) & form.causal
    if form.window:
        hidden |= ahead <= -form.window
    after = np.where(hidden, -np.inf, after)
    e = np.exp(after - after.max(-1, keepdims=True))
    return before, after, e / e.sum(-1, keepdims=True), v


def attention_backward(
    g: Values, qkv: Values, of: Heads, mask: Values, probs: Values, delta: Values | None = None
) -> Values:
    """From the probabilities as they are stored; delta is the sum of dp * p, of a result as it is stored."""
    before, _, _, v = attended(qkv, of)
    q, k = np.split(heads(qkv, 1, of.packed)[0], [of.queries, of.queries + of.keys], axis=1)[:2]
    k = np.repeat(k, of.sharing, axis=1)
    (g,) = heads(g, 1, of.queries)
    dp = g @ v.swapaxes(-1, -2) * mask / 0.8
    delta = (dp * probs).sum(-1) if delta is None else delta
    ds = probs * (dp - delta[..., None]) * (of.form.scale or q.shape[-1] ** -0.5)
    if of.form.cap:
        ds = ds * (1 - np.tanh(before / of.form.cap) ** 2)
    shared = [
        a.reshape(len(a), of.keys, -1, *a.shape[2:]).sum(2)
        for a in (ds.swapaxes(-1, -2) @ q, (probs * mask / 0.8).swapaxes(-1, -2) @ g)
    ]
    return np.concatenate([packed(ds @ k), packed(*shared)], axis=-1)


@cache
def inputs_of(tokens: int, of: Heads) -> tuple[Values, Values, Values]:
    rng = np.random.default_rng(1)
    qkv = 1.5 * rng.standard_normal((2, tokens, of.packed * 4))
    mask = np.empty((2, of.queries, tokens, tokens), np.uint8)
    NumpyBackend().dropout_mask(KEY, 0.2, mask)
    return qkv, rng.standard_normal((2, tokens, of.queries * 4)), mask


def attention_cases() -> Iterator[Case]:
    for name, form in SCORES.items():
        of = Heads(6, 2, 3, 12, form) if form.alibi else Heads(6, 2, form=form)
        qkv, grad, mask = inputs_of(140, of)
        shape = (2, 6, 140, 140)
        probs, after = attended(qkv, of)[2], attended(qkv, of)[1]
        top = after.max(-1)
        lse = top + np.log(np.exp(after - top[..., None]).sum(-1))

        def eager(q: Values, of: Heads = of) -> list[Values]:
            _, _, p, v = attended(q, of)
            return [packed(p @ v), p]

        def eager_back(g: Values, q: Values, p: Values, m: Values, of: Heads = of) -> Values:
            return attention_backward(g, q, of, m, p)

        def flash(q: Values, of: Heads = of) -> list[Values]:
            _, after, p, v = attended(q, of)
            top = after.max(-1)
            return [packed(p @ v), top + np.log(np.exp(after - top[..., None]).sum(-1))]

        def flash_back(g: Values, q: Values, o: Values, z: Values, of: Heads = of, m: Values = mask) -> list[Values]:
            delta = (heads(g, 1, 6)[0] * heads(o, 1, 6)[0]).sum(-1)
            probs = np.exp(attended(q, of)[1] - z[..., None])
            return [delta, attention_backward(g, q, of, mask_of(of, m), probs, delta)]

        out = packed((attended(qkv, of)[2] * mask_of(of, mask) / 0.8) @ attended(qkv, of)[3])
        loose: dict[str, Any] = {"tolerance": 200.0, "halves": 3.0}
        yield Case(
            f"attention {name}",
            lambda k, q, o, p, n=of: k.attention(q, n, Probs(p), o),
            eager,
            [qkv],
            [grad.shape, shape],
            **loose,
        )
        yield Case(
            f"attention_backward {name}",
            lambda k, g, q, p, m, d, n=of: k.attention_backward(g, q, n, Probs(p, m, 0.8), room_for(k, p), d),
            eager_back,
            [grad, qkv, probs, mask],
            [qkv.shape],
            **loose,
        )
        yield Case(
            f"flash_attention {name}",
            lambda k, q, o, z, n=of: k.flash_attention(q, n, Dropout(KEY, 0.0), o, z),
            flash,
            [qkv],
            [grad.shape, shape[:3]],
            compute=(1,),
            **loose,
        )
        yield Case(
            f"flash_attention_backward {name}",
            lambda k, g, q, o, z, d, dq, n=of: k.flash_attention_backward(g, q, n, Dropout(KEY, 0.2), o, z, d, dq),
            flash_back,
            [grad, qkv, out, lse],
            [shape[:3], qkv.shape],
            compute=(0,),
            states=(3,),
            **loose,
        )


def mask_of(of: Heads, mask: Values) -> Values:
    """Dropout's mask of these heads, drawn as part of the whole's."""
    if not of.whole:
        return mask
    tokens = mask.shape[-1]
    whole = np.empty((2, of.whole, tokens, tokens), np.uint8)
    NumpyBackend().dropout_mask(KEY, 0.2, whole)
    return whole[:, of.first : of.first + of.queries]


CASES = [*activation_cases(), *norm_cases(), *rotary_cases(), *loss_cases(), *attention_cases()]


@every_case(FLOATING, FLOATING, CASES)
def test_kernel_computes_its_formula(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype))


@pytest.mark.quick(10)
@every_case([fp32, bf16], [fp32, bf16], CASES)
def test_arrays_may_be_strided(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype, strided=True))
