"""Ops of other families than GPT-2's and Llama's: their gradients, and that neutral arguments change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zerosim import functional as F
from zerosim.backends.forms import Rope
from zerosim.errors import InputError
from zerosim.functional.policy import ActivationPolicy
from zerosim.functional.rope_scaling import inverse_frequencies
from zerosim.tensor.gradcheck import gradcheck
from zerosim.tensor.tensor import Tensor, cpu, tensor

MEGATRON = ActivationPolicy("megatron")


def packed_with_biases(x: Tensor, *params: Tensor) -> Tensor:
    return F.packed_linear(x, params[:3], params[3:])


def rotary(rope: Rope) -> Callable[[Tensor], Tensor]:
    return lambda qkv: F.rotary(qkv, 2, 1, rope=rope)


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
    neighbours = F.rotary(tensor(qkv.numpy()[..., order], cpu(), dtype="fp64"), 1, 1, rope=Rope(interleaved=True))
    assert (neighbours.numpy() == plain[..., order]).all()
    for rope, what in (
        (Rope(turned=10), "10 columns of a head of 8 cannot turn: choose 8 at most"),
        (Rope(turned=3), "a head of 3 columns cannot be cut into pairs"),
        (Rope(frequencies=(1.0,)), "1 frequencies for 4 pairs: give one for each"),
    ):
        with pytest.raises(InputError, match=what):
            F.rotary(qkv, 1, 1, rope=rope)


def test_scalings_of_rotary_positions_are_refused_by_name() -> None:
    def found(kind: str, **given: Any) -> Any:
        return inverse_frequencies(kind, given, 1e4, 8, 4096, 64)

    assert found("default") == ([1.0, pytest.approx(0.1), pytest.approx(0.01), pytest.approx(0.001)], 1.0)
    assert found("linear", factor=4)[0] == [one / 4 for one in found("default")[0]]
    for kind, given, what in (
        ("yarm", {}, "rope scaling 'yarm': did you mean 'yarn'"),
        ("linear", {}, "rope scaling linear: factor None: expected a number more than 0"),
        ("yarn", {"factor": -1, "original_max_position_embeddings": 64}, "yarn: factor -1"),
        ("yarn", {"factor": 4}, "yarn: original_max_position_embeddings None"),
        ("llama3", {"factor": True}, "llama3: factor True"),
        (
            "longrope",
            {"original_max_position_embeddings": 64, "short_factor": [1.0]},
            "longrope: short_factor has 1 numbers: expected 4, one for each pair",
        ),
    ):
        with pytest.raises(InputError, match=what):
            found(kind, **given)
