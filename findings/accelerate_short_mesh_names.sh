#!/usr/bin/env bash
# accelerate 1.15.0: parallelism_config without its long prefix is dropped by the launcher without a word, so a mesh of
# 4 x 2 becomes 1 x 1.
#
# One would guess that dp_shard_size under parallelism_config is the size of dp_shard, as ParallelismConfig's own
# argument is called, or that the launcher refuses it, as it refuses unknown keys at the top. The keys must repeat the
# section: parallelism_config_dp_shard_size. Under the short names every size stays 1. fsdp_config takes its keys with
# and without the prefix.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q accelerate==1.15.0
cat > "$work/mesh.py" <<'PY'
import sys

import accelerate
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

PATH = sys.argv[1]
FILE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "machine_rank": 0,
    "num_machines": 1, "num_processes": 8, "main_training_function": "main", "rdzv_backend": "static",
    "same_network": True, "use_cpu": False, "debug": False, "fsdp_config": {"fsdp_version": 2},
}
sizes = {}
for prefix in ("", "parallelism_config_"):
    mesh = {f"{prefix}dp_shard_size": 4, f"{prefix}tp_size": 2}
    with open(PATH, "w") as file:
        yaml.safe_dump({**FILE, "parallelism_config": mesh}, file)
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", PATH, "train.py"]))
    found = prepare_multi_gpu_env(args)
    sizes[prefix] = [found[f"PARALLELISM_CONFIG_{axis}_SIZE"] for axis in ("DP_SHARD", "TP")]
print(f"accelerate {accelerate.__version__}: dp_shard x tp by prefix of the keys: {sizes}")
assert sizes == {"": ["1", "1"], "parallelism_config_": ["4", "2"]}
PY
"$work/venv/bin/python" "$work/mesh.py" "$work/file.yaml" 2>/dev/null
