"""What PyTorch's allocator holds for each named loss at its peak, beside the bytes that the mode's program counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from zerosim import functional as F
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.device.device import Device
from zerosim.device.events import Alloc, Free
from zerosim.device.recorder import Recorder
from zerosim.functional.loss import LogitsGrad
from zerosim.functional.loss_modes import MODES
from zerosim.tensor.tensor import tensor

torch = pytest.importorskip("torch")
VOCAB, SEQ = 1000, 64
Loss = Callable[[Any, Any], Any]


def cross_entropy(logits: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits.view(-1, VOCAB), labels.reshape(-1))


def transformers_5(logits: Any, labels: Any) -> Any:
    pytest.importorskip("transformers")
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits, labels, VOCAB)


def shifted(logits: Any, labels: Any) -> Any:
    """Do as transformers 4: `modeling_llama.py` to 4.45, `loss_utils.py` from 4.46."""
    return cross_entropy(logits[..., :-1, :].contiguous(), labels[..., 1:])


def cast(loss: Loss, logits: Any, labels: Any) -> Any:
    """Cast the logits, which this function's argument holds until the loss exists."""
    wide = logits.float()
    return loss(wide, labels)


def replaced(head: Any, labels: Any) -> Any:
    logits = head()
    logits = logits.float()
    return shifted(logits, labels)


def shifted_autocast(logits: Any, labels: Any) -> Any:
    """Do as `shifted` under autocast on a GPU, whose log-softmax is in fp32."""
    copy = logits[..., :-1, :].contiguous()
    return cross_entropy(copy.float(), labels[..., 1:])


def held(loss: Loss, logits: Any, labels: Any) -> Any:
    """Compute the loss in the model, whose argument holds the logits meanwhile."""
    return loss(logits, labels)


def converted(loss: Loss, logits: Any, labels: Any) -> Any:
    """Do as accelerate's convert_outputs_to_fp32."""
    value = loss(logits, labels)
    logits.float()
    return value


def torchtune(head: Any, labels: Any) -> Any:
    """Do as CEWithChunkedOutputLoss, and TransformerDecoder.chunked_output."""
    chunks = [head(part) for part in range(8)]
    losses = [
        torch.nn.functional.cross_entropy(chunk.reshape(-1, VOCAB).float(), part.reshape(-1), reduction="sum")
        for chunk, part in zip(chunks, labels.chunk(8, dim=1), strict=True)
    ]
    return sum(losses) / labels.numel()


def litgpt(head: Any, labels: Any) -> Any:
    """Do as `chunked_cross_entropy` of one chunk of positions; the caller holds the logits."""
    logits = head().float()
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="none").mean()
    loss.logits = logits
    return loss


class InPlace(torch.autograd.Function):
    """Unsloth's Fast_CrossEntropyLoss, without its kernels."""

    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any) -> Any:
        ctx.save_for_backward(logits)
        return torch.zeros(len(labels))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.saved_tensors[0], None


def unsloth(wide: Any, labels: Any) -> Any:
    return InPlace.apply(wide[..., :-1, :].contiguous().view(-1, VOCAB), labels[..., 1:].reshape(-1)).sum()


def unsloth_replaced(head: Any, labels: Any) -> Any:
    logits = head()
    logits = logits.float()
    return unsloth(logits, labels)


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "torch-half": lambda head, labels: cross_entropy(head(), labels),
    "torch": lambda head, labels: cast(cross_entropy, head(), labels),
    "hf-4.45": replaced,
    "hf-4.48": lambda head, labels: cast(shifted, head(), labels),
    "hf-5": lambda head, labels: transformers_5(head(), labels),
    "unsloth-4.45": unsloth_replaced,
    "unsloth-4.48": lambda head, labels: cast(unsloth, head(), labels),
    "hf-half": lambda head, labels: held(shifted, head(), labels),
    "hf-half-autocast": lambda head, labels: held(shifted_autocast, head(), labels),
    "unsloth-half": lambda head, labels: held(unsloth, head(), labels),
    "unsloth-half-autocast": lambda head, labels: converted(unsloth, head(), labels),
    "torchtune": torchtune,
    "litgpt": litgpt,
}


def head(hidden: Any, weight: Any, part: int | None = None) -> Any:
    """Compute the logits; of a `part`, those of an eighth of the positions."""
    return torch.nn.functional.linear(hidden if part is None else hidden.chunk(8, dim=1)[part], weight)


def peak_of_torch(name: str, rows: int) -> float:
    from torch.profiler import profile

    hidden = torch.randn(rows, SEQ, 1, dtype=torch.bfloat16)
    weight = torch.randn(VOCAB, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, VOCAB, (rows, SEQ))
    with profile(profile_memory=True) as seen:
        CASES[name](partial(head, hidden, weight), labels).backward()
    return peak_of(seen) / (rows * SEQ * VOCAB)


def peak_of(seen: Any) -> float:
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return float(max(accumulate(event.nbytes() for event in events)))


def peak_of_ours(name: str, rows: int) -> float:
    device = Device(0, NumpyBackend(), recorder=Recorder(keep=True))
    targets = tensor(np.zeros(rows * SEQ), device, dtype="int64").buffer
    own = [tensor(np.zeros((rows, SEQ, VOCAB)), device, dtype="bf16").buffer]
    _, make_grad = MODES[name](own, partial(F.cross_entropy_sum, targets=targets), LogitsGrad(targets, 1.0, SEQ))
    make_grad()
    device.recorder.drain()
    sizes = {event.id: event.nbytes for event in device.recorder.history if isinstance(event, Alloc)}
    changes = (
        sizes[event.id] if isinstance(event, Alloc) else -sizes[event.id]
        for event in device.recorder.history
        if isinstance(event, (Alloc, Free))
    )
    return max(accumulate(changes)) / (rows * SEQ * VOCAB)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_as_many_bytes_a_logit_as_pytorch(name: str, rows: int) -> None:
    assert round(peak_of_torch(name, rows)) == round(peak_of_ours(name, rows))


def liger_of_foak(hidden: Any, weight: Any) -> None:
    """Allocate as fms-acceleration's copy of Liger does, and compute no loss."""
    chunk = 4
    grad_input = torch.zeros_like(hidden)
    for start in range(0, len(hidden), chunk):
        logits = hidden[start : start + chunk] @ weight.t()
        logits = logits.float()
        logits = logits.to(hidden.dtype)
        scaled = logits * 1.0
        grad_input[start : start + chunk] = scaled @ weight


def test_a_chunk_of_foaks_liger_has_eight_bytes_a_logit() -> None:
    from torch.profiler import profile

    hidden, weight = torch.randn(64, 1, dtype=torch.bfloat16), torch.randn(VOCAB, 1, dtype=torch.bfloat16)
    with profile(profile_memory=True) as seen:
        liger_of_foak(hidden, weight)
    assert round(peak_of(seen) / (4 * VOCAB)) == 8
