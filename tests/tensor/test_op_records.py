"""What each op leaves in the record, forward and backward: bytes by kind, and kernels with their flops.

In bf16, so that what is kept in the compute type (4 bytes) stands out. B = 2, T = 3, D = 4, so M = 6 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zerosim import functional as F
from zerosim.backends.forms import Scores
from zerosim.device.device import Device, Kind
from zerosim.device.events import Alloc, Kernel
from zerosim.dtypes import fp32
from zerosim.functional.policy import ActivationPolicy
from zerosim.optim.adam import Adam
from zerosim.optim.optimizer import Step
from zerosim.optim.sgd import SGD
from zerosim.tensor.autograd import backward
from zerosim.tensor.tensor import Tensor, tensor

KEY = (1, 2)
MEGATRON = ActivationPolicy("megatron")
FLASH = ActivationPolicy("lean", "flash")
AGAIN = ActivationPolicy("lean", "eager", "selective")
Seen = tuple[list[tuple[str, int]], list[tuple[str, int]]]
"""Allocations as (kind, bytes) and kernels as (name, flops), in order."""

A, G, T = "activation", "activation_grad", "temp"
X = 2 * 3 * 4  # elements of x
QKV, PROBS = 2 * 3 * 8, 2 * 2 * 3 * 3  # 2 heads of queries, 1 of keys and values, 2 columns each
PRODUCT = PROBS * 2  # multiply-adds of one product of scores: B H T T d

EAGER = [("attention_scores", 2 * PRODUCT), ("softmax", 0), ("attention_values", 2 * PRODUCT)]
EAGER_BACK = [
    ("attention_dvalues", 2 * PRODUCT),
    ("attention_dprobs", 2 * PRODUCT),
    ("softmax_backward", 0),
    ("attention_dquery", 2 * PRODUCT),
    ("attention_dkey", 2 * PRODUCT),
]


def ids(device: Device) -> Any:
    return tensor([[0, 1, 2], [2, 2, 6]], device, dtype="int64").buffer


def attend(policy: ActivationPolicy, dropout: float = 0.0) -> Callable[..., Tensor]:
    return lambda qkv: F.attention(qkv, 2, num_kv_heads=1, dropout=dropout, key=KEY, policy=policy)


CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], Seen, Seen]] = {
    "linear": (
        F.linear,
        [(2, 3, 4), (4, 5), (5,)],
        ([(A, 60)], [("linear", 2 * 6 * 20)]),
        ([(G, 2 * X), (G, 40), (G, 10)], [("linear_dgrad", 240), ("linear_wgrad", 240), ("column_sum", 30)]),
    ),
    "packed_linear": (
        lambda x, a, b: F.packed_linear(x, (a, b)),
        [(2, 3, 4), (5, 4), (3, 4)],
        ([(A, 2 * 6 * 8)], [("linear", 240), ("linear", 144)]),
        (
            [(G, 40), (G, 24), (G, 2 * X), (T, 2 * X)],
            [("linear_wgrad", 240), ("linear_wgrad", 144), ("linear_dgrad", 240), ("linear_dgrad", 144), ("add", X)],
        ),
    ),
    "layer_norm": (
        F.layer_norm,
        [(2, 3, 4), (4,), (4,)],
        ([(A, 2 * X), (A, 24), (A, 24)], [("layer_norm", 7 * X)]),
        ([(G, 2 * X), (G, 8), (G, 8)], [("layer_norm_backward", 11 * X)]),
    ),
    "layer_norm, statistics again": (
        lambda x, w, b: F.layer_norm(x, w, b, policy=MEGATRON),
        [(2, 3, 4), (4,), (4,)],
        ([(A, 2 * X), (T, 24), (T, 24)], [("layer_norm", 7 * X)]),
        (
            [(G, 2 * X), (G, 8), (G, 8), (T, 24), (T, 24)],
            [("layer_norm_stats", 4 * X), ("layer_norm_backward", 11 * X)],
        ),
    ),
    "rms_norm": (
        F.rms_norm,
        [(2, 3, 4), (4,)],
        ([(A, 2 * X), (A, 24)], [("rms_norm", 4 * X)]),
        ([(G, 2 * X), (G, 8)], [("rms_norm_backward", 8 * X)]),
    ),
    "rms_norm, statistics again": (
        lambda x, w: F.rms_norm(x, w, policy=MEGATRON),
        [(2, 3, 4), (4,)],
        ([(A, 2 * X), (T, 24)], [("rms_norm", 4 * X)]),
        ([(G, 2 * X), (G, 8), (T, 24)], [("rms_norm_stats", 2 * X), ("rms_norm_backward", 8 * X)]),
    ),
    "gelu": (F.gelu, [(2, 3, 4)], ([(A, 2 * X)], [("gelu", 8 * X)]), ([(G, 2 * X)], [("gelu_backward", 16 * X)])),
    "swiglu": (
        F.swiglu,
        [(2, 3, 4)],
        ([(A, X)], [("swiglu", 6 * X // 2)]),
        ([(G, 2 * X)], [("swiglu_backward", 10 * X // 2)]),
    ),
    "rotary": (
        lambda qkv: F.rotary(qkv, 2, 1),
        [(2, 3, 8)],
        ([(A, 2 * QKV)], [("rotary", 3 * 6 * 3 * 2)]),
        ([(G, 2 * QKV)], [("rotary", 3 * 6 * 3 * 2)]),
    ),
    "head_norm": (
        lambda qkv, q, k: F.head_norm(qkv, q, k, 2, 1),
        [(2, 3, 8), (2,), (2,)],
        ([(A, 2 * QKV), (A, 48), (A, 24)], [("head_norm", 4 * 24), ("head_norm", 4 * 12), ("copy", 0)]),
        (
            [(G, 2 * QKV), (G, 4), (G, 4)],
            [("head_norm_backward", 8 * 24), ("head_norm_backward", 8 * 12), ("copy", 0)],
        ),
    ),
    "attention, eager": (
        attend(ActivationPolicy()),
        [(2, 3, 8)],
        ([(A, 2 * X), (A, 2 * PROBS)], EAGER),
        ([(G, 2 * QKV), (T, 2 * PROBS)], EAGER_BACK),
    ),
    "attention, eager, dropout": (
        attend(ActivationPolicy(), 0.5),
        [(2, 3, 8)],
        ([(A, 2 * X), (A, 2 * PROBS), (A, PROBS)], [("dropout_mask", 0), *EAGER]),
        ([(G, 2 * QKV), (T, 2 * PROBS)], EAGER_BACK),
    ),
    "attention, megatron, dropout": (
        attend(MEGATRON, 0.5),
        [(2, 3, 8)],
        (
            [(A, 2 * X), (A, 2 * PROBS), (A, PROBS), (A, 2 * PROBS), (T, 2 * PROBS)],
            [("dropout_mask", 0), *EAGER[:2], ("attention_dropout", 0), *EAGER[2:]],
        ),
        ([(G, 2 * QKV), (T, 2 * PROBS)], EAGER_BACK),
    ),
    "attention of another text, with a bias": (
        lambda q, kv, bias: F.attention(q, 2, num_kv_heads=1, form=Scores(causal=False), kv=kv, bias=bias),
        [(2, 3, 4), (2, 3, 4), (2, 3, 3)],
        ([(A, 2 * X), (A, 2 * PROBS)], EAGER),
        ([(G, 2 * X), (T, 2 * PROBS), (G, 2 * X), (G, 2 * 18)], EAGER_BACK),
    ),
    "relative_bias": (
        lambda w: F.relative_bias(w, 3, largest=6, causal=True),
        [(8, 2)],
        ([(A, 8 * 9), (A, 2 * 18), (A, 2 * 18)], [("relative_buckets", 0), ("embedding", 0), ("copy", 0)]),
        ([(T, 2 * 18), (G, 2 * 16)], [("copy", 0), ("embedding_backward", 18)]),
    ),
    "attention, flash": (
        attend(FLASH),
        [(2, 3, 8)],
        ([(A, 2 * X), (A, 4 * 12)], [("flash_attention", 4 * PRODUCT)]),
        ([(G, 2 * QKV), (T, 4 * 12)], [("flash_attention_backward", 10 * PRODUCT)]),
    ),
    "attention, run again": (
        attend(AGAIN),
        [(2, 3, 8)],
        ([(A, 2 * X), (A, 2 * PROBS)], EAGER),
        ([(A, 2 * X), (A, 2 * PROBS), (G, 2 * QKV), (T, 2 * PROBS)], [*EAGER, *EAGER_BACK]),
    ),
    "embedding": (
        lambda w: F.embedding(ids(w.device), w),
        [(7, 4)],
        ([(A, 48), (A, 2 * X)], [("embedding", 0)]),  # 6 ids of 8 bytes
        ([(G, 56)], [("embedding_backward", X)]),
    ),
    "add_rows": (
        F.add_rows,
        [(2, 3, 4), (5, 4)],
        ([(A, 2 * X)], [("add", X)]),
        ([(G, 40)], [("fill", 0), ("sum_to", X)]),
    ),
    "dropout": (
        lambda x: F.dropout(x, 0.5, KEY),
        [(2, 3, 4)],
        ([(A, X), (A, 2 * X)], [("dropout_mask", 0), ("dropout", 2 * X)]),
        ([(G, 2 * X)], [("dropout", 2 * X)]),
    ),
    "cross_entropy": (
        lambda z: F.cross_entropy(z, ids(z.device)),
        [(2, 3, 7)],
        ([(A, 48), (T, 24), (A, 24), (T, 4)], [("cross_entropy", 4 * 42), ("sum_to", 6), ("divide", 1)]),
        ([(G, 84)], [("cross_entropy_backward", 4 * 42), ("multiply", 42)]),
    ),
}


def seen(device: Device, run: Callable[[], Any]) -> tuple[Any, Seen]:
    device.recorder.drain()
    device.recorder.history.clear()
    result = run()
    device.recorder.drain()
    history = device.recorder.history
    allocs = [(e.kind, e.nbytes) for e in history if isinstance(e, Alloc)]
    return result, (allocs, [(e.name, e.flops) for e in history if isinstance(e, Kernel)])


@pytest.mark.parametrize("name", CASES)
def test_an_op_records_its_bytes_and_its_work(name: str, device: Device) -> None:
    function, shapes, forward, back = CASES[name]
    random = np.random.default_rng(0)
    inputs = [tensor(random.standard_normal(shape), device, dtype="bf16", requires_grad=True) for shape in shapes]
    out, found = seen(device, lambda: function(*inputs))
    assert found == forward
    node, grads = out.node, [out.new_grad()]
    grads[0].array[...] = 1
    assert seen(device, lambda: backward(node, grads))[1] == back


@pytest.mark.parametrize(
    ("optimizer", "kernel"), [(Adam(), ("adam", 150)), (SGD(), ("sgd", 40)), (SGD(0.9), ("sgd", 40))], ids=str
)
def test_an_update_records_its_work(optimizer: Adam | SGD, kernel: tuple[str, int], device: Device) -> None:
    weights, grad, *buffers = (device.alloc((10,), fp32, Kind.OPTIM) for _ in range(2 + len(optimizer.states)))
    for buffer in (weights, grad, *buffers):
        buffer.array[...] = 1
    states = dict(zip(optimizer.states, buffers, strict=True))
    now = Step(1.0, 0.1, 1)
    assert seen(device, lambda: optimizer.update(weights, grad, states, now, decays=True))[1] == ([], [kernel])
