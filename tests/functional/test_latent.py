"""Latent attention's ops, sinks, queries by position, gpt-oss's function: gradients in fp64, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zerosim import functional as F
from zerosim.backends.forms import Choice, Rope, Scores
from zerosim.errors import InputError
from zerosim.functional.policy import ActivationPolicy
from zerosim.tensor.gradcheck import gradcheck
from zerosim.tensor.tensor import Tensor, cpu, tensor

ROPES = Rope(100.0), Rope(50.0, interleaved=True, factor=1.5), Rope(frequencies=(0.8, 0.1))
POLICIES = ActivationPolicy(), ActivationPolicy(attention="flash"), ActivationPolicy(recompute="selective")


def latent(rope: Rope, positions: tuple[range, ...] = ()) -> Callable[..., Tensor]:
    return lambda q, kv, turned: F.latent_heads(q, kv, turned, 2, rope=rope, positions=positions)


def narrow(policy: ActivationPolicy) -> Callable[..., Tensor]:
    """Two heads with 5 columns of queries and keys, and 3 of values."""
    return lambda qkv: F.attention(qkv, 2, policy=policy, value=3)


def sunk(policy: ActivationPolicy) -> Callable[..., Tensor]:
    return lambda qkv, sinks: F.attention(qkv, 4, num_kv_heads=2, policy=policy, sinks=sinks, form=Scores(window=3))


def of_experts(x: Tensor, stack: Tensor, bias: Tensor) -> Tensor:
    """Two experts of which one has no row."""
    logits = tensor(np.zeros((4, 2)), x.device, dtype="fp64")
    counts = F.route(logits, 1, Choice())[1].routing().counts
    assert counts == (4, 0)
    return F.grouped_linear(x, stack, counts, bias, first=1)


GRADIENTS: dict[str, tuple[Callable[..., Tensor], list[Any]]] = {
    **{f"latent heads, {rope}": (latent(rope), [(2, 3, 14), (2, 3, 12), (2, 3, 4)]) for rope in ROPES},
    "latent heads, of some tokens": (latent(ROPES[0], (range(1, 3), range(7, 8))), [(2, 3, 14), (2, 3, 12), (2, 3, 4)]),
    **{f"narrow values, {policy.attention} {policy.recompute}": (narrow(policy), [(1, 4, 26)]) for policy in POLICIES},
    **{f"sinks, {policy.attention} {policy.recompute}": (sunk(policy), [(2, 5, 16), (4,)]) for policy in POLICIES},
    "columns": (lambda x: F.columns(x, 1, 4), [(2, 3, 6)]),
    "plain norms": (lambda x: F.head_norm(x, None, None, 2, 1, 1e-6), [(2, 3, 16)]),
    "tempered": (lambda x: F.tempered(x, 4, 0.3, 2), [(2, 5, 7)]),
    "clamped": (lambda x: F.clamped_swiglu(x, 1.702, 0.9), [(5, 8)]),
    "biases of experts": (of_experts, [(4, 3), (2, 6, 3), (2, 4)]),
}


@pytest.mark.parametrize(("function", "inputs"), GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.usefixtures("plain_device")
def test_gradients(function: Callable[..., Tensor], inputs: list[Any]) -> None:
    gradcheck(function, inputs)


def test_scores_depend_on_distances_alone() -> None:
    """The shared columns are rotated as the queries' are."""
    device, rng = cpu(), np.random.default_rng(0)
    q, kv, turned = (tensor(rng.standard_normal((1, 3, n)), device, dtype="fp64") for n in (14, 12, 4))
    scores = []
    for first in (0, 5):
        qkv = latent(Rope(100.0), (range(first, first + 3),))(q, kv, turned).numpy()
        queries, keys = (qkv[0, :, at : at + 14].reshape(3, 2, 7) for at in (0, 14))
        scores.append(np.einsum("qhd,khd->hqk", queries, keys))
    np.testing.assert_allclose(*scores, rtol=1e-12)


def test_a_sink_takes_its_share_of_every_query() -> None:
    """With a score of -inf it takes nothing; equal to the only key's score, half."""
    device = cpu()
    qkv = tensor(np.array([[[0.0, 0.0, 4.0]]]), device, dtype="fp64")
    for policy in POLICIES:
        for sink, share in ((-math.inf, 1.0), (0.0, 0.5)):
            out = F.attention(qkv, 1, policy=policy, sinks=tensor(np.array([sink]), device, dtype="fp64"))
            assert out.numpy().item() == pytest.approx(4.0 * share)


def test_queries_are_multiplied_by_a_number_of_their_position() -> None:
    x = tensor(np.ones((1, 5, 3)), cpu(), dtype="fp64")
    found = F.tempered(x, 2, 0.1, 3).numpy()[0]
    np.testing.assert_allclose(found[:, 0], [1 + 0.1 * math.log1p((t + 1) // 3) for t in range(5)])
    assert (found[:, 2] == 1).all()
    assert F.tempered(x, 2, 0.1, 6) is x


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: F.latent_heads(x(7), x(8), x(2), 2, rope=Rope()), "2 heads with 2 rotated columns do not fit 7"),
        (lambda x: F.latent_heads(x(6), x(8), x(3), 2, rope=Rope()), "2 heads with 3 rotated columns do not fit 6"),
        (lambda x: F.latent_heads(x(6), x(4), x(2), 2, rope=Rope(frequencies=(1.0, 0.5))), "2 frequencies for 1 pairs"),
        (lambda x: F.clamped_swiglu(x(3)), "3 columns are not pairs"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call: Callable[..., Any], said: str) -> None:
    device = cpu()
    with pytest.raises(InputError, match=said):
        call(lambda columns: tensor(np.ones((1, 2, columns)), device))
