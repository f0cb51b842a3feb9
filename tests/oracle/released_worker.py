"""One process of four with transformers' own expert parallelism, on gloo.

    python -m oracle.released_worker FOLDER RANK RANKS EP

FOLDER holds first/, a model as it is released, and tokens.npz; this leaves rank<RANK>.pickle: the loss of its rows, and
whole gradients. Started by `test_expert_parallel.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig

from .worker import be_one_of, whole


def results_of(tasks: Any, rank: int) -> Any:
    folder, ranks, ep = Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "first",
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
        distributed_config=DistributedConfig(fsdp_size=ranks, ep_size=ep),
    )
    rows = torch.from_numpy(np.load(folder / "tokens.npz")["tokens"][0]).chunk(ranks)[rank]
    loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    return float(loss), {name: whole(p.grad).numpy().copy() for name, p in model.named_parameters()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(RANK=sys.argv[2], WORLD_SIZE=sys.argv[3], LOCAL_RANK=sys.argv[2])
    be_one_of(int(sys.argv[3]), results_of)
