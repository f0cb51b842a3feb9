"""What a training step holds of its logits in each mode: the bytes of the table there, and always one result."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from zerosim import functional as F
from zerosim.backends.forms import PLAIN, LogitForm
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.device.device import Buffer, Device
from zerosim.device.events import Alloc, Free
from zerosim.device.recorder import Recorder
from zerosim.functional.loss import LogitsGrad
from zerosim.functional.loss_modes import MODES
from zerosim.tensor.tensor import tensor

ROWS, VOCAB = 8, 1000
LOGITS = ROWS * VOCAB
BYTES = {  # of a half-type logit: forward's peak, until backward, backward's peak
    "in-place": (2, 2, 2),
    "lean": (4, 2, 2),
    "megatron": (6, 4, 6),
    "megatron-fused": (6, 4, 6),
    "megatron-compiled": (10, 4, 10),
    "torch": (10, 4, 12),
    "torch-kept": (10, 6, 14),
    "torch-fp32-kept": (8, 8, 16),
    "torch-half": (4, 2, 6),
    "torch-half-kept": (4, 4, 8),
    "hf-4.45": (12, 4, 12),
    "hf-4.45-kept": (12, 8, 16),
    "hf-4.48": (14, 4, 12),
    "hf-4.48-kept": (14, 6, 14),
    "hf-5": (10, 4, 12),
    "hf-5-kept": (10, 6, 14),
    "unsloth-4.45": (8, 4, 8),
    "unsloth-4.48": (10, 4, 8),
    "hf-half": (6, 2, 6),
    "hf-half-autocast": (12, 4, 12),
    "unsloth-half": (4, 2, 4),
    "unsloth-half-autocast": (8, 2, 4),
    "torchtune": (6, 4, 5),
    "litgpt": (8, 8, 16),  # of one chunk
}
WIDE = {  # of an fp32 logit
    "in-place": (4, 4, 4),
    "lean": (8, 4, 4),
    "megatron": (4, 4, 4),
    "megatron-fused": (8, 4, 4),
    "megatron-compiled": (8, 4, 8),
    "torch": (8, 4, 12),
    "torch-kept": (8, 8, 16),
    "torch-fp32-kept": (8, 8, 16),
    "torch-half": (8, 4, 12),
    "torch-half-kept": (8, 8, 16),
    "hf-4.45": (12, 4, 12),
    "hf-4.45-kept": (12, 8, 16),
    "hf-4.48": (12, 4, 12),
    "hf-4.48-kept": (12, 8, 16),
    "hf-5": (8, 4, 12),
    "hf-5-kept": (8, 8, 16),
    "unsloth-4.45": (8, 4, 8),
    "unsloth-4.48": (8, 4, 8),
    "hf-half": (12, 4, 12),
    "hf-half-autocast": (12, 4, 12),
    "unsloth-half": (8, 4, 8),
    "unsloth-half-autocast": (8, 4, 8),
    "torchtune": (8, 4, 8),
    "litgpt": (8, 8, 16),
}


class Live:
    """Live bytes, and their peak since `begin`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def read(self) -> int:
        self.device.recorder.drain()
        for event in self.device.recorder.history:
            if isinstance(event, Alloc):
                self.sizes[event.id] = event.nbytes
            elif isinstance(event, Free):
                del self.sizes[event.id]
            self.peak = max(self.peak, sum(self.sizes.values()))
        self.device.recorder.history.clear()
        return sum(self.sizes.values())

    def begin(self) -> int:
        now = self.read()
        self.peak = now
        return now


def drawn(device: Device, dtype: str) -> tuple[Buffer, Buffer]:
    rng = np.random.default_rng(0)
    logits = tensor(3 * rng.standard_normal((ROWS, VOCAB)), device, dtype=dtype)
    return logits.buffer, tensor(rng.integers(0, VOCAB, (ROWS,)), device, dtype="int64").buffer


forms = pytest.mark.parametrize("form", [PLAIN, LogitForm(0.5), LogitForm(1.5, 4.0)], ids=["plain", "factor", "cap"])


def in_one_go(device: Device, mode: str, dtype: str, form: LogitForm) -> tuple[Any, Any]:
    logits, targets = drawn(device, dtype)
    own = [logits]
    del logits
    sums, grad_of = partial(F.cross_entropy_sum, targets=targets, form=form), LogitsGrad(targets, 8.0, ROWS, form=form)
    total, make_grad = MODES[mode](own, sums, grad_of)
    return total.array.copy(), make_grad().array.copy()


@forms
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_every_mode_has_one_loss_and_one_gradient_to_the_bit(dtype: str, form: LogitForm) -> None:
    results = {mode: in_one_go(Device(0, NumpyBackend()), mode, dtype, form) for mode in MODES}
    total, grad = results["lean"]
    for mode, (other_total, other_grad) in results.items():
        assert other_total == total, mode
        assert (other_grad == grad).all(), mode


@forms
@pytest.mark.parametrize(("dtype", "table"), [("bf16", BYTES), ("fp32", WIDE)])
@pytest.mark.parametrize("mode", MODES)
def test_the_bytes_of_a_logit(mode: str, dtype: str, table: dict[str, tuple[int, int, int]], form: LogitForm) -> None:
    device = Device(0, NumpyBackend(), recorder=Recorder(keep=True))
    live = Live(device)
    logits, targets = drawn(device, dtype)
    own = [logits]
    del logits
    live.begin()
    sums, grad_of = partial(F.cross_entropy_sum, targets=targets, form=form), LogitsGrad(targets, 8.0, ROWS, form=form)
    _, make_grad = MODES[mode](own, sums, grad_of)
    kept = live.read()
    forward = live.peak
    live.begin()
    grad = make_grad()
    assert bool(grad_of.outputs) == (mode.endswith("-kept") or mode == "litgpt")
    grad_of.outputs.clear()  # what the caller keeps until backward ends
    after = live.read()
    del grad, make_grad
    # What is counted by row (targets, log-sum-exp, the losses) is far below a byte a logit.
    assert tuple(count // LOGITS for count in (forward, kept, live.peak)) == table[mode]
    assert after // LOGITS == (2 if dtype == "bf16" else 4)
