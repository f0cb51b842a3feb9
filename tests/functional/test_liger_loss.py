"""Liger's fused linear cross-entropy: what it holds, and the gradients of a head and a loss apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from test_loss_modes import Live

from zerosim import functional as F
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.device.device import Device
from zerosim.device.recorder import Recorder
from zerosim.functional.chunked_loss import ChunkedLoss
from zerosim.functional.common import one_like
from zerosim.functional.liger_loss import LIGER, LigerLoss
from zerosim.functional.loss import LogitsGrad
from zerosim.tensor.tensor import Tensor, tensor

WIDTH, VOCAB, TOKENS = 16, 2048, 512
CHUNK = 4 * VOCAB  # 512 / (2048 / 16) tokens


@dataclass
class Built:
    live: Live
    loss: LigerLoss
    x: Tensor
    weight: Tensor


def built(name: str, *, dtype: str = "bf16", rows: int = 2, trained: bool = True) -> Built:
    rng, device = np.random.default_rng(0), Device(0, NumpyBackend(), recorder=Recorder(keep=True))
    x = tensor(rng.standard_normal((rows, TOKENS // rows, WIDTH)), device, dtype=dtype, requires_grad=True)
    weight = tensor(rng.standard_normal((VOCAB, WIDTH)), device, dtype=dtype, requires_grad=trained)
    targets = tensor(rng.integers(0, VOCAB, x.shape[:2]), device, dtype="int64").buffer
    of = ChunkedLoss([weight], lambda own, ids: F.cross_entropy_sum(own, ids), LogitsGrad(targets, 1.0, TOKENS), [])
    return Built(Live(device), LigerLoss(of, LIGER[name], {}), x, weight)


@pytest.mark.parametrize("name", LIGER)
@pytest.mark.parametrize("rows", [1, 2])
def test_the_gradients_of_a_head_and_a_loss_apart(name: str, rows: int) -> None:
    it = built(name, dtype="fp32", rows=rows)
    total = it.loss.run(it.x)
    found = it.loss.rule(None).backward(one_like(total))
    whole = F.cross_entropy(F.linear(it.x, it.weight, transposed=True), it.loss.of.grad_of.targets)
    whole.backward()
    assert float(total.array[0]) / TOKENS == pytest.approx(whole.item(), rel=1e-6)
    for ours, leaf in zip(found, (it.x, it.weight), strict=True):
        assert ours is not None
        assert leaf.grad is not None
        np.testing.assert_allclose(ours.array, leaf.grad.numpy(), rtol=1e-4, atol=1e-7)
    assert not it.loss.saved


@pytest.mark.parametrize(
    ("name", "rows", "trained", "logit", "held", "forward"),
    [  # bytes of a chunk's logit at the peak; of a head's weight from forward on, and in forward
        ("liger", 2, False, 2, 0, 0),
        ("liger", 2, True, 2, 2, 2),
        ("liger-foak", 2, False, 8, 0, 0),
        ("liger-foak", 1, True, 8, 2, 2),
        ("liger-fp32", 2, True, 2, 2, 4),
    ],
)
def test_what_it_holds(name: str, rows: int, trained: bool, logit: int, held: int, forward: int) -> None:
    it, inputs, weights = built(name, rows=rows, trained=trained), 2 * TOKENS * WIDTH, WIDTH * VOCAB
    before = it.live.begin()
    total = it.loss.run(it.x)
    after = it.live.read()
    small = 8 * TOKENS  # of each token: a loss, a log-sum-exp
    copy = inputs if name == "liger-foak" and rows > 1 else 0
    sums = max(forward * weights + logit * CHUNK, (forward + held) * weights if forward > held else 0)
    assert 0 <= it.live.peak - before - inputs - copy - sums <= small
    assert 0 <= after - before - inputs - held * weights <= small
    del total


def test_without_a_graph_it_computes_the_loss_alone() -> None:
    it = built("liger")
    with it.x.device.no_grad():
        it.loss.run(it.x)
    assert not it.loss.saved


def test_a_frozen_input_has_no_gradient() -> None:
    it = built("liger")
    it.loss.run(Tensor(it.x.buffer))
    assert list(it.loss.saved) == ["gradient of the weight"]
