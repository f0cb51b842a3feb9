#!/usr/bin/env bash
# deepspeed 0.19.8: loading a universal checkpoint restores neither frozen weights nor buffers, without a word.
#
# One would guess that load_checkpoint gives back the model that was saved: the converter even writes a frozen weight's
# fp32.pt (ZeRO 1 and 2), and the model_states file has its values at each stage. With checkpoint.load_universal the
# engine never loads the module, and restores trained weights alone: a frozen layer and a buffer keep what a new model
# was initialized with. After an ordinary load both are back.
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


def engine(stage, universal, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    model[2].requires_grad_(False)
    model[1].running_mean.fill_(seed)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }
    trained = [one for one in model.parameters() if one.requires_grad]
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained), config=config)[0]


def values(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: one.detach().clone() for name, one in engine.module.state_dict().items()}



def convert(tag, inject):
    words = {"input_folder": f"{OUT}/{tag}", "output_folder": f"{OUT}/{tag}_universal", "keep_temp_folder": False}
    words |= {"num_extract_workers": 1, "num_merge_workers": 1, "strict": True, "inject_missing_state": inject}
    ds_to_universal.main(SimpleNamespace(**words))


for stage in (2, 3):
    tag, saved = f"stage{stage}", engine(stage, False, 1)
    saved.backward(saved(torch.arange(16.0).reshape(2, 8)).square().sum())
    saved.step()
    saved.save_checkpoint(OUT, tag=tag)
    convert(tag, stage < 3)
    before, found = values(saved), {}
    for universal in (False, True):
        loaded = engine(stage, universal, 2)
        loaded.load_checkpoint(OUT, tag=f"{tag}_universal" if universal else tag)
        after = values(loaded)
        back = {name: torch.equal(before[name], after[name]) for name in ("0.weight", "2.weight", "1.running_mean")}
        found["universal" if universal else "ordinary"] = back
    print(f"deepspeed {deepspeed.__version__}, stage {stage}, is it back after a load: {found}")
    assert found["universal"] == {"0.weight": True, "2.weight": False, "1.running_mean": False}
    assert all(found["ordinary"].values())
PY
TORCH_EXTENSIONS_DIR="$work/extensions" "$work/venv/bin/python" "$work/load.py" "$work/out" 2> "$work/log" |
    grep "^deepspeed" || { tail -20 "$work/log"; exit 1; }
