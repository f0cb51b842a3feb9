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


def kernels_of(name: str, made: list[Any], seen: set[str]) -> tuple[dict[str, str], list[Any]]:
    """The raw sources of a module, but for those already seen, and the elementwise kernels `made` as it is imported."""
    made.clear()
    module = importlib.import_module(name)
    sources: dict[str, str] = {}
    for title, value in vars(module).items():
        if isinstance(value, str) and TEMPLATE.search(value) and value not in seen:
            seen.add(value)
            sources[title] = value
    if hasattr(module, "_combine"):
        for op in ("sum", "avg", "max"):
            for count in (1, 2, 8):
                module._combine(op, count)
    if hasattr(module, "rotary_source"):
        sources["rotary of a table"] = module.rotary_source((1.0, 0.25))
    if hasattr(module, "stored_source"):
        for kind in module.STORE:
            sources[f"stored_rule, {kind}"] = module.stored_source(kind, "s0 += g; w -= s0 * W(n0);", 1, 1)
    return sources, list(made)


def note_elementwise(types: Any) -> list[Any]:
    """The list to which every elementwise kernel is added from here on."""
    made: list[Any] = []
    make = types.elementwise

    def noted(*args: Any) -> Any:
        made.append(make(*args))
        return made[-1]

    types.elementwise = noted
    return made


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
    from zerosim.backends import cuda
    from zerosim.backends.cuda import types

    failed, total, seen, made = 0, 0, set[str](), note_elementwise(types)
    for found in sorted(module.name for module in pkgutil.iter_modules(cuda.__path__)):
        sources, elementwise = kernels_of(f"zerosim.backends.cuda.{found}", made, seen)
        jobs = [
            (f"{name}: {', '.join(names)}", types.RAW_PREAMBLE + source, ("--std=c++17", "--fmad=false"), names)
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
                    print(f"FAILED {found} {title} ({arch})\n{log}")
        total += len(jobs)
        if jobs:
            print(f"{found}: {len(sources)} sources, {len(jobs)} programs, {' '.join(archs)}", flush=True)
    if total < 100:
        print(f"only {total} programs were found: kernels are missing")
    return 1 if failed or total < 100 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["sm_80", "sm_90"]))
