"""Fused ops: their gradients, what they keep, and that each gives what its composition of primitives gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zerosim import functional as F
from zerosim import primitives as P
from zerosim import rng
from zerosim.device import Buffer, Device, Kind
from zerosim.dtypes import uint8
from zerosim.errors import InputError
from zerosim.finite_differences import gradcheck
from zerosim.tensor import Operand, Tensor, cpu, tensor

KEY = rng.key("a fixed place")
IDS = [[3, 0, 3], [1, 3, 0]]


def ids(values: Any, device: Device) -> Buffer:
    return tensor(values, device, dtype="int64").buffer


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b)


def linear_transposed(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b, transposed=True)


def attention(heads: int, dropout: float = 0.0) -> Callable[[Tensor], Tensor]:
    return lambda qkv: F.attention(qkv, heads, dropout=dropout, key=KEY)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        pytest.param(linear, [(4, 3), (3, 2)], id="linear"),
        pytest.param(linear, [(2, 4, 3), (3, 5), (5,)], id="linear-bias"),
        pytest.param(linear_transposed, [(4, 3), (2, 3)], id="linear-transposed"),
        pytest.param(linear_transposed, [(2, 4, 3), (5, 3), (5,)], id="linear-transposed-bias"),
        pytest.param(F.layer_norm, [(5, 4), (4,), (4,)], id="layer_norm"),
        pytest.param(F.layer_norm, [(2, 3, 7), (7,), (7,)], id="layer_norm-3d"),
        pytest.param(F.gelu, [(3, 4)], id="gelu"),
        pytest.param(F.gelu, [np.linspace(-8, 8, 33)], id="gelu-tails"),
        pytest.param(attention(1), [(2, 3, 6)], id="attention"),
        pytest.param(attention(2), [(1, 4, 12)], id="attention-2-heads"),
        pytest.param(attention(4), [(2, 3, 24)], id="attention-4-heads"),
        pytest.param(attention(2), [(2, 1, 12)], id="attention-T1"),
        pytest.param(attention(1), [(1, 66, 3)], id="attention-two-blocks"),
        pytest.param(attention(2, 0.4), [(2, 4, 12)], id="attention-dropout"),
        pytest.param(attention(1, 0.5), [(1, 1, 6)], id="attention-dropout-T1"),
        pytest.param(lambda w: F.embedding(ids(IDS, w.device), w), [(5, 3)], id="embedding-repeated-ids"),
        pytest.param(F.add_rows, [(2, 3, 4), (3, 4)], id="add_rows"),
        pytest.param(F.add_rows, [(2, 3, 4), (5, 4)], id="add_rows-unused"),
        pytest.param(F.add_rows, [(1, 1, 4), (2, 4)], id="add_rows-T1"),
        pytest.param(lambda x: F.cross_entropy(x, ids([0, 3, 1], x.device)), [(3, 4)], id="cross_entropy"),
        pytest.param(lambda x: F.cross_entropy(x, ids(IDS, x.device)), [(2, 3, 4)], id="cross_entropy-3d"),
        pytest.param(lambda x: F.dropout(x, 0.3, KEY), [(4, 5)], id="dropout"),
        pytest.param(lambda x: F.dropout(x, 0.0, KEY), [(2, 2)], id="dropout-0"),
    ],
)
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


def attention_composed(heads: int, dropout: float = 0.0) -> Callable[[Tensor], Tensor]:
    def run(qkv: Tensor) -> Tensor:
        batch, tokens, width = qkv.shape
        split = qkv.reshape(batch, tokens, 3, heads, -1).transpose(2, 0, 3, 1, 4)  # (3, B, H, T, d)
        q, k, v = (pick(split, i) for i in range(3))
        probs = softmax(P.mask_future(q @ k.transpose(0, 1, 3, 2) / (width // 3 // heads) ** 0.5))
        if dropout:
            mask = qkv.device.alloc(probs.shape, uint8, Kind.ACTIVATION)
            qkv.device.backend.dropout_mask(KEY, dropout, mask.array)
            probs = probs * tensor(Tensor(mask).numpy(), qkv.device, dtype="fp64") / (1 - dropout)
        return (probs @ v).transpose(0, 2, 1, 3).reshape(batch, tokens, width // 3)

    return run


def pick(x: Tensor, index: int) -> Tensor:
    """x[index], spelled as a product with a constant."""
    one_hot = np.zeros((x.shape[0],) + (1,) * (len(x.shape) - 1))
    one_hot[index] = 1
    return (x * tensor(one_hot, x.device, dtype="fp64")).sum(0)


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
        pytest.param(F.add_rows, lambda x, rows: x + rows, [(2, 3, 4), (3, 4)], id="add_rows"),
        pytest.param(
            lambda x: F.cross_entropy(x, ids(IDS, x.device)), cross_entropy_composed, [(2, 3, 4)], id="cross_entropy"
        ),
    ],
)
def test_fused_is_composed(
    fused: Callable[..., Tensor], composed: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    random = np.random.default_rng(3)
    values = [random.standard_normal(shape) for shape in shapes]
    results = []
    for function in (fused, composed):
        device = cpu()
        leaves = [tensor(value, device, dtype="fp64", requires_grad=True) for value in values]
        out = function(*leaves)
        weights = tensor(np.random.default_rng(4).standard_normal(out.shape), device, dtype="fp64")
        (out * weights).sum().backward()
        results.append([out.numpy(), *(leaf.grad.numpy() for leaf in leaves if leaf.grad is not None)])
    assert len(results[0]) == len(results[1]) == 1 + len(shapes)
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


# -- single ops ---------------------------------------------------------------------------------------
def test_attention_is_causal() -> None:
    device = cpu()
    qkv = np.random.default_rng(0).standard_normal((1, 6, 12))
    before = F.attention(tensor(qkv, device), 2).numpy()
    qkv[:, 4] += 1
    after = F.attention(tensor(qkv, device), 2).numpy()
    assert (before[:, :4] == after[:, :4]).all()
    assert (before[:, 4:] != after[:, 4:]).all()


def test_dropout_is_a_function_of_its_key() -> None:
    x = tensor(np.ones((100, 100)), dtype="fp64")
    one, again, other = (F.dropout(x, 0.25, key).numpy() for key in (KEY, KEY, rng.key("another place")))
    assert (one == again).all()
    assert (one != other).any()
    assert set(np.unique(one)) == {0.0, 1 / 0.75}
    assert abs((one == 0).mean() - 0.25) < 0.01
    assert F.dropout(x, 0.0, KEY) is x


def test_loss_and_its_gradient_in_one_go_are_those_of_cross_entropy() -> None:
    """`scale / count` times the gradient of the SUM; scale 1 and count 6 rows: of the mean."""
    device = cpu()
    logits = tensor(np.random.default_rng(0).standard_normal((2, 3, 4)), device, dtype="fp64", requires_grad=True)
    loss = F.cross_entropy(logits, ids(IDS, device))
    loss.backward()
    total, dlogits = F.cross_entropy_and_grad(logits, ids(IDS, device), scale=1.0, count=6)
    assert total.array[0] / 6 == loss.item()
    assert logits.grad is not None
    assert (logits.grad.array == dlogits.array).all()
    _, scaled = F.cross_entropy_and_grad(logits, ids(IDS, device), scale=2.0**16, count=6)
    assert (scaled.array == 2.0**16 * dlogits.array).all()


def test_big_logits_neither_overflow_nor_lose() -> None:
    device = cpu()
    logits = tensor([[1000.0, 0.0], [-1000.0, 0.0]], device, dtype="fp64", requires_grad=True)
    loss = F.cross_entropy(logits, ids([1, 0], device))
    loss.backward()
    assert logits.grad is not None
    assert loss.item() == 1000
    assert (logits.grad.numpy() == [[0.5, -0.5], [-0.5, 0.5]]).all()


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
        pytest.param(lambda x: F.add_rows(x, ones(x, 3, 12)), 2 * 36, id="add_rows: rows"),
        pytest.param(
            lambda x: F.cross_entropy(x, ids(np.zeros((2, 3)), x.device)),
            X + 8 * ROWS + 4 * ROWS,
            id="cross_entropy: logits, targets, lse in fp32",
        ),
        pytest.param(lambda x: F.dropout(x, 0.5, KEY), ROWS * D, id="dropout: 1-byte mask"),
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
        ("4 heads do not divide", lambda: F.attention(zeros(1, 2, 18), 4)),
        ("expected a chance", lambda: F.attention(zeros(1, 2, 18), 2, dropout=1.0)),
        ("expected a chance", lambda: F.dropout(zeros(2), 1.0, KEY)),
        ("expected a chance", lambda: F.dropout(zeros(2), -0.1, KEY)),
        ("two devices", lambda: F.linear(zeros(2, 3), tensor(np.zeros((3, 4))))),
    ]
    for message, call in calls:
        with pytest.raises(InputError, match=message):
            call()
