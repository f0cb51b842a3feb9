"""Every kernel of every backend against plain float64 formulas, and what shards and threads rely on:
exact casts, the order of sums, and bits that do not depend on cuts or on alignment.

A case is one call of one kernel: its inputs, its outputs' shapes, and the formula. The `backend` of conftest.py is
NumPy's and CUDA's in turn: one set of promises holds both. What only NumPy's blocks could break is for it alone.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zerosim.backends.kernels import AdamStep, Backend, Dropout, Heads, Window
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.dtypes import FLOATING, DType, bf16, compute_dtype, fp16, fp32, fp64, int64, uint8
from zerosim.optim.elementwise import Now
from zerosim.optim.sgd import SGD

HALVES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
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


def test_kernels_are_called_as_the_contract_has_it(backend: Backend) -> None:
    for name, declared in vars(Backend).items():
        if callable(declared) and not name.startswith("_") and name != "native_collective":
            _, *expected = inspect.signature(declared).parameters.values()
            found = list(inspect.signature(getattr(backend, name)).parameters.values())
            assert found == expected, name


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
        k.attention(q, n, None, 1.0, o, p, None)

    def run_dropout(k: Any, q: Any, m: Any, o: Any, p: Any, d: Any) -> None:
        k.attention(q, n, m, 0.8, o, p, d)

    def back(k: Any, g: Any, q: Any, p: Any, d: Any) -> None:
        k.attention_backward(g, q, n, p, None, None, 1.0, room_for(k, p), d)

    def back_dropout(k: Any, g: Any, q: Any, p: Any, m: Any, d: Any) -> None:
        k.attention_backward(g, q, n, p, m, None, 0.8, room_for(k, p), d)

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


FLASH_KEY = (123, 456)
CASES = list(cases())


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


# -- values ------------------------------------------------------------------------------------------------
@every_case(numpy=FLOATING, cuda=FLOATING)
def test_kernel_computes_its_formula(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype))


@every_case(numpy=[fp16, bf16], cuda=[fp16, bf16])
def test_outputs_may_be_wider_than_inputs(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype, fp32))


@pytest.mark.quick(10)
@every_case(numpy=[fp32, fp16, bf16], cuda=[fp32, bf16])
def test_arrays_may_be_strided(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    """CUDA's kernels have one path for elements of one size."""
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype, strided=True))


@pytest.mark.quick(10)
@pytest.mark.bits
@every_case(numpy=FLOATING, cuda=[fp32, bf16])
def test_alignment_never_changes_a_bit(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    """cuBLAS chooses how to multiply by the alignment of what it is given: products keep their bits from one block of
    512 bytes to another. CUDA's other kernels go element by element (the one that writes words has a test of its own).
    """
    every: Sequence[int] = (1, 2, 4, 7, 17) if "attention" in case.name else (1, 2, 3, 4, 7, 8, 16, 17)
    if backend.name == "cuda":
        every = (256,) if any(word in case.name for word in ("matmul", "linear", "attention")) else (1, 3)
    for dtype in dtypes:
        first = [bits(backend, a) for a in case.run(backend, dtype)[1]]
        for offset in every:
            found = [bits(backend, a) for a in case.run(backend, dtype, offset=offset)[1]]
            assert found == first, f"{dtype} at offset {offset}"


@pytest.mark.quick(10)
@every_case(numpy=FLOATING, cuda=FLOATING)
def test_inf_and_nan_are_results_like_others(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    """No warning (warnings are errors; only NumPy has any), and a nan in an input comes out."""
    which = next(i for i, x in enumerate(case.inputs) if x.dtype.kind == "f")
    on_numpy = backend.name == "numpy"
    for dtype, poison in ((t, x) for t in dtypes for x in (np.nan, *((np.inf, -np.inf, t.max) if on_numpy else ()))):
        inputs = [x.copy() for x in case.inputs]
        inputs[which].reshape(-1)[:1] = poison
        poisoned = Case(**{**vars(case), "inputs": inputs})
        outputs = poisoned.run(backend, dtype)[1]
        if np.isnan(poison):
            assert any(np.isnan(backend.to_host(a)).any() for a in outputs[-3:]), dtype


def test_the_contract_is_whole(backend: Backend) -> None:
    for name in [n for n in vars(Backend) if not n.startswith("_") and n != "name"]:
        kernel = getattr(backend, name)
        assert callable(kernel)
        if name != "native_collective":  # which no device records by its name
            assert kernel.__name__ == name


# -- casts ---------------------------------------------------------------------------------------------------
def same(a: Values, b: Values) -> bool:
    """Equal bits, where any nan equals any nan."""
    unsigned = {2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    return bool(np.all((a.view(unsigned) == b.view(unsigned)) | (np.isnan(a) & np.isnan(b))))


def as_half(backend: Backend, values: Values, dtype: DType) -> Values:
    """The 16-bit patterns that the backend rounds `values` to."""
    source = put(backend, values, fp64 if values.dtype == np.float64 else fp32)
    out = place(backend, values.shape, dtype)
    backend.copy(source, out)
    return np.asarray(backend.to_host(out)).astype(HALVES[dtype.name])  # exact: the values are half's already


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [fp16, bf16], ids=str)
def test_casts_are_exact(backend: Backend, dtype: DType) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(HALVES[dtype.name])
    with np.errstate(all="ignore"):
        wide = every.astype(np.float32)
    assert same(backend.to_host(put(backend, wide, dtype)), wide)

    # Everything within two float32 steps of a half value, of the middle between two, and at random.
    near = (wide.view(np.uint32)[:, None] + np.arange(-2, 3).astype(np.uint32)).reshape(-1)
    half_step = np.uint32(0x1000 if dtype is fp16 else 0x8000)
    subnormal_middles = ((np.arange(1024, dtype=np.float32) + np.float32(0.5)) * np.float32(2**-24)).view(np.uint32)
    around = (subnormal_middles[:, None] + np.arange(-2, 3).astype(np.uint32)).reshape(-1)
    random = np.random.default_rng(1).integers(0, 2**32, 2**17, dtype=np.uint32)
    small = (random & np.uint32(0x87FFFFFF)) | np.uint32(0x30000000)  # where float16 becomes subnormal
    values = np.concatenate([near, near + half_step, around, random, small]).view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(HALVES[dtype.name])
    assert same(as_half(backend, values, dtype), expected)


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [fp16, bf16], ids=str)
def test_fp64_is_rounded_once(backend: Backend, dtype: DType) -> None:
    """Just beside the middle of two halves: by way of float32 it would land on the middle, then on even."""
    lower = np.arange(1.0, 2.0, dtype.eps)
    middle = lower + dtype.eps / 2
    even = np.where(np.arange(lower.size) % 2 == 0, lower, lower + dtype.eps)
    for scale in (1.0, -1.0, 2.0**-10):
        for shift, expected in ((-(2.0**-45), lower), (0.0, even), (2.0**-45, lower + dtype.eps)):
            got = as_half(backend, (middle + shift) * scale, dtype).astype(np.float64)
            assert np.array_equal(got, expected * scale)


@every_dtype
def test_fill_and_copy(backend: Backend, dtype: DType) -> None:
    array = place(backend, (3, 5), dtype)
    backend.fill(array, 0.1)
    once = put(backend, np.full((3, 5), 0.1), dtype)
    assert bits(backend, array) == bits(backend, once)
    backend.fill(array, 1e300)
    assert np.isinf(backend.to_host(array)).all() == (dtype is not fp64)
    values = put(backend, np.arange(15.0).reshape(5, 3), dtype)
    backend.copy(values.T, array)
    assert np.array_equal(backend.to_host(array), np.arange(15.0).reshape(5, 3).T)
    empty = backend.empty((0,), dtype)
    backend.copy(empty, empty)


# -- order and cuts --------------------------------------------------------------------------------------------
@pytest.mark.bits
@every_dtype
def test_reduce_adds_in_the_order_given(backend: Backend, dtype: DType) -> None:
    rng = np.random.default_rng(2)
    for count in (1, 2, 3, 5):
        parts = [
            put(backend, rng.standard_normal((9, 8191)) * 10.0 ** rng.integers(-3, 4), dtype) for _ in range(count)
        ]
        total = backend.to_host(parts[0]).copy()
        for part in parts[1:]:
            total = total + backend.to_host(part)
        for op, wanted in (("sum", total), ("avg", total / count)):
            expected = bits(backend, put(backend, wanted, dtype))
            out = place(backend, (9, 8191), dtype)
            backend.reduce(parts, op, out)
            assert bits(backend, out) == expected
            for i in range(count):
                copies = [put(backend, backend.to_host(part), dtype) for part in parts]
                backend.reduce(copies, op, copies[i])
                assert bits(backend, copies[i]) == expected, f"{op} in place of part {i} of {count}"
        window = (slice(None), slice(100, 4200))
        out = place(backend, (9, 8191), dtype)
        backend.reduce([part[window] for part in parts], "sum", out[window])
        assert bits(backend, out[window]) == bits(backend, put(backend, total[window], dtype))


@pytest.mark.bits
@every_dtype
def test_a_slice_gets_the_bits_of_the_whole(backend: Backend, dtype: DType) -> None:
    rng, compute, size = np.random.default_rng(3), compute_dtype(dtype), 150_001
    values = [rng.standard_normal(size) for _ in range(3)] + [rng.random(size)]
    mask = place(backend, (size,), uint8)
    backend.dropout_mask((5, 6), 0.2, mask)

    def run(*cuts: int) -> list[bytes]:
        p, m, v = (put(backend, values[i], compute) for i in (0, 2, 3))
        g, x, out = put(backend, values[1], dtype), put(backend, values[0], dtype), place(backend, (6, size), dtype)
        for start, end in zip((0, *cuts), (*cuts, size), strict=True):
            s = slice(start, end)
            backend.adam(p[s], g[s], m[s], v[s], AdamStep(**ADAM, decoupled=True))
            backend.elementwise(SGD(0.9).rule, Now(0.1, 2, 0.01), 0.5, g[s], p[s], m[s])
            backend.reduce([x[s], g[s], x[s]], "avg", out[0, s])
            backend.copy(p[s], out[1, s])
            backend.add(x[s], g[s], out[2, s])
            backend.gelu(x[s], out[3, s])
            backend.gelu_backward(g[s], x[s], out[4, s])
            backend.dropout(x[s], mask[s], 0.8, out[5, s])
        return [bits(backend, a) for a in (p, m, v, out)]

    assert run() == run(1, 13, 40_000, 40_000, 111_111) == run(75_001)


@pytest.mark.bits
@every_dtype
def test_sum_squares(backend: Backend, dtype: DType) -> None:
    out = backend.empty((1,), fp64)
    for size in (0, 1, 8192, 8193, 100_003):
        array = put(backend, np.random.default_rng(size).standard_normal(size), dtype)
        exact = math.fsum(np.square(backend.to_host(array).astype(np.float64)))
        backend.sum_squares(array, size, out)
        first = float(backend.to_host(out)[0])
        assert first == pytest.approx(exact, rel=1e-13)
        for offset in range(1, 18):
            backend.sum_squares(put(backend, backend.to_host(array), dtype, offset=offset), size, out)
            assert float(backend.to_host(out)[0]) == first
    for poison in (np.inf, np.nan):
        array = put(backend, np.array([1.0, poison]), dtype)
        backend.sum_squares(array, 2, out)
        assert np.array_equal(backend.to_host(out), [poison], equal_nan=True)
    backend.sum_squares(put(backend, np.full(9, 3e38), fp32), 9, out)
    assert np.isfinite(backend.to_host(out)).all()  # no overflow: the squares are fp64


@pytest.mark.bits
@every_dtype
def test_sums_of_squares_by_runs_are_those_of_the_runs_alone(backend: Backend, dtype: DType) -> None:
    array = put(backend, np.random.default_rng(1).standard_normal(30_001), dtype)
    runs, alone = backend.empty((5,), fp64), backend.empty((1,), fp64)
    backend.sum_squares(array, 10_000, runs)
    for index, total in enumerate(backend.to_host(runs)):
        backend.sum_squares(array[index * 10_000 : (index + 1) * 10_000], 10_000, alone)
        assert backend.to_host(alone)[0] == total
    assert backend.to_host(runs)[4] == 0.0


@every_dtype
def test_finite_probe(backend: Backend, dtype: DType) -> None:
    """Whatever is finite counts as such, and one value that is not is found wherever it stands."""
    out = backend.empty((1,), fp64)
    largest = dtype.max if dtype is not fp64 else 1e150  # CUDA's is a sum of squares
    for size in (1, 7, 8193, 70_001):
        values = np.random.default_rng(size).standard_normal(size)
        values[:3] = [0.0, largest, -largest][:size]
        for offset in (0, 1, 3):
            array = put(backend, values, dtype, offset=offset)
            backend.finite_probe(array, out)
            assert backend.to_host(out)[0] == 0.0
            for place_of, poison in ((0, np.nan), (size // 2, np.inf), (size - 1, -np.inf)):
                spoiled = values.copy()
                spoiled[place_of] = poison
                backend.finite_probe(put(backend, spoiled, dtype, offset=offset), out)
                assert np.isnan(backend.to_host(out)[0])


# -- single kernels ----------------------------------------------------------------------------------------------
@every_dtype
def test_attention_sees_no_future(backend: Backend, dtype: DType) -> None:
    qkv = np.random.default_rng(4).standard_normal((2, 150, 24))
    outs = []
    for later in (0.0, 100.0):
        changed = qkv.copy()
        changed[:, 90:] += later
        sent = put(backend, changed, dtype)
        out, flash = (place(backend, (2, 150, 8), dtype) for _ in range(2))
        probs, lse = place(backend, (2, 4, 150, 150), dtype), place(backend, (2, 4, 150), compute_dtype(dtype))
        backend.attention(sent, Heads(4, 4), None, 1.0, out, probs, None)
        assert not np.triu(backend.to_host(probs), 1).any()
        backend.flash_attention(sent, Heads(4, 4), Dropout(FLASH_KEY, 0.0), flash, lse)
        outs.append([bits(backend, a) for a in (out[:, :90], flash[:, :90], lse[:, :, :90])])
    assert outs[0] == outs[1]


@pytest.mark.bits
@every_dtype
@pytest.mark.parametrize(("num_heads", "kv"), [(4, 4), (6, 2)])
def test_a_kept_dropped_softmax_changes_no_bit(backend: Backend, dtype: DType, num_heads: int, kv: int) -> None:
    """It is softmax * mask, not divided yet: exactly what backward makes of the two where it is not kept."""
    rng = np.random.default_rng(7)
    shape, heads = (2, num_heads, 70, 70), Heads(num_heads, kv)
    qkv = put(backend, rng.standard_normal((2, 70, (num_heads + 2 * kv) * 8)), dtype)
    grad = put(backend, rng.standard_normal((2, 70, num_heads * 8)), dtype)
    mask = put(backend, (rng.random(shape) < 0.7).astype(np.uint8), uint8)
    probs, dropped, room = (place(backend, shape, dtype) for _ in range(3))
    out, plain, kept = (
        place(backend, grad.shape, dtype),
        place(backend, qkv.shape, dtype),
        place(backend, qkv.shape, dtype),
    )
    backend.attention(qkv, heads, mask, 0.7, out, probs, dropped)
    assert (backend.to_host(dropped) == backend.to_host(probs) * backend.to_host(mask)).all()
    backend.attention_backward(grad, qkv, heads, probs, mask, None, 0.7, room, plain)
    backend.attention_backward(grad, qkv, heads, probs, mask, dropped, 0.7, room, kept)
    assert bits(backend, plain) == bits(backend, kept)


@pytest.mark.bits
@every_dtype
def test_statistics_alone_are_the_norms(backend: Backend, dtype: DType) -> None:
    x = put(backend, np.random.default_rng(8).standard_normal((3000, 48)), dtype)
    row = put(backend, np.ones(48), dtype)
    with_norm, alone = ([place(backend, (3000,), compute_dtype(dtype)) for _ in range(2)] for _ in range(2))
    backend.layer_norm(x, row, row, 1e-5, place(backend, x.shape, dtype), *with_norm)
    backend.layer_norm_stats(x, 1e-5, *alone)
    assert [bits(backend, a) for a in with_norm] == [bits(backend, a) for a in alone]


def test_layer_norm_backward_may_leave_out_dx(backend: Backend) -> None:
    case = next(c for c in CASES if c.name == "layer_norm_backward")
    before, (_, *wanted) = case.run(backend, fp32)
    inputs = [put(backend, x, fp32) for x in before]
    got = [place(backend, (48,), fp32) for _ in range(2)]
    backend.layer_norm_backward(*inputs, None, *got)
    assert [bits(backend, a) for a in got] == [bits(backend, a) for a in wanted]


def test_a_bad_gradient_spoils_its_own_embedding_only(backend: Backend) -> None:
    grad = np.ones((4, 3))
    grad[1] = np.inf, np.nan, 1
    dweight = place(backend, (5, 3), fp32)
    backend.embedding_backward(put(backend, grad, fp32), put(backend, np.array([2, 0, 2, 4]), int64), dweight)
    wanted = [[np.inf, np.nan, 1], [0] * 3, [2] * 3, [0] * 3, [1] * 3]
    assert np.array_equal(backend.to_host(dweight), wanted, equal_nan=True)


def philox_words(key: tuple[int, int], count: int) -> list[int]:
    """Philox-4x64-10 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"), spelled out."""
    words: list[int] = []
    full = 2**64 - 1
    for block in range(-(-count // 8)):
        (a, b, c, d), (k0, k1) = (block + 1, 0, 0, 0), key
        for _ in range(10):
            left, right = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
            a, b, c, d = (right >> 64) ^ b ^ k0, right & full, (left >> 64) ^ d ^ k1, left & full
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & full, (k1 + 0xBB67AE8584CAA73B) & full
        for word in (a, b, c, d):
            words += [word & 0xFFFFFFFF, word >> 32]
    return words[:count]


@pytest.mark.bits
def test_dropout_mask_is_the_philox_stream(backend: Backend) -> None:
    key, shape = (0x0123456789ABCDEF, 2**64 - 2), (7, 11, 13)
    for probability in (0.1, 0.5, 0.999):
        mask = place(backend, shape, uint8)
        backend.dropout_mask(key, probability, mask)
        threshold = round(probability * 2**32)
        wanted = np.array([word >= threshold for word in philox_words(key, mask.size)]).reshape(shape)
        assert np.array_equal(backend.to_host(mask), wanted)


def test_dropout_mask_statistics(backend: Backend) -> None:
    long, short = (place(backend, (size,), uint8) for size in (300_001, 1_003))
    backend.dropout_mask((1, 2), 0.3, long)
    backend.dropout_mask((1, 2), 0.3, short)
    kept = backend.to_host(long)
    assert np.array_equal(kept[:1_003], backend.to_host(short))  # a position's fate depends on nothing else
    assert set(np.unique(kept)) == {0, 1}
    assert abs(kept.mean() - 0.7) < 5 * math.sqrt(0.3 * 0.7 / kept.size)
    assert abs(np.corrcoef(kept[1:], kept[:-1])[0, 1]) < 5 / math.sqrt(kept.size)
    for other in ((1, 3), (2, 2)):
        backend.dropout_mask(other, 0.3, long)
        assert abs(np.corrcoef(kept, backend.to_host(long))[0, 1]) < 5 / math.sqrt(kept.size)
    for probability, value in ((0.0, 1), (1.0, 0)):
        backend.dropout_mask((1, 2), probability, long)
        assert (backend.to_host(long) == value).all()


# -- parts of a whole ----------------------------------------------------------------------------------------
@pytest.mark.bits
def test_a_window_of_a_mask_is_the_windows_of_the_whole(backend: Backend) -> None:
    """Runs that start and end anywhere among the 8 words of a counter, back to back, apart, or over each other."""
    key, probability = (7, 2**63 + 1), 0.4
    whole = place(backend, (5000,), uint8)
    backend.dropout_mask(key, probability, whole)
    expected = backend.to_host(whole)
    cases = [(first, run, run + gap, 3) for first in range(10) for run in (1, 3, 8, 13) for gap in (0, 1, 7)]
    cases += [(1, 1025, 1030, 4), (4096, 31, 0, 1), (4099, 16, 40, 9), (0, 5, 2, 6)]
    for first, run, stride, runs in cases:
        mask = place(backend, (runs, run), uint8, offset=first % 3)
        backend.dropout_mask(key, probability, mask, Window(first, run, stride))
        wanted = [expected[first + i * stride : first + i * stride + run] for i in range(runs)]
        assert np.array_equal(backend.to_host(mask), wanted), (first, run, stride)
    backend.dropout_mask(key, probability, place(backend, (0,), uint8), Window(3, 4, 5))


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_parts_of_a_table_add_up_to_the_whole(backend: Backend, dtype: DType) -> None:
    """Every id is some part's, whose row it gets; the others give zeros, whatever their rows hold."""
    random = np.random.default_rng(0)
    table, ids = random.standard_normal((11, 5)), random.integers(0, 11, (3, 7))
    stored, tokens = put(backend, table, dtype), put(backend, ids, int64)
    out = place(backend, (3, 7, 5), dtype)
    backend.embedding(tokens, stored, out)
    whole = backend.to_host(out).astype(np.float64)
    grad = put(backend, random.standard_normal((3, 7, 5)), dtype)
    dtable = place(backend, (11, 5), dtype)
    backend.embedding_backward(grad, tokens, dtable)
    total, rows = np.zeros_like(whole), []
    for first, stop in ((0, 4), (4, 5), (5, 9), (9, 11), (11, 13)):  # the last one is padding
        part = np.full((stop - first, 5), np.nan)
        part[: max(0, min(stop, 11) - first)] = table[first:stop]
        backend.embedding(tokens, put(backend, part, dtype), out, first)
        own = backend.to_host(out).astype(np.float64)
        assert np.array_equal(own[(ids < first) | (ids >= stop)], np.zeros_like(own)[(ids < first) | (ids >= stop)])
        total += own
        dpart = place(backend, (stop - first, 5), dtype)
        backend.embedding_backward(grad, tokens, dpart, first)
        rows.append(backend.to_host(dpart))
    assert np.array_equal(total, whole)
    assert np.array_equal(np.concatenate(rows)[:11], backend.to_host(dtable))
    assert not np.concatenate(rows)[11:].any()


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_shares_of_a_cross_entropy_are_those_of_the_whole(backend: Backend, dtype: DType) -> None:
    """Sums of exponentials below a top, the target's logit, and columns of the gradient, part by part."""
    random, compute = np.random.default_rng(1), compute_dtype(dtype)
    logits, targets = 3 * random.standard_normal((6, 10)), random.integers(0, 10, 6)
    logits[2] += 900  # exp of it overflows: only less the top of all columns it does not
    stored, ids = put(backend, logits, dtype), put(backend, targets, int64)
    logits = backend.to_host(stored).astype(np.float64)
    top = put(backend, logits.max(1), compute)
    losses, lse, dlogits = (
        place(backend, shape, t) for shape, t in (((6,), compute), ((6,), compute), ((6, 10), dtype))
    )
    backend.cross_entropy(stored, ids, losses, lse)
    backend.cross_entropy_backward(stored, ids, lse, 2.0, 7, dlogits)
    sums, picked, columns = np.zeros(6), np.zeros(6), []
    for first, stop in ((0, 3), (3, 4), (4, 10), (10, 10)):
        mine = stored[:, first:stop]
        share, found = place(backend, (6,), compute, offset=1), place(backend, (6,), compute)
        backend.cross_entropy_shares(mine, ids, first, top, share, found)
        sums += backend.to_host(share)
        here = (targets >= first) & (targets < stop)
        assert np.array_equal(backend.to_host(found), np.where(here, logits[np.arange(6), targets], 0.0))
        picked += backend.to_host(found)
        dmine = place(backend, (6, stop - first), dtype)
        backend.cross_entropy_backward(mine, ids, lse, 2.0, 7, dmine, first)
        columns.append(backend.to_host(dmine).astype(np.float64))
    off = 16 * compute.eps
    np.testing.assert_allclose(sums, np.exp(logits - logits.max(1, keepdims=True)).sum(1), rtol=off, atol=0)
    assert np.array_equal(picked, logits[np.arange(6), targets])
    found = np.log(sums) + logits.max(1) - picked
    np.testing.assert_allclose(found, backend.to_host(losses), rtol=off, atol=off * 1000)
    assert np.array_equal(np.concatenate(columns, axis=1), backend.to_host(dlogits).astype(np.float64))


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_some_heads_drop_what_the_whole_drops(backend: Backend, dtype: DType) -> None:
    """Flash attention of heads 2 and 3 of 4, two sequences: its masks are those of the whole's heads."""
    random, dropout = np.random.default_rng(2), Dropout((5, 6), 0.5)
    d, tokens = 3, 9
    q, k, v = (random.standard_normal((2, tokens, 4, d)) for _ in range(3))

    def packed_heads(heads: slice) -> Values:
        return np.concatenate([x[:, :, heads].reshape(2, tokens, -1) for x in (q, k, v)], axis=-1)

    def run(heads: slice, n: Heads) -> Any:
        qkv = put(backend, packed_heads(heads), dtype)
        out = place(backend, (2, tokens, n.queries * d), dtype)
        lse, delta = (place(backend, (2, n.queries, tokens), compute_dtype(dtype)) for _ in range(2))
        backend.flash_attention(qkv, n, dropout, out, lse)
        dqkv = place(backend, qkv.shape, dtype)
        backend.flash_attention_backward(out, qkv, n, dropout, out, lse, delta, dqkv)
        shape = (2, tokens, -1, n.queries, d)
        return [backend.to_host(x).reshape(shape).astype(np.float64) for x in (out, dqkv)]

    whole, part = run(slice(0, 4), Heads(4, 4)), run(slice(2, 4), Heads(2, 2, 2, 4))
    other = run(slice(2, 4), Heads(2, 2))
    for ours, theirs, first in zip(part, whole, other, strict=True):
        np.testing.assert_allclose(ours, theirs[..., 2:4, :], rtol=0, atol=64 * dtype.eps)
        assert np.abs(first - ours).max() > 1e-2  # the first heads' masks are others


def test_nothing_is_something_too(backend: Backend) -> None:
    """A rank beyond the last parameter owns an empty shard."""
    p, g, m, v = (backend.empty((0,), fp32) for _ in range(4))
    backend.adam(p, g, m, v, AdamStep(**ADAM, decoupled=True))
    backend.elementwise(SGD(0.9).rule, Now(0.1, 1, 0.01), 0.5, g, p, m)
    backend.reduce([p, g], "avg", m)
    backend.add(p, g, m)
