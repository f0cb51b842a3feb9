#!/usr/bin/env bash
# torchao 0.18.0: an MX block below 2^-118 comes back halved, and under RCEIL as zeros.
#
# One would guess that what a block loses is digits. If the byte of its scale is 0, which stands for 2^-127, to_mx
# divides by 2^-126, the smallest normal fp32 number, and to_dtype multiplies by 2^-127: FLOOR, CEIL and EVEN give back
# half. RCEIL does not scale such a block at all, so that its numbers become 0; that is Transformer Engine's rule too.
# fp32 and bf16 hold such numbers with all their digits.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy
"$work/venv/bin/pip" install -q torchao==0.18.0
"$work/venv/bin/python" - 2>/dev/null <<'PY'
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

found = {}
for mode in ScaleCalculationMode:
    for exponent in (-117, -120):
        values = torch.full((1, 32), 2.0**exponent)
        scales, codes = to_mx(values, torch.float8_e4m3fn, 32, mode)
        back = to_dtype(codes, scales, torch.float8_e4m3fn, 32, torch.float32)
        found[mode.name, exponent] = (back / values).unique().item()
print("torchao 0.18.0: what comes back of 2^-117 and 2^-120, as a part of it:")
print(found)
assert all(part == 1.0 for (_, exponent), part in found.items() if exponent == -117)
assert all(part == (0.0 if name == "RCEIL" else 0.5) for (name, exponent), part in found.items() if exponent == -120)
PY
