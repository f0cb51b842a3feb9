"""Check that CuPy, its CUDA libraries, the driver and a GPU can be used, and say how to mend what cannot.

The check runs before the first array on a GPU. A fault is one sentence and one command, the same in a run's error
and in `zerosim doctor`. The facts come from `facts.py`; this module does not import CuPy.

Source: CUDA compatibility guide (a driver runs every older CUDA, and newer ones of its own major version), release
notes of CUDA 12.0 and 13.0 (the oldest GPUs that they compile for), cuBLAS's manual (cublasSetWorkspace: 32 MiB on
compute capability 9 and newer, 4 MiB before).
"""

from __future__ import annotations

from zerosim.backends.cuda.facts import CudaFacts, basic_facts, cuda_facts, find_gpu, find_model, graphs_error
from zerosim.errors import InputError
from zerosim.units import format_bytes

__all__ = [
    "check_cuda", "check_graphs", "check_nccl", "check_precision", "check_room", "cuda_facts", "cuda_faults",
    "nccl_fault",
]  # fmt: skip

INSTALL = "pip install 'cupy-cuda12x[ctk]>=14'"
"""The requirement of pyproject.toml's extra `cuda`. The name zerosim on a package index may belong to another
project."""
BF16_SINCE = 14
OLDEST_DRIVER = 12
OLDEST_GPUS = ((13000, "7.5"), (0, "5.0"))
"""The oldest compute capability that CUDA compiles for, from this version on."""

Fault = tuple[str, str]
"""A problem, and the command or setting that mends it."""


def check_cuda(ranks: int | None = None) -> None:
    """Refuse a run on GPUs that could not start. With `ranks`, dealt out in turn, also refuse a GPU without room for
    them.

    Raises: InputError, one line with the command that mends it.
    """
    facts = basic_facts()
    models = (find_model(index) for index in range(facts.num_gpus))
    old = (_age_fault(facts, index, *model) for index, model in enumerate(models) if model is not None)
    for fault in (*cuda_faults(facts), *old):
        if fault is not None:
            raise InputError(f"--backend cuda: {fault[0]}: {fault[1]}")
    for index in range(min(ranks or 0, facts.num_gpus)):
        check_room(index, len(range(index, ranks or 0, facts.num_gpus)), 0)


def check_graphs() -> None:
    """Refuse CUDA graphs where cuBLAS cannot be called beside CuPy. Raises: InputError with what runs instead."""
    error = graphs_error()
    if error is not None:
        raise InputError(
            f"--capture-graphs: {error}: leave --capture-graphs out, and each kernel is launched by itself"
        )


def check_room(index: int, ranks: int, rank_bytes: int) -> None:
    """Refuse `ranks` ranks of `rank_bytes` bytes each, and cuBLAS's workspace, on a GPU with less free memory.

    Raises: InputError with both figures.
    """
    gpu = find_gpu(index)
    if gpu is None:
        return
    workspace = (32 if int(gpu.compute_capability.split(".")[0]) >= 9 else 4) * 2**20
    needed = ranks * (rank_bytes + workspace)
    if needed > gpu.free_bytes:
        raise InputError(
            f"{ranks} rank{'s' if ranks > 1 else ''} on GPU {index} ({gpu.name}) need {format_bytes(needed)}, "
            f"cuBLAS's workspaces included, and {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.memory_bytes)} are "
            "free: use fewer --ranks or a smaller model, or find with nvidia-smi which process uses the GPU"
        )


def check_precision(name: str) -> None:
    """Refuse bf16 on a CuPy without bf16. Raises: InputError."""
    if name != "bf16":
        return
    facts = basic_facts()
    if facts.cupy is not None and _major(facts.cupy) < BF16_SINCE:
        raise InputError(
            f"--precision bf16 on --backend cuda needs CuPy {BF16_SINCE}, this is {facts.cupy}: "
            f"pip install --upgrade '{_package(facts)}[ctk]>={BF16_SINCE}', or --precision fp16"
        )


def check_nccl() -> None:
    """Refuse NCCL's collectives if NCCL does not load. Raises: InputError."""
    if (wrong := nccl_fault(cuda_facts(probe=False))) is not None:
        raise InputError(f"--collective native on --backend cuda: {wrong[0]}: {wrong[1]}, or --collective direct")


def cuda_faults(facts: CudaFacts) -> tuple[Fault, ...]:
    """Return the faults that keep a GPU from being used, in the order to mend them, without those not yet known."""
    if len(facts.distributions) > 1:
        names = " ".join(found.split()[0] for found in facts.distributions)
        shown = " and ".join(facts.distributions)
        return ((f"{shown} overwrite each other", f"pip uninstall -y {names} && {INSTALL}"),)
    if not facts.is_installed:
        return (("CuPy is not installed", INSTALL),)
    if facts.look_error is not None:
        return ((f"CuPy does not answer ({facts.look_error})", "check that nvidia-smi answers"),)
    if facts.cupy is None:
        why = facts.import_error or "no reason given"
        mend = _libraries(facts) if ".so" in why else f"pip install --force-reinstall '{_package(facts)}[ctk]'"
        return ((f"{_shown(facts)} is installed but its import fails ({why})", mend),)
    if (wrong := _version_fault(facts)) is not None:  # another CuPy brings other libraries
        return (wrong,)
    return tuple(fault for fault in (_gpu_fault(facts), _library_fault(facts)) if fault is not None)


def nccl_fault(facts: CudaFacts) -> Fault | None:
    """Return NCCL's fault, if every rank has its own GPU and native collectives were requested."""
    if facts.nccl is not None:
        return None
    major = (facts.runtime_version or 12000) // 1000
    return "NCCL does not load", f"pip install nvidia-nccl-cu{major}"


def _version_fault(facts: CudaFacts) -> Fault | None:
    """Return the fault of a driver older than CuPy's CUDA."""
    driver, runtime = facts.driver_version, facts.runtime_version
    if facts.num_gpus or not driver or not runtime or driver // 1000 >= runtime // 1000:
        return None
    what = f"{_shown(facts)} is built for CUDA {version_text(runtime)}, the driver runs CUDA {version_text(driver)}"
    if driver // 1000 < OLDEST_DRIVER:
        return what, f"install a driver for CUDA {OLDEST_DRIVER} or newer; nvidia-smi shows which CUDA it runs"
    return what, f"pip uninstall -y {_package(facts)} && {INSTALL}"


def _gpu_fault(facts: CudaFacts) -> Fault | None:
    if facts.num_gpus > 0:
        old = (_age_fault(facts, gpu.index, gpu.name, gpu.compute_capability) for gpu in facts.gpus)
        return next((fault for fault in old if fault is not None), None)
    if facts.driver_version == 0:
        what = "there is no NVIDIA driver (libcuda.so.1 does not load)"
        return what, "install NVIDIA's driver, or start the container with --gpus all, until nvidia-smi answers"
    if facts.visible is not None:
        shown = facts.visible or "''"
        return f"CUDA_VISIBLE_DEVICES={shown} leaves no GPU", "unset it, or set it to a number that nvidia-smi -L lists"
    why = f" ({facts.count_error})" if facts.count_error else ""
    return f"no GPU is visible{why}", "nvidia-smi must list one; in a container, start it with --gpus all"


def _age_fault(facts: CudaFacts, index: int, name: str, capability: str) -> Fault | None:
    """Return the fault of a GPU for which this CUDA does not compile."""
    runtime = facts.runtime_version or 0
    oldest = next(oldest for since, oldest in OLDEST_GPUS if runtime >= since)
    if tuple(map(int, capability.split("."))) >= tuple(map(int, oldest.split("."))):
        return None
    what = f"GPU {index} ({name}) has compute capability {capability}, CUDA {version_text(runtime)} needs {oldest}"
    if runtime >= OLDEST_GPUS[0][0]:
        return what, f"pip uninstall -y {_package(facts)} && {INSTALL}, or hide it with CUDA_VISIBLE_DEVICES"
    return what, "hide it with CUDA_VISIBLE_DEVICES, or --backend numpy"


def _library_fault(facts: CudaFacts) -> Fault | None:
    for name, error in (("cuBLAS", facts.cublas_error), ("NVRTC", facts.nvrtc_error)):
        if error is not None:
            return f"{name} does not load ({error})", _libraries(facts)
    if facts.probe_error is not None:
        return f"a kernel does not compile ({facts.probe_error})", _libraries(facts)
    return None


def _libraries(facts: CudaFacts) -> str:
    """Return CuPy's own extra: the CUDA libraries as wheels."""
    return f"pip install '{_package(facts)}[ctk]'"


def _package(facts: CudaFacts) -> str:
    """Return the name of CuPy's package in pip; `cupy` itself is built from source and brings no libraries."""
    name = facts.distributions[0].split()[0] if facts.distributions else "cupy"
    return "cupy-cuda12x" if name == "cupy" else name


def _shown(facts: CudaFacts) -> str:
    return facts.distributions[0] if facts.distributions else f"CuPy {facts.cupy or ''}".strip()


def version_text(number: int) -> str:
    """Return '12.8' for NVIDIA's 12080."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _major(version: str) -> int:
    head = version.split(".")[0]
    return int(head) if head.isdigit() else BF16_SINCE  # a development version has what the newest release has
