"""One process of two, on gloo: the bytes of the buckets of PyTorch's own DDP, where most parameters are frozen.

    python -m oracle.bucket_worker FOLDER RANK

FOLDER holds tasks.pickle; this leaves rank<RANK>.pickle: by model, each backward's buckets. Started by
`test_buckets.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .runs import Task
from .worker import be_one_of, cross_entropy

RANKS = 2
FROZEN = "wte,wpe,h.0,h.1.attn"


class Adapted(nn.Module):
    """A frozen map of 1,000 x 1,000 beside an adapter of rank 8."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(1000, 1000, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(1000, 8, bias=False), nn.Linear(8, 1000, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def bucket_bytes(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], **how: Any) -> list[list[int]]:
    """Return the bytes of each bucket of three backwards. PyTorch cuts buckets to size after the first one, and reads
    the annotations of a hook, so they are no strings."""
    wrapped, found = DistributedDataParallel(model, **how), list[list[int]]()

    def seen(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        found[-1].append(bucket.buffer().nbytes)
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / RANKS)  # type: ignore[no-any-return]

    wrapped.register_comm_hook(None, seen)
    for _ in range(3):
        found.append([])
        loss_of(wrapped).backward()
    return found


def results_of(tasks: dict[bool, Task], rank: int) -> Any:
    gpt, batch = tasks[False].gpt(), torch.from_numpy(tasks[False].tokens[0])
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad = not name.startswith(tuple(f"{one}." for one in FROZEN.split(",")))
    return {
        "adapted": bucket_bytes(Adapted(), lambda model: model(torch.ones(1, 1000)).sum()),
        "gpt": bucket_bytes(gpt, lambda model: cross_entropy(model(batch[:, :-1]), batch[:, 1:]), bucket_cap_mb=0.01),
    }


if __name__ == "__main__":
    be_one_of(RANKS, results_of)
