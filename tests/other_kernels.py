"""other_kernels.py [PYTEST ARGUMENTS]: run pytest as older CPUs would, for some BLAS kernels side by side.

OpenBLAS and NumPy choose their kernels by the CPU; both can be told to take older ones. `pytest -m bits` is what
promises equal bits, and what people read: the README and the notebooks. A notebook or a slow test is run under one of
the older kernels, the others under each. Exit code 1 where some run failed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__  # type: ignore[attr-defined]

V3 = {"AVX", "F16C", "FMA3", "AVX2", "X86_V3"}
"""What a Haswell has beyond what NumPy is built for, in the names of NumPy 2.0 and of later ones."""

KERNELS: dict[str, set[str]] = {"Prescott": set(), "Haswell": V3}
"""OpenBLAS's name for them, and what NumPy may use besides: SSE3 alone; AVX2 and FMA."""

LIMIT_S = 1800

SHOW = "import numpy, threadpoolctl as t; print(*(f'{p.get(\"architecture\")}' for p in t.threadpool_info()))"


def environment(kernels: str) -> dict[str, str]:
    """The variables under which OpenBLAS and NumPy take these kernels, as far as this CPU has more, and tests their
    share."""
    more = [name for name in __cpu_dispatch__ if __cpu_features__.get(name) and name not in KERNELS[kernels]]
    changed = {"OPENBLAS_CORETYPE": kernels, "NPY_DISABLE_CPU_FEATURES": " ".join(more)}
    changed["ZEROSIM_TESTS_SHARE"] = f"{[*KERNELS].index(kernels)}/{len(KERNELS)}"
    return {**os.environ, **{name: value for name, value in changed.items() if value}}


@contextmanager
def started(kernels: str, arguments: list[str]) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """pytest under these kernels, and the file that its words go to. It does not outlive the block."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        job = subprocess.Popen(
            command, env=environment(kernels), stdout=output, stderr=subprocess.STDOUT, encoding="utf-8"
        )
        try:
            yield job, output
        finally:
            job.kill()
            job.wait(timeout=60)


def versions(kernels: str) -> str:
    """What NumPy and OpenBLAS say that they are."""
    command, found = [sys.executable, "-c", SHOW], environment(kernels)
    shown = subprocess.run(command, env=found, capture_output=True, encoding="utf-8", timeout=60)
    return f"NumPy {np.__version__}, OpenBLAS says {shown.stdout.strip()}"


def others_notebooks(number: int) -> list[str]:
    """Arguments that leave out the notebooks of the other kernels: they are dealt out in turn."""
    root = Path(__file__).parent.parent / "notebooks"
    paths = [*sorted(root.glob("*.ipynb")), *sorted(root.glob("instructors/*.ipynb"))]
    others = [path.stem for i, path in enumerate(paths) if i % len(KERNELS) != number]
    return [f"--deselect=tests/test_notebooks.py::test_a_clean_run_gives_the_committed_outputs[{n}]" for n in others]


def main(arguments: list[str]) -> int:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        print(f"{platform.machine()}: the older kernels are those of x86-64; nothing was run")
        return 0
    failed = []
    with ExitStack() as stack:
        jobs = {
            kernels: stack.enter_context(started(kernels, [*arguments, *others_notebooks(number)]))
            for number, kernels in enumerate(KERNELS)
        }
        for kernels, (job, output) in jobs.items():
            job.wait(timeout=LIMIT_S)
            output.seek(0)
            print(f"== {kernels}: {versions(kernels)}\n{output.read()}", flush=True)
            if job.returncode:
                failed.append(kernels)
    if failed:
        print(f"failed with the kernels of {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
