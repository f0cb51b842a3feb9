"""Ops of experts: gradients in fp64, rows that come back where they left, and one product in the record."""

from __future__ import annotations

import numpy as np
import pytest

from zerosim import functional as F
from zerosim.backends.forms import Choice
from zerosim.comm.runtime import make_backend
from zerosim.device.device import Device, Kind
from zerosim.device.events import Alloc, Free, Kernel
from zerosim.device.recorder import Recorder
from zerosim.dtypes import bf16
from zerosim.errors import InputError
from zerosim.placement.spread import EVEN
from zerosim.tensor.autograd import backward
from zerosim.tensor.gradcheck import gradcheck
from zerosim.tensor.tensor import Leaf, Tensor, cpu, tensor

RNG = np.random.default_rng(4)
TOKENS, EXPERTS, K, WIDE = 7, 6, 2, 5
CHOICES = {
    "softmax": Choice(),
    "normed": Choice(normed=True, scale=2.5),
    "sigmoid": Choice("sigmoid", normed=True),
    "of chosen": Choice("softmax of chosen"),
    "groups": Choice("sigmoid", groups=3, chosen=2, best=2, normed=True),
    "given": Choice(given=(7, 3, 1, 1, 1, 1), normed=True),
}


def routing(device: Device, how: Choice = CHOICES["normed"]) -> F.Routing:
    """Routes that no small step of a gradient check changes."""
    logits = tensor(3 * RNG.standard_normal((TOKENS, EXPERTS)), device, dtype="fp64")
    return F.route(logits, K, how)[1].routing()


@pytest.mark.parametrize("how", CHOICES.values(), ids=CHOICES)
def test_gradients_of_a_router(how: Choice) -> None:
    gradcheck(lambda logits: F.choose(logits * 4.0, K, how)[0], [(TOKENS, EXPERTS)])


def test_gradients_of_rows_on_their_way() -> None:
    def there_and_back(x: Tensor, weights: Tensor) -> Tensor:
        way = routing(x.device)
        return F.combine(F.weigh(F.dispatch(x, way), F.row_weights(weights, way)), way, x.shape)

    gradcheck(there_and_back, [(TOKENS, WIDE), (TOKENS, K)])


def test_composed_weighing_also_holds_the_gradient_times_the_rows() -> None:
    """PyTorch's backward of (R, D) * (R, 1) makes two products of R x D and then sums one of them."""

    def backward_of(composed: bool) -> tuple[int, list[np.ndarray]]:
        device, rng = cpu(Recorder(keep=True)), np.random.default_rng(8)
        leaves = [Leaf(), Leaf()]
        rows, weights = (
            Tensor(tensor(rng.standard_normal(shape), device, dtype="fp64").buffer, leaf)
            for shape, leaf in zip([(TOKENS, WIDE), (TOKENS, 1)], leaves, strict=True)
        )
        out = F.weigh(rows, weights, composed=composed)
        grad = tensor(rng.standard_normal(out.shape), device, dtype="fp64").buffer
        device.recorder.drain()
        before = len(device.recorder.history)
        assert out.node is not None
        backward(out.node, [grad])
        device.recorder.drain()
        sizes, peak = dict[int, int](), 0
        for event in list(device.recorder.history)[before:]:
            if isinstance(event, Alloc):
                sizes[event.id] = event.nbytes
            elif isinstance(event, Free):
                sizes.pop(event.id, None)
            peak = max(peak, sum(sizes.values()))
        return peak, [leaf.take().array.copy() for leaf in leaves]

    (fused, one), (composed, other) = backward_of(False), backward_of(True)
    assert composed - fused == 8 * TOKENS * WIDE
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("transposed", [False, True], ids=["in_out", "out_in"])
def test_gradients_of_experts_maps(transposed: bool) -> None:
    shape = (EXPERTS, 4, WIDE) if transposed else (EXPERTS, WIDE, 4)
    rng = np.random.default_rng(5)
    logits = 3 * rng.standard_normal((TOKENS, EXPERTS))
    gradcheck(
        lambda rows, stack: F.grouped_linear(
            rows,
            stack,
            F.route(tensor(logits, rows.device, dtype="fp64"), K, Choice())[1].routing().counts,
            transposed=transposed,
        ),
        [(TOKENS * K, WIDE), shape],
    )


@pytest.mark.parametrize("transposed", [False, True], ids=["in_out", "out_in"])
def test_gradients_of_adapters_of_experts(transposed: bool) -> None:
    """As PEFT merges them, `target_parameters`: A (E r, I), B (O, r E)."""
    shape = (3, 4, WIDE) if transposed else (3, WIDE, 4)

    def merged(stack: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.stack_with_adapter(stack, a, b, 0.5, transposed=transposed)

    gradcheck(merged, [shape, (3 * 2, WIDE), (4, 2 * 3)])
    device, rng = cpu(), np.random.default_rng(2)
    stack, a, b = (rng.standard_normal(one) for one in (shape, (6, WIDE), (4, 6)))
    found = merged(*(tensor(one, device, dtype="fp64") for one in (stack, a, b))).numpy()
    delta = np.einsum("ore,eri->eoi", b.reshape(4, 2, 3), a.reshape(3, 2, WIDE))
    np.testing.assert_allclose(found, stack + 0.5 * (delta if transposed else delta.swapaxes(1, 2)), rtol=1e-13)


def test_adapters_by_rows_add_what_a_merged_stack_computes() -> None:
    counts, rng = (2, 0, 3), np.random.default_rng(3)
    shapes = [(5, WIDE), (3, 4, WIDE), (3 * 2, WIDE), (4, 2 * 3)]

    def by_rows(x: Tensor, stack: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.add_adapter(F.grouped_linear(x, stack, counts), x, a, b, counts, 0.5)

    gradcheck(by_rows, shapes)
    device = cpu()
    x, stack, a, b = (tensor(rng.standard_normal(one), device, dtype="fp64") for one in shapes)
    merged = F.grouped_linear(x, F.stack_with_adapter(stack, a, b, 0.5), counts)
    np.testing.assert_allclose(by_rows(x, stack, a, b).numpy(), merged.numpy(), rtol=1e-12)


def test_a_token_is_the_sum_of_its_experts() -> None:
    """Against one expert after the other, as transformers' modules compute it."""
    device, rng = cpu(), np.random.default_rng(6)
    x, logits, stack = (rng.standard_normal(s) for s in ((TOKENS, WIDE), (TOKENS, EXPERTS), (EXPERTS, 4, WIDE)))
    weights, chosen = F.route(tensor(logits, device, dtype="fp64"), K, Choice())
    way = chosen.routing()
    rows = F.dispatch(tensor(x, device, dtype="fp64"), way)
    rows = F.weigh(F.grouped_linear(rows, tensor(stack, device, dtype="fp64"), way.counts), F.row_weights(weights, way))
    found = F.combine(rows, way, (TOKENS, 4)).numpy()
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for token in range(TOKENS):
        best = np.argsort(-scores[token])[:K]
        expected = sum(scores[token, e] * (stack[e] @ x[token]) for e in best)
        np.testing.assert_allclose(found[token], expected, rtol=1e-13)


def test_all_experts_are_one_product_whatever_the_router_says() -> None:
    """A product for each expert would put the data into the record."""
    device = Device(0, make_backend("meta"))
    logits, x, stack = (
        Tensor(device.alloc(shape, bf16, Kind.ACTIVATION), Leaf())
        for shape in ((TOKENS, EXPERTS), (TOKENS, WIDE), (EXPERTS, 4, WIDE))
    )
    way = F.route(logits, K, Choice())[1].routing()
    out = F.grouped_linear(F.dispatch(x, way), stack, way.counts)
    assert out.node is not None
    backward(out.node, [out.new_grad()])
    products = [event for event in device.recorder.events if isinstance(event, Kernel) and event.engine == "matmul"]
    rows, flops = TOKENS * K, 2 * TOKENS * K * WIDE * 4
    assert [(one.name, one.flops, one.shape) for one in products] == [
        ("grouped", flops, (rows, WIDE, 4, EXPERTS)),
        ("grouped_dgrad", flops, (rows, 4, WIDE, EXPERTS)),
        ("grouped_wgrad", flops, (4, rows, WIDE, EXPERTS)),
    ]
    assert products[0].bytes_read == 2 * (rows * WIDE + EXPERTS * 4 * WIDE)


def test_on_shapes_rows_are_assumed_to_divide_evenly() -> None:
    device = Device(0, make_backend("meta"))
    logits = Tensor(device.alloc((TOKENS, EXPERTS), bf16, Kind.ACTIVATION))
    assert F.route(logits, K, Choice())[1].routing().counts == (3, 3, 2, 2, 2, 2)
    real = tensor(RNG.standard_normal((TOKENS, EXPERTS)), cpu())
    assert F.route(real, K, Choice(), spread=EVEN)[1].routing().counts == (3, 3, 2, 2, 2, 2)


def test_ops_name_what_does_not_fit() -> None:
    device = cpu()
    logits = tensor(np.zeros((TOKENS, EXPERTS)), device)
    with pytest.raises(InputError, match="7 choices for a token, and there are 6 experts"):
        F.route(logits, 7, Choice())
    way = F.route(logits, K, Choice())[1].routing()
    rows = tensor(np.zeros((TOKENS * K, WIDE)), device)
    with pytest.raises(InputError, match=r"a stack of shape \(5, 4, 5\) for 5 columns, and rows of 6 experts"):
        F.grouped_linear(rows, tensor(np.zeros((5, 4, WIDE)), device), way.counts)
