"""Ops of other families than GPT-2's and Llama's: their gradients, and that neutral arguments change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from meeting import Meeting

from zerosim import functional as F
from zerosim.backends.forms import Rope, Scores, alibi_slopes
from zerosim.comm.runtime import make_backend
from zerosim.device.device import Device, Kind
from zerosim.device.events import Kernel
from zerosim.dtypes import bf16
from zerosim.errors import InputError
from zerosim.functional.policy import ActivationPolicy
from zerosim.functional.rope_scaling import inverse_frequencies
from zerosim.nn.group import WHOLE_MAPS, WholeMaps
from zerosim.parallel.tensor import Borders, TensorParallel
from zerosim.tensor.autograd import backward
from zerosim.tensor.gradcheck import gradcheck
from zerosim.tensor.tensor import Leaf, Tensor, cpu, tensor

MEGATRON = ActivationPolicy("megatron")


def packed_with_biases(x: Tensor, *params: Tensor) -> Tensor:
    return F.packed_linear(x, params[:3], params[3:])


def rotary(rope: Rope) -> Callable[[Tensor], Tensor]:
    return lambda qkv: F.rotary(qkv, 2, 1, rope=rope)


SCORES = {
    "scaled": Scores(scale=0.7),
    "capped": Scores(cap=1.5),
    "slopes": Scores(alibi=1.0),
    "window": Scores(window=3),
    "both-ways": Scores(causal=False),
    "all": Scores(0.6, 2.0, 0.3, 2),
}


def attention(form: Scores, policy: ActivationPolicy, dropout: float = 0.3) -> Callable[[Tensor], Tensor]:
    heads = {"first_head": 2, "whole_heads": 6} if form.alibi else {}
    return lambda qkv: F.attention(
        qkv, 4, num_kv_heads=2, dropout=dropout, key=(1, 2), policy=policy, form=form, **heads
    )


@pytest.mark.parametrize("policy", [MEGATRON, ActivationPolicy("lean", "flash", "selective")], ids=["eager", "flash"])
@pytest.mark.parametrize("form", SCORES.values(), ids=SCORES)
@pytest.mark.usefixtures("plain_device")
def test_gradients_of_attention(form: Scores, policy: ActivationPolicy) -> None:
    gradcheck(attention(form, policy), [(1, 5, 16)])


@pytest.mark.parametrize("form", SCORES.values(), ids=SCORES)
def test_flash_is_eager_to_within_rounding(form: Scores) -> None:
    """Over several blocks of queries; windows longer than a block, and shorter."""
    for window in {form.window, 40 * form.window}:
        results = []
        for policy in (ActivationPolicy(), ActivationPolicy("lean", "flash")):
            device, rng = cpu(), np.random.default_rng(5)
            qkv = tensor(rng.standard_normal((2, 150, 40)), device, dtype="fp64", requires_grad=True)
            out = attention(form._replace(window=window), policy)(qkv)
            (out * tensor(rng.standard_normal(out.shape), device, dtype="fp64")).sum().backward()
            assert qkv.grad is not None
            results.append((out.numpy(), qkv.grad.numpy()))
        for eager, flash in zip(*results, strict=True):
            assert np.abs(eager - flash).max() <= 40 * 2.0**-52 * np.abs(eager).max()


def work_of_attention(tokens: int, form: Scores, policy: ActivationPolicy, dropout: float) -> list[tuple[Any, ...]]:
    device = Device(0, make_backend("meta"))
    qkv = Tensor(device.alloc((2, tokens, 8 * 4), bf16, Kind.ACTIVATION), Leaf())
    out = attention(form, policy, dropout)(qkv)
    assert out.node is not None
    backward(out.node, [out.new_grad()])
    kernels = [event for event in device.recorder.events if isinstance(event, Kernel) and event.name != "dropout_mask"]
    return [(one.name, one.flops, one.bytes_read, one.bytes_written, one.shape) for one in kernels]


@pytest.mark.parametrize("policy", [MEGATRON, ActivationPolicy(), ActivationPolicy("lean", "flash")], ids=str)
def test_a_window_costs_the_sum_of_what_its_queries_read(policy: ActivationPolicy) -> None:
    """Flops and bytes are linear in the scores that count; a window of all tokens is none."""
    tokens, dropout = 12, 0.5
    plain, none = (work_of_attention(tokens, Scores(window=w), policy, dropout) for w in (0, 12))
    assert plain == none == work_of_attention(tokens, Scores(window=99), policy, dropout)
    for window in (1, 2, 5, 11):
        form = Scores(window=window)
        pairs = sum(min(i + 1, window) for i in range(tokens))
        assert form.pairs(tokens) == pairs
        for (name, flops, read, written, shape), one in zip(
            work_of_attention(tokens, form, policy, dropout), plain, strict=True
        ):
            assert name == one[0]
            assert flops * tokens**2 == one[1] * pairs
            if "flash" in name:
                assert (read, written, shape) == (*one[2:4], (*one[4], pairs))
                continue
            scores = {  # of 2 bytes (the mask: 1), read and written
                "attention_scores": (0, 2), "softmax": (2, 2), "attention_dropout": (3, 2), "attention_values": (2, 0),
                "attention_dvalues": (2, 0), "attention_dprobs": (0, 2), "softmax_backward": (5, 2),
                "attention_dquery": (2, 0), "attention_dkey": (2, 0),
            }[name]  # fmt: skip
            if policy.saves == "lean" and name in ("attention_values", "attention_dvalues"):
                scores = (3, 0)
            away = 2 * 4 * (tokens**2 - pairs)
            assert (one[2] - read, one[3] - written) == (scores[0] * away, scores[1] * away), name


def test_scores_that_cannot_be_are_refused() -> None:
    qkv = tensor(np.zeros((1, 3, 16)), cpu())
    for form in (Scores(window=-1), Scores(cap=-1.0), Scores(window=2, causal=False)):
        with pytest.raises(InputError, match="expected a cap and a window of at least 0, and a window only if causal"):
            F.attention(qkv, 4, num_kv_heads=2, form=form)


@pytest.mark.parametrize("heads", [8, 12, 1, 6])
def test_slopes_are_blooms(heads: int) -> None:
    """2^(-8/n) and its powers; for 12 heads those of 8, and 4 of the 16 heads' that lie between."""
    near = max(n for n in (1, 2, 4, 8) if n <= heads)
    every = [2.0 ** (-8 * (i + 1) / near) for i in range(near)]
    between = [2.0 ** (-8 * (i + 1) / (2 * near)) for i in range(2 * near)][::2]
    assert alibi_slopes(heads) == pytest.approx(every + between[: heads - near], rel=1e-15)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        pytest.param(
            packed_with_biases, [(2, 3, 5), (4, 5), (2, 5), (3, 5), (4,), (2,), (3,)], id="packed_linear-biases"
        ),
        pytest.param(lambda x, w: F.layer_norm(x, w, None), [(2, 3, 7), (7,)], id="layer_norm-no-bias"),
        pytest.param(lambda x, w: F.layer_norm(x, w, None, policy=MEGATRON), [(5, 4), (4,)], id="layer_norm-again"),
        pytest.param(lambda x, w: F.rms_norm(x, w, plus_one=True), [(2, 3, 7), (7,)], id="rms_norm-plus-one"),
        pytest.param(F.gelu_erf, [np.linspace(-8, 8, 33)], id="gelu_erf"),
        pytest.param(F.relu, [np.linspace(-3, 3, 12)], id="relu"),
        pytest.param(F.geglu, [(2, 3, 8)], id="geglu"),
        pytest.param(lambda x, q, k: F.head_norm(x, q, k, 4, 2), [(2, 3, 16), (2,), (2,)], id="head_norm"),
        pytest.param(
            lambda x, q, k: F.head_norm(x, q, k, 4, 2, plus_one=True), [(2, 3, 16), (2,), (2,)], id="head_norm-plus-one"
        ),
        pytest.param(lambda x, q, k: F.head_norm(x, q, k, 4, 2), [(2, 3, 16), (8,), (4,)], id="head_norm-all"),
        pytest.param(
            lambda x, q, k: F.head_layer_norm(x, q, k, 4, 2), [(2, 3, 24), (4, 3), (2, 3)], id="head_layer_norm-own"
        ),
        pytest.param(
            lambda x, q, k: F.head_layer_norm(x, q, k, 4, 2), [(2, 3, 24), (3,), (3,)], id="head_layer_norm-one"
        ),
        pytest.param(lambda x: F.scaled(x, 2.5), [(2, 3)], id="scaled"),
        pytest.param(lambda x, y: x + F.scaled(y, 0.22), [(2, 3), (2, 3)], id="a scaled branch"),
        pytest.param(rotary(Rope(10.0, 4)), [(2, 4, 24)], id="rotary-some-columns"),
        pytest.param(rotary(Rope(10.0, interleaved=True)), [(2, 4, 24)], id="rotary-neighbours"),
        pytest.param(rotary(Rope(turned=4, frequencies=(0.9, 0.1), factor=1.3)), [(2, 4, 24)], id="rotary-table"),
    ],
)
@pytest.mark.usefixtures("plain_device")
def test_gradients(function: Callable[..., Tensor], inputs: list[Any]) -> None:
    gradcheck(function, inputs)


def test_biases_of_packed_maps_are_those_of_separate_maps() -> None:
    device, rng = cpu(), np.random.default_rng(0)
    x, *params = (tensor(rng.standard_normal(shape), device) for shape in [(2, 3, 5), (4, 5), (2, 5), (4,), (2,)])
    packed = F.packed_linear(x, params[:2], params[2:]).numpy()
    alone = [
        F.linear(x, weight, bias, transposed=True).numpy() for weight, bias in zip(params[:2], params[2:], strict=True)
    ]
    assert (packed == np.concatenate(alone, axis=-1)).all()
    with pytest.raises(InputError, match="1 biases for 2 weights: give each one, or none"):
        F.packed_linear(x, params[:2], params[3:])


def test_biases_of_packed_maps_are_cut_with_their_columns() -> None:
    """Two ranks with half of each map's outputs: their columns are the whole's, and their shares of dx add up."""
    rng = np.random.default_rng(0)
    x, *params = (rng.standard_normal(shape) for shape in [(2, 3, 5), (4, 5), (2, 5), (4,), (2,)])
    seed = rng.standard_normal((2, 3, 6))

    def run(params: list[Any], seed: Any, maps: WholeMaps) -> list[Any]:
        leaves = [
            tensor(value, device, dtype="fp64", requires_grad=True) for device in [cpu()] for value in (x, *params)
        ]
        out = maps.packed_linear(leaves[0], leaves[1:3], leaves[3:])
        assert out.node is not None
        backward(out.node, [tensor(seed, out.device, dtype="fp64").buffer])
        return [out.numpy(), *(leaf.grad.numpy() for leaf in leaves if leaf.grad is not None)]

    def on_rank(rank: int) -> list[Any]:
        maps = TensorParallel(2, rank, meeting.of(rank), Borders(), keeps_gathered=True, pads_vocab=False)
        halves = [np.split(one, 2)[rank] for one in params]
        return run(halves, seed[..., columns[rank]], maps)

    meeting, columns = Meeting(2), ([0, 1, 4], [2, 3, 5])
    whole = run(params, seed, WHOLE_MAPS)
    for rank, (out, dx, *grads) in enumerate(meeting.run(on_rank)):
        np.testing.assert_allclose(out, whole[0][..., columns[rank]], rtol=1e-12)
        np.testing.assert_allclose(dx, whole[1], rtol=1e-12)
        for ours, theirs in zip(grads, whole[2:], strict=True):
            np.testing.assert_allclose(ours, np.split(theirs, 2)[rank], rtol=1e-12)


def test_variants_are_compositions_of_the_plain_ops() -> None:
    device, rng = cpu(), np.random.default_rng(0)

    def draw(*shape: int) -> Tensor:
        return tensor(rng.standard_normal(shape), device, dtype="fp64")

    x, w = draw(2, 3, 8), draw(8)
    zero, one = tensor(np.zeros(8), device, dtype="fp64"), tensor(np.ones(8), device, dtype="fp64")
    assert (F.layer_norm(x, w, None).numpy() == F.layer_norm(x, w, zero).numpy()).all()
    assert (F.rms_norm(x, w, plus_one=True).numpy() == F.rms_norm(x, w + one, plus_one=False).numpy()).all()
    gate, up = (tensor(half, device, dtype="fp64") for half in np.split(x.numpy(), 2, axis=-1))
    np.testing.assert_allclose(F.geglu(x).numpy(), F.gelu(gate).numpy() * up.numpy(), rtol=1e-14)
    assert (F.relu(x).numpy() == np.maximum(x.numpy(), 0)).all()


def test_a_rope_of_other_words_is_llamas() -> None:
    """All columns, the base's own frequencies, pairs of neighbours once columns are permuted: the same rotation."""
    qkv = tensor(np.random.default_rng(0).standard_normal((2, 9, 3 * 8)), cpu(), dtype="fp64")
    plain = F.rotary(qkv, 1, 1).numpy()
    rates = tuple(10000.0 ** (-2 * i / 8) for i in range(4))
    np.testing.assert_allclose(F.rotary(qkv, 1, 1, rope=Rope(turned=8, frequencies=rates)).numpy(), plain, rtol=1e-12)
    order = [8 * head + place for head in range(3) for place in (0, 4, 1, 5, 2, 6, 3, 7)]
    order[16:] = range(16, 24)
    later = F.rotary(tensor(qkv.numpy()[:, 2:], cpu(), dtype="fp64"), 1, 1, positions=[range(2, 9)]).numpy()
    np.testing.assert_array_equal(later, plain[:, 2:])
    neighbours = F.rotary(tensor(qkv.numpy()[..., order], cpu(), dtype="fp64"), 1, 1, rope=Rope(interleaved=True))
    assert (neighbours.numpy() == plain[..., order]).all()
    for rope, what in (
        (Rope(turned=10), "10 columns of a head of 8 cannot turn: choose 8 at most"),
        (Rope(turned=3), "a head of 3 columns cannot be cut into pairs"),
        (Rope(frequencies=(1.0,)), "1 frequencies for 4 pairs: give one for each"),
    ):
        with pytest.raises(InputError, match=what):
            F.rotary(qkv, 1, 1, rope=rope)


def test_scalings_that_a_changed_head_does_not_fit_are_refused() -> None:
    def found(kind: str, **given: Any) -> Any:
        return inverse_frequencies(kind, given, 1e4, 8, 4096, 64)

    assert found("default") == ([1.0, pytest.approx(0.1), pytest.approx(0.01), pytest.approx(0.001)], 1.0)
    assert found("linear", factor=4)[0] == [one / 4 for one in found("default")[0]]
    with pytest.raises(InputError, match="longrope: short_factor has 1 numbers: expected 4, one for each pair"):
        found("longrope", original_max_position_embeddings=64, short_factor=[1.0])
    with pytest.raises(InputError, match="dynamic: a head has one pair of rotated columns"):
        inverse_frequencies("dynamic", {"factor": 2}, 1e4, 2, 4096, 64)
