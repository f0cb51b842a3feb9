#!/usr/bin/env bash
# torch 2.13.0: a cast to float8_e4m3fn turns infinity into 448; a cast to float8_e5m2 keeps it.
#
# One would guess that e4m3fn, which has no infinity, gives nan, as ml_dtypes does. It saturates instead, finite numbers
# and infinity alike, so that a check for infinity after the cast finds nothing. e5m2 does not saturate: 1e9 becomes
# infinity there.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy ml_dtypes==0.6.0
"$work/venv/bin/python" - <<'PY'
import ml_dtypes
import numpy as np
import torch

values = torch.tensor([449.0, 1e9, float("inf"), float("nan")])
with np.errstate(all="ignore"):
    other = values.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist()
e4m3, e5m2 = (values.to(kind).float().tolist() for kind in (torch.float8_e4m3fn, torch.float8_e5m2))
print("torch", torch.__version__, "of", values.tolist())
print("float8_e4m3fn:", e4m3)
print("float8_e5m2:  ", e5m2)
print("ml_dtypes' float8_e4m3fn:", other)
assert e4m3[:3] == [448.0] * 3 and e4m3[3] != e4m3[3]
assert e5m2[:3] == [448.0, float("inf"), float("inf")]
assert other[0] == 448.0 and all(one != one for one in other[1:])
PY
