#!/usr/bin/env bash
# deepspeed 0.19.8: sub_group_size 0 makes every parameter a sub-group of its own; it does not turn sub-groups off.
#
# One would guess that 0 means no limit, as for gradient_clipping or loss_scale, and axolotl's ZeRO-3 files hold a 0
# there. At stage 3 a group is closed as soon as it has at least that many elements, so 0 and 1 give a group a
# parameter: four for two linear maps with biases, where 1e9, the default, gives one. Each group is a step of the
# optimizer with a flat fp32 copy of its own.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy
"$work/venv/bin/pip" install -q deepspeed==0.19.8
cat > "$work/groups.py" <<'PY'
import os

os.environ.update(
    DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511"
)
import deepspeed
import torch

found = {}
for size in (0, 1, 100, 10**9):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "sub_group_size": size},
    }
    _, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )
    found[size] = len(optimizer.fp16_groups)
print(f"deepspeed {deepspeed.__version__}: sub-groups of four parameters by sub_group_size: {found}")
assert found == {0: 4, 1: 4, 100: 3, 10**9: 1}
PY
TORCH_EXTENSIONS_DIR="$work/extensions" "$work/venv/bin/python" "$work/groups.py" 2>/dev/null | tail -1
