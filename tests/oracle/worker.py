"""One process of two that train with PyTorch's own DDP or FSDP2, or of four with its HSDP, on gloo.

    python -m oracle.worker FOLDER RANK METHODS...

FOLDER holds tasks.pickle; this leaves rank<RANK>.pickle: by (method, tied), what zerosim is compared with.
Started by `test_distributed.py`.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from .gpt import GPT
from .runs import Task

RANKS = {"ddp": 2, "fsdp2": 2, "hsdp": 4}
CLIP_NORM = 0.9
LR = 1e-3
TIMEOUT = timedelta(seconds=60)


class Traffic(TorchDispatchMode):
    """Lists the bytes of whole tensors that FSDP2 gathers, scatters and reduces: zerosim's `payload_bytes`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d._allgather_base_"):
            self.calls.append(("all_gather", args[0].nbytes))
        elif name.startswith("c10d._reduce_scatter_base_"):
            self.calls.append(("reduce_scatter", args[1].nbytes))
        elif name.startswith("c10d.allreduce_"):
            self.calls.append(("all_reduce", sum(tensor.nbytes for tensor in args[0])))
        return func(*args, **(kwargs or {}))

    @property
    def payload_bytes(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for op, nbytes in self.calls:
            counts[op] += nbytes
        return dict(counts)


def ddp(model: GPT) -> Any:
    return DistributedDataParallel(model, bucket_cap_mb=1)


def hsdp(model: GPT) -> Any:
    """`fsdp2` on two replicas of two ranks."""
    return fsdp2(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


def fsdp2(model: GPT, mesh: DeviceMesh | None = None) -> Any:
    """zerosim's units, but for a tied table: it belongs to the root, which keeps it from its first use to its last."""
    units = [model.wpe, *model.h, model.ln_f]
    if model.lm_head is not None:
        units += [model.wte, model.lm_head]
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


METHODS = {"ddp": ddp, "fsdp2": fsdp2, "hsdp": hsdp}


def train(task: Task, method: str, rank: int) -> dict[str, Any]:
    model = task.gpt()
    wrapped = METHODS[method](model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    rows = task.tokens.shape[1] // RANKS[method]
    losses, norms, traffic = [], [], []
    for batch in batches(task, rank, rows):
        optimizer.zero_grad()
        with Traffic() as seen:
            loss = cross_entropy(wrapped(batch[:, :-1]), batch[:, 1:])
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        norms.append(float(whole(norm)))
        optimizer.step()
        losses.append(float(loss.detach()))
        traffic.append(seen.payload_bytes)
    weights = {name: whole(p.detach()).numpy().copy() for name, p in model.named_parameters()}
    return {"losses": losses, "grad_norm": norms, "traffic": traffic, "calls": seen.calls, "weights": weights}


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(task: Task, rank: int, rows: int) -> Iterator[torch.Tensor]:
    """This rank's rows of each step."""
    for batch in torch.from_numpy(task.tokens):
        yield batch[rank * rows : (rank + 1) * rows]


def whole(tensor: Any) -> torch.Tensor:
    """All of a sharded tensor (every rank takes part), or a plain one as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def be_one_of(ranks: int, results_of: Callable[[dict[bool, Task], int], Any]) -> None:
    """Leave what this process, FOLDER RANK on the command line, makes of the tasks, and end."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    results = results_of(pickle.loads((folder / "tasks.pickle").read_bytes()), rank)
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads can abort an interpreter that shuts down in the ordinary way


def results_of(tasks: dict[bool, Task], rank: int) -> Any:
    return {(method, tied): train(task, method, rank) for tied, task in tasks.items() for method in sys.argv[3:]}


if __name__ == "__main__":
    [count] = {RANKS[method] for method in sys.argv[3:]}
    be_one_of(count, results_of)
