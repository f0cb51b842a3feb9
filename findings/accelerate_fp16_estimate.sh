#!/usr/bin/env bash
# accelerate 1.15.0: estimate-memory's figure for training in float16 is half of what its own mixed precision holds.
#
# One would guess that "Training using Adam" of `accelerate estimate-memory` is the sum of weights, gradients and
# optimizer states, and that float16, which keeps the weights in fp32 too, needs as much as float32. The command prints
# the largest of its parts: for float32 a part called step holds all 16 bytes a parameter, for float16 the largest part
# is the two moments, 8 bytes. A model that Accelerator(mixed_precision="bf16") trains holds 16 in tensors alone.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q accelerate==1.15.0
cat > "$work/estimate.py" <<'PY'
import accelerate
import torch
from accelerate import Accelerator
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes


def model():
    return torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(4)])


numel = sum(one.numel() for one in model().parameters())
size, _ = calculate_maximum_sizes(model())
assert size == 4 * numel
parts = {dtype: estimate_training_usage(size, dtype) for dtype in ("float32", "float16")}
printed = {dtype: max(of.values()) / numel for dtype, of in parts.items()}
summed = sum(parts["float16"][part] for part in ("model", "gradients", "optimizer")) / numel


accelerator = Accelerator(mixed_precision="bf16", cpu=True)
net = model()
net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
loss = net(torch.ones(8, 256)).float().pow(2).mean()
accelerator.backward(loss)
optimizer.step()
tensors = [one for param in net.parameters() for one in (param, param.grad)]
tensors += [one for state in optimizer.state.values() for one in state.values() if one.ndim]
held = sum(one.numel() * one.element_size() for one in tensors) / numel
print(f"accelerate {accelerate.__version__}: bytes a parameter for training with Adam, printed: {printed}; the parts that "
      f"it lists for float16 add to {summed}; held after a step with mixed_precision bf16: {held}")
assert printed == {"float32": 16.0, "float16": 8.0}
assert summed == 18.0
assert held == 16.0
PY
cd "$work" && "$work/venv/bin/python" "$work/estimate.py" 2>/dev/null
