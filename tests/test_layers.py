"""Who may import whom: downwards only, read from the imports themselves."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest
from processes import finished

ROOT = Path(__file__).parent.parent / "zerosim"

# Folders and loose modules, lowest first. A file may import its own floor and those below.
LAYERS = [
    {"errors", "units", "dtypes", "verbs", "version"},
    {"placement"},
    {"config"},  # plain data over plain data
    {"dialects"},
    {"backends"},
    {"device"},
    {"comm"},
    {"tensor"},
    {"functional"},
    {"nn"},
    {"models", "optim"},
    {"parallel"},
    {"ledger"},
    {"state"},
    {"train"},
    {"analysis"},
    {"report"},
    {"stepper", "bench", "playback"},
    {"grading", "lessons"},
    {"cli"},
    {"__init__", "__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# These are imported inside one room only, so that nobody else needs them.
ONLY_IN = {
    "rich": {"report", "stepper", "cli"},
    "matplotlib": {"report"},
    "torch": {"bench"},
    "ml_dtypes": {"backends"},
    "threadpoolctl": {"comm", "bench", "train", "playback"},
    "cupy": {"backends"},
    "mpi4py": {"comm"},
    "tokenizers": {"train"},
    "yaml": {"dialects"},
    "hjson": {"dialects"},
}
# Rooms that hold host values (token ids, files, random draws); arithmetic on devices' arrays is backends' alone.
NUMPY_ROOMS = {
    "backends",
    "config",
    "placement",
    "state",
    "train",
    "models",
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


@cache
def found_in(path: Path) -> tuple[list[ast.Import | ast.ImportFrom], list[ast.Call]]:
    """A file's imports and calls, at any depth of it: each file is parsed once."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    found = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return found, [node for node in nodes if isinstance(node, ast.Call)]


def imports(path: Path) -> set[str]:
    """Every module that a file imports; `from zerosim import x` as zerosim.x."""
    found: set[str] = set()
    for node in found_in(path)[0]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}: relative import"
            found |= (
                {f"zerosim.{alias.name}" for alias in node.names} if node.module == "zerosim" else {node.module or ""}
            )
    return found


def test_imports_go_downwards() -> None:
    for path in modules():
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "zerosim" and len(parts) > 1 and parts[1] in LEVEL:
                assert LEVEL[parts[1]] <= LEVEL[room_of(path)], f"{path}: {room_of(path)} may not import {name}"


def test_libraries_stay_in_their_rooms() -> None:
    for path in modules():
        tops = {name.split(".")[0] for name in imports(path)}
        for library, rooms in ONLY_IN.items():
            assert library not in tops or room_of(path) in rooms, f"{path}: {room_of(path)} imports {library}"
        assert "numpy" not in tops or room_of(path) in NUMPY_ROOMS, f"{path}: {room_of(path)} does array work"


def test_no_room_is_above_and_below_another() -> None:
    """Folder by folder, whatever LAYERS says: from no room a chain of imports leads back to it."""
    below: dict[str, set[str]] = {}
    for path in modules():
        rooms = {name.split(".")[1] for name in imports(path) if name.startswith("zerosim.")}
        below.setdefault(room_of(path), set()).update((rooms & LEVEL.keys()) - {room_of(path)})
    while below:  # take away whoever imports nobody that is left
        free = {room for room, rooms in below.items() if not rooms & below.keys()}
        assert free, f"these import one another: {sorted(below)}"
        below = {room: rooms for room, rooms in below.items() if room not in free}


def test_every_room_has_its_floor_and_few_modules_are_loose() -> None:
    assert {room_of(path) for path in modules()} == set(LEVEL)
    assert len([path for path in modules() if path.parent == ROOT]) <= 7


def test_tensors_know_neither_mesh_nor_layout() -> None:
    rooms = {f"zerosim.{name}" for name in ("placement.mesh", "placement.layout", "placement.zero")}
    for path in sorted((ROOT / "tensor").glob("*.py")):
        assert not imports(path) & rooms, path


def test_readers_read_records_only() -> None:
    for reader in ("memory.py", "traffic.py", "activations.py", "pools.py"):
        used = {name for name in imports(ROOT / "ledger" / reader) if name.startswith("zerosim.device")}
        assert used <= {"zerosim.device.events", "zerosim.device.stretches"}


def test_what_counts_knows_nothing_of_how_it_is_shown() -> None:
    for room in ("ledger", "train", "analysis"):
        for path in sorted((ROOT / room).rglob("*.py")):
            assert "html" not in path.read_text("utf-8"), path


def test_formulas_import_nothing_of_the_simulator() -> None:
    files = sorted((ROOT / "analysis" / "formulas").glob("*.py"))
    assert len(files) > 5
    for path in files:
        names = {name for name in imports(path) if name.startswith("zerosim")}
        assert not {name for name in names if not name.startswith("zerosim.analysis.formulas.")}, path


def printed(code: str) -> list[str]:
    """What a Python of its own prints."""
    done = finished([sys.executable, "-c", code], cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_zerosim_loads_nothing_heavy() -> None:
    heavy = "numpy", "rich", "matplotlib", "ml_dtypes", "threadpoolctl", "torch", "cupy", "mpi4py"
    code = f"import sys, zerosim, zerosim.config; print([m for m in {heavy!r} if m in sys.modules])"
    assert printed(code) == ["[]"]


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
        "homes = 'zerosim.backends.cuda', 'zerosim.comm.transports.mpi'\n"
        "print([name for name in sys.modules if name.startswith(homes)])"
    )
    assert printed(code) == ["[]", "[]"]


# -- habits that other machines ask for ---------------------------------------------------------------
def name_of(call: ast.Call) -> str:
    """What is called, as a.b.c; of anything but names only the attributes after it, as .b.c."""
    parts, function = [""], call.func
    while isinstance(function, ast.Attribute):
        parts, function = [function.attr, *parts], function.value
    first = function.id if isinstance(function, ast.Name) else ""
    return ".".join([first, *parts[:-1]])


def words_of(call: ast.Call) -> set[str | None]:
    return {keyword.arg for keyword in call.keywords}


def python_files() -> list[Path]:
    return [*modules(), *sorted(Path(__file__).parent.rglob("*.py"))]


def test_text_files_are_utf_8_whatever_the_locale() -> None:
    for path in python_files():
        for call in found_in(path)[1]:
            said, where = name_of(call), f"{path}:{call.lineno}"
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
        for call in found_in(path)[1]:
            said, words = name_of(call), words_of(call)
            waits = said in ("subprocess.run", "subprocess.check_output", "subprocess.check_call")
            waits = waits or said.endswith((".communicate", "process.wait", "job.wait", "holder.wait"))
            has_limit = "timeout" in words or None in words or (said.endswith(".wait") and call.args)
            assert not waits or has_limit, f"{path}:{call.lineno}: {said} without a timeout"
