"""One process of two, on gloo: the bytes of the buckets of PyTorch's own DDP and of DeepSpeed's, where most parameters
are frozen.

    python -m oracle.bucket_worker FOLDER RANK

FOLDER holds tasks.pickle; this leaves rank<RANK>.pickle: by model, each backward's buckets; by DeepSpeed's ZeRO stage
and options, what `deepspeed_buckets` returns. Started by `test_buckets.py`.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .runs import Task
from .worker import Traffic, be_one_of, cross_entropy

RANKS = 2
FROZEN = "wte,wpe,h.0,h.1.attn"
CASES = [(stage, size, overlap) for stage in (1, 2, 3) for size in (5_000, 10_000, 16_000) for overlap in (False, True)]
"""ZeRO stage, reduce_bucket_size, overlap_comm. An adapter's tensors have 8,000 elements each."""


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


def deepspeed_buckets(stage: int, size: int, overlap: bool) -> dict[str, Any]:
    """Return the bytes of the reduction buffers outside of backward and in it, and those of each gradient reduction."""
    import deepspeed

    model = Adapted()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    zero = {
        "stage": stage,
        "reduce_bucket_size": size,
        "overlap_comm": overlap,
        "stage3_param_persistence_threshold": 0,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def held() -> int:
        buffers = [bucket.buffer for bucket in engine.optimizer.ipg_buckets.values()]
        flat = [one for each in buffers for one in (each if isinstance(each, list) else [each])]
        return sum(one.nbytes for one in flat if one is not None)

    found, inside = {"before": held()}, list[int]()
    model.b.register_full_backward_pre_hook(lambda *_: inside.append(0))
    model.a.register_full_backward_hook(lambda *_: inside.append(held()))
    loss = engine(torch.ones(1, 1000, dtype=torch.bfloat16)).sum()
    with Traffic() as traffic:
        engine.backward(loss)
    sent = [nbytes for op, nbytes in traffic.calls if op in ("all_reduce", "reduce_scatter")]
    return found | {"inside": inside[-1], "after": held(), "sent": sent}


def results_of(tasks: dict[bool, Task], rank: int) -> Any:
    gpt, batch = tasks[False].gpt(), torch.from_numpy(tasks[False].tokens[0])
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad = not name.startswith(tuple(f"{one}." for one in FROZEN.split(",")))
    found: dict[Any, Any] = {}
    if find_spec("deepspeed") is not None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which gcc compiles for a minute
        deepspeed.init_distributed("gloo")
        found = {case: deepspeed_buckets(*case) for case in CASES}
    return found | {
        "adapted": bucket_bytes(Adapted(), lambda model: model(torch.ones(1, 1000)).sum()),
        "gpt": bucket_bytes(gpt, lambda model: cross_entropy(model(batch[:, :-1]), batch[:, 1:]), bucket_cap_mb=0.01),
    }


if __name__ == "__main__":
    be_one_of(RANKS, results_of)
