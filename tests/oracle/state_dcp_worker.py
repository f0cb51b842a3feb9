"""One process of several that train `Tiny` by FSDP2 on gloo and save it as PyTorch's distributed checkpoints.

    torchrun -m oracle.state_dcp_worker FOLDER

Leaves FOLDER/nested and FOLDER/flat (both forms of the optimizer's state), FOLDER/safetensors and FOLDER/pieces
(weights alone), and FOLDER/whole.pt: all of it, gathered by PyTorch, without sharding.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .state_model import Tiny, tokens

STEPS = 3


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = fully_shard(Tiny(), mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    for step in range(STEPS):
        model(tokens(step, rank, ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = get_model_state_dict(model)
    for name, is_flat in (("nested", False), ("flat", True)):
        options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
        states = get_optimizer_state_dict(model, optimizer, options=options)
        counters = {"train_state": {"step": torch.tensor(STEPS)}, "epoch": 1}
        dcp.save({"model": weights, "optim": states, **counters}, checkpoint_id=folder / name)
    untied = {name: one for name, one in weights.items() if name != "head.weight"}
    kind = SerializationFormat.SAFETENSORS
    dcp.save(untied, storage_writer=FileSystemWriter(folder / "safetensors", serialization_format=kind))
    dcp.save(untied, storage_writer=HuggingFaceStorageWriter(str(folder / "pieces"), save_distributed=True))
    options = StateDictOptions(full_state_dict=True)
    whole = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
