"""The engine: graphs of any shape, no gradient ever written into by accident, bytes that die in time."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from same import no_garbage_collector

from zerosim import functional as F
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.events import Alloc, Kernel
from zerosim.dtypes import fp32, fp64
from zerosim.errors import InputError
from zerosim.ledger.memory import MemoryLedger
from zerosim.placement.rows import Held
from zerosim.tensor import ops as P
from zerosim.tensor.autograd import Node, backward
from zerosim.tensor.flat import Flat, whole
from zerosim.tensor.tensor import Leaf, Operand, Parameter, Tensor, apply, cpu, tensor


def leaf(values: object, device: Device) -> Tensor:
    return tensor(values, device, dtype="fp64", requires_grad=True)


def grad_of(x: Tensor) -> list[float]:
    assert x.grad is not None
    return x.grad.numpy().tolist()


# -- any graph ----------------------------------------------------------------------------------------
OPS = ("add", "subtract", "multiply", "reshape", "sum")


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=14),
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_any_graph_against_forward_derivatives(program: list[tuple[str, int, int]], ends: list[int]) -> None:
    """Whole numbers, so that `==` holds: each value is carried with its derivatives by three leaves' elements.

    add and reshape hand one buffer on to several parents, which is where adding in place could corrupt.
    """
    device = cpu()
    leaves = [leaf([2.0, -3.0], device), leaf([1.0, 5.0], device), leaf([-1.0, 4.0], device)]
    nodes = list(leaves)
    # (value, derivative by each of the 6 leaf elements), per element
    eyes = np.eye(6).reshape(3, 2, 6)
    known = [(x.numpy(), eyes[i]) for i, x in enumerate(leaves)]
    for op, i, j in program:
        a, b = nodes[i % len(nodes)], nodes[j % len(nodes)]
        (va, da), (vb, db) = known[i % len(nodes)], known[j % len(nodes)]
        if op == "add":
            nodes.append(a + b)
            known.append((va + vb, da + db))
        elif op == "subtract":
            nodes.append(a - b)
            known.append((va - vb, da - db))
        elif op == "multiply":
            nodes.append(a * b)
            known.append((va * vb, da * vb[:, None] + va[:, None] * db))
        elif op == "reshape":
            nodes.append(a.reshape(2, 1).reshape(2))
            known.append((va, da))
        else:
            nodes.append(a.sum(0, keepdims=True) + b)
            known.append((va.sum() + vb, da.sum(0) + db))
        assume(all(np.abs(part).max() < 2**40 for part in known[-1]))
    total, derivative = tensor(0.0, device, dtype="fp64"), np.zeros(6)
    for end in ends:
        total = total + nodes[end % len(nodes)].sum()
        derivative = derivative + known[end % len(nodes)][1].sum(0)
    if total.node is not None:
        total.backward()
    collected = [np.zeros(2) if x.grad is None else x.grad.numpy() for x in leaves]
    assert (np.concatenate(collected) == derivative).all()


def test_nodes_of_one_depth_wait_for_each_other(device: Device) -> None:
    """Two nodes of one depth in the queue at once, of which one arrived after another was taken out."""
    x = leaf([1.0, 2.0], device)
    a = P.exp(x)
    (P.exp(P.sqrt(a)) + P.tanh(a)).sum().backward()
    e = np.exp([1.0, 2.0])
    np.testing.assert_allclose(
        grad_of(x), e * (np.exp(np.sqrt(e)) / (2 * np.sqrt(e)) + 1 / np.cosh(e) ** 2), rtol=1e-12
    )


def test_diamonds(device: Device) -> None:
    x = leaf([3.0], device)
    y = x * x
    ((y + y) * y + y).sum().backward()  # 2 x^4 + x^2
    assert grad_of(x) == [8 * 27 + 2 * 3]


def test_a_shared_gradient_is_not_added_into(device: Device) -> None:
    """add gives ONE buffer to both: what a leaf was given must not grow when the other adds to its own."""
    a, b = leaf([1.0], device), leaf([1.0], device)
    (a + b).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.buffer.storage is b.grad.buffer.storage
    (5 * a).sum().backward()
    assert (grad_of(a), grad_of(b)) == ([6], [1])
    (7 * b).sum().backward()
    assert (grad_of(a), grad_of(b)) == ([6], [8])
    c, d = leaf([1.0], device), leaf([1.0], device)
    (c.reshape(1) + 0 + d).sum().backward()  # handed on twice more, to one input each
    (5 * c).sum().backward()
    assert (grad_of(c), grad_of(d)) == ([6], [1])


def test_the_seed_is_not_written_into(device: Device) -> None:
    x, y = leaf([1.0, 1.0], device), leaf([1.0, 1.0], device)
    middle = x + y
    out = middle + middle + x
    seed = tensor([1.0, 10.0], device, dtype="fp64").buffer
    assert out.node is not None
    backward(out.node, [seed])
    assert (seed.array == [1, 10]).all()
    assert (grad_of(x), grad_of(y)) == ([3, 30], [2, 20])
    z = leaf([1.0, 1.0], device)
    for _ in range(3):
        handed_on = (z + 0).reshape(2)
        assert handed_on.node is not None
        backward(handed_on.node, [seed])
    assert (seed.array == [1, 10]).all()
    assert grad_of(z) == [3, 30]


class Twice:
    """Hands out one buffer as two gradients, the second as a view."""

    def backward(self, grad: Buffer) -> tuple[Buffer | None, ...]:
        both = grad.device.alloc(grad.shape, grad.dtype, Kind.ACTIVATION_GRAD)
        grad.device.backend.copy(grad.array, both.array)
        return both, both.reshape(*grad.shape)


def test_views_of_one_buffer_are_shared_too(device: Device) -> None:
    x, y = leaf([1.0], device), leaf([1.0], device)
    a, b = x * 1, y * 1  # nodes, to which more gradients come
    out = apply(Twice(), device.alloc((1,), fp64, Kind.ACTIVATION), a, b)
    (out + (a * 10 + b * 100)).sum().backward()  # `out` is walked first, then a and b get more
    assert (grad_of(x), grad_of(y)) == ([11], [101])


def test_leaves_accumulate_and_can_be_cleared(device: Device) -> None:
    x = leaf([2.0], device)
    (x * x).sum().backward()
    (3 * x).sum().backward()
    assert grad_of(x) == [7]
    x.grad = None
    assert x.grad is None
    (3 * x).sum().backward()
    assert grad_of(x) == [3]
    with pytest.raises(InputError, match="cleared"):
        x.grad = x  # type: ignore[assignment]


def test_a_graph_is_walked_once(device: Device) -> None:
    x = leaf([2.0], device)
    loss = (x * x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="already used: run forward again"):
        loss.backward()
    y = x.exp()
    first, second = y.sum(), (y * 2).sum()
    first.backward()
    with pytest.raises(RuntimeError, match="already used"):
        second.backward()


def test_backward_starts_at_one_element_that_wants_a_gradient(device: Device) -> None:
    for start in (leaf([1.0, 2.0], device) * 2, tensor([1.0], device)):
        with pytest.raises(InputError, match="backward starts at one element"):
            start.backward()
    x = leaf([4.0], device)
    x.backward()
    assert grad_of(x) == [1]


def test_only_what_wants_a_gradient_gets_one(device: Device) -> None:
    x, constant = leaf([2.0], device), tensor([3.0], device, dtype="fp64")
    (x * constant + constant).sum().backward()
    assert constant.grad is None
    assert not (constant * constant).requires_grad
    assert grad_of(x) == [3]


def test_deep_chains_do_not_recurse(device: Device) -> None:
    x = leaf([1.0], device)
    y = x
    for _ in range(max(5000, 4 * sys.getrecursionlimit())):
        y = y + x
    y.sum().backward()
    assert grad_of(x) == [max(5000, 4 * sys.getrecursionlimit()) + 1]
    for _ in range(5000):  # a graph that nobody walks goes without recursion, too
        y = y * x
    del y


# -- bytes ------------------------------------------------------------------------------------------------
def test_no_grad_keeps_nothing(device: Device, live: Callable[[], int]) -> None:
    x = leaf(np.ones((4, 4)), device)
    before = live()
    with device.no_grad():
        y = F.gelu(x).exp() * x
    assert not y.requires_grad
    assert live() == before + 128
    assert (x + 1).requires_grad


def test_saved_buffers_die_as_backward_goes(device: Device, ledger: MemoryLedger, live: Callable[[], int]) -> None:
    """Twenty saved buffers of 800 bytes go one by one, against two gradients on their way."""
    x = leaf(np.full(100, 0.5), device)
    y = x
    for _ in range(20):
        y = y.tanh()
    loss = y.sum()
    del y
    start = live()
    device.recorder.history.clear()
    loss.backward()
    events = list(device.recorder.events)
    at_kernels = []
    for event in events:
        ledger.read([event])
        if isinstance(event, Kernel) and event.name == "subtract":  # one per tanh
            at_kernels.append(ledger.live_bytes)
    assert len(at_kernels) == 20
    assert all(later - earlier == -800 for earlier, later in itertools.pairwise(at_kernels))
    assert start == 21 * 800 + 8
    assert ledger.live_bytes == 800 + 8 + 800  # x, loss, x.grad


def test_reference_counts_alone_free_everything(device: Device, live: Callable[[], int]) -> None:
    with no_garbage_collector():
        for walk in (True, False):
            x, w = leaf(np.ones((3, 4)), device), leaf(np.ones((4, 4)), device)
            h = F.gelu(F.linear(x, w)) + x
            loss = ((h @ w).exp() * h / w.sum() - h.tanh()).mean()
            if walk:
                loss.backward()
            del x, w, h, loss
            assert live() == 0


def test_a_failing_rule_leaves_no_cycle(device: Device, live: Callable[[], int]) -> None:
    class Fails:
        def backward(self, grad: Buffer) -> tuple[Buffer | None, ...]:
            raise ZeroDivisionError

    with no_garbage_collector():
        x = leaf([1.0], device)
        bad = apply(Fails(), (x * 2).buffer, x)
        with pytest.raises(ZeroDivisionError):
            bad.sum().backward()
        del x, bad
        assert live() == 0


# -- parameters -------------------------------------------------------------------------------------------
def place(flat: Flat, values: object) -> None:
    flat.held = Held(whole(flat.numel), flat.numel)
    flat.param = flat.device.alloc((flat.numel,), flat.dtype, Kind.UNSHARDED_PARAM)
    flat.device.backend.from_host(np.asarray(values), flat.param.array)


def two_parameters(device: Device) -> tuple[Flat, Parameter, Parameter]:
    flat = Flat("flat", device, fp64, fp64)
    a, b = flat.declare("a", (2, 2)), flat.declare("b", (2,))
    place(flat, [1, 2, 3, 4, 5, 6])
    return flat, a, b


def test_a_parameters_gradient_is_its_window(device: Device) -> None:
    flat, a, b = two_parameters(device)
    x = tensor([[1.0, 10.0]], device, dtype="fp64")
    y = F.linear(x, a, b)
    assert y.node is not None
    assert y.node.depth == 1  # a parameter is a leaf, of depth 0
    y.sum().backward()
    assert flat.take_grad().array.tolist() == [1, 1, 10, 10, 1, 1]


@pytest.mark.parametrize("uses", [2, 3])
def test_a_parameter_used_several_times_sums_its_uses(device: Device, uses: int) -> None:
    """Tied: once transposed, once not, once as an embedding; each rule makes a gradient of its own."""
    flat, table, _ = two_parameters(device)
    ids = tensor([1, 1, 0], device, dtype="int64").buffer
    x = tensor([[1.0, 10.0]], device, dtype="fp64")
    loss = F.linear(x, table).sum() + F.linear(x, table, transposed=True).sum()
    expected = np.array([[1, 1], [10, 10]]) + np.array([[1, 10], [1, 10]])
    if uses == 3:
        loss = loss + F.embedding(ids, table).sum()
        expected += np.array([[1, 1], [2, 2]])
    loss.backward()
    assert flat.take_grad().array.tolist() == [*expected.reshape(-1).tolist(), 0, 0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda b: P.add(b, b), [2, 2]),
        (lambda b: P.multiply(b, b), [10, 12]),
        (lambda b: P.subtract(P.multiply(b, 3.0), b), [2, 2]),
        (lambda b: P.multiply(tensor(np.ones((4, 1, 2)), b.device, dtype="fp64"), b), [4, 4]),
        (lambda b: F.layer_norm(tensor([[1.0, 1.0]], b.device, dtype="fp64"), b, b), [1, 1]),
    ],
)
def test_primitives_take_parameters(device: Device, function: Callable[[Operand], Tensor], expected: list[int]) -> None:
    flat, _, b = two_parameters(device)
    function(b).sum().backward()
    assert flat.take_grad().array.tolist() == [0, 0, 0, 0, *expected]


def test_an_unused_parameter_gets_zero(device: Device) -> None:
    flat, _a, b = two_parameters(device)
    P.multiply(b, 2.0).sum().backward()
    assert flat.take_grad().array.tolist() == [0, 0, 0, 0, 2, 2]
    assert flat.take_grad().array.tolist() == [0] * 6  # and each microbatch begins anew


def test_a_micro_batch_begins_with_a_gradient_of_its_own(device: Device) -> None:
    """One flat buffer each, in which rules write where it is to stay: no buffer besides."""
    flat, a, b = two_parameters(device)
    x = tensor([[1.0, 10.0]], device, dtype="fp64")
    grads = []
    for factor in (1, 2):
        device.recorder.events.clear()
        F.linear(x * factor, a, b).sum().backward()
        grads.append(flat.take_grad())
        of_parameters = [e for e in device.recorder.events if isinstance(e, Alloc) and e.kind == "unsharded_grad"]
        assert [event.nbytes for event in of_parameters] == [48]
    assert [grad.array.tolist() for grad in grads] == [[1, 1, 10, 10, 1, 1], [2, 2, 20, 20, 1, 1]]


def test_gradients_may_have_a_dtype_of_their_own(device: Device) -> None:
    flat = Flat("flat", device, fp32, fp64)
    w = flat.declare("w", (2,))
    place(flat, [1, 2])
    P.multiply(w, 0.1).sum().backward()
    grad = flat.take_grad()
    assert grad.dtype is fp64
    assert grad.array.tolist() == [np.float32(0.1)] * 2


def test_ops_save_the_handle_and_not_the_array(device: Device, live: Callable[[], int]) -> None:
    """Resharding between forward and backward frees the bytes; backward reads what was brought back."""
    flat, a, _ = two_parameters(device)
    values = flat.whole_param().array.copy()
    x = leaf([[1.0, 10.0]], device)
    y = F.linear(x, a)
    before = live()
    flat.reshard()
    assert live() == before - 6 * 8
    with pytest.raises(RuntimeError, match=r"rank 0 uses a while flat is sharded: all_gather it before use"):
        y.sum().backward()
    y = None  # type: ignore[assignment]
    place(flat, values)
    y = F.linear(x, a)
    flat.reshard()
    place(flat, 2 * values)
    y.sum().backward()
    assert grad_of(x) == [[2 * (1 + 2), 2 * (3 + 4)]]


def test_a_gradient_dies_with_its_last_reader(device: Device, live: Callable[[], int]) -> None:
    """The first one too, which the caller handed in: nobody on the way keeps it."""
    seen: list[int] = []

    class Fresh:
        def backward(self, grad: Buffer) -> tuple[Buffer | None, ...]:
            seen.append(live())
            return (device.alloc((1000,), fp32, Kind.ACTIVATION_GRAD),)

    sink = Leaf()
    node = Node(Fresh(), (Node(Fresh(), (Node(Fresh(), (sink,)),)),))
    backward(node, [device.alloc((1000,), fp32, Kind.ACTIVATION_GRAD)])
    assert seen == [4000, 4000, 4000]
    assert sink.take().numel == 1000
