"""Every kernel as cases: a call, its inputs, its outputs' shapes, and a plain float64 formula of what it must leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from zerosim.backends.forms import Rope
from zerosim.backends.kernels import AdamStep, Backend, Dropout, Heads, Probs
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.backends.numpy.gptq import decode_gptq, encode_gptq
from zerosim.backends.numpy.nf4 import decode_nf4, encode_nf4
from zerosim.dtypes import FLOATING, DType, compute_dtype, int64, uint8

Values = np.ndarray[Any, np.dtype[Any]]


# -- arrays, placed at will ----------------------------------------------------------------------------
def place(backend: Backend, shape: tuple[int, ...], dtype: DType, offset: int = 0, strided: bool = False) -> Any:
    """An empty array that starts `offset` elements into its buffer; strided: every other element of one."""
    if strided:
        return backend.empty((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]
    return backend.empty((math.prod(shape) + offset,), dtype)[offset:].reshape(shape)


def put(backend: Backend, values: Values, dtype: DType, **where: Any) -> Any:
    array = place(backend, np.shape(values), dtype, **where)
    backend.from_host(np.asarray(values), array)
    return array


def dtype_of(backend: Backend, array: Any) -> DType:
    return next(d for d in FLOATING if backend.empty((0,), d).dtype == array.dtype)


def room_for(backend: Backend, probs: Any) -> Any:
    """attention_backward's workspace."""
    return backend.empty(probs.shape, dtype_of(backend, probs))


def bits(backend: Backend, array: Any) -> bytes:
    return bytes(backend.to_host(array).tobytes())


# -- the table of cases ------------------------------------------------------------------------------------
@dataclass
class Case:
    """`call(kernels, *inputs, *outputs)` must leave in the outputs what `formula(*inputs)` returns.

    Inputs are float64 values, stored in the dtype under test, or integers. An output is a shape, of
    the dtype under test; `compute` lists the outputs that have its compute dtype instead, `states` the
    inputs that do; `in_place` counts the inputs that come back as outputs; `halves` is what half types
    may be off by besides, in last places of the largest result. `blocks`: the sizes are there for the blocks
    that NumPy's kernels go by, and tell nothing new of others.
    """

    name: str
    call: Callable[..., None]
    formula: Callable[..., Any]
    inputs: list[Values]
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    compute: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()
    tolerance: float = 16.0
    halves: float = 0.0
    blocks: bool = False

    def dtype_of(self, i: int, dtype: DType) -> DType:
        kind = self.inputs[i].dtype
        if kind.kind != "f":
            return uint8 if kind == np.uint8 else int64
        return compute_dtype(dtype) if i in self.states else dtype

    def run(self, backend: Backend, dtype: DType, out_dtype: DType | None = None, **where: Any) -> list[Any]:
        """Every input as it was rounded, then every output."""
        arrays = [put(backend, x, self.dtype_of(i, dtype), **where) for i, x in enumerate(self.inputs)]
        before = [backend.to_host(a).astype(np.float64 if a.dtype.kind not in "iu" else a.dtype) for a in arrays]
        outs = [
            place(backend, shape, compute_dtype(dtype) if i in self.compute else out_dtype or dtype, **where)
            for i, shape in enumerate(self.outputs)
        ]
        self.call(backend, *arrays, *outs)
        return [before, [arrays[i] for i in self.in_place] + outs]


def softmax(x: Values) -> Values:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def heads(x: Values, parts: int, num_heads: int) -> list[Values]:
    split = x.reshape(*x.shape[:2], parts, num_heads, -1)
    return [split[:, :, i].swapaxes(1, 2) for i in range(parts)]


def packed(*parts: Values) -> Values:
    stacked = np.stack([p.swapaxes(1, 2) for p in parts], axis=2)
    return stacked.reshape(*stacked.shape[:2], -1)


def query_key_value(qkv: Values, num_heads: int, kv: int) -> list[Values]:
    """(B, H, T, d) each: keys and values repeated for the query heads that share them."""
    width = qkv.shape[-1] // (num_heads + 2 * kv)
    (q,), (k, v) = heads(qkv[..., : num_heads * width], 1, num_heads), heads(qkv[..., num_heads * width :], 2, kv)
    return [q, *(x.repeat(num_heads // kv, axis=1) for x in (k, v))]


def attention_scores(qkv: Values, num_heads: int, kv: int) -> Values:
    q, k, _ = query_key_value(qkv, num_heads, kv)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    return scores


def attention(qkv: Values, num_heads: int, kv: int, mask: Any = 1.0, keep: float = 1.0) -> list[Values]:
    probs = softmax(attention_scores(qkv, num_heads, kv))
    return [packed((probs * mask / keep) @ query_key_value(qkv, num_heads, kv)[2]), probs]


def attention_backward(
    grad: Values, qkv: Values, probs: Values, num_heads: int, kv: int, mask: Any = 1.0, keep: float = 1.0
) -> Values:
    q, k, v = query_key_value(qkv, num_heads, kv)
    (g,) = heads(grad, 1, num_heads)
    dp = g @ v.swapaxes(-1, -2) * mask / keep
    ds = probs * (dp - (dp * probs).sum(-1, keepdims=True)) / math.sqrt(q.shape[-1])
    return packed_grads(ds @ k, ds.swapaxes(-1, -2) @ q, (probs * mask / keep).swapaxes(-1, -2) @ g, kv)


def packed_grads(dq: Values, dk: Values, dv: Values, kv: int) -> Values:
    """q|k|v columns, a key-value head's gradient summed over the query heads that share it."""
    summed = [x.reshape(len(x), kv, -1, *x.shape[2:]).sum(2) for x in (dk, dv)]
    return np.concatenate([packed(dq), packed(*summed)], axis=-1)


def flash_backward(
    grad: Values, qkv: Values, out: Values, lse: Values, num_heads: int, kv: int, mask: Any = 1.0, keep: float = 1.0
) -> list[Values]:
    """With the sum of dp * p taken as that of grad * out, which is what is stored: out may have been rounded."""
    q, k, v = query_key_value(qkv, num_heads, kv)
    (g,), (y,) = heads(grad, 1, num_heads), heads(out, 1, num_heads)
    probs = np.exp(attention_scores(qkv, num_heads, kv) - lse[..., None])
    delta = (g * y).sum(-1)
    ds = probs * (g @ v.swapaxes(-1, -2) * mask / keep - delta[..., None]) / math.sqrt(q.shape[-1])
    return [delta, packed_grads(ds @ k, ds.swapaxes(-1, -2) @ q, (probs * mask / keep).swapaxes(-1, -2) @ g, kv)]


def layer_norm(x: Values, weight: Values, bias: Values) -> list[Values]:
    mean, rstd = x.mean(-1), 1 / np.sqrt(x.var(-1) + 1e-5)
    return [(x - mean[:, None]) * rstd[:, None] * weight + bias, mean, rstd]


def layer_norm_backward(grad: Values, x: Values, weight: Values, mean: Values, rstd: Values) -> list[Values]:
    normed, g = (x - mean[:, None]) * rstd[:, None], grad * weight
    dx = rstd[:, None] * (g - g.mean(-1, keepdims=True) - normed * (g * normed).mean(-1, keepdims=True))
    return [dx, (grad * normed).sum(0), grad.sum(0)]


def gelu(x: Values) -> Values:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_backward(grad: Values, x: Values) -> Values:
    u, slope = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3), math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return grad * (0.5 * (1 + np.tanh(u)) + 0.5 * x * slope / np.cosh(u) ** 2)


def log_sum_exp(x: Values) -> Values:
    return x.max(-1) + np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1))


def onehot(ids: Values, size: int) -> Values:
    return np.equal(ids[..., None], np.arange(size)).astype(float)


ADAM = {"grad_scale": 0.5, "lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}


def adam(decoupled: bool) -> Callable[..., Any]:
    def formula(p: Values, g: Values, m: Values, v: Values) -> list[Values]:
        g = g * 0.5 + (0 if decoupled else 0.1 * p)
        p = p * (1 - 0.01 * 0.1) if decoupled else p
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        return [p - 0.01 * (m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.95**3)) + 1e-8), m, v]

    return formula


def cases() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal
    x, y, positive = normal((70, 37)), normal((70, 37)), rng.uniform(0.5, 2, (70, 37))
    row, flat, weight = normal(37), normal(2003), normal((37, 29))
    yield Case("add", lambda k, *a: k.add(*a), np.add, [x, y], [x.shape])
    yield Case("add in place", lambda k, a, b: k.add(a, b, a), np.add, [x, y], in_place=(0,))
    yield Case("add number", lambda k, a, o: k.add(a, 0.3, o), lambda a: a + 0.3, [x], [x.shape])
    yield Case("subtract row", lambda k, *a: k.subtract(*a), np.subtract, [x, row], [x.shape])
    yield Case("multiply", lambda k, *a: k.multiply(*a), np.multiply, [x, y], [x.shape])
    yield Case("divide", lambda k, *a: k.divide(*a), np.divide, [x, positive], [x.shape])
    yield Case("divide column", lambda k, *a: k.divide(*a), np.divide, [x, positive[:, :1]], [x.shape])
    yield Case("exp", lambda k, *a: k.exp(*a), np.exp, [x], [x.shape])
    yield Case("log", lambda k, *a: k.log(*a), np.log, [positive], [x.shape])
    yield Case("sqrt", lambda k, *a: k.sqrt(*a), np.sqrt, [positive], [x.shape])
    yield Case("tanh", lambda k, *a: k.tanh(*a), np.tanh, [x], [x.shape])
    yield Case("sum_to row", lambda k, *a: k.sum_to(*a), lambda a: a.sum(0), [x], [(37,)])
    yield Case("sum_to column", lambda k, *a: k.sum_to(*a), lambda a: a.sum(1, keepdims=True), [x], [(70, 1)])
    yield Case("sum_to all", lambda k, *a: k.sum_to(*a), lambda a: a.sum(keepdims=True)[0], [x], [(1,)])
    yield Case("sum_to itself", lambda k, *a: k.sum_to(*a), np.copy, [x], [x.shape])
    yield Case("max_to", lambda k, *a: k.max_to(*a), lambda a: a.max(1, keepdims=True), [x], [(70, 1)])
    square = normal((3, 9, 9))
    future = np.triu(np.ones((9, 9), bool), 1)
    yield Case(
        "mask_future",
        lambda k, a, o: k.mask_future(a, -1e4, o),
        lambda a: np.where(future, -1e4, a),
        [square],
        [(3, 9, 9)],
    )
    yield Case("matmul", lambda k, *a: k.matmul(*a), np.matmul, [x, weight], [(70, 29)])
    yield Case("matmul x.T", lambda k, a, b, o: k.matmul(a.T, b, o), lambda a, b: a.T @ b, [x, y], [(37, 37)])
    yield Case("matmul w.T", lambda k, a, b, o: k.matmul(a, b.T, o), lambda a, b: a @ b.T, [x, y], [(70, 70)])
    yield Case(
        "matmul many", lambda k, *a: k.matmul(*a), np.matmul, [normal((2, 3, 5, 7)), normal((7, 4))], [(2, 3, 5, 4)]
    )
    yield Case(
        "matmul_add x.T", lambda k, o, a, b: k.matmul_add(a.T, b, o), lambda o, a, b: o + a.T @ b,
        [normal((37, 37)), x, y], in_place=(0,),
    )  # fmt: skip
    yield Case("linear", lambda k, *a: k.linear(*a), lambda a, w, b: a @ w + b, [x, weight, normal(29)], [(70, 29)])
    yield Case("linear w.T", lambda k, a, w, o: k.linear(a, w.T, None, o), lambda a, w: a @ w.T, [x, y], [(70, 70)])
    # A row times a column, which NumPy hands to another part of BLAS than other products.
    yield Case("matmul one number", lambda k, *a: k.matmul(*a), np.matmul, [x[:1], weight[:, :1]], [(1, 1)])
    yield Case(
        "linear one number", lambda k, a, w, o: k.linear(a, w, None, o), np.matmul, [row[None], weight[:, :1]], [(1, 1)]
    )
    for rows, note, blocks in ((150, "", False), (2500, " many rows", True), (1, " one row", False)):
        yield from row_cases(rows, note, blocks)
    yield Case("gelu", lambda k, *a: k.gelu(*a), gelu, [4 * flat], [flat.shape])
    yield Case(
        "gelu_backward",
        lambda k, *a: k.gelu_backward(*a),
        gelu_backward,
        [normal(2003), 4 * flat],
        [flat.shape],
        tolerance=100.0,  # 1 - tanh(u)**2 cancels, and is multiplied by x**3
    )
    yield from attention_cases("", (3, 40, 2, 2, 4), blocks=False)
    yield from attention_cases(" one token", (2, 1, 2, 2, 5), blocks=False)
    yield from attention_cases(" grouped", (2, 35, 6, 2, 4), blocks=False)
    yield from attention_cases(" one key head, more tokens", (1, 150, 6, 1, 3), blocks=False)
    yield from attention_cases(" many sequences", (24, 100, 2, 2, 4), blocks=True)
    yield from attention_cases(" many heads", (2, 300, 8, 8, 2), blocks=True)

    ids = rng.integers(0, 11, (4, 30))
    ids[0, 0] = 0
    yield Case(
        "embedding", lambda k, i, w, o: k.embedding(i, w, o), lambda i, w: w[i], [ids, normal((11, 8))], [(4, 30, 8)]
    )
    yield Case(
        "embedding_backward",
        lambda k, *a: k.embedding_backward(*a),
        lambda g, i: onehot(i.reshape(-1), 13).T @ g.reshape(-1, 8),
        [normal((4, 30, 8)), ids],
        [(13, 8)],
    )
    logits, targets = 5 * normal((400, 200)), rng.integers(0, 200, 400)
    yield Case(
        "cross_entropy",
        lambda k, *a: k.cross_entropy(*a),
        lambda z, t: [log_sum_exp(z) - z[np.arange(400), t], log_sum_exp(z)],
        [logits, targets],
        [(400,), (400,)],
        compute=(0, 1),
    )
    yield Case(
        "cross_entropy_backward",
        lambda k, z, t, s, o: k.cross_entropy_backward(z, t, s, 1024.0, 7, o),
        lambda z, t, s: (np.exp(z - s[:, None]) - onehot(t, 200)) * 1024 / 7,
        [logits, targets, log_sum_exp(logits)],
        [logits.shape],
        states=(2,),
        tolerance=100.0,
    )
    yield Case(
        "cross_entropy one row",
        lambda k, *a: k.cross_entropy(*a),
        lambda z, t: [log_sum_exp(z) - z[np.arange(1), t], log_sum_exp(z)],
        [logits[:1], targets[:1]],
        [(1,), (1,)],
        compute=(0, 1),
    )
    kept = (rng.random(2003) < 0.8).astype(np.uint8)
    yield Case(
        "dropout", lambda k, a, m, o: k.dropout(a, m, 0.8, o), lambda a, m: a * m / 0.8, [flat, kept], [flat.shape]
    )

    parts = list(normal((3, 2003)))
    yield Case("reduce sum", lambda k, *a: k.reduce(a[:-1], "sum", a[-1]), lambda *p: sum(p), parts, [(2003,)])
    yield Case("reduce avg", lambda k, *a: k.reduce(a[:-1], "avg", a[-1]), lambda *p: sum(p) / 3, parts, [(2003,)])
    yield Case("reduce max", lambda k, *a: k.reduce(a[:-1], "max", a[-1]), lambda *p: np.max(p, 0), parts, [(2003,)])
    states = [flat, normal(2003), normal(2003), rng.random(2003)]
    for name, decoupled in (("adam", False), ("adamw", True)):
        yield Case(
            name,
            lambda k, *a, d=decoupled: k.adam(*a, AdamStep(**ADAM, decoupled=d)),
            adam(decoupled),
            states,
            states=(0, 2, 3),
            in_place=(0, 2, 3),
        )


def row_cases(rows: int, note: str, blocks: bool) -> Iterator[Case]:
    normal = np.random.default_rng(2).standard_normal
    x, weight, bias = 3 * normal((rows, 48)) + 1, normal(48), normal(48)
    _, mean, rstd = layer_norm(x, weight, bias)
    yield Case(
        f"column_sum{note}",
        lambda k, *a: k.column_sum(*a),
        lambda g: g.sum(0),
        [normal((rows, 37))],
        [(37,)],
        blocks=blocks,
    )
    yield Case(
        f"layer_norm{note}",
        lambda k, a, w, b, *o: k.layer_norm(a, w, b, 1e-5, *o),
        layer_norm,
        [x, weight, bias],
        [(rows, 48), (rows,), (rows,)],
        compute=(1, 2),
        blocks=blocks,
    )
    yield Case(
        f"layer_norm_backward{note}",
        lambda k, *a: k.layer_norm_backward(*a),
        layer_norm_backward,
        [normal((rows, 48)), x, weight, mean, rstd],
        [(rows, 48), (48,), (48,)],
        states=(3, 4),
        blocks=blocks,
    )
    yield Case(
        f"layer_norm_stats{note}",
        lambda k, a, *o: k.layer_norm_stats(a, 1e-5, *o),
        lambda a: layer_norm(a, weight, bias)[1:],
        [x],
        [(rows,), (rows,)],
        compute=(0, 1),
        blocks=blocks,
    )


def attention_cases(name: str, sizes: tuple[int, int, int, int, int], blocks: bool) -> Iterator[Case]:
    batch, tokens, num_heads, kv, width = sizes
    rng = np.random.default_rng(1)
    n = Heads(num_heads, kv)
    qkv = rng.standard_normal((batch, tokens, (num_heads + 2 * kv) * width))
    grad = rng.standard_normal((batch, tokens, num_heads * width))
    qkv[0] *= 10  # scores up to about 1,000, whose exp overflows
    shape = (batch, num_heads, tokens, tokens)
    mask = (rng.random(shape) < 0.8).astype(np.uint8)
    probs = attention(qkv, *n[:2])[1]

    def run(k: Any, q: Any, o: Any, p: Any) -> None:
        k.attention(q, n, Probs(p), o)

    def run_dropout(k: Any, q: Any, m: Any, o: Any, p: Any, d: Any) -> None:
        k.attention(q, n, Probs(p, m, 0.8, d), o)

    def back(k: Any, g: Any, q: Any, p: Any, d: Any) -> None:
        k.attention_backward(g, q, n, Probs(p), room_for(k, p), d)

    def back_dropout(k: Any, g: Any, q: Any, p: Any, m: Any, d: Any) -> None:
        k.attention_backward(g, q, n, Probs(p, m, 0.8), room_for(k, p), d)

    def dropout_formula(q: Values, m: Values) -> list[Values]:
        out, p = attention(q, *n[:2], m, 0.8)
        return [out, p, p * m]

    # Tensor cores multiply v with probabilities, and q and k with gradients of scores, as they are stored: rounded to
    # the half type, where NumPy keeps them in float32. Half a last place of each, of a row that adds up to 1.
    rounded: dict[str, Any] = {"blocks": blocks, "halves": 1.5}
    # A score of 1,000 is off by 1,000 roundings of 1, and exp(score) with it.
    loose: dict[str, Any] = {"tolerance": 4.0 * 1000, **rounded}
    yield Case(f"attention{name}", run, lambda q: attention(q, *n[:2]), [qkv], [grad.shape, shape], **loose)
    yield Case(
        f"attention dropout{name}", run_dropout, dropout_formula, [qkv, mask], [grad.shape, shape, shape], **loose
    )
    yield Case(
        f"attention_backward{name}",
        back,
        lambda g, q, p: attention_backward(g, q, p, *n[:2]),
        [grad, qkv, probs],
        [qkv.shape],
        **rounded,
    )
    yield Case(
        f"attention_backward dropout{name}",
        back_dropout,
        lambda g, q, p, m: attention_backward(g, q, p, *n[:2], m, 0.8),
        [grad, qkv, probs, mask],
        [qkv.shape],
        **rounded,
    )
    for dropout in (0.0, 0.2):
        kept = np.empty(shape, np.uint8)
        NumpyBackend().dropout_mask(FLASH_KEY, dropout, kept)
        chance = (kept, 1 - dropout)
        out = attention(qkv, *n[:2], *chance)[0]
        scores = attention_scores(qkv, *n[:2])
        label = f"{' dropout' if dropout else ''}{name}"
        yield Case(
            f"flash_attention{label}",
            lambda k, q, o, z, p=dropout: k.flash_attention(q, n, Dropout(FLASH_KEY, p), o, z),
            lambda q, c=chance: [attention(q, *n[:2], *c)[0], log_sum_exp(attention_scores(q, *n[:2]))],
            [qkv],
            [grad.shape, shape[:3]],
            compute=(1,),
            **loose,
        )
        yield Case(
            f"flash_attention_backward{label}",
            lambda k, g, q, o, z, d, dq, p=dropout: k.flash_attention_backward(
                g, q, n, Dropout(FLASH_KEY, p), o, z, d, dq
            ),
            lambda g, q, o, z, c=chance: flash_backward(g, q, o, z, *n[:2], *c),
            [grad, qkv, out, log_sum_exp(scores)],
            [shape[:3], qkv.shape],
            compute=(0,),
            states=(3,),
            **loose,
        )


# -- Llama's ----------------------------------------------------------------------------------------------
def rms_norm(x: Values, w: Values) -> list[Values]:
    rstd = 1 / np.sqrt((x * x).mean(1) + 1e-5)
    return [x * rstd[:, None] * w, rstd]


def rms_norm_backward(g: Values, x: Values, w: Values, rstd: Values) -> list[Values]:
    n = x * rstd[:, None]
    return [rstd[:, None] * (g * w - n * (g * w * n).mean(1, keepdims=True)), (g * n).sum(0)]


def rotated(x: Values, head_dim: int, heads: int, base: float, inverse: bool) -> Values:
    """Pairs as complex numbers, turned by multiplication."""
    out, half = x.copy(), head_dim // 2
    places = np.arange(x.shape[1])[:, None]
    turn = np.exp((-1j if inverse else 1j) * places * base ** (-2.0 * np.arange(half) / head_dim))
    for head in range(heads):
        first = slice(head * head_dim, head * head_dim + half)
        second = slice(head * head_dim + half, (head + 1) * head_dim)
        pairs = (x[..., first] + 1j * x[..., second]) * turn
        out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


def swiglu(x: Values) -> Values:
    gate, up = np.split(x, 2, axis=1)
    return np.asarray(gate / (1 + np.exp(-gate)) * up)


def swiglu_backward(g: Values, x: Values) -> Values:
    gate, up = np.split(x, 2, axis=1)
    s = 1 / (1 + np.exp(-gate))
    return np.concatenate([g * up * s * (1 + gate * (1 - s)), g * gate * s], axis=1)


def llama_row_cases(rows: int, note: str, blocks: bool) -> Iterator[Case]:
    normal = np.random.default_rng(0).standard_normal
    x, w, g = 3 * normal((rows, 48)) + 1, normal(48), normal((rows, 48))
    rstd, more = rms_norm(x, w)[1], {"blocks": blocks}
    outs = [(rows, 48), (rows,)]

    def without_dx(k: Any, *a: Any) -> None:
        k.rms_norm_backward(*a[:4], None, a[4])

    yield Case(
        f"rms_norm{note}", lambda k, a, b, *o: k.rms_norm(a, b, 1e-5, *o), rms_norm, [x, w], outs, compute=(1,), **more
    )
    yield Case(
        f"rms_norm_stats{note}",
        lambda k, a, o: k.rms_norm_stats(a, 1e-5, o),
        lambda a: rms_norm(a, w)[1],
        [x],
        outs[1:],
        compute=(0,),
        **more,
    )
    for name, call, first in (("", lambda k, *a: k.rms_norm_backward(*a), 0), (" without dx", without_dx, 1)):
        yield Case(
            f"rms_norm_backward{name}{note}",
            call,
            lambda *a, first=first: rms_norm_backward(*a)[first:],
            [g, x, w, rstd],
            [(rows, 48), (48,)][first:],
            states=(3,),
            **more,
        )
    wide = 4 * normal((rows, 2 * 70))
    yield Case(f"swiglu{note}", lambda k, *a: k.swiglu(*a), swiglu, [wide], [(rows, 70)], **more)
    inputs = [normal((rows, 70)), wide]
    yield Case(
        f"swiglu_backward{note}", lambda k, *a: k.swiglu_backward(*a), swiglu_backward, inputs, [wide.shape], **more
    )


def llama_cases() -> Iterator[Case]:
    for rows, note, blocks in ((2000, " many rows", True), (130, "", False), (1, " one row", False)):
        yield from llama_row_cases(rows, note, blocks)
    for inverse in (False, True):
        for tokens in (9, 300):
            yield Case(
                f"rotary of {tokens} tokens, inverse={inverse}",
                lambda k, a, o, i=inverse: k.rotary(a, 6, 3, Rope(100.0), i, o),
                lambda a, i=inverse: rotated(a, 6, 3, 100.0, i),
                [np.random.default_rng(0).standard_normal((2, tokens, 24))],
                [(2, tokens, 24)],
                tolerance=16.0 + 4 * tokens,  # an angle of 300 is off by 300 roundings of 1
            )
    far = np.array([[-700.0, 700.0, 0.0, 2.0, 2.0, 2.0]])  # exp of it is inf, and the gate then 0 or itself
    yield Case("swiglu far out", lambda k, *a: k.swiglu(*a), swiglu, [far], [(1, 3)])


FLASH_KEY = (123, 456)


def nf4_cases() -> Iterator[Case]:
    for numel in (1, 63, 64, 65, 200, 64 * 256 + 7):
        codes = encode_nf4(np.random.default_rng(numel).standard_normal(numel) * 0.02)

        def formula(stored: Values, numel: int = numel) -> Values:
            return np.asarray(decode_nf4(stored, numel), np.float64)

        yield Case(f"dequantize_nf4 {numel}", lambda k, *a: k.dequantize_nf4(*a), formula, [codes], [(numel,)])


def gptq_cases() -> Iterator[Case]:
    for shape in ((1, 1), (1, 127), (3, 128), (2, 129), (65, 200)):
        codes = encode_gptq(np.random.default_rng(shape[1]).standard_normal(shape) * 0.02)

        def formula(stored: Values, shape: tuple[int, int] = shape) -> Values:
            return np.asarray(decode_gptq(stored, shape[0] * shape[1]), np.float64).reshape(shape)

        yield Case(f"dequantize_gptq {shape}", lambda k, *a: k.dequantize_gptq(*a), formula, [codes], [shape])


CASES = [*cases(), *llama_cases(), *nf4_cases(), *gptq_cases()]


def every_case(numpy: Sequence[DType], cuda: Sequence[DType], cases: Sequence[Case] = CASES) -> pytest.MarkDecorator:
    """Each case on both backends, in the types in which it can tell something on each."""
    found = [("numpy", case, numpy) for case in cases]
    found += [("cuda", case, cuda) for case in cases if not case.blocks]
    ids = [f"{name}-{case.name}" for name, case, _ in found]
    return pytest.mark.parametrize(("backend", "case", "dtypes"), found, indirect=["backend"], ids=ids)


every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=str)


def check(backend: Backend, case: Case, dtype: DType, before: list[Values], outputs: list[Any]) -> None:
    """|error| <= half the last place of what was stored + some compute-dtype roundings of the largest term."""
    expected = case.formula(*before)
    for output, wanted in zip(outputs, expected if isinstance(expected, list) else [expected], strict=True):
        got = backend.to_host(output).astype(np.float64)
        assert got.shape == wanted.shape
        stored = dtype_of(backend, output)
        compute = compute_dtype(dtype)
        scale = max(1.0, float(np.abs(wanted[np.isfinite(wanted)]).max()))
        bound = 0.51 * stored.eps * np.maximum(np.abs(wanted), stored.min_normal) + case.tolerance * compute.eps * scale
        if dtype.is_half and backend.name != "numpy":
            bound += case.halves * dtype.eps * scale
        worst = np.abs(got - wanted) - bound
        assert worst.max() <= 0, f"{case.name} {dtype}: off by {np.abs(got - wanted).max()}"
