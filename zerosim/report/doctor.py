"""The findings of `zerosim doctor` as tables: what works, the commands that repair the rest, GPUs, this machine."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from zerosim.backends.cuda.check import version_text
from zerosim.report.look import Adaptive, Grid, Look, Stack, prose, right, titled
from zerosim.report.names import counted, listed
from zerosim.train.diagnosis import Availability, Diagnosis
from zerosim.units import format_bytes

ROOMS = {
    "numpy": "--backend numpy",
    "meta": "zerosim plan",
    "cuda": "--backend cuda",
    "nccl": "--collective native",
    "mpi": "--world mpi",
}
"""The command-line option for each of them."""


def doctor_report(found: Diagnosis) -> Stack:
    """Return all findings, the commands before the details."""
    return Stack(
        prose(_headline(found), "bold"),
        _standings_table(found),
        _mending(found),
        _gpus_table(found) if found.cuda.gpus else None,
        _machine_table(found),
    )


def _headline(found: Diagnosis) -> str:
    usable = [standing.name for standing in found.standings if standing.is_usable]
    missing = [standing.name for standing in found.standings if not standing.is_usable]
    text = f"zerosim {found.zerosim}: {listed(usable)} can be used" if usable else f"zerosim {found.zerosim}"
    return text + (f"; {listed(missing)} cannot" if missing else "")


def _standings_table(found: Diagnosis) -> RenderableType:
    grid = Grid(
        "", Column("asked for by", no_wrap=True), "usable", Column("what was found, or why nothing", overflow="fold")
    )
    for standing in found.standings:
        usable = Text("yes", style="green") if standing.is_usable else Text("no", style="yellow")
        grid.add(standing.name, ROOMS[standing.name], usable, _about(standing, found))
    return Adaptive(grid, grid.without("asked for by"))


def _about(standing: Availability, found: Diagnosis) -> str:
    if standing.faults:
        return "; ".join(fault.what for fault in standing.faults)
    if standing.name == "numpy":
        numpy = next(f"{library.name} {library.version}" for library in found.libraries if library.name == "numpy")
        return numpy + "".join(f", {blas.name}" for blas in found.blas[:1])
    if standing.name == "meta":
        return "shapes only, of any size"
    if standing.name == "cuda":
        package = found.cuda.distributions[0] if found.cuda.distributions else f"CuPy {found.cuda.cupy}"
        return f"{package} on {counted(found.cuda.num_gpus, 'GPU')}"
    if standing.name == "nccl":
        return f"NCCL {found.cuda.nccl}"
    return f"mpi4py {found.mpi.mpi4py} on {found.mpi.library}"


def _mending(found: Diagnosis) -> RenderableType | None:
    """Return one command for each missing part."""
    commands = [(standing.name, fault.mend) for standing in found.standings for fault in standing.faults]
    commands += [(library.name, library.mend) for library in found.libraries if library.mend is not None]
    lines = [prose(f"{name}: {mend}") for name, mend in commands]
    return Stack(prose("To install what is missing", "bold"), *lines, close=True) if lines else None


def _gpus_table(found: Diagnosis) -> RenderableType:
    def build(look: Look) -> Table:
        capability = "compute capability" if look.width > 70 else "cc"
        grid = Grid(right("gpu"), Column("name", overflow="fold"), right(capability), right("memory"), right("free"))
        for gpu in found.cuda.gpus:
            memory = (format_bytes(gpu.memory_bytes), format_bytes(gpu.free_bytes))
            grid.add(str(gpu.index), gpu.name, gpu.compute_capability, *memory)
        return grid(look)

    return titled("GPUs", Adaptive(build))


def _machine_table(found: Diagnosis) -> RenderableType:
    """Return names and values: a line for each part that exists, none for the others."""
    machine, cuda, mpi = found.machine, found.cuda, found.mpi
    memory = "unknown" if machine.memory_bytes is None else format_bytes(machine.memory_bytes)
    free = "" if machine.free_bytes is None else f", {format_bytes(machine.free_bytes)} free"
    runtime, driver = (version_text(number or 0) for number in (cuda.runtime_version, cuda.driver_version))
    aware = {None: "does not say whether it is GPU-aware", True: "GPU-aware", False: "not GPU-aware"}
    # A name, the value or None if it is absent, and the shown text.
    lines: list[tuple[str, object, str | None]] = [
        ("Python", True, f"{found.python}, {found.executable}"),
        ("system", True, f"{machine.system}, {machine.processor}"),
        ("cores", True, str(machine.cores)),
        ("memory", True, memory + free),
        *(("BLAS", True, f"{blas.name} {blas.version or ''}".strip() + f", {counted(blas.threads, 'thread')}")
          for blas in found.blas),
        *((library.name, library.version, library.version) for library in found.libraries),
        ("CuPy", cuda.is_installed or None, ", ".join(cuda.distributions) or cuda.cupy or "installed"),
        ("CUDA", cuda.runtime_version, f"{runtime}, which CuPy is built for"),
        ("driver", cuda.driver_version, f"runs CUDA {driver} and older" if cuda.driver_version else "none"),
        ("cuBLAS", cuda.cupy, cuda.cublas_error or "loads"),
        ("NVRTC", cuda.cupy, cuda.nvrtc_error or cuda.probe_error or "loads"),
        ("NCCL", cuda.cupy, cuda.nccl or "does not load"),
        ("visible", cuda.visible, f"CUDA_VISIBLE_DEVICES={cuda.visible}"),
        ("mpi4py", mpi.mpi4py, mpi.mpi4py),
        ("MPI", mpi.library, f"{mpi.library}, threads: {mpi.threads}, {aware[mpi.is_gpu_aware]}"),
        ("mpirun", mpi.mpirun, mpi.mpirun),
        ("", mpi.other_mpirun, f"the shell finds another one first: {mpi.other_mpirun}"),
    ]  # fmt: skip
    grid = Grid(Column("", no_wrap=True), Column("", overflow="fold"), has_header=False)
    for name, known, text in lines:
        if known is not None and text is not None:
            grid.add(name, text)
    note = "A run holds BLAS to one thread, for its ranks are threads already." if found.blas else ""
    return titled("This machine", Adaptive(grid), note)
