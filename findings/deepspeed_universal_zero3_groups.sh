#!/usr/bin/env bash
# deepspeed 0.19.8: a universal checkpoint loaded at ZeRO-3 gives each parameter group the first one's settings, and
# lets Adam's count of steps grow by the number of sub-groups with each step.
#
# One would guess that the second group keeps its own weight_decay and learning rate, as at ZeRO 1 and 2 and as after an
# ordinary load, and that the count goes up by one. At ZeRO-3 the first group's settings are copied to all, and one
# tensor `step` is shared by all sub-groups: torch's AdamW counts it up once for each, so the bias correction is wrong.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy
"$work/venv/bin/pip" install -q deepspeed==0.19.8
cat > "$work/load.py" <<'PY'
import os
import sys

os.environ.update(
    DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29513"
)
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal

OUT = sys.argv[1]


def engine(universal):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    matrices, rest = [model[0].weight, model[1].weight], [model[0].bias, model[1].bias]
    groups = [{"params": matrices, "weight_decay": 0.1, "lr": 1e-3}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)[0]


def step(engine):
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()



def convert(tag, inject):
    words = {"input_folder": f"{OUT}/{tag}", "output_folder": f"{OUT}/{tag}_universal", "keep_temp_folder": False}
    words |= {"num_extract_workers": 1, "num_merge_workers": 1, "strict": True, "inject_missing_state": inject}
    ds_to_universal.main(SimpleNamespace(**words))


saved = engine(False)
step(saved)
saved.save_checkpoint(OUT, tag="tag")
convert("tag", False)
found = {}
for universal in (False, True):
    loaded = engine(universal)
    loaded.load_checkpoint(OUT, tag="tag_universal" if universal else "tag")
    step(loaded)
    inner = loaded.optimizer.optimizer
    settings = [(group["weight_decay"], group["lr"]) for group in inner.param_groups]
    steps = [float(state["step"]) for state in inner.state.values()]
    found["universal" if universal else "ordinary"] = (settings, steps)
print(f"deepspeed {deepspeed.__version__}: weight_decay and lr of two groups, and their steps after 2: {found}")
assert found == {
    "ordinary": ([(0.1, 1e-3), (0.0, 5e-3)], [2.0, 2.0]),
    "universal": ([(0.1, 1e-3), (0.1, 1e-3)], [3.0, 3.0]),
}
PY
TORCH_EXTENSIONS_DIR="$work/extensions" "$work/venv/bin/python" "$work/load.py" "$work/out" 2> "$work/log" |
    grep "^deepspeed" || { tail -20 "$work/log"; exit 1; }
