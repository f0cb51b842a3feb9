"""Devices and backends to test on, the ledger of what is live, and hypothesis held to the same examples each time.

`import cupy` is the real CuPy where that finds a GPU, and the stand-in of `tests/standin` elsewhere.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from zerosim.backends.kernels import Backend
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.device.device import Device
from zerosim.device.recorder import Recorder
from zerosim.ledger.memory import MemoryLedger

# Nothing here lives in cycles for long, and what is live is kept: looking for garbage less often spares a tenth.
gc.set_threshold(50_000, 20, 50)

settings.register_profile(
    "zerosim",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # so is a busy machine
)
settings.load_profile("zerosim")

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background would ignore it
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as would what `nohup` starts
os.environ["PYTHONUTF8"] = "1"  # what processes print does not depend on the locale that the tests run in
STANDIN = Path(__file__).parent / "standin"
_PROBE = "import cupy; raise SystemExit(cupy.cuda.runtime.getDeviceCount() < 1)"


def _find_gpu() -> bool:
    """Whether CuPy finds a GPU; asked of another process, so that nothing here imports it before a test does."""
    known = os.environ.get("ZEROSIM_TESTS_GPU")  # pytest-xdist's workers take over what the first process found
    if known is None:
        spec = importlib.util.find_spec("cupy")
        there = spec is not None and not str(spec.origin).startswith(str(STANDIN))
        there = (
            there and subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, timeout=120).returncode == 0
        )
        known = os.environ["ZEROSIM_TESTS_GPU"] = "1" if there else "0"
    return known == "1"


HAS_GPU = _find_gpu()
if not HAS_GPU:
    for _name in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "cupy_backends")]:
        del sys.modules[_name]  # a real CuPy that some plugin half imported
    sys.path.insert(0, str(STANDIN))


NO_COMPILER = "backend cuda: CuPy finds no GPU here, and its stand-in needs g++, which is not installed"
RUN_KERNELS = {
    *(f"test_cuda{part}.py" for part in ("", "_attention", "_batched", "_graphs", "_kernels", "_products")),
    "test_bench_cuda.py",
    "test_mpi_cuda.py",
    "test_standin.py",
}


def can_run_kernels() -> bool:
    return HAS_GPU or shutil.which("g++") is not None


def _runs_kernels(item: pytest.Item) -> bool:
    """Whether a test runs backend cuda's kernels: by its file, or as one of several backends."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return item.path.name in RUN_KERNELS or parameters.get("backend") == "cuda"


@pytest.hookimpl(tryfirst=True)  # before -m selects by the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cuda"):
            if not HAS_GPU:
                item.add_marker(pytest.mark.skip(reason="needs a real GPU, and CuPy finds none here"))
        elif _runs_kernels(item) and not HAS_GPU:
            item.add_marker("standin")
            if not can_run_kernels():
                item.add_marker(pytest.mark.skip(reason=NO_COMPILER))
    most = int(os.environ.get("ZEROSIM_TESTS_CASES", "0"))
    cases: dict[tuple[object, str], list[pytest.Item]] = {}
    for item in items:
        if not (item.get_closest_marker("standin") or item.get_closest_marker("slow")):
            cases.setdefault((item.parent, item.name.partition("[")[0]), []).append(item)
    for of_one_test in cases.values():
        marker = of_one_test[0].get_closest_marker("quick")
        if kept := [*(marker.args if marker else ()), *([most] if most else ())]:
            _slow_but_some(of_one_test, min(kept))
    _deal(items)


def _deal(items: list[pytest.Item]) -> None:
    """Keep a kernel's share of the slow tests that promise bits, where other_kernels.py runs several kernels."""
    number, kernels = map(int, os.environ.get("ZEROSIM_TESTS_SHARE", "0/1").split("/"))
    slow = [item for item in items if item.get_closest_marker("slow") and item.get_closest_marker("bits")]
    dealt = [item for item in slow if item.path.name != "test_notebooks.py"]  # other_kernels.py deals those by name
    turn = {item: i for i, item in enumerate(dealt)}
    items[:] = [item for item in items if turn.get(item, number) % kernels == number]


def _slow_but_some(cases: list[pytest.Item], count: int) -> None:
    """Mark a test's cases slow, except for so many, evenly spread: as many as `quick(n)` says, or ZEROSIM_TESTS_CASES
    if that is fewer."""
    kept = {i * len(cases) // count for i in range(count)}
    for i, item in enumerate(cases):
        if i not in kept:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave the tests themselves out of later collections: to look through half a million objects takes a quarter of a
    second, and hundreds of tests ask for that."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed does not depend on the width and colours that happen to be set where the tests run."""
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _standin_reset() -> Iterator[None]:
    """What one test left under way on the stand-in races with nothing in the next."""
    yield
    standin = getattr(sys.modules.get("cupy"), "standin", None)
    if standin is not None:
        standin.reset()


@pytest.fixture(params=["numpy", "cuda"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Every backend: CUDA's on a GPU, or on the CPU by way of the stand-in, in a stream of its own as ranks are."""
    if request.param == "numpy":
        yield NumpyBackend()
        return
    if not can_run_kernels():
        pytest.skip(NO_COMPILER)
    import cupy

    from zerosim.backends.cuda.backend import CudaBackend

    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
        yield CudaBackend()


@pytest.fixture
def plain_device(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Device:
    """What `cpu()` is, on every backend: outside any world, without a record. `gradcheck` gets its like."""

    def make() -> Device:
        return Device(0, backend, recorder=Recorder(enabled=False))

    monkeypatch.setattr("zerosim.tensor.gradcheck.cpu", make)
    return make()


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger()


@pytest.fixture
def device(ledger: MemoryLedger) -> Device:
    """A NumPy device whose events go to `ledger` and stay in `device.recorder.history`."""
    return Device(0, NumpyBackend(), recorder=Recorder((ledger,), keep=True))


@pytest.fixture
def live(device: Device, ledger: MemoryLedger) -> Callable[[], int]:
    """How many bytes are live on `device` now."""

    def count() -> int:
        device.recorder.drain()
        return ledger.live_bytes

    return count
