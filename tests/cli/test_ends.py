"""How commands end: what could not be done is said, by its own exit code, and costs nothing else that was asked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import finished, posix

import zerosim
from zerosim import errors
from zerosim.cli import run as run_verb
from zerosim.cli.main import main
from zerosim.comm import collective_errors
from zerosim.train import run as experiment

ROOT = Path(zerosim.__file__).parents[1]
SMALL = "--layers 1 --hidden 16 --heads 2 --seq 8 --ranks 2 --micro-batch 1 --steps 2"
LOST = 5
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full to write to")

VERBS = [
    f"run {SMALL} --json out.json --save-weights out.npz",
    f"run {SMALL} --json -",
    f"compare {SMALL} --stages 0,3 --json out.json",
    "plan --json out.json",
    f"check {ROOT / 'scenarios' / 'figure1.toml'} --json out.json",
    "fit --limit 20MB --json out.json",
    "explain --stage 2 --params 7.5B --ranks 64 --json out.json",
    "plot memory -o out.svg --json out.json",
    f"step {SMALL} --steps 1",
    "zoo gpus --json out.json",
    "doctor --json out.json",
    "--version",
    "run --help",
]
"""Each prints something; `out.*` are the files that it is asked for."""

EACH = """
import json, os, sys
from zerosim.cli.main import main
from zerosim.comm import collective_errors
if sys.argv[2:] == ["terminal"]:
    import pty, threading
    master, slave = pty.openpty()
    shown, sys.stdin = os.dup(1), None
    os.dup2(slave, 1)
    def drain():
        while True:
            os.write(shown, os.read(master, 1 << 16))
    threading.Thread(target=drain, daemon=True).start()
results = []
for words in json.loads(sys.argv[1]):
    code = main([os.fsdecode(word.encode()) for word in words.split(" ")])  # as a shell hands them over
    left = sorted(name for name in os.listdir() if name.startswith("out"))
    results.append([words, code, left])
    for name in left:
        os.remove(name)
with open("results", "w", encoding="utf-8") as file:
    json.dump(results, file)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def shell(command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`zerosim` in a shell command, as a person has it."""
    command = f'zerosim() {{ "{sys.executable}" -m zerosim "$@"; }}; {command}'
    return finished(["bash", "-c", command], errors="replace", env=environment(**more))


def each(verbs: list[str], redirect: str = "", **more: str) -> tuple[list[tuple[str, int, list[str]]], str, str]:
    """Every command of `verbs`, one after the other in one process: its code and files; stdout and stderr of all."""
    Path("each.py").write_text(EACH, encoding="utf-8")
    Path("verbs").write_text(json.dumps(verbs), encoding="utf-8")
    done = shell(f'"{sys.executable}" each.py "$(cat verbs)" {redirect}', **more)
    assert "Traceback" not in done.stderr
    assert Path("results").exists(), done.stderr
    return [tuple(row) for row in json.loads(Path("results").read_text("utf-8"))], done.stdout, done.stderr


def asked_for(words: str) -> list[str]:
    return sorted({word for word in words.split() if word.startswith("out.")})


# -- output that cannot be written ------------------------------------------------------------------
@pytest.mark.slow
@posix
@pytest.mark.parametrize("redirect", [pytest.param("> /dev/full", marks=FULL), ">&-"], ids=["full", "closed"])
def test_stdout_that_takes_nothing_costs_no_file_and_is_told(folder: Path, redirect: str) -> None:
    results, _, err = each(VERBS, redirect)
    for words, code, left in results:
        assert (code, left) == (LOST, asked_for(words)), words
    why = "No space left on device" if "full" in redirect else "it is closed"
    told = f"zerosim: error: stdout: cannot be written: {why}: the output is lost"
    assert [line for line in err.splitlines() if line.startswith("zerosim: ")] == [told] * len(VERBS)


@pytest.mark.slow
@pytest.mark.quick(1)
@posix
@pytest.mark.parametrize("redirect", [pytest.param("2> /dev/full", marks=FULL), "2>&-", "2>&- <&-"])
def test_without_stderr_and_stdin_all_that_goes_to_stdout_is_there(folder: Path, redirect: str) -> None:
    results, out, err = each([VERBS[0], VERBS[1], "explain --stage 9", f"step {SMALL} --steps 1"], redirect)
    assert [code for _, code, _ in results] == [0, 0, 2, 0]
    assert results[0][2] == ["out.json", "out.npz"]
    assert "ZeRO-3 on 2 ranks" in out
    assert '{"schema": 2' in out
    assert "error" not in out  # what was meant for stderr
    assert err == ""


@pytest.mark.slow
@posix
def test_what_is_quiet_needs_no_stdout(folder: Path) -> None:
    done = shell(f"zerosim run {SMALL} --quiet --json out.json >&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(Path("out.json").read_text("utf-8"))["num_parameters"] == 7536


@posix
def test_nothing_takes_the_place_of_a_closed_stdout(folder: Path) -> None:
    """What opens next must not get stdout's number; nor is /dev/stdout some file then."""
    done = shell(f"zerosim run {SMALL} --json /dev/stdout >&-")
    assert done.returncode == 2
    assert "--json /dev/stdout" in done.stderr


@pytest.mark.slow
@FULL
@posix
def test_other_ends_keep_their_codes(folder: Path) -> None:
    figure_1 = (ROOT / "scenarios" / "figure1.toml").read_text("utf-8")
    Path("wrong.toml").write_text(figure_1.replace('"31.4"', '"31.3"'), encoding="utf-8")
    results, _, err = each(["check wrong.toml", f"run {SMALL} --lr 1e30 --optimizer sgd --steps 5"], "> /dev/full")
    assert [code for _, code, _ in results] == [1, 4]
    assert err.count("stdout: cannot be written") == 2
    assert "not finite" in err


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_costs_one_file_and_not_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_verb, "write_weights", no_space)
    assert main(["run", *SMALL.split(), "--save-weights", "out.npz", "--json", "out.json"]) == LOST
    out, err = capsys.readouterr()
    assert err == "zerosim: error: --save-weights out.npz: cannot be written: No space left on device\n"
    assert "ZeRO-3 on 2 ranks" in out
    assert sorted(os.listdir()) == ["out.json"]


# -- launchers --------------------------------------------------------------------------------------
LAUNCHERS: list[dict[str, str]] = [
    {"PMIX_RANK": "1"},
    {"PMI_RANK": "3", "PMI_SIZE": "4"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"},
    {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7"},
    {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_TASK_PID": str(os.getpid())},
]


@pytest.fixture(params=LAUNCHERS, ids=lambda variables: next(iter(variables)) + str(len(variables)))
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a launcher, or a shell that one started, hands on."""
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(collective_errors, "FIRST_SPEAKS_S", 0.0)
    monkeypatch.setattr(collective_errors, "NEXT_SPEAKS_S", 0.0)
    monkeypatch.delenv("PMIX_SERVER_TMPDIR", raising=False)
    return dict(request.param)


@pytest.mark.quick(1)
def test_without_a_world_of_processes_every_process_speaks_and_writes(
    launched: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        ("explain --stage 2 --params 7.5B --ranks 64 --json out.json", "16,640,625,000"),
        ("plan --json out.json", "per GPU"),
        ("zoo gpus --json out.json", "v100-32"),
    ):
        assert main(words.split()) == 0
        assert said in capsys.readouterr().out
        Path("out.json").unlink()
    assert main(["plan", "--stage", "7"]) == 2
    assert "--stage 7" in capsys.readouterr().err


def test_a_run_is_made_or_refused_but_never_silent(
    launched: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["run", *SMALL.split(), "--json", "out.json"])
    out, err = capsys.readouterr()
    if code == 0:
        assert "ZeRO-3 on 2 ranks" in out
        assert Path("out.json").exists()
    else:
        assert code == 2
        assert "each would train all 2 ranks: add --world mpi, or start one process" in err
        assert next(name for name in launched if name.endswith(("_SIZE", "_TASKS"))) in err
        assert not Path("out.json").exists()
    shell_of_slurm = "SLURM_PROCID" in launched and "SLURM_TASK_PID" not in launched
    assert (code == 0) == (shell_of_slurm or launched == {"PMIX_RANK": "1"})


def test_a_person_at_a_terminal_is_not_a_launched_process(
    launched: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`srun -n 4 --pty bash`: the shell has the variables, and a person types into what it starts."""
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 0)
    assert main(["run", *SMALL.split(), "--json", "out.json"]) == 0
    assert "ZeRO-3 on 2 ranks" in capsys.readouterr().out
    assert Path("out.json").exists()


def test_an_error_waits_for_its_end_where_another_process_of_the_job_has_told_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("zerosim.comm.collective_errors.time.sleep", waits.append)
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(folder))
    for rank, must_wait in (("2", False), ("1", True), ("2", False), ("0", True)):
        monkeypatch.setenv("PMIX_RANK", rank)
        waits.clear()
        assert main(["plan", "--stage", "7"]) == 2
        assert (collective_errors.END_S in waits) == must_wait
        assert "--stage 7" in capsys.readouterr().err  # nobody ended it


# -- what fails oddly -------------------------------------------------------------------------------
class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def test_a_mistake_of_its_own_has_a_code_of_its_own_even_where_it_cannot_be_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(error: Exception) -> Callable[..., None]:
        def run(*_: Any, **__: Any) -> None:
            raise error

        return run

    for error, said in (
        (TypeError("oh"), "TypeError: oh"),
        (Unsayable(), "Unsayable: (it cannot be shown: its message raised RuntimeError)"),
        (KeyError(Unsayable()), "KeyError: (it cannot be shown: its message raised RuntimeError)"),
        (FileNotFoundError(2, "No such file", "x"), "FileNotFoundError: [Errno 2] No such file: 'x'"),
    ):
        monkeypatch.setattr(experiment, "run", fail(error))
        assert main(["run", *SMALL.split()]) == 6
        assert capsys.readouterr().err == f"zerosim: internal error: {said} (--debug shows where)\n"


@posix
def test_a_working_directory_that_is_gone_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in (["run", *SMALL.split()], ["plan", "--json", "out.json"], ["doctor"]):
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert (out, err) == (
            "",
            "zerosim: error: the working directory no longer exists: cd to an existing one\n",
        )


def test_the_page_for_programs_lists_every_exit_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "for_programs.md"
    line = next(line for line in page.read_text("utf-8").splitlines() if "Exit codes:" in line)
    kinds = [errors.InputError, errors.OutOfMemory, errors.RankFailed, errors.OutputError, errors.ZerosimError]
    ended = [errors.DIFFERENCE, errors.HUNG_UP, errors.INTERRUPTED, errors.BROKEN_PIPE]
    codes = {0, *(kind.exit_code for kind in kinds), *ended}
    assert [int(code) for code in re.findall(r"(?:: |; )(\d+) ", line)] == sorted(codes)


# -- letters ----------------------------------------------------------------------------------------
SPOKEN = [
    *VERBS,
    f"run {SMALL} --sample Ψ✓ --quiet",
    f"run {SMALL} --stage 0 --capacity 125KB",
    "plot traffic -o out-Ψ.svg",
]


@pytest.mark.slow
@posix
@pytest.mark.parametrize(
    ("letters", "place"),
    [
        ({"PYTHONIOENCODING": "cp1252"}, ""),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "terminal"),
    ],
    ids=["cp1252 in a pipe", "C in a terminal"],
)
def test_letters_that_cannot_be_printed_never_end_a_command(folder: Path, letters: dict[str, str], place: str) -> None:
    results, out, err = each(SPOKEN, place, **letters, TERM="xterm-256color", MPLBACKEND="nonsense")
    assert [(words, code) for words, code, _ in results] == [(words, 3 if "125KB" in words else 0) for words in SPOKEN]
    assert "Psi = 7,536" in out
    assert ("\x1b[" in out) == bool(place)
    assert "internal error" not in err
    assert len(results[-1][2]) == 1


SLOW = """
import sys, time
from zerosim.cli import main, streams, zoo
streams.SILENT_S = (0.2, 0.2)
def works(args):
    began, screen = time.monotonic(), streams._raw(sys.stderr)
    silent_since = screen.written_at
    while screen.written_at == silent_since:
        time.sleep(0.01)
    print(time.monotonic() - began)
    return 0
zoo.main = works
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_command_that_is_silent_for_long_says_that_it_works() -> None:
    done = finished([sys.executable, "-c", SLOW, "zoo"])
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert re.fullmatch(r"zerosim zoo: \d+ s, still running; Ctrl-C ends it", lines[0])
    assert len(lines) <= 1 + float(done.stdout) / 0.2


# -- Ctrl-C at the start and at the end -------------------------------------------------------------
COUNTS = """
import _signal, runpy, sys
class Finder:
    left = {number}
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        cls.left -= name not in ("zerosim", "zerosim.__main__")
        if cls.left <= 0:
            _signal.raise_signal(_signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""
"""Ctrl-C when that many modules have been looked for, from zerosim's first line on, and at each one after it."""
WAYS = {
    "python -m zerosim": 'runpy.run_module("zerosim", run_name="__main__", alter_sys=True)',
    "zerosim": "from zerosim.__main__ import main; sys.exit(main())",
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("way", "number"), [(way, number) for way in WAYS for number in (1, 2, 12)] + [("zerosim", 150)]
)
def test_ctrl_c_from_the_first_import_on_is_a_line(folder: Path, way: str, number: int) -> None:
    program = COUNTS.format(number=number) + WAYS[way]
    done = finished([sys.executable, "-c", program, "run", *SMALL.split(), "--quiet"], env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "zerosim: interrupted\n")


def test_ctrl_c_after_a_command_changes_nothing() -> None:
    """While Python ends."""
    program = f"import atexit, _signal, sys; atexit.register(_signal.raise_signal, _signal.SIGINT); {WAYS['zerosim']}"
    done = finished([sys.executable, "-c", program, "--version"], env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, f"zerosim {zerosim.__version__}\n", "")
