"""Compile every CUDA kernel of zerosim with the real NVRTC, for given architectures: no GPU is needed.

Run with a Python that has CuPy and NVRTC: `PYTHONPATH=. python tests/cuda_compile/compile_all.py [sm_80 sm_90 ...]`
(`pip install 'cupy-cuda13x[ctk]'`, or cupy-cuda13x with nvidia-cuda-nvrtc, -runtime and -cccl). Prints one line a
module, exits 1 with the compiler's log where a kernel fails, and 77 where CuPy or NVRTC is missing. Raw kernels are
the templates found in the modules' sources; each is compiled for one stored type throughout, and for mixed ones.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

NO_KERNELS = frozenset({"cuda_check", "cuda_facts", "cuda_lane", "cuda_nccl", "cuda_host"})
TEMPLATE = re.compile(r"template\s*<([^>]*)>\s*__global__\s+void\s+(\w+)\s*\(")
HALVES = ("float16", "bfloat16")
ELEMENTWISE = [
    *((stored, stored, contiguous) for stored in ("float64", "float32", *HALVES) for contiguous in (True, False)),
    *((half, "float32", True) for half in HALVES),
    *(("float32", half, False) for half in HALVES),
    *(("float64", half, True) for half in HALVES),
]
"""Types of inputs and outputs, and whether they are contiguous."""
NDARRAY, INDEXER, SCALAR = 1, 2, 3
"""Kinds of arguments, as cupy/_core/_kernel.pxd numbers them."""
COMPUTE = {"double": "double", "float": "float", "__half": "float", "__nv_bfloat16": "float"}


def raw_expressions(source: str) -> Iterator[str]:
    """Every template kernel of a source, for each stored type, and with float where only the output differs."""
    for parameters, name in TEMPLATE.findall(source):
        letters = [parameter.split()[-1] for parameter in parameters.split(",")]
        for stored, compute in COMPUTE.items():
            # A letter's role: ids (I), bytes of a mask (B), the compute type (S, W); all others are stored types.
            roles = {"I": "long long", "B": "unsigned char", "S": compute, "W": compute}
            first = [roles.get(letter, stored) for letter in letters]
            yield f"{name}<{', '.join(first)}>"
            if letters[-1] in {"O", "U"}:
                yield f"{name}<{', '.join([*first[:-1], compute])}>"
            if letters[0] in {"G", "V"} and len(letters) > 1:
                yield f"{name}<{', '.join([compute, *first[1:]])}>"


def elementwise_source(kernel: Any, stored: str, out: str, contiguous: bool) -> str:
    """What CuPy would hand to the compiler for inputs of one stored type (masks: uint8) and outputs of another."""
    import cupy
    import numpy as np
    from cupy._core import _kernel, _scalar

    letters = {p.ctype for p in kernel.params if p.dtype is None and len(p.ctype or "") == 1}
    dtypes = {letter: np.dtype("uint8" if letter == "M" else stored) for letter in letters}
    dtypes |= {p.ctype: np.dtype(out) for p in kernel.out_params if p.ctype in letters}
    dims, infos = (1 if contiguous else 3), []
    for p in kernel.params[:-1]:
        if p.dtype is None:
            infos.append(_kernel._ArgInfo(NDARRAY, cupy.ndarray, dtypes[p.ctype], dims, contiguous, True))
        else:
            infos.append(_kernel._ArgInfo(SCALAR, _scalar.CScalar, p.dtype, 0, True, True))
    infos.append(_kernel._ArgInfo(INDEXER, cupy._core._carray.Indexer, None, dims, True, True))
    types = _kernel._TypeMap(tuple(sorted(dtypes.items())))
    code = _kernel._get_elementwise_kernel_code(
        tuple(infos), types, kernel.params, kernel.operation, kernel.name, kernel.preamble, **kernel.kwargs
    )
    return "".join(f"#include <{name}>\n" for name in cupy._core.core._cupy_header_list) + code


def kernels_of(module: Any, seen: set[str]) -> tuple[dict[str, str], list[Any]]:
    """The raw sources, but for those already seen, and the elementwise kernels that a module holds, in tuples too."""
    import cupy

    sources: dict[str, str] = {}
    elementwise: list[Any] = []
    for name, value in vars(module).items():
        if isinstance(value, str) and "__global__" in value and value not in seen:
            seen.add(value)
            sources[name] = value
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, cupy.ElementwiseKernel):
                elementwise.append(item)
    if hasattr(module, "_combine"):
        elementwise += [module._combine(op, count) for op in ("sum", "avg", "max") for count in (1, 2, 8)]
    return sources, elementwise


def compile_source(code: str, options: tuple[str, ...], arch: str, names: tuple[str, ...]) -> str:
    """The compiler's log if it fails, else nothing."""
    from cupy._core import core
    from cupy.cuda import compiler

    program = compiler._NVRTCProgram(code, "kernel.cu", name_expressions=names, method="cubin")
    options = (*core.assemble_cupy_compiler_options(options), f"-arch={arch}", "-ftz=true")
    try:
        program.compile(options)
    except compiler.CompileException as error:
        return str(error)
    return ""


def without_cublas() -> None:
    """Where cuBLAS is not installed, an empty module in its place: what is compiled here calls none of it."""
    import cupy_backends.cuda.libs as libs

    try:
        libs.cublas  # noqa: B018
    except (AttributeError, ImportError):
        libs.cublas = sys.modules["cupy_backends.cuda.libs.cublas"] = ModuleType("cublas")


def main(archs: list[str]) -> int:
    try:
        import cupy
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as missing:
        print(f"not run: CuPy with NVRTC is needed ({missing})")
        return 77
    if not hasattr(cupy, "_core"):
        print("not run: this is the tests' stand-in for CuPy, not CuPy")
        return 77
    without_cublas()
    import zerosim.backends
    from zerosim.backends.cuda.types import RAW_PREAMBLE

    failed, seen = 0, set[str]()
    for found in pkgutil.iter_modules(zerosim.backends.__path__):
        if not found.name.startswith("cuda_") or found.name in NO_KERNELS:
            continue
        module = importlib.import_module(f"zerosim.backends.{found.name}")
        sources, elementwise = kernels_of(module, seen)
        jobs = [
            (f"{name}: {', '.join(names)}", RAW_PREAMBLE + source, ("--std=c++17", "--fmad=false"), names)
            for name, source in sources.items()
            if (names := tuple(dict.fromkeys(raw_expressions(source))))
        ]
        for kernel in elementwise:
            for stored, out, contiguous in ELEMENTWISE:
                code = elementwise_source(kernel, stored, out, contiguous)
                jobs.append((f"{kernel.name} {stored} {out}", code, kernel.kwargs.get("options", ()), ()))
        for arch in archs:
            for title, code, options, names in jobs:
                log = compile_source(code, options, arch, names)
                if log:
                    failed += 1
                    print(f"FAILED {found.name} {title} ({arch})\n{log}")
        if jobs:
            print(f"{found.name}: {len(sources)} sources, {len(jobs)} programs, {' '.join(archs)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["sm_80", "sm_90"]))
