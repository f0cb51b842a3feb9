"""Fused ops: their gradients, what they keep, and that each gives what its composition of primitives gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from zerosim import functional as F
from zerosim.backends.forms import Rope, Scores
from zerosim.backends.kernels import Heads
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import uint8
from zerosim.errors import InputError
from zerosim.functional.attention import Attended, Core, eager, flash
from zerosim.functional.loss import LogitsGrad
from zerosim.functional.loss_modes import lean
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.tensor import ops as P
from zerosim.tensor import rng
from zerosim.tensor.autograd import backward
from zerosim.tensor.gradcheck import gradcheck
from zerosim.tensor.tensor import Operand, Tensor, cpu, tensor

KEY = rng.key("a fixed place")
IDS = [[3, 0, 3], [1, 3, 0]]


def ids(values: Any, device: Device) -> Buffer:
    return tensor(values, device, dtype="int64").buffer


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b)


def linear_transposed(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b, transposed=True)


def attention(
    heads: int, dropout: float = 0.0, kv: int | None = None, policy: ActivationPolicy = DEFAULT
) -> Callable[[Tensor], Tensor]:
    return lambda qkv: F.attention(qkv, heads, num_kv_heads=kv, dropout=dropout, key=KEY, policy=policy)


def attention_beside(q: Tensor, kv: Tensor, bias: Tensor) -> Tensor:
    """Of 4 heads of queries, which share 2 of another text's keys and values."""
    form = Scores(1.0, causal=False)
    return F.attention(q, 4, num_kv_heads=2, dropout=0.3, key=KEY, policy=EAGER_AGAIN, form=form, kv=kv, bias=bias)


FLASH, MEGATRON = ActivationPolicy("lean", "flash"), ActivationPolicy("megatron")
EAGER_AGAIN, FLASH_AGAIN = (
    ActivationPolicy("megatron", "eager", "selective"),
    ActivationPolicy("lean", "flash", "selective"),
)


def megatron_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight, bias, 1e-3, policy=MEGATRON)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        pytest.param(linear, [(4, 3), (3, 2)], id="linear"),
        pytest.param(linear, [(2, 4, 3), (3, 5), (5,)], id="linear-bias"),
        pytest.param(linear_transposed, [(4, 3), (2, 3)], id="linear-transposed"),
        pytest.param(linear_transposed, [(2, 4, 3), (5, 3), (5,)], id="linear-transposed-bias"),
        pytest.param(F.layer_norm, [(5, 4), (4,), (4,)], id="layer_norm"),
        pytest.param(F.layer_norm, [(2, 3, 7), (7,), (7,)], id="layer_norm-3d"),
        pytest.param(megatron_norm, [(2, 3, 7), (7,), (7,)], id="layer_norm-stats-again"),
        pytest.param(F.gelu, [(3, 4)], id="gelu"),
        pytest.param(F.gelu, [np.linspace(-8, 8, 33)], id="gelu-tails"),
        pytest.param(attention(1), [(2, 3, 6)], id="attention"),
        pytest.param(attention(2), [(1, 4, 12)], id="attention-2-heads"),
        pytest.param(attention(4), [(2, 3, 24)], id="attention-4-heads"),
        pytest.param(attention(2), [(2, 1, 12)], id="attention-T1"),
        pytest.param(attention(2, 0.4), [(2, 4, 12)], id="attention-dropout"),
        pytest.param(attention(1, 0.5), [(1, 1, 6)], id="attention-dropout-T1"),
        pytest.param(attention(4, 0.0, 2), [(2, 3, 16)], id="attention-grouped"),
        pytest.param(attention(3, 0.0, 1), [(1, 4, 10)], id="attention-one-kv-head"),
        pytest.param(attention(4, 0.3, 2), [(1, 4, 16)], id="attention-grouped-dropout"),
        pytest.param(attention(2, 0.3, None, MEGATRON), [(1, 4, 12)], id="attention-megatron"),
        pytest.param(attention(4, 0.3, 2, EAGER_AGAIN), [(1, 4, 16)], id="attention-again"),
        pytest.param(attention_beside, [(2, 3, 8), (2, 5, 8), (4, 3, 5)], id="attention-beside"),
        pytest.param(lambda qkv, bias: F.attention(qkv, 2, bias=bias), [(2, 3, 12), (2, 3, 3)], id="attention-bias"),
        pytest.param(lambda w: F.relative_bias(w, 9, largest=6, causal=False), [(8, 3)], id="relative_bias"),
        pytest.param(attention(2, 0.0, None, FLASH), [(2, 3, 12)], id="flash"),
        pytest.param(attention(4, 0.4, 2, FLASH), [(2, 4, 16)], id="flash-grouped-dropout"),
        pytest.param(attention(1, 0.5, None, FLASH), [(1, 1, 6)], id="flash-dropout-T1"),
        pytest.param(attention(2, 0.4, 1, FLASH_AGAIN), [(2, 3, 8)], id="flash-again"),
        pytest.param(lambda w: F.embedding(ids(IDS, w.device), w), [(5, 3)], id="embedding-repeated-ids"),
        pytest.param(F.add_rows, [(2, 3, 4), (3, 4)], id="add_rows"),
        pytest.param(F.add_rows, [(2, 3, 4), (5, 4)], id="add_rows-unused"),
        pytest.param(F.add_rows, [(1, 1, 4), (2, 4)], id="add_rows-T1"),
        pytest.param(lambda x: F.cross_entropy(x, ids([0, 3, 1], x.device)), [(3, 4)], id="cross_entropy"),
        pytest.param(lambda x: F.cross_entropy(x, ids(IDS, x.device)), [(2, 3, 4)], id="cross_entropy-3d"),
        pytest.param(lambda x: F.dropout(x, 0.3, KEY), [(4, 5)], id="dropout"),
        pytest.param(lambda x: F.dropout(x, 0.0, KEY), [(2, 2)], id="dropout-0"),
        pytest.param(F.rms_norm, [(5, 4), (4,)], id="rms_norm"),
        pytest.param(F.rms_norm, [(2, 3, 7), (7,)], id="rms_norm-3d"),
        pytest.param(
            lambda x, w: F.rms_norm(x, w, policy=MEGATRON),
            [(5, 4), (4,)],
            id="rms_norm-again",
        ),
        pytest.param(lambda x: F.rotary(x, 2, 1, rope=Rope(10.0)), [(2, 4, 16)], id="rotary"),
        pytest.param(F.swiglu, [(2, 3, 8)], id="swiglu"),
        pytest.param(lambda x, *w: F.packed_linear(x, w), [(2, 3, 5), (4, 5), (2, 5), (3, 5)], id="packed_linear"),
        pytest.param(lambda x, w: F.packed_linear(x, [w]), [(3, 5), (4, 5)], id="packed_linear-one"),
        pytest.param(
            lambda x, *w: F.attention(F.rotary(F.packed_linear(x, w), 4, 2), 4, num_kv_heads=2),
            [(2, 3, 8), (8, 8), (4, 8), (4, 8)],
            id="grouped-query attention",
        ),
    ],
)
@pytest.mark.usefixtures("plain_device")
def test_gradients(function: Callable[..., Tensor], inputs: list[Any]) -> None:
    gradcheck(function, inputs)


# -- fused and composed ------------------------------------------------------------------------------
def norm_composed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdims=True)
    return centred / ((centred * centred).mean(-1, keepdims=True) + 1e-5).sqrt() * weight + bias


def gelu_composed(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + ((2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x)).tanh())


def softmax(scores: Tensor) -> Tensor:
    exps = (scores - P.maximum(scores, (-1,))).exp()
    return exps / exps.sum(-1, keepdims=True)


def attention_composed(heads: int, dropout: float = 0.0, kv: int | None = None) -> Callable[[Tensor], Tensor]:
    """Each of the H + 2K heads is picked out by a product with a constant; shared ones are picked more than once."""
    kv = kv or heads

    def run(qkv: Tensor) -> Tensor:
        batch, tokens, width = qkv.shape
        d = width // (heads + 2 * kv)
        split = qkv.reshape(batch, tokens, heads + 2 * kv, d).transpose(0, 2, 1, 3)  # (B, H + 2K, T, d)
        share = [head // (heads // kv) for head in range(heads)]
        columns = range(heads), [heads + i for i in share], [heads + kv + i for i in share]
        q, k, v = (choose(split, which) for which in columns)
        probs = softmax(P.mask_future(q @ k.transpose(0, 1, 3, 2) / d**0.5))
        if dropout:
            mask = qkv.device.alloc(probs.shape, uint8, Kind.ACTIVATION)
            qkv.device.backend.dropout_mask(KEY, dropout, mask.array)
            probs = probs * tensor(Tensor(mask).numpy(), qkv.device, dtype="fp64") / (1 - dropout)
        return (probs @ v).transpose(0, 2, 1, 3).reshape(batch, tokens, heads * d)

    return run


def choose(x: Tensor, heads: Sequence[int]) -> Tensor:
    """x[:, heads] of x (B, H, T, d), spelled as a product with a constant."""
    batch, given, tokens, d = x.shape
    one_hot = tensor(np.eye(given)[list(heads)], x.device, dtype="fp64")
    return (one_hot @ x.reshape(batch, given, tokens * d)).reshape(batch, len(heads), tokens, d)


def cross_entropy_composed(logits: Tensor) -> Tensor:
    one_hot = tensor(np.eye(logits.shape[-1])[IDS], logits.device, dtype="fp64")
    top = P.maximum(logits, (-1,))
    lse = (logits - top).exp().sum(-1, keepdims=True).log() + top
    return (lse - (logits * one_hot).sum(-1, keepdims=True)).mean().reshape(1)


@pytest.mark.parametrize(
    ("fused", "composed", "shapes"),
    [
        pytest.param(linear, lambda x, w, b: x @ w + b, [(2, 4, 3), (3, 5), (5,)], id="linear"),
        pytest.param(linear_transposed, lambda x, w: x @ w.transpose(), [(4, 3), (5, 3)], id="linear-transposed"),
        pytest.param(F.layer_norm, norm_composed, [(2, 3, 8), (8,), (8,)], id="layer_norm"),
        pytest.param(F.gelu, gelu_composed, [(4, 5)], id="gelu"),
        pytest.param(attention(1), attention_composed(1), [(2, 5, 6)], id="attention"),
        pytest.param(attention(3), attention_composed(3), [(2, 4, 18)], id="attention-3-heads"),
        pytest.param(attention(2), attention_composed(2), [(1, 70, 12)], id="attention-two-blocks"),
        pytest.param(attention(2, 0.3), attention_composed(2, 0.3), [(2, 4, 12)], id="attention-dropout"),
        pytest.param(attention(4, 0.0, 2), attention_composed(4, 0.0, 2), [(2, 5, 24)], id="attention-grouped"),
        pytest.param(
            attention(6, 0.3, 2), attention_composed(6, 0.3, 2), [(1, 70, 20)], id="attention-grouped-dropout"
        ),
        pytest.param(attention(2, 0.0, None, FLASH), attention_composed(2), [(1, 70, 12)], id="flash"),
        pytest.param(attention(4, 0.3, 2, FLASH), attention_composed(4, 0.3, 2), [(2, 66, 16)], id="flash-dropout"),
        pytest.param(attention(4, 0.3, 2, FLASH_AGAIN), attention_composed(4, 0.3, 2), [(2, 5, 16)], id="flash-again"),
        pytest.param(attention(4, 0.3, 2, EAGER_AGAIN), attention_composed(4, 0.3, 2), [(2, 5, 16)], id="eager-again"),
        pytest.param(F.add_rows, lambda x, rows: x + rows, [(2, 3, 4), (3, 4)], id="add_rows"),
        pytest.param(
            lambda x: F.cross_entropy(x, ids(IDS, x.device)), cross_entropy_composed, [(2, 3, 4)], id="cross_entropy"
        ),
    ],
)
def test_fused_is_composed(
    plain_device: Device, fused: Callable[..., Tensor], composed: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    random = np.random.default_rng(3)
    values = [random.standard_normal(shape) for shape in shapes]
    results = []
    for function in (fused, composed):
        device = plain_device
        leaves = [tensor(value, device, dtype="fp64", requires_grad=True) for value in values]
        out = function(*leaves)
        weights = tensor(np.random.default_rng(4).standard_normal(out.shape), device, dtype="fp64")
        (out * weights).sum().backward()
        results.append([out.numpy(), *(leaf.grad.numpy() for leaf in leaves if leaf.grad is not None)])
    assert len(results[0]) == len(results[1]) == 1 + len(shapes)
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


# -- single ops ---------------------------------------------------------------------------------------


def attention_results(policy: ActivationPolicy, dtype: str, dropout: float = 0.3) -> list[Any]:
    """The result and the gradient of qkv, on one draw rounded to `dtype`."""
    device = cpu()
    random = np.random.default_rng(5)
    qkv = tensor(random.standard_normal((3, 150, 40)), device, dtype=dtype, requires_grad=True)
    out = F.attention(qkv, 6, num_kv_heads=2, dropout=dropout, key=KEY, policy=policy)
    seed = tensor(random.standard_normal(out.shape), device, dtype=dtype)
    result = out.numpy()
    assert out.node is not None
    backward(out.node, [seed.buffer])
    assert qkv.grad is not None
    return [result, qkv.grad.numpy()]


@pytest.mark.parametrize("core", [eager, flash])
def test_blocks_of_keys_are_merged_by_their_log_sum_exp(core: Callable[[Tensor, Core], Attended]) -> None:
    """The later half of the queries: the core on their own keys, and the earlier keys, which they see in full."""
    heads, kv, half, columns = 4, 2, 5, 6
    qkv = np.random.default_rng(3).standard_normal((2, 2 * half, (heads + 2 * kv) * columns))

    def run(values: Any) -> tuple[Any, Any]:
        found = core(tensor(values, cpu(), dtype="fp64"), Core(Heads(heads, kv), 0.0, KEY, DEFAULT))
        assert found.lse.shape == (2, heads, values.shape[1])
        return found.out.array.reshape(2, -1, heads, columns).swapaxes(1, 2), found.lse.array[..., None]

    own, own_lse = run(qkv[:, half:])
    apart = qkv.reshape(2, 2 * half, -1, columns).swapaxes(1, 2)
    keys, values = (np.repeat(apart[:, at : at + kv, :half], heads // kv, axis=1) for at in (heads, heads + kv))
    weights = np.exp(apart[:, :heads, half:] @ keys.swapaxes(2, 3) / np.sqrt(columns))
    total = weights.sum(axis=-1, keepdims=True)
    lse = np.logaddexp(own_lse, np.log(total))
    merged = np.exp(own_lse - lse) * own + np.exp(-lse) * (weights @ values)
    whole, whole_lse = run(qkv)
    np.testing.assert_allclose(merged, whole[:, :, half:], rtol=1e-12)
    np.testing.assert_allclose(lse, whole_lse[:, :, half:], rtol=1e-13)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_flash_is_eager_to_within_rounding(dtype: str, dropout: float) -> None:
    """The same masks too: one other dropped score would show. Gradients pass through a rounded result."""
    eps = {"fp64": 2.0**-52, "fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}[dtype]
    eager, flash = (attention_results(policy, dtype, dropout) for policy in (DEFAULT, FLASH))
    for ours, theirs, roundings in zip(flash, eager, (1 if eps > 1e-3 else 20, 8 if eps > 1e-3 else 40), strict=True):
        assert np.abs(ours - theirs).max() <= roundings * eps * np.abs(theirs).max()


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_what_is_kept_changes_no_bit(dtype: str) -> None:
    for base in (DEFAULT, FLASH):
        wanted = attention_results(base, dtype)
        for saves, recompute in (("megatron", "none"), ("lean", "selective"), ("megatron", "selective")):
            got = attention_results(ActivationPolicy(saves, base.attention, recompute), dtype)
            assert all((one == other).all() for one, other in zip(got, wanted, strict=True))


def test_dropout_is_a_function_of_its_key() -> None:
    x = tensor(np.ones((100, 100)), dtype="fp64")
    one, again, other = (F.dropout(x, 0.25, key).numpy() for key in (KEY, KEY, rng.key("another place")))
    assert (one == again).all()
    assert (one != other).any()
    assert set(np.unique(one)) == {0.0, 1 / 0.75}
    assert abs((one == 0).mean() - 0.25) < 0.01
    assert F.dropout(x, 0.0, KEY) is x


def test_a_training_steps_loss_and_gradient_are_those_of_cross_entropy() -> None:
    """`scale / count` times the gradient of the SUM; scale 1 and count 6 rows: of the mean."""
    device = cpu()
    logits = tensor(np.random.default_rng(0).standard_normal((2, 3, 4)), device, dtype="fp64", requires_grad=True)
    loss = F.cross_entropy(logits, ids(IDS, device))
    loss.backward()
    targets = ids(IDS, device)
    values = logits.array.copy()

    def run(scale: float) -> tuple[Buffer, Buffer]:
        own = tensor(values, device, dtype="fp64").buffer
        total, make_grad = lean([own], partial(F.cross_entropy_sum, targets=targets), LogitsGrad(targets, scale, 6))
        return total, make_grad()

    total, dlogits = run(1.0)
    assert total.array[0] / 6 == loss.item()
    assert logits.grad is not None
    assert (logits.grad.array == dlogits.array).all()
    _, scaled = run(2.0**16)
    assert (scaled.array == 2.0**16 * dlogits.array).all()


def ones(x: Tensor, *shape: int) -> Tensor:
    """A weight that is a leaf, and kept by nobody but the op."""
    return tensor(np.ones(shape), x.device, dtype="fp16", requires_grad=True)


ROWS, D = 6, 12  # of x, (2, 3, 12) in fp16: 144 bytes
X = 2 * ROWS * D


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        pytest.param(lambda x: F.linear(x, ones(x, 12, 4)), X + 2 * 48, id="linear: x, weight"),
        pytest.param(F.gelu, X, id="gelu: x"),
        pytest.param(
            lambda x: F.layer_norm(x, ones(x, 12), ones(x, 12)),
            X + 2 * 2 * D + 2 * 4 * ROWS,
            id="layer_norm: x, weight, bias, mean and rstd in fp32",
        ),
        pytest.param(lambda x: F.attention(x, 2), X + 2 * 2 * 2 * 9, id="attention: qkv, probs"),
        pytest.param(
            lambda x: F.attention(x, 2, dropout=0.5),
            X + 2 * 2 * 2 * 9 + 2 * 2 * 9,
            id="attention-dropout: qkv, probs, 1-byte mask",
        ),
        pytest.param(
            lambda x: F.attention(x, 2, dropout=0.5, policy=MEGATRON),
            X + 2 * 2 * 2 * 9 + 2 * 2 * 9 + 2 * 2 * 2 * 9,
            id="attention-megatron: qkv, probs, 1-byte mask, dropped probs",
        ),
        pytest.param(
            lambda x: F.attention(x, 2, dropout=0.5, policy=FLASH),
            X + 2 * ROWS * 4 + 4 * 2 * 2 * 3,
            id="flash: qkv, result, log-sum-exp in fp32, no mask",
        ),
        pytest.param(lambda x: F.attention(x, 2, dropout=0.5, policy=EAGER_AGAIN), X, id="attention-again: qkv"),
        pytest.param(lambda x: F.attention(x, 2, dropout=0.5, policy=FLASH_AGAIN), X, id="flash-again: qkv"),
        pytest.param(
            lambda x: F.layer_norm(x, ones(x, 12), ones(x, 12), policy=MEGATRON),
            X + 2 * 2 * D,
            id="layer_norm-megatron: x, weight, bias",
        ),
        pytest.param(lambda x: F.add_rows(x, ones(x, 3, 12)), 2 * 36, id="add_rows: rows"),
        pytest.param(
            lambda x: F.cross_entropy(x, ids(np.zeros((2, 3)), x.device)),
            X + 8 * ROWS + 4 * ROWS,
            id="cross_entropy: logits, targets, lse in fp32",
        ),
        pytest.param(lambda x: F.dropout(x, 0.5, KEY), ROWS * D, id="dropout: 1-byte mask"),
        pytest.param(lambda x: F.rms_norm(x, ones(x, 12)), X + 2 * 12 + 4 * 6, id="rms_norm: x, weight, rstd in fp32"),
        pytest.param(
            lambda x: F.rms_norm(x, ones(x, 12), policy=MEGATRON),
            X + 2 * 12,
            id="rms_norm-megatron: x, weight",
        ),
        pytest.param(lambda x: F.rotary(x, 1, 1), 0, id="rotary: nothing"),
        pytest.param(F.swiglu, X, id="swiglu: x"),
        pytest.param(
            lambda x: F.packed_linear(x, [ones(x, 4, 12), ones(x, 2, 12)]),
            X + 2 * 72,
            id="packed_linear: x once, weights",
        ),
    ],
)
def test_what_is_kept_for_backward(
    device: Device, live: Callable[[], int], function: Callable[[Tensor], Tensor], kept: int
) -> None:
    """The output's bytes and the input's are nobody else's here: what is left is what the rule saved."""
    x = tensor(np.ones((2, 3, 12)), device, dtype="fp16", requires_grad=True)
    node = function(x).node
    del x
    assert live() == kept
    del node
    assert live() == 0


def test_what_an_op_takes_is_checked() -> None:
    device = cpu()

    def zeros(*shape: int) -> Operand:
        return tensor(np.zeros(shape), device)

    calls: list[tuple[str, Callable[[], object]]] = [
        ("3 columns", lambda: F.linear(zeros(2, 3), zeros(4, 3))),
        ("as many rows as tokens", lambda: F.add_rows(zeros(2, 3, 4), zeros(1, 4))),
        ("as many rows as tokens", lambda: F.add_rows(zeros(2, 3, 4), zeros(3, 1))),
        (
            "4 heads of queries and 4 each of keys and values do not divide 18 columns",
            lambda: F.attention(zeros(1, 2, 18), 4),
        ),
        ("3 heads of keys and values do not divide 4", lambda: F.attention(zeros(1, 2, 20), 4, num_kv_heads=3)),
        ("0 heads of keys", lambda: F.attention(zeros(1, 2, 20), 4, num_kv_heads=0)),
        ("expected a chance", lambda: F.attention(zeros(1, 2, 18), 2, dropout=1.0)),
        ("expected a chance", lambda: F.attention(zeros(1, 2, 18), 2, dropout=1.0, policy=FLASH)),
        ("expected a chance", lambda: F.dropout(zeros(2), 1.0, KEY)),
        ("expected a chance", lambda: F.dropout(zeros(2), -0.1, KEY)),
        ("two devices", lambda: F.linear(zeros(2, 3), tensor(np.zeros((3, 4))))),
        ("rms_norm: x has 3 columns", lambda: F.rms_norm(zeros(2, 3), zeros(4))),
        (r"2 \+ 2 \* 1 heads do not divide 18 columns", lambda: F.rotary(zeros(1, 2, 18), 2, 1)),
        ("a head of 3 columns cannot be cut into pairs", lambda: F.rotary(zeros(1, 2, 9), 1, 1)),
        ("3 columns are not two halves", lambda: F.swiglu(zeros(2, 3))),
        ("x has 3 columns", lambda: F.packed_linear(zeros(2, 3), [zeros(4, 3), zeros(4, 2)])),
    ]
    for message, call in calls:
        with pytest.raises(InputError, match=message):
            call()
