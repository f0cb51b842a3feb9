#!/usr/bin/env bash
# transformers 5.24.0 with accelerate 1.15.0: fsdp_config's offload_params, accelerate's own key, is dropped by
# TrainingArguments without a word.
#
# One would guess that fsdp_offload_params: true, which an accelerate YAML understands, offloads parameters from
# fsdp_config too, or that an unknown key is refused. TrainingArguments strips the prefix, stores the key, and hands
# accelerate's plugin only the keys that it knows: cpu_offload is one, offload_params is none. Nothing is offloaded, and
# no warning says so.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0 accelerate==1.15.0
cat > "$work/offload.py" <<'PY'
import warnings

import accelerate
import transformers
from transformers import TrainingArguments

found = {}
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    for key in ("fsdp_offload_params", "offload_params", "cpu_offload"):
        args = TrainingArguments(output_dir="out", fsdp=True, fsdp_config={"version": 2, key: True}, use_cpu=True)
        found[key] = args.fsdp_plugin_args.get("cpu_offload")
said = [str(one.message) for one in heard if "offload" in str(one.message)]
print(f"transformers {transformers.__version__}, accelerate {accelerate.__version__}: cpu_offload of the plugin by key: "
      f"{found}; warnings about it: {said}")
assert found == {"fsdp_offload_params": None, "offload_params": None, "cpu_offload": True}
assert said == []
PY
cd "$work" && "$work/venv/bin/python" "$work/offload.py" 2>/dev/null
