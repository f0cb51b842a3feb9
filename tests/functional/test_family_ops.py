"""Ops of other families than GPT-2's and Llama's: their gradients, and that neutral arguments change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zerosim import functional as F
from zerosim.errors import InputError
from zerosim.tensor.gradcheck import gradcheck
from zerosim.tensor.tensor import Tensor, cpu, tensor


def packed_with_biases(x: Tensor, *params: Tensor) -> Tensor:
    return F.packed_linear(x, params[:3], params[3:])


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        pytest.param(
            packed_with_biases, [(2, 3, 5), (4, 5), (2, 5), (3, 5), (4,), (2,), (3,)], id="packed_linear-biases"
        ),
    ],
)
@pytest.mark.usefixtures("plain_device")
def test_gradients(function: Callable[..., Tensor], inputs: list[Any]) -> None:
    gradcheck(function, inputs)


def test_biases_of_packed_maps_are_those_of_separate_maps() -> None:
    device, rng = cpu(), np.random.default_rng(0)
    x, *params = (tensor(rng.standard_normal(shape), device) for shape in [(2, 3, 5), (4, 5), (2, 5), (4,), (2,)])
    packed = F.packed_linear(x, params[:2], params[2:]).numpy()
    alone = [F.linear(x, weight, bias, transposed=True).numpy() for weight, bias in zip(params[:2], params[2:])]
    assert (packed == np.concatenate(alone, axis=-1)).all()
    with pytest.raises(InputError, match="1 biases for 2 weights: give each one, or none"):
        F.packed_linear(x, params[:2], params[3:])
