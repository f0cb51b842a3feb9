#!/usr/bin/env bash
# deepspeed 0.19.8: with round_robin_gradients, zero_to_fp32 gives weights another weight's numbers, without a word.
#
# One would guess that the script in each checkpoint's folder gives the weights that the engine trained. With
# round_robin_gradients at ZeRO 1 and 2 the flat buffer has the weights in another order than param_shapes, by which
# zero_to_fp32 cuts it: weights come out shuffled, in the right shapes. ds_to_universal follows param_slice_mappings and
# is right.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy
"$work/venv/bin/pip" install -q deepspeed==0.19.8
cat > "$work/save.py" <<'PY'
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

deepspeed.init_distributed("gloo")
for is_round_robin in (False, True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    zero = {"stage": 2, "round_robin_gradients": is_round_robin, "reduce_bucket_size": 1000}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    engine.save_checkpoint(sys.argv[1], tag=f"round-robin-{is_round_robin}")
    trained = {name: safe_get_full_fp32_param(one) for name, one in engine.module.named_parameters()}
    if deepspeed.comm.get_rank() == 0:
        found = get_fp32_state_dict_from_zero_checkpoint(sys.argv[1], f"round-robin-{is_round_robin}")
        whose = {a: [b for b, other in trained.items() if torch.equal(one, other)] for a, one in found.items()}
        said = f"deepspeed {deepspeed.__version__}, round_robin_gradients {is_round_robin}: the weight in the file is {whose}"
        print(said)
        right = all(names == [name] for name, names in whose.items())
        assert right != is_round_robin, "the behaviour has changed"
    deepspeed.comm.barrier()
os._exit(0)
PY
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
cd "$work" && "$work/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 save.py "$work/out" 2> log |
    grep "^deepspeed" || { tail -20 log; exit 1; }
