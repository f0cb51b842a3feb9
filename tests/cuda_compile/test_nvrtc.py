"""Every CUDA kernel compiles with NVIDIA's own compiler, for the architectures of A100 and H100; ctypes finds cuBLAS.

It needs the real CuPy, NVRTC and cuBLAS but no GPU; with neither it is skipped, and says what to install. In a
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


FIND = """
try:
    from cupy_backends.cuda.libs import cublas
except ImportError as error:
    raise SystemExit(77) from error
from zerosim.backends.cuda.graphs import GraphsBackend  # what it names in CuPy is there
from zerosim.backends.cuda.libraries import cublas_library
assert cublas_library().cublasGemmStridedBatchedEx.argtypes
"""


def test_ctypes_finds_the_cublas_that_cupy_has_loaded() -> None:
    """With every function that zerosim calls in it."""
    python = os.environ.get("ZEROSIM_CUPY_PYTHON", sys.executable)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, "-c", FIND], env=environment, cwd=HERE, capture_output=True, encoding="utf-8", timeout=300
    )
    if done.returncode == 77:
        pytest.skip("no CuPy with cuBLAS; to run it: pip install 'cupy-cuda13x[ctk]'")
    assert done.returncode == 0, done.stdout + done.stderr
