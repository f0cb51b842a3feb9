"""Primitive ops and the operators that are spelled with them: gradients, values, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zerosim.device.device import Device
from zerosim.dtypes import fp16
from zerosim.errors import InputError
from zerosim.tensor import ops as P
from zerosim.tensor.gradcheck import gradcheck
from zerosim.tensor.tensor import Tensor, cpu, tensor

POSITIVE = np.random.default_rng(1).uniform(0.5, 2.0, (2, 3))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        pytest.param(P.add, [(2, 3), (2, 3)], id="add"),
        pytest.param(P.add, [(2, 3), (3,)], id="add-row"),
        pytest.param(P.add, [(4, 1, 3), (2, 1)], id="add-both-broadcast"),
        pytest.param(P.add, [(), (2,)], id="add-0d"),
        pytest.param(lambda x: 3 + x + 2, [(2, 3)], id="add-number"),
        pytest.param(lambda x: x + x, [(2, 3)], id="add-itself"),
        pytest.param(P.subtract, [(2, 3), (2, 3)], id="subtract"),
        pytest.param(P.subtract, [(2, 1), (3,)], id="subtract-broadcast"),
        pytest.param(lambda x: 1 - x - 2, [(2, 3)], id="subtract-number"),
        pytest.param(lambda x: -x, [(2, 3)], id="negative"),
        pytest.param(P.multiply, [(2, 3), (2, 3)], id="multiply"),
        pytest.param(P.multiply, [(3, 1), (2, 1, 4)], id="multiply-broadcast"),
        pytest.param(lambda x: 2 * x * 3.5, [(2, 3)], id="multiply-number"),
        pytest.param(lambda x: x * x, [(2, 3)], id="multiply-itself"),
        pytest.param(P.divide, [(2, 3), POSITIVE], id="divide"),
        pytest.param(P.divide, [(4, 1, 3), POSITIVE], id="divide-broadcast"),
        pytest.param(lambda x: (1 / x) / 7, [POSITIVE], id="divide-number"),
        pytest.param(P.matmul, [(2, 3), (3, 4)], id="matmul"),
        pytest.param(P.matmul, [(5, 2, 3), (3, 4)], id="matmul-broadcast-right"),
        pytest.param(P.matmul, [(2, 3), (2, 1, 3, 2)], id="matmul-broadcast-left"),
        pytest.param(P.matmul, [(2, 1, 2, 3), (4, 3, 1)], id="matmul-broadcast-both"),
        pytest.param(lambda x: x @ x, [(3, 3)], id="matmul-itself"),
        pytest.param(P.exp, [(2, 3)], id="exp"),
        pytest.param(P.log, [POSITIVE], id="log"),
        pytest.param(P.sqrt, [POSITIVE], id="sqrt"),
        pytest.param(P.tanh, [(2, 3)], id="tanh"),
        pytest.param(P.sum, [(2, 3)], id="sum"),
        pytest.param(lambda x: x.sum(1), [(2, 3)], id="sum-dim"),
        pytest.param(lambda x: x.sum(0, -1), [(2, 3, 4)], id="sum-dims"),
        pytest.param(lambda x: x.sum(-2, keepdims=True), [(2, 3, 4)], id="sum-kept"),
        pytest.param(lambda x: x.sum(), [()], id="sum-0d"),
        pytest.param(P.mean, [(2, 3)], id="mean"),
        pytest.param(lambda x: x.mean(0, keepdims=True) * x, [(2, 3)], id="mean-dim"),
        pytest.param(lambda x: x.reshape(3, -1), [(2, 3)], id="reshape"),
        pytest.param(lambda x: x.transpose(2, 0, 1), [(2, 3, 4)], id="transpose"),
        pytest.param(lambda x: x.transpose(0, -1, 1), [(2, 3, 4)], id="transpose-negative"),
        pytest.param(lambda x: x.transpose(), [(2, 3)], id="transpose-all"),
        pytest.param(lambda x: P.mask_future(x, -2.0), [(2, 3, 3)], id="mask_future"),
    ],
)
@pytest.mark.usefixtures("plain_device")
def test_gradients(function: Callable[..., Tensor], inputs: list[Any]) -> None:
    gradcheck(function, inputs)


A, B = np.arange(1.0, 7.0).reshape(2, 3), np.array([4.0, 5.0, 8.0])


@pytest.mark.parametrize(
    ("ours", "numpys"),
    [
        (lambda a, b: a + b, A + B),
        (lambda a, b: a - b, A - B),
        (lambda a, b: a * b, A * B),
        (lambda a, b: a / b, A / B),
        (lambda a, b: a @ b.reshape(3, 1), A @ B[:, None]),
        (lambda a, b: 2 + a, 2 + A),
        (lambda a, b: 2 - a, 2 - A),
        (lambda a, b: 2 * a, 2 * A),
        (lambda a, b: 2 / b, 2 / B),
        (lambda a, b: np.float64(2) * a, 2 * A),
        (lambda a, b: np.float32(2) - a, 2 - A),
        (lambda a, b: a / np.int64(2), A / 2),
        (lambda a, b: -a, -A),
        (lambda a, b: a.exp(), np.exp(A)),
        (lambda a, b: a.log(), np.log(A)),
        (lambda a, b: a.sqrt(), np.sqrt(A)),
        (lambda a, b: a.tanh(), np.tanh(A)),
        (lambda a, b: a.sum(), A.sum()),
        (lambda a, b: a.sum(0), A.sum(0)),
        (lambda a, b: a.sum(-1, keepdims=True), A.sum(-1, keepdims=True)),
        (lambda a, b: a.mean(), A.mean()),
        (lambda a, b: a.mean(1), A.mean(1)),
        (lambda a, b: P.maximum(a, (1,)), A.max(1, keepdims=True)),
        (lambda a, b: a.reshape(3, 2), A.reshape(3, 2)),
        (lambda a, b: a.transpose(), A.T),
        (lambda a, b: P.mask_future(a.transpose() @ a), np.where(np.tri(3) > 0, A.T @ A, -np.inf)),
    ],
)  # fmt: skip
def test_values_are_numpys(ours: Callable[[Tensor, Tensor], Tensor], numpys: Any) -> None:
    device = cpu()
    result = ours(tensor(A, device, dtype="fp64"), tensor(B, device, dtype="fp64")).numpy()
    assert (result == numpys).all()
    assert result.size == np.size(numpys)


def test_a_number_takes_the_tensors_dtype(device: Device) -> None:
    x = tensor([1.0, 2.0], device, dtype="fp16")
    assert (2 * x).dtype is fp16
    assert (x / 3).dtype is fp16


def test_the_maximum_is_a_constant(device: Device) -> None:
    assert not P.maximum(tensor([[1.0, 2.0]], device, requires_grad=True), (1,)).requires_grad


def test_views_cost_nothing(device: Device, live: Callable[[], int]) -> None:
    x = tensor(np.zeros((2, 6)), device, requires_grad=True)
    before = live()
    y = x.reshape(3, 4).reshape(12)
    assert live() == before == 48
    assert y.buffer.storage is x.buffer.storage


def test_a_tensor_holds_a_copy() -> None:
    values = np.array([1.0, 2.0])
    x = tensor(values, dtype="fp64")
    values[0] = 9
    x.numpy()[1] = 9
    assert (x.numpy() == [1, 2]).all()
    assert tensor([[3.5]]).item() == 3.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x + tensor([1.0, 2.0]), "two devices"),
        (lambda x: x @ tensor([[1.0], [2.0]]), "two devices"),
        (lambda x: x * tensor([1.0, 2.0], x.device, dtype="fp64"), "one dtype"),
        (lambda x: x * np.ones(2), "takes tensors and numbers, not Tensor and ndarray"),
        (lambda x: np.ones(2) * x, "not Tensor and ndarray"),
        (lambda x: [1.0, 2.0] - x, "takes tensors and numbers, not list and Tensor"),
        (lambda x: x + tensor(np.ones((2, 3)), x.device), r"\(1, 2\) and \(2, 3\) do not broadcast"),
        (lambda x: x @ x, "inner sizes"),
        (lambda x: x.reshape(2) @ x, "2-d"),
    ],
)
def test_errors(call: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(tensor([[1.0, 2.0]]))


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: x + x, 0),
        (lambda x: x - 1, 0),
        (lambda x: x * 2, 2),  # the constant
        (lambda x: x / 2, 2),
        (lambda x: x * x, 48),  # x
        (lambda x: x.transpose() @ tensor(np.ones((4, 1)), x.device, dtype="fp16"), 8),  # the constant
        (lambda x: x.exp(), 48),  # the result
        (lambda x: x.log(), 48),
        (lambda x: x.sum(0), 0),
        (lambda x: x.mean(), 2),
        (lambda x: x.reshape(24).transpose(), 0),
    ],
)
def test_what_backward_does_not_read_is_not_kept(
    device: Device, live: Callable[[], int], function: Callable[[Tensor], Tensor], kept: int
) -> None:
    x = tensor(np.ones((4, 6)), device, dtype="fp16", requires_grad=True)
    node = function(x).node
    del x
    assert live() == kept
    del node
    assert live() == 0
