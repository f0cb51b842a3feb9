"""Scripts that are written for plain FSDP2, run by torchrun on gloo: two steps of a tiny model, and a finite loss."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.processes import SECONDS, ended, started
from zerosim import RunConfig
from zerosim.dialects.written import fsdp2

pytest.importorskip("transformers")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this build of PyTorch has no gloo", allow_module_level=True)

SHARD = {"model": "llama3-8b", "ranks": 8, "clip_norm": 1.0, "foreach": False}
HSDP = {**SHARD, "dp_replicate": 2, "accumulate": 2, "replica_reduction": "step", "recompute": "full", "warmup": 1}
TP = {**SHARD, "tp": 2, "accumulate": 2, "grad_sync": False, "recompute": "full:2", "decay": "matrices"}
HOST = {
    **SHARD,
    "model": "gpt2",
    "optimizer": "sgd",
    "offload": "optimizer=host,params=host",
    "prefetch": 2,
    "keep_root_units": False,
    "loss": "hf-5",
}


@pytest.mark.parametrize(
    ("values", "axes"),
    [
        pytest.param(SHARD, {"SHARD": 2}, id="shard 2"),
        pytest.param(HSDP, {"REPLICATE": 2, "SHARD": 2}, id="replicate 2 x shard 2", marks=pytest.mark.slow),
        pytest.param(TP, {"SHARD": 2, "TP": 2}, id="shard 2 x tp 2", marks=pytest.mark.slow),
        pytest.param(HOST, {"SHARD": 2}, id="host", marks=pytest.mark.slow),
    ],
)
def test_it_trains(values: dict[str, Any], axes: dict[str, int], tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    usual = {"recipe": "fsdp2", "attention": "flash", "optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1}
    page.write_text(fsdp2.written(RunConfig(**{**usual, **values})), encoding="utf-8")
    env = {**os.environ, "TINY": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    env |= {name: str(size) for name, size in axes.items()}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(math.prod(axes.values()))]
    with ended(started([sys.executable, *words, page], env=env, stdout=-1, stderr=-2)) as process:
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step ")]
    assert len(losses) == 2
    assert all(abs(loss - math.log(256)) < 0.3 for loss in losses)
