"""Every way in which a GPU cannot be used is one line with the command that mends it; nothing here needs a GPU.

CuPy's own behaviour is that of 14.2.0, seen on a machine without a driver: its import works, getDeviceCount raises, the
libraries that load when first used raise over many lines, and two packages over one another only warn.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

import zerosim
from zerosim.backends.cuda.check import check_cuda, check_graphs, check_nccl, check_precision, check_room, cuda_faults
from zerosim.backends.cuda.facts import CudaFacts, Gpu, cuda_facts, one_line
from zerosim.errors import InputError

WELL = CudaFacts(True, ("cupy-cuda13x 14.2.0",), "14.2.0", None, 13020, 13000, num_gpus=1)

FAKE = """
import types
__version__ = {version!r}

class CUDARuntimeError(RuntimeError): ...

def raising(error):
    def call(*_): raise error
    return call

def count():
    if {count!r} is None:
        raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
    return {count!r}

class Device:
    def __init__(self, index): self.index = index
    mem_info = ({free!r}, 80_000_000_000)

def properties(index):
    return dict(name=b"NVIDIA H100", major={capability!r}[0], minor={capability!r}[1])

class RawModule:
    def __init__(self, **words): ...
    def get_function(self, name):
        if {compiles!r}: return name
        raise RuntimeError('probe.cu(1): cannot open source file "cuda_fp16.h"\\n\\n1 error detected')

runtime = types.SimpleNamespace(getDeviceCount=count, runtimeGetVersion=lambda: {runtime!r},
    driverGetVersion=lambda: {driver!r}, getDeviceProperties=properties)
nvrtc = types.SimpleNamespace(getVersion=lambda: (12, 9))
cuda = types.SimpleNamespace(runtime=runtime, Device=Device, nvrtc=nvrtc)
"""
NOT_FOUND = 'Failure finding "libcublasLt.so.12": No such file: libcublasLt.so.12\\n  listdir("/x"):\\n    libcudart.so'


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A Python that has no CuPy, until one is put there whose answers are given."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("cupy", "cupy_backends")}
    for name in kept:
        del sys.modules[name]
    plain = [folder for folder in sys.path if not Path(folder, "cupy").is_dir()]  # wherever pip has put it
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(Path(zerosim.__file__).parents[1]), *plain])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    importlib.invalidate_caches()

    def put(
        *,
        packages: tuple[str, ...] = ("cupy-cuda12x",),
        version: str = "14.2.0",
        runtime: int = 12090,
        driver: int = 12080,
        count: int | None = 1,
        free: int = 79_000_000_000,
        cublas: bool = True,
        compiles: bool = True,
        capability: tuple[int, int] = (9, 0),
        source: str = FAKE,
    ) -> None:
        for package in packages:
            folder = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n", "utf-8")
        words = dict(version=version, runtime=runtime, driver=driver, count=count, free=free, compiles=compiles)
        words["capability"] = capability
        (tmp_path / "cupy.py").write_text(source.format(**words) if source is FAKE else dedent(source), "utf-8")
        libs = tmp_path / "cupy_backends" / "cuda" / "libs"
        libs.mkdir(parents=True)
        # As CuPy does: the library is found when the attribute is asked for, before the module is imported.
        found = f"def __getattr__(name):\n    raise ImportError('''{NOT_FOUND}''')\n"
        (libs / "__init__.py").write_text("cublas = object()\n" if cublas else found, "utf-8")
        importlib.invalidate_caches()

    yield put
    for name in [name for name in sys.modules if name.split(".")[0] in ("cupy", "cupy_backends")]:
        del sys.modules[name]
    sys.modules.update(kept)


def refusal(check: Callable[[], None]) -> str:
    with pytest.raises(InputError) as caught:
        check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- a run's refusals -------------------------------------------------------------------------------
def test_a_gpu_that_is_well_is_not_refused(install: Callable[..., None]) -> None:
    install()
    check_cuda(4)
    check_precision("bf16")
    assert cuda_facts().gpus == (Gpu(0, "NVIDIA H100", "9.0", 80_000_000_000, 79_000_000_000),)


def test_cupy_is_not_installed(install: Callable[..., None]) -> None:
    assert refusal(check_cuda) == "--backend cuda: CuPy is not installed: pip install 'cupy-cuda12x[ctk]>=14'"


def test_two_cupys_are_refused_before_either_is_imported(install: Callable[..., None]) -> None:
    install(packages=("cupy-cuda12x", "cupy-cuda13x"))
    said = refusal(check_cuda)
    assert "cupy-cuda12x 14.2.0 and cupy-cuda13x 14.2.0" in said
    assert said.endswith("pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'cupy-cuda12x[ctk]>=14'")


def test_an_import_that_fails_names_the_library_and_the_package_that_has_it(install: Callable[..., None]) -> None:
    banner = "=" * 64
    text = f"{banner}\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: libcudart.so.12: cannot open\n{banner}"
    install(source=f"raise ImportError({text!r})")
    assert refusal(check_cuda) == (
        "--backend cuda: cupy-cuda12x 14.2.0 is installed but its import fails (ImportError: libcudart.so.12: cannot "
        "open): pip install 'cupy-cuda12x[ctk]'"
    )


def test_an_import_that_fails_for_another_reason_wants_it_installed_again(install: Callable[..., None]) -> None:
    install(source="raise AttributeError('no such thing in numpy')")
    assert refusal(check_cuda).endswith("numpy): pip install --force-reinstall 'cupy-cuda12x[ctk]'")


def test_no_driver(install: Callable[..., None]) -> None:
    install(count=None, driver=0)
    assert "no NVIDIA driver (libcuda.so.1 does not load): install" in refusal(check_cuda)


def test_a_driver_for_cuda_12_wants_the_cupy_for_cuda_12(install: Callable[..., None]) -> None:
    install(packages=("cupy-cuda13x",), count=None, runtime=13020, driver=12040)
    assert refusal(check_cuda) == (
        "--backend cuda: cupy-cuda13x 14.2.0 is built for CUDA 13.2, the driver runs CUDA 12.4: "
        "pip uninstall -y cupy-cuda13x && pip install 'cupy-cuda12x[ctk]>=14'"
    )


def test_a_driver_older_than_every_cupy_wants_a_newer_driver(install: Callable[..., None]) -> None:
    install(count=None, driver=11040)
    assert "CUDA 12.9, the driver runs CUDA 11.4: install a driver" in refusal(check_cuda)


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_gpus_hidden_by_the_environment(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    install(count=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert f"CUDA_VISIBLE_DEVICES={visible or repr('')} leaves no GPU: unset it" in refusal(check_cuda)


def test_no_gpu(install: Callable[..., None]) -> None:
    install(count=0)
    assert "no GPU is visible: nvidia-smi" in refusal(check_cuda)


def test_a_library_that_does_not_load_is_met_before_the_first_product(install: Callable[..., None]) -> None:
    install(cublas=False)
    expected = "cuBLAS does not load (no libcublasLt.so.12): pip install 'cupy-cuda12x[ctk]'"
    assert refusal(check_cuda) == f"--backend cuda: {expected}"


def test_headers_that_are_missing_are_found_by_compiling(install: Callable[..., None]) -> None:
    install(compiles=False)
    ((what, mend),) = cuda_faults(cuda_facts())
    assert "cuda_fp16.h" in what
    assert mend == "pip install 'cupy-cuda12x[ctk]'"


def test_bf16_needs_cupy_14(install: Callable[..., None]) -> None:
    install(version="13.6.0")
    check_precision("fp16")
    check_precision("fp32")
    said = refusal(lambda: check_precision("bf16"))
    assert "needs CuPy 14, this is 13.6.0: pip install --upgrade 'cupy-cuda12x[ctk]>=14'" in said


def test_ranks_are_dealt_out_and_their_workspaces_need_room(install: Callable[..., None]) -> None:
    install(count=2, free=3 * 32 * 2**20)  # 32 MiB a rank on compute capability 9
    check_cuda(6)
    assert "4 ranks on GPU 0 (NVIDIA H100) need 134 MB" in refusal(lambda: check_cuda(7))
    check_room(1, 1, 64 * 2**20)
    assert "1 rank on GPU 1" in refusal(lambda: check_room(1, 1, 64 * 2**20 + 1))


@pytest.mark.parametrize(
    ("runtime", "capability", "expected"),
    [
        (
            13020,
            (7, 0),
            "CUDA 13.2 needs 7.5: pip uninstall -y cupy-cuda13x && pip install 'cupy-cuda12x[ctk]>=14', or",
        ),
        (12090, (3, 7), "CUDA 12.9 needs 5.0: hide it with CUDA_VISIBLE_DEVICES, or --backend numpy"),
    ],
)
def test_a_gpu_too_old_for_its_cuda(
    install: Callable[..., None], runtime: int, capability: tuple[int, int], expected: str
) -> None:
    install(packages=(f"cupy-cuda{runtime // 1000}x",), runtime=runtime, driver=13000, capability=capability)
    found = ".".join(map(str, capability))
    assert f"GPU 0 (NVIDIA H100) has compute capability {found}, {expected}" in refusal(check_cuda)
    ((what, _),) = cuda_faults(cuda_facts())
    assert what.startswith("GPU 0")


def test_graphs_need_a_cublas_beside_cupy(install: Callable[..., None]) -> None:
    install(runtime=99090, driver=99090)
    said = refusal(check_graphs)
    assert said.startswith("--capture-graphs: ")
    assert said.endswith(": leave --capture-graphs out, and each kernel is launched by itself")


def test_nccl_has_a_package_of_its_own(install: Callable[..., None]) -> None:
    install(packages=("cupy-cuda13x",), runtime=13020, driver=13000)
    assert "NCCL does not load: pip install nvidia-nccl-cu13, or --collective direct" in refusal(check_nccl)


# -- the judgement alone ----------------------------------------------------------------------------


def test_a_driver_of_the_same_major_version_runs_a_newer_cuda() -> None:
    assert WELL.runtime_version is not None
    assert WELL.driver_version is not None
    assert WELL.runtime_version > WELL.driver_version
    assert cuda_faults(WELL) == ()


def test_an_older_driver_that_shows_gpus_is_believed() -> None:
    assert cuda_faults(replace(WELL, driver_version=12080)) == ()  # NVIDIA's compatibility package


def test_independent_faults_are_told_together() -> None:
    facts = replace(WELL, driver_version=0, num_gpus=0, cublas_error="no libcublas.so.13")
    assert [mend.split()[0] for _, mend in cuda_faults(facts)] == ["install", "pip"]


def test_the_line_of_an_error_that_says_what_happened() -> None:
    assert one_line(ValueError("\n====\n  one\ntwo")) == "one"
    assert one_line(ValueError("")) == "ValueError"
    assert one_line(ImportError(NOT_FOUND)) == "no libcublasLt.so.12"
