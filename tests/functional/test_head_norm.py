"""Norms of queries and keys over heads that ranks divide, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from meeting import Meeting

from zerosim import functional as F
from zerosim.backends.kernels import Backend
from zerosim.device.device import Buffer, Device
from zerosim.errors import InputError
from zerosim.functional.policy import ActivationPolicy
from zerosim.tensor.autograd import backward
from zerosim.tensor.tensor import cpu, tensor


def normed(qkv: Any, weights: tuple[Any, Any], seed: Any, heads: tuple[int, int], group: Any, dtype: str) -> list[Any]:
    """The result and the gradients, of qkv and of both weights."""
    device = cpu()
    leaves = [tensor(value, device, dtype=dtype, requires_grad=True) for value in (qkv, *weights)]
    out = F.head_norm(*leaves, *heads, plus_one=True, group=group)
    assert out.node is not None
    backward(out.node, [tensor(seed, device, dtype=dtype).buffer])
    return [out.numpy(), *(leaf.grad.numpy() for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["apart", "copied"])
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_a_norm_over_all_heads_is_one_though_ranks_divide_them(dtype: str, kv_heads: int) -> None:
    """Four ranks, a query head each; with two heads of keys, pairs of ranks hold copies and their gradients add up."""
    ranks, width, rng = 4, 3, np.random.default_rng(7)
    qkv, seed = (rng.standard_normal((2, 5, (4 + 2 * kv_heads) * width)) for _ in range(2))
    weights = rng.standard_normal(4 * width), rng.standard_normal(kv_heads * width)
    k, v = slice(12, 12 + 3 * kv_heads), slice(12 + 3 * kv_heads, None)
    seed[..., v] = 0
    whole = normed(qkv, weights, seed, (4, kv_heads), None, dtype)
    copies = ranks // kv_heads

    def columns(rank: int) -> list[int]:
        one = list(range(width * (rank // copies), width * (rank // copies + 1)))
        return [*range(width * rank, width * rank + width), *(12 + i for i in one), *(v.start + i for i in one)]

    def on_rank(rank: int) -> list[Any]:
        at, own = columns(rank), seed.copy()
        own[..., k] /= copies
        parts = weights[0][at[:width]], weights[1][[i - 12 for i in at[width : 2 * width]]]
        return normed(qkv[..., at], parts, own[..., at], (1, 1), meeting.of(rank), dtype)

    meeting = Meeting(ranks)
    found = [np.zeros_like(one) for one in whole]
    for rank, (out, dqkv, dq, dk) in enumerate(meeting.run(on_rank)):
        at = columns(rank)
        found[0][..., at] = out
        found[1][..., at] += dqkv
        found[2][at[:width]] += dq
        found[3][[i - 12 for i in at[width : 2 * width]]] += dk
    for ours, theirs in zip(found, whole, strict=True):
        bound = 1e-13 if dtype == "fp64" else 2.0**-6
        assert np.abs(ours - theirs).max() <= bound * np.abs(theirs).max()


@pytest.mark.parametrize("rounds_last", [False, True])
@pytest.mark.parametrize("sizes", [(3, 3), (12, 6)], ids=["by head", "over all"])
def test_copies_in_fp32_change_no_bit(sizes: tuple[int, int], rounds_last: bool) -> None:
    """Saves 'eager': q and k in fp32, what weights multiply in bf16 or fp32, and not q|k|v."""
    rng, found = np.random.default_rng(3), list[list[Any]]()
    qkv, seed = (rng.standard_normal((2, 5, 24)) for _ in range(2))
    weights, nbytes = [rng.standard_normal(size) for size in sizes], list[int]()
    for saves in ("lean", "eager"):
        device = cpu()
        leaves = [tensor(value, device, dtype="bf16", requires_grad=True) for value in (qkv, *weights)]
        out = F.head_norm(*leaves, 4, 2, rounds_last=rounds_last, policy=ActivationPolicy(saves=saves))
        assert out.node is not None
        nbytes.append(sum(one.nbytes for one in out.node.rule.saved().values() if isinstance(one, Buffer)))
        backward(out.node, [tensor(seed, device, dtype="bf16").buffer])
        found.append([out.numpy(), *(leaf.grad.numpy() for leaf in leaves if leaf.grad is not None)])
    assert nbytes[1] - nbytes[0] == 10 * 18 * (8 if rounds_last else 6)
    for lean, eager in zip(*found, strict=True):
        assert np.array_equal(lean, eager)


def test_weights_of_a_head_norm_are_of_one_kind() -> None:
    qkv, weight = tensor(np.zeros((1, 3, 16)), cpu()), tensor(np.zeros(3), cpu())
    with pytest.raises(
        InputError, match=r"expected \(2,\) twice for a norm by head, or \(8,\) and \(4,\) for one over all"
    ):
        F.head_norm(qkv, weight, weight, 4, 2)
    with pytest.raises(InputError, match=r"head_norm: 3 \+ 2 \* 2 heads do not divide 16 columns"):
        F.head_norm(qkv, weight, weight, 3, 2)


def test_weights_of_a_layer_norm_of_heads_are_one_or_each_heads() -> None:
    qkv, own, wrong = (tensor(np.zeros(shape), cpu()) for shape in ((1, 3, 16), (2,), (3, 2)))
    with pytest.raises(InputError, match=r"head_layer_norm: weight \(3, 2\): expected \(2,\) or \(4, 2\)"):
        F.head_layer_norm(qkv, wrong, own, 4, 2)
    with pytest.raises(InputError, match=r"head_layer_norm: 3 \+ 2 \* 2 heads do not divide 16 columns"):
        F.head_layer_norm(qkv, own, own, 3, 2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_layer_norm_of_heads_runs_on_every_backend(backend: Backend, dtype: str) -> None:
    device, rng = Device(0, backend), np.random.default_rng(3)
    shapes = (2, 5, 24), (4, 3), (2, 3)
    leaves = [tensor(rng.standard_normal(shape), device, dtype=dtype, requires_grad=True) for shape in shapes]
    out = F.head_layer_norm(*leaves, 4, 2)
    assert out.node is not None
    backward(out.node, [tensor(rng.standard_normal(out.shape), device, dtype=dtype).buffer])
    x, *weights = (leaf.numpy().astype(np.float64) for leaf in leaves)
    by_head = x.reshape(2, 5, 8, 3)
    normed = (by_head - by_head.mean(-1, keepdims=True)) / np.sqrt(by_head.var(-1, keepdims=True) + 1e-5)
    wanted = np.concatenate([normed[:, :, :4] * weights[0], normed[:, :, 4:6] * weights[1], by_head[:, :, 6:]], axis=2)
    bound = 2.0**-8 if dtype == "bf16" else 1e-6
    assert np.abs(out.numpy() - wanted.reshape(x.shape)).max() <= bound * np.abs(wanted).max()
    assert all(leaf.grad is not None and np.isfinite(leaf.grad.numpy()).all() for leaf in leaves)
