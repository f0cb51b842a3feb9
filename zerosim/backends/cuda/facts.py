"""Find CuPy, CUDA libraries, driver and GPUs, without raising. `check.py` judges whether they suffice.

Only functions import CuPy. Its errors span many lines; this module keeps the one line that says what happened.

Source: CuPy 14 (`cupy/_environment.py`, `cupy_backends/cuda/libs/__init__.py`), CUDA Runtime API
(cudaDriverGetVersion is 0 where there is no driver).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

DISTRIBUTIONS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
PROBE = "#include <cuda_fp16.h>\ntemplate <class T> __global__ void probe(T* x) { x[0] = T(1.0f); }\n"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU. Memory in bytes: `free_bytes`: memory that no process uses now."""

    index: int
    name: str
    compute_capability: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """The facts found. Versions of CUDA are NVIDIA's numbers: 12080 is 12.8. A driver version of 0 means no driver.

    distributions    CuPy's packages as pip knows them, such as 'cupy-cuda12x 14.2.0'
    cupy             the imported version, None if CuPy is not installed or its import fails
    runtime_version  the CUDA that this CuPy is built for; driver_version the newest that the driver runs
    visible          CUDA_VISIBLE_DEVICES, None if it is not set
    cublas_error     why cuBLAS does not load; so nvrtc_error, count_error (of the GPUs), and probe_error of a kernel
    look_error       why there are no facts: the process that looked did not return
    nccl             its version, None if it does not load
    """

    is_installed: bool = False
    distributions: tuple[str, ...] = ()
    cupy: str | None = None
    import_error: str | None = None
    runtime_version: int | None = None
    driver_version: int | None = None
    visible: str | None = None
    num_gpus: int = 0
    count_error: str | None = None
    cublas_error: str | None = None
    nvrtc_error: str | None = None
    probe_error: str | None = None
    look_error: str | None = None
    nccl: str | None = None
    gpus: tuple[Gpu, ...] = ()


def cuda_facts(*, probe: bool = True) -> CudaFacts:
    """Return all facts about CuPy and the GPUs, without raising. `probe` also compiles a small kernel on the first
    GPU."""
    facts = basic_facts()
    if facts.cupy is None:
        return facts
    gpus = tuple(gpu for index in range(facts.num_gpus) if (gpu := find_gpu(index)) is not None)
    facts = replace(facts, gpus=gpus, nccl=_nccl())
    loads = facts.cublas_error is None and facts.nvrtc_error is None
    return replace(facts, probe_error=_probe()) if probe and facts.num_gpus and loads else facts


def basic_facts() -> CudaFacts:
    """Return the facts that need no GPU memory."""
    facts = installed_facts()
    if not facts.is_installed:
        return facts
    loaded, error = _tried(_cupy)
    if error is not None:
        return replace(facts, import_error=error)
    cupy, runtime = loaded
    count, count_error = _tried(runtime.getDeviceCount)
    nvrtc = getattr(cupy.cuda, "nvrtc", None)
    return replace(
        facts,
        cupy=str(cupy.__version__),
        runtime_version=_tried(runtime.runtimeGetVersion)[0],
        driver_version=_tried(runtime.driverGetVersion)[0],
        num_gpus=count or 0,
        count_error=count_error,
        cublas_error=_tried(_cublas)[1],
        nvrtc_error=None if nvrtc is None else _tried(nvrtc.getVersion)[1],
    )


def installed_facts() -> CudaFacts:
    """Return the facts that need no import of CuPy."""
    there = []
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            there.append(f"{name} {importlib.metadata.version(name)}")
    is_installed = True
    with contextlib.suppress(ValueError):  # a module without a spec: other code put it there
        is_installed = importlib.util.find_spec("cupy") is not None
    return CudaFacts(is_installed, tuple(there), visible=os.environ.get("CUDA_VISIBLE_DEVICES"))


def _cupy() -> Any:
    import cupy

    return cupy, cupy.cuda.runtime  # a folder that only looks like CuPy has no such attribute


def _cublas() -> Any:
    # Import it this way: accessing the attribute makes CuPy find the library, in a wheel too. `import a.b` skips that.
    from cupy_backends.cuda.libs import cublas

    return cublas


def graphs_error() -> str | None:
    """Return why this process could not capture CUDA graphs, or None."""

    def look() -> None:
        cupy, _ = _cupy()
        assert cupy.cuda.Stream.begin_capture is not None
        from zerosim.backends.cuda.libraries import cublas_library

        cublas_library()

    return _tried(look)[1]


def find_model(index: int) -> tuple[str, str] | None:
    """Return a GPU's name and compute capability, or None if it does not answer. Its memory stays untouched."""

    def look() -> tuple[str, str]:
        found = _cupy()[1].getDeviceProperties(index)
        name = found["name"]
        return name.decode() if isinstance(name, bytes) else str(name), f"{found['major']}.{found['minor']}"

    model: tuple[str, str] | None = _tried(look)[0]
    return model


def find_gpu(index: int) -> Gpu | None:
    """Return one GPU, or None if it does not answer. Asking for its free memory creates this process's context on
    it."""

    def look() -> tuple[int, int]:
        free, total = _cupy()[0].cuda.Device(index).mem_info
        return int(total), int(free)

    model = find_model(index)
    found: tuple[int, int] | None = None if model is None else _tried(look)[0]
    return None if model is None or found is None else Gpu(index, *model, *found)


def _nccl() -> str | None:
    """Return '2.27.7' for NCCL's 22707, or None if NCCL does not load."""

    def look() -> str:
        from cupy.cuda import nccl

        version = int(nccl.get_version())
        return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"

    found: str | None = _tried(look)[0]
    return found


def _probe() -> str | None:
    """Return why a kernel in half precision does not compile: CUDA's headers are a separate package."""

    def compile_it() -> None:
        cupy, _ = _cupy()
        module = cupy.RawModule(code=PROBE, options=("--std=c++17",), name_expressions=("probe<__half>",))
        module.get_function("probe<__half>")

    return _tried(compile_it)[1]


def _tried(look: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result of `look`, or its error in one line. CuPy's warnings are ignored."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return look(), None
    except Exception as error:
        return None, one_line(error)


def one_line(error: Exception) -> str:
    """Return the line of an error that says what happened, without banners and lists of searched paths."""
    text = str(error)
    if (missing := re.search(r'Failure finding "([^"]+)"', text)) is not None:
        return f"no {missing[1]}"
    if "Original error:" in text:
        text = text.split("Original error:")[1]
    lines = [line.strip() for line in text.splitlines() if line.strip(" =-")]
    return lines[0] if lines else type(error).__name__


def main() -> None:
    """Print the facts as one line of JSON, for `zerosim doctor`, which runs this in a separate process."""
    print(json.dumps(asdict(cuda_facts())))
