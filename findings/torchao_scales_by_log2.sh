#!/usr/bin/env bash
# torchao 0.18.0: scales that are rounded down to a power of two can be rounded up, and RCEIL's rounded down.
#
# One would guess that round_scales_to_power_of_2, "rounded down to the nearest power of 2", never enlarges a scale, and
# that RCEIL never gives a scale too small for its block. Both take floor or ceil of log2 in fp32. Just below or above
# 2^k, log2 rounds to k. 2^20 - 1/4 becomes 2^20, and a block whose largest number is one step above 448 * 2^20 has the
# scale 2^20. torchao clips, so nothing becomes nan. bf16 numbers are too coarse for the second. A GPU's own conversion,
# which torchao uses when compiled, takes the bits and is exact.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy
"$work/venv/bin/pip" install -q torchao==0.18.0
"$work/venv/bin/python" - 2>/dev/null <<'PY'
import torch
from torchao.float8.float8_utils import amax_to_scale
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

amax = torch.tensor([448.0 / 2**20 * (1 + 2**-22)])
scale, power = (amax_to_scale(amax, torch.float8_e4m3fn, round_down).item() for round_down in (False, True))
print(f"torchao 0.18.0: a scale of {scale} is rounded down to {power}")
assert scale < power == 2**20

top = torch.nextafter(torch.tensor(448.0 * 2**20), torch.tensor(torch.inf))
byte, codes = to_mx(top.expand(1, 32).contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
exponent = byte.view(torch.uint8).item() - 127
print(f"RCEIL: a block of {top.item()} has the scale 2^{exponent}; 448 * 2^{exponent} is {448.0 * 2**exponent}")
assert exponent == 20 and 448.0 * 2**exponent < top.item()
PY
