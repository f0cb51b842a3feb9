"""Every CUDA kernel compiles with NVIDIA's own compiler, for the architectures of A100 and H100.

It needs the real CuPy and NVRTC but no GPU; with neither it is skipped, and says what to install. In a
process of its own, since these tests may run on the stand-in for CuPy. ZEROSIM_CUPY_PYTHON may name another
Python, which has them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_kernel_compiles(arch: str) -> None:
    python = os.environ.get("ZEROSIM_CUPY_PYTHON", sys.executable)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, str(HERE / "compile_all.py"), arch]
    done = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, encoding="utf-8", timeout=900)
    if done.returncode == 77:
        pytest.skip(f"{done.stdout.strip()}; to run it: pip install 'cupy-cuda13x[ctk]'")
    assert done.returncode == 0, done.stdout + done.stderr
