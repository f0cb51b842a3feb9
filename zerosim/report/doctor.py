"""What `zerosim doctor` found, as tables: what can be used, the commands that mend the rest, GPUs, this machine."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from zerosim.backends.cuda.check import version_text
from zerosim.report.look import Adaptive, Look, Stack, prose, titled
from zerosim.train.diagnosis import Diagnosis, Standing
from zerosim.units import format_bytes

ROOMS = {
    "numpy": "--backend numpy",
    "meta": "zerosim plan",
    "cuda": "--backend cuda",
    "nccl": "--collective native",
    "mpi": "--world mpi",
}
"""What asks for each of them on a command line."""


def doctor_report(found: Diagnosis) -> Stack:
    """All of it, the commands before the details."""
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
    text = f"zerosim {found.zerosim}: {_listed(usable)} can be used" if usable else f"zerosim {found.zerosim}"
    return text + (f"; {_listed(missing)} cannot" if missing else "")


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _standings_table(found: Diagnosis) -> RenderableType:
    def build(look: Look, asked: bool) -> Table:
        table = look.table()
        table.add_column("")
        if asked:
            table.add_column("asked for by", no_wrap=True)
        table.add_column("usable")
        table.add_column("what is there, or why not", overflow="fold")
        for standing in found.standings:
            style = "green" if standing.is_usable else "yellow"
            cells = [ROOMS[standing.name]] if asked else []
            ready = Text("yes" if standing.is_usable else "no", style=style)
            table.add_row(standing.name, *cells, ready, look.text(_about(standing, found)))
        return table

    return Adaptive(lambda look: build(look, True), lambda look: build(look, False))


def _about(standing: Standing, found: Diagnosis) -> str:
    if standing.faults:
        return "; ".join(fault.what for fault in standing.faults)
    if standing.name == "numpy":
        return _version(found, "numpy") + "".join(f", {blas.name}" for blas in found.blas[:1])
    if standing.name == "meta":
        return "shapes alone, of any size"
    if standing.name == "cuda":
        package = found.cuda.distributions[0] if found.cuda.distributions else f"CuPy {found.cuda.cupy}"
        count = found.cuda.num_gpus
        return f"{package} on {count} GPU{'s' if count > 1 else ''}"
    if standing.name == "nccl":
        return f"NCCL {found.cuda.nccl}"
    return f"mpi4py {found.mpi.mpi4py} on {found.mpi.library}"


def _mending(found: Diagnosis) -> RenderableType | None:
    """One command for each thing that is missing."""
    commands = [(standing.name, fault.mend) for standing in found.standings for fault in standing.faults]
    commands += [(library.name, library.mend) for library in found.libraries if library.mend is not None]
    lines = [prose(f"{name}: {mend}") for name, mend in commands]
    return Stack(prose("To have what is missing", "bold"), *lines, close=True) if lines else None


def _gpus_table(found: Diagnosis) -> RenderableType:
    def build(look: Look) -> Table:
        table = look.table()
        table.add_column("gpu", justify="right")
        table.add_column("name", overflow="fold")
        table.add_column("compute capability" if look.width > 70 else "cc", justify="right")
        table.add_column("memory", justify="right")
        table.add_column("free", justify="right")
        for gpu in found.cuda.gpus:
            memory, free = format_bytes(gpu.memory_bytes), format_bytes(gpu.free_bytes)
            table.add_row(str(gpu.index), gpu.name, gpu.compute_capability, memory, free)
        return table

    return titled("GPUs", Adaptive(build))


def _machine_table(found: Diagnosis) -> RenderableType:
    """Names and what they are: a line each for what there is, none for what there is not."""

    def build(look: Look) -> Table:
        table = look.table()
        table.show_header = False
        table.add_column("", no_wrap=True)
        table.add_column("", overflow="fold")
        for name, value in _details(found):
            table.add_row(name, look.text(value))
        return table

    note = "A run holds BLAS to one thread, for its ranks are threads already." if found.blas else ""
    return titled("This machine", Adaptive(build), note)


def _details(found: Diagnosis) -> list[tuple[str, str]]:
    machine = found.machine
    memory = "unknown" if machine.memory_bytes is None else format_bytes(machine.memory_bytes)
    free = "" if machine.free_bytes is None else f", {format_bytes(machine.free_bytes)} free"
    lines = [
        ("Python", f"{found.python}, {found.executable}"),
        ("system", f"{machine.system}, {machine.processor}"),
        ("cores", str(machine.cores)),
        ("memory", memory + free),
    ]
    for blas in found.blas:
        threads = f"{blas.threads} thread{'s' if blas.threads > 1 else ''}"
        lines.append(("BLAS", f"{blas.name} {blas.version or ''}".strip() + f", {threads}"))
    lines += [(library.name, library.version) for library in found.libraries if library.version is not None]
    return lines + _cuda_details(found) + _mpi_details(found)


def _cuda_details(found: Diagnosis) -> list[tuple[str, str]]:
    cuda = found.cuda
    lines = [("CuPy", ", ".join(cuda.distributions) or cuda.cupy or "installed")] if cuda.is_installed else []
    if cuda.runtime_version is not None:
        lines.append(("CUDA", f"{version_text(cuda.runtime_version)}, which CuPy is built for"))
    if cuda.driver_version is not None:
        driver = f"runs CUDA {version_text(cuda.driver_version)} and older" if cuda.driver_version else "none"
        lines.append(("driver", driver))
    if cuda.cupy is not None:
        lines.append(("cuBLAS", cuda.cublas_error or "loads"))
        lines.append(("NVRTC", cuda.nvrtc_error or cuda.probe_error or "loads"))
        lines.append(("NCCL", cuda.nccl or "does not load"))
    if cuda.visible is not None:
        lines.append(("visible", f"CUDA_VISIBLE_DEVICES={cuda.visible}"))
    return lines


def _mpi_details(found: Diagnosis) -> list[tuple[str, str]]:
    mpi = found.mpi
    lines = [] if mpi.mpi4py is None else [("mpi4py", mpi.mpi4py)]
    if mpi.library is not None:
        aware = {None: "does not say whether it is GPU-aware", True: "GPU-aware", False: "not GPU-aware"}
        lines.append(("MPI", f"{mpi.library}, threads: {mpi.threads}, {aware[mpi.is_gpu_aware]}"))
    if mpi.mpirun is not None:
        lines.append(("mpirun", mpi.mpirun))
    if mpi.other_mpirun is not None:
        lines.append(("", f"the shell finds another one first: {mpi.other_mpirun}"))
    return lines


def _version(found: Diagnosis, name: str) -> str:
    return next(f"{library.name} {library.version}" for library in found.libraries if library.name == name)
