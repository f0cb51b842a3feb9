"""Who may import whom: downwards only, read from the imports themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "zerosim"

# Lowest first. A module may import its own layer and those below.
LAYERS = [
    {"dtypes", "units", "errors", "html", "mpirun", "inputs"},
    {"record", "kernel_work", "backends", "placement", "presets"},
    {"scenario"},  # plain data over plain data: errors, units and presets are all it knows
    {"device", "allocator"},
    {"comm"},
    {"sharding", "functional", "primitives", "tensor", "autograd", "rng", "finite_differences"},
    {"models", "nn", "optim", "precision"},
    {"parallel", "schedule"},
    {"engine", "runtime", "data", "npz", "build"},
    {"ledger", "planner", "pools", "result"},
    {"books", "experiment", "machine", "shapes", "report", "bench", "expect", "doctor"},
    {"stepper", "grading", "lessons"},
    {"cli", "__init__", "__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# These are imported inside one room only, so that nobody else needs them.
ONLY_IN = {
    "rich": {"report", "cli"},
    "matplotlib": {"report"},
    "torch": {"bench"},
    "ml_dtypes": {"backends"},
    "threadpoolctl": {"runtime", "bench", "doctor"},
    "cupy": {"backends"},
    "mpi4py": {"comm"},
}
# Rooms that hold host values (token ids, files, random draws); arithmetic on devices' arrays is backends' alone.
NUMPY_ROOMS = {
    "backends",
    "data",
    "npz",
    "rng",
    "experiment",
    "placement",
    "models",
    "engine",
    "finite_differences",
    "tensor",
    "lessons",
    "stepper",
    "grading",
    "bench",
    "cli",
    "report",
}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at any depth of it; `from zerosim import x` as zerosim.x."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= (
                {f"zerosim.{alias.name}" for alias in node.names} if node.module == "zerosim" else {node.module or ""}
            )
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    own = LEVEL[room_of(path)]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "zerosim" and len(parts) > 1 and parts[1] in LEVEL:
            assert LEVEL[parts[1]] <= own, f"{room_of(path)} may not import {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)}
    for library, rooms in ONLY_IN.items():
        assert library not in tops or room_of(path) in rooms, f"{room_of(path)} imports {library}"
    assert "numpy" not in tops or room_of(path) in NUMPY_ROOMS, f"{room_of(path)} does array work"


def test_readers_read_records_only() -> None:
    for reader in ("ledger.py", "pools.py"):
        assert not {name for name in imports(ROOT / reader) if name.startswith("zerosim.device.device")}


def test_formulas_import_nothing_of_the_simulator() -> None:
    files = sorted((ROOT / "planner" / "formulas").glob("*.py"))
    assert len(files) > 5
    for path in files:
        names = {name for name in imports(path) if name.startswith("zerosim")}
        assert not {name for name in names if not name.startswith("zerosim.analysis.formulas.")}, path


def test_importing_zerosim_loads_nothing_heavy() -> None:
    heavy = "numpy", "rich", "matplotlib", "ml_dtypes", "threadpoolctl", "torch", "cupy", "mpi4py"
    code = f"import sys, zerosim, zerosim.config; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", cwd=ROOT.parent, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_public_names_are_sorted_and_exist() -> None:
    import zerosim

    assert zerosim.__all__ == sorted(zerosim.__all__)
    for name in zerosim.__all__:
        assert getattr(zerosim, name) is not None
    assert set(zerosim.__all__) <= set(dir(zerosim))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = zerosim.no_such_name


def test_a_run_on_numpy_touches_neither_gpus_nor_mpi() -> None:
    sizes = "layers=1, hidden=16, heads=2, seq=8, micro_batch=1, steps=1, ranks=2"
    code = (
        f"import sys, zerosim; zerosim.run(zerosim.RunConfig({sizes})); "
        "seen = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(seen & {'cupy', 'cupy_backends', 'mpi4py'}))\n"
        "print([name for name in sys.modules if name.startswith(('zerosim.backends.cuda', 'zerosim.comm.mpi'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", cwd=ROOT.parent, check=True, timeout=120
    )
    assert done.stdout.split() == ["[]", "[]"]


# -- habits that other machines ask for ---------------------------------------------------------------
def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]


def words_of(call: ast.Call) -> set[str | None]:
    return {keyword.arg for keyword in call.keywords}


def python_files() -> list[Path]:
    return [*modules(), *sorted(Path(__file__).parent.rglob("*.py"))]


def test_text_files_are_utf_8_whatever_the_locale() -> None:
    for path in python_files():
        for call in calls(path):
            said, where = ast.unparse(call.func), f"{path}:{call.lineno}"
            if said.endswith((".read_text", ".write_text")) and not said.startswith("data."):
                num_others = 1 if said.endswith(".write_text") else 0
                assert len(call.args) > num_others or "encoding" in words_of(call), where
            if said == "open":
                mode = call.args[1] if len(call.args) > 1 else None
                is_text = not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
                assert not is_text or "encoding" in words_of(call), where
            if said.startswith("subprocess."):
                assert "text" not in words_of(call) or {"encoding", "errors"} & words_of(call), where


def test_no_test_waits_for_a_process_without_end() -> None:
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for call in calls(path):
            said, words = ast.unparse(call.func), words_of(call)
            waits = said in ("subprocess.run", "subprocess.check_output", "subprocess.check_call")
            waits = waits or said.endswith((".communicate", "process.wait", "job.wait", "holder.wait"))
            has_limit = "timeout" in words or None in words or (said.endswith(".wait") and call.args)
            assert not waits or has_limit, f"{path}:{call.lineno}: {said} without a timeout"
