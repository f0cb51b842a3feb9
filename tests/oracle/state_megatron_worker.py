"""One process of two that save a checkpoint by megatron-core's own dist_checkpointing, on CPUs.

    torchrun -m oracle.state_megatron_worker FOLDER

Layers are on two pipeline ranks, stacked under one name; a table is cut in two; the optimizer's names are those of
`fully_reshardable`. Leaves FOLDER/iter_0000007 and FOLDER/whole.pt.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

LAYERS, TABLE = 4, "embedding.word_embeddings.weight"
STACKED = "decoder.layers.mlp.linear_fc1.weight"
STATES = {"fp32_param": 1.0, "exp_avg": 2.0, "exp_avg_sq": 3.0}


def main(folder: Path) -> None:
    torch.cuda.synchronize = lambda *_: None  # the library asks for a GPU where none is needed
    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers, table = torch.randn(LAYERS, 8, 6), torch.randn(10, 6)
    own, rows = LAYERS // ranks, len(table) // ranks
    part = table[rank * rows : (rank + 1) * rows]
    model, optimizer = {"emb": ShardedTensor.from_rank_offsets(TABLE, part.bfloat16(), (0, rank, ranks))}, {}
    for key, factor in STATES.items():
        name = f"optimizer.state.{key}"
        optimizer[key] = ShardedTensor.from_rank_offsets(f"{name}.{TABLE}", part * factor, (0, rank, ranks))
        for layer in range(rank * own, (rank + 1) * own):
            at = (0, layer, LAYERS)
            optimizer[f"{key}{layer}"] = ShardedTensor.from_rank_offsets(
                f"{name}.{STACKED}", layers[layer] * factor, at, prepend_axis_num=1
            )
            model[f"{layer}"] = ShardedTensor.from_rank_offsets(
                STACKED, layers[layer].bfloat16(), at, prepend_axis_num=1
            )
    rng = ShardedObject("rng_state", [{"random_rng_state": random.getstate()}], (ranks,), (rank,))
    extra = ShardedObject("decoder.layers.mlp._extra_state", io.BytesIO(b"abc"), (ranks,), (rank,))
    state = {"model": model, "optimizer": optimizer, "rng_state": rng, "extra": extra, "iteration": 7}
    inner = folder / "iter_0000007"
    inner.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save({**state, "args": argparse.Namespace(lr=1.0)}, str(inner), ("torch_dist", 1))
    if rank == 0:
        torch.save({"layers": layers, "table": table}, folder / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
