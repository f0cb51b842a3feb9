"""One process of two that average one matrix's gradients through PyTorch's DDP communication hooks, on gloo.

    python -m oracle.hook_worker FOLDER RANK METHODS...

FOLDER holds tasks.npz: grads (steps, ranks, rows, columns) and q (columns, r). Started by `test_hooks.py`.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


class Times(nn.Module):
    """A loss whose gradient is what it is given."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def averaged(method: str, grads: Tensor, q: Tensor) -> list[Any]:
    """What each step's gradient is after the hook, on this rank."""
    model = DistributedDataParallel(Times(*grads.shape[1:]))
    if method == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=q.shape[1], start_powerSGD_iter=2)
        state.p_memory_dict[0] = torch.zeros(grads.shape[1] * q.shape[1])
        state.q_memory_dict[0] = q.reshape(-1).clone()
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    found = []
    for gradient in grads:
        model.zero_grad()
        model(gradient).backward()
        found.append(model.module.weight.grad.numpy().copy())
    return found


def main(folder: Path, rank: int, methods: list[str]) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    task = np.load(folder / "tasks.npz")
    grads, q = torch.from_numpy(task["grads"][:, rank]), torch.from_numpy(task["q"])
    results = {method: averaged(method, grads, q) for method in methods}
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(results))
    gc.collect()  # the models, whose hooks hold the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    os._exit(
        0
    )  # torch's threads have aborted processes that were ending: "terminate called without an active exception"
