"""One process of two that train with `torch.distributed.pipelining` on gloo, in float64.

    python -m oracle.pipeline_worker FOLDER RANK SCHEDULES...

FOLDER holds tasks.pickle; this leaves rank<RANK>.pickle: by (schedule, tied), what zerosim is compared with. Started by
`test_pipeline.py`.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from zerosim.placement.stages import Chunks

from .gpt import GPT
from .runs import Task
from .worker import be_one_of

SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zb-h1": (ScheduleInterleavedZeroBubble, 1),
    "zb-v": (ScheduleZBVZeroBubble, 2),
}
"""The class, and the chunks of layers on each rank."""
RANKS, MICRO_BATCHES = 2, 4
LR, MOMENTUM = 0.1, 0.9


class Part(nn.Module):
    """Some of a GPT's blocks: with its embeddings before the first one, with its head after the last one."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        each = len(model.h) // count
        self.h = nn.ModuleDict({str(i): model.h[i] for i in range(index * each, (index + 1) * each)})
        self.is_first, self.is_last = index == 0, index == count - 1
        if self.is_first:
            self.wte, self.wpe = model.wte, model.wpe
        if self.is_last:
            self.ln_f = model.ln_f
            self.head = model.wte if model.lm_head is None else model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h.values():
            x = block(x)
        return F.linear(self.ln_f(x), self.head.weight) if self.is_last else x


class Sent(TorchDispatchMode):
    """Adds up the bytes of tensors that this process sends."""

    def __init__(self) -> None:
        super().__init__()
        self.payload_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(("c10d.send", "c10d.isend")):
            self.payload_bytes["send"] += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(task: Task, name: str, rank: int) -> dict[str, Any]:
    model, (kind, chunks) = task.gpt().double(), SCHEDULES[name]
    count, device = RANKS * chunks, torch.device("cpu")
    numbers = Chunks(RANKS, chunks, turns_back=name == "zb-v").of_stage(rank)
    parts = [Part(model, number, count) for number in numbers]
    stages = [PipelineStage(part, number, count, device) for number, part in zip(numbers, parts, strict=True)]
    is_alone = name in ("gpipe", "1f1b")  # a class for one chunk takes no list
    schedule = kind(stages[0] if is_alone else stages, MICRO_BATCHES, loss_fn=mean_loss)
    named = {key: p for key, p in model.named_parameters() if any(p is q for part in parts for q in part.parameters())}
    optimizer = torch.optim.SGD(named.values(), LR, MOMENTUM)
    losses, sent = [], []
    gradients: dict[str, Any] = {}
    for batch in torch.from_numpy(task.tokens):
        optimizer.zero_grad()
        of_slots: list[Tensor] = []
        with Sent() as seen:
            ids = (batch[:, :-1],) if 0 in numbers else ()
            ends = dict(target=batch[:, 1:], losses=of_slots) if count - 1 in numbers else {}
            schedule.step(*ids, **ends)
        if task.tied:  # PyTorch leaves that to its user
            dist.all_reduce(model.wte.weight.grad)
        gradients = gradients or {key: p.grad.numpy().copy() for key, p in named.items()}
        optimizer.step()
        losses.append(float(torch.stack(of_slots).mean()) if of_slots else None)
        sent.append(seen.payload_bytes["send"])
    weights = {key: p.detach().numpy().copy() for key, p in named.items()}
    return {"losses": losses, "gradients": gradients, "weights": weights, "sent": sent}


def results_of(tasks: dict[bool, Task], rank: int) -> Any:
    # ZB-V has the table and the head on one rank, in two stages, each of which divides the shared gradient by m.
    asked = [(name, tied) for tied in tasks for name in sys.argv[3:] if not (tied and name == "zb-v")]
    return {(name, tied): train(tasks[tied], name, rank) for name, tied in asked}


if __name__ == "__main__":
    be_one_of(RANKS, results_of)
