#!/usr/bin/env bash
# torch 2.13.0: context_parallel balances causal attention only if 2 x ranks divides the sequence, and never says so.
#
# One would guess that a length which cannot be balanced is refused, as Megatron-LM refuses it, or that a warning says
# so. On 4 ranks a row of 16 tokens is cut into an early and a late part for each rank. A row of 12 is cut into one part
# each, in order: the last rank then reads 33 of the 78 keys, the first 6. A row of 10 is cut into 3, 3, 3 and 1 tokens,
# whose mean losses must not be averaged as they are. No error, no warning, no line in a log.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$work/shards.py" <<'PY'
import logging
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

RANKS = 4
EXPECTED = {
    16: [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]],
    12: [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
    10: [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]],
}


class Heard(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.records = []

    def emit(self, record):
        self.records.append(record)


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh, heard = init_device_mesh("cpu", (RANKS,)), Heard()
    for name in (None, "torch"):
        logging.getLogger(name).addHandler(heard)
    for tokens, expected in EXPECTED.items():
        ids = torch.arange(tokens)[None]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
                mine = ids[0].tolist()
        shards = [None] * RANKS
        dist.all_gather_object(shards, mine)
        assert shards == expected
        if rank == 0:
            keys = [sum(token + 1 for token in shard) for shard in shards]
            print(f"torch {torch.__version__}, {tokens} tokens: {shards}, keys read {keys}")
    assert not heard.records
    dist.destroy_process_group()


torch.multiprocessing.start_processes(main, (sys.argv[1],), RANKS, start_method="fork")
PY
"$work/venv/bin/python" "$work/shards.py" "$work/store"
