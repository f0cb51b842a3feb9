"""`grade` runs an answer where it can be ended: whatever it does, it neither stays nor takes this process along."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import dataclasses
import enum
import functools
import importlib
import json
import linecache
import marshal
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from grading_here import Own2, Own3
from processes import SECONDS, ended, started

from zerosim.comm import scheduler
from zerosim.errors import InputError, ZerosimError
from zerosim.grading import Check, Flat, Slice, Unit, Zero2, Zero3, find_exercise, grade
from zerosim.grading.crashes import lost
from zerosim.grading.judge import verdict_on
from zerosim.grading.limits import Watch
from zerosim.grading.pickling import pack, unpack
from zerosim.grading.plain import Odd, packed, plain, unpacked
from zerosim.grading.process import MOST_SHOWN
from zerosim.grading.verdict import VERDICTS, Verdict

needs_posix = pytest.mark.skipif(os.name != "posix", reason="signals")


# -- what cannot be ended inside a process ----------------------------------------------------------
class Holds(Own3):
    def pre_forward(self, unit: Unit) -> None:
        if unit.name == "h.1":
            sum(iter(int, 1))  # goes round in C: no other thread of its process runs any more
        super().pre_forward(unit)


def holds(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    return sum(iter(int, 1)), world_size


class Crashes(Own3):
    def post_forward(self, unit: Unit) -> None:
        ctypes.string_at(0)


class Killed(Own3):
    def post_forward(self, unit: Unit) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Leaves(Own3):
    def post_forward(self, unit: Unit) -> None:
        os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "exercise", "check", "words", "line"),
    [
        (
            Holds,
            "zero3",
            "runs",
            "did not end within 1 s and blocked everything else, in pre_forward",
            "sum(iter(int, 1))",
        ),
        (
            holds,
            "bounds",
            "slices",
            "did not end within 1 s and blocked everything else, in holds",
            "sum(iter(int, 1))",
        ),
        (Crashes, "zero3", "runs", "in post_forward", "ctypes.string_at(0)"),
        pytest.param(Killed, "zero3", "runs", "ended the process: SIGKILL", "", marks=needs_posix),
        (Leaves, "zero3", "runs", "SystemExit: os._exit(0)", "os._exit(0)"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_nothing_inside_could_end_is_ended_and_named(
    answer: Any, exercise: str, check: str, words: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerosim.grading.process.SILENCE_S", 1.0)
    found = grade(answer, exercise)
    assert found.state == "failed"
    assert found.points == 0
    failed = found[check]
    assert failed.passed is False
    assert words in failed.counted
    assert line in failed.line
    assert not line or failed.line.startswith("test_grading_apart.py, line ")
    assert failed.hint
    if check == "runs":
        assert failed.case == "4 ranks"
        assert failed.expected == "2 steps on 4 ranks, to the end"
    assert [one.passed for one in found.checks if one.name != check] == [None] * len(find_exercise(exercise).judges)
    assert "Traceback" not in str(found)


WAITS = f"""Thread 0x00007f01 (most recent call first):
  File "{scheduler.__file__}", line 64 in sleep
  File "/home/ada/caf\\xe9.py", line 3 in post_backward
"""
DOES = """hread 0x00007f02 [rank 1] (most recent call first):
  File "/home/ada/caf\\xe9.py", line 9 in publish_params
  File "/home/ada/caf\\xe9.py", line 2 in post_backward
"""


@pytest.mark.parametrize(
    ("dump", "code", "words"),
    [
        (
            f"Timeout (0:00:05)!\n{WAITS}T{DOES}",
            1,
            "did not end within 5 s and blocked everything else, in publish_params",
        ),
        (
            f"Fatal Python error: Bus error\n\n{WAITS}Current t{DOES}",
            -7,
            "ended the process: bus error, in publish_params",
        ),
        (
            f"Windows fatal exception: access violation\n\nCurrent t{DOES}",
            3221225477,
            "access violation, in publish_params",
        ),
        ("", 3, "ended the process with exit code 3"),
        ("", None, "did not end and stopped responding"),
    ],
)
def test_the_line_is_that_of_the_thread_that_did_it(dump: str, code: int | None, words: str) -> None:
    """Others may wait in lines of the same answer; what is no ASCII is escaped in a dump."""
    one = find_exercise("zero2")
    check = lost(one, "4 ranks", dump.splitlines(), code, ["/home/ada/café.py"], 5.0).checks[0]
    assert check.counted.endswith(words)
    assert check.line == ("café.py, line 9" if dump else "")
    assert check.case == "4 ranks"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system is told nowhere else")
def test_memory_without_end_is_refused() -> None:
    class Takes(Own2):
        def publish_params(self, flat: Flat) -> None:
            self.much = bytearray(5 << 30)

    check = grade(Takes, "zero2")["runs"]
    assert "MemoryError" in check.counted
    assert check.line.endswith("self.much = bytearray(5 << 30)")


# -- what it prints ---------------------------------------------------------------------------------
@pytest.mark.slow
def test_what_an_answer_prints_is_shown_up_to_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(Own2):
        def publish_params(self, flat: Flat) -> None:
            print(f"rank {self.comm.rank} spreads {flat.name} ∇")
            os.write(2, b"and stderr\n")
            super().publish_params(flat)
            if flat.name == "lm_head" and self.device.where.step == 1:
                print("x" * 30_000, end="")

    assert grade(Prints, "zero2").passed
    shown = capsys.readouterr().out
    assert "rank 3 spreads lm_head ∇\n" in shown
    assert "and stderr\n" in shown
    assert len(shown) < MOST_SHOWN + 100
    assert shown.splitlines()[-1].startswith("... and ")
    assert shown.endswith(" characters more\n")


# -- how an answer gets there -----------------------------------------------------------------------
class Way(enum.Enum):
    FORWARD = 1
    BACKWARD = -1

    def next(self, index: int) -> int:
        return index + self.value


class Place(NamedTuple):
    index: int
    count: int

    @property
    def is_inside(self) -> bool:
        return 0 <= self.index < self.count


@dataclasses.dataclass
class Coming:
    flat: Flat
    work: Any
    others: list[str] = dataclasses.field(default_factory=list)


@functools.cache
def no_lock_holds(name: str) -> bool:
    with LOCK:
        return name in SEEN


SEEN: list[str] = []
LOCK = threading.Lock()


def remembering(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        SEEN.append(args[1].name)
        return function(*args)

    return wrapped


class Launches:
    coming: dict[str, Coming]
    comm: Any

    def launch(self, flat: Flat) -> None:
        if flat.name not in self.coming:
            self.coming[flat.name] = Coming(flat, self.comm.launch_all_gather(flat.shard()))


class Prefetches(Launches, Zero3):
    """In all styles that a notebook has."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.coming = {}

    @functools.cached_property
    def order(self) -> dict[str, int]:
        return {flat.name: index for index, flat in enumerate(self.flats)}

    @staticmethod
    def spot(index: int, count: int) -> Place:
        return Place(index, count)

    def use(self, flat: Flat, way: Way) -> None:
        self.launch(flat)
        place = self.spot(way.next(self.order[flat.name]), len(self.flats))
        if place.is_inside:
            self.launch(self.flats[place.index])
        arrived = self.coming.pop(flat.name)
        assert dataclasses.replace(arrived, others=["a"]).others == ["a"]
        assert len(dataclasses.fields(Coming)) == 3
        flat.unshard(arrived.work.wait())

    @remembering
    def pre_forward(self, unit: Unit) -> None:
        self.use(unit.flat, Way.FORWARD)

    def pre_backward(self, unit: Unit) -> None:
        assert no_lock_holds(unit.name)  # what another function of the module has put there
        self.use(unit.flat, Way.BACKWARD)


@pytest.mark.slow
def test_an_answer_goes_with_all_that_it_uses_and_changes_nothing_here() -> None:
    found = grade(Prefetches, "prefetch")
    assert found.passed, str(found)
    assert SEEN == []


@pytest.mark.slow
def test_an_answer_that_no_module_has_is_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a notebook's cell or an exec'd text leaves it: in a module that cannot be imported, its lines in linecache."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    source = textwrap.dedent("""
        from zerosim.grading import Strategy
        scale = 2
        class Mine(Strategy):
            keeps_grads = False
            def post_backward(self, unit):
                if unit.reduces:
                    unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad()))
            def publish_params(self, flat):
                global scale
                scale += 1
                self.comm.all_gather(flat.shard(), out=flat.whole_param())
                if flat.name == "lm_head":
                    missing
    """)
    monkeypatch.setitem(linecache.cache, "a cell", (len(source), None, source.splitlines(True), "a cell"))
    exec(compile(source, "a cell", "exec"), cell)
    check = grade(cell["Mine"], "zero2")["runs"]
    assert "NameError: name 'missing' is not defined" in check.counted
    assert check.line == "a cell, line 14: missing"
    assert cell["scale"] == 2


@pytest.mark.slow
def test_what_was_changed_in_zerosim_here_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Own2):
        def publish_params(self, flat: Flat) -> None: ...

    monkeypatch.setattr("zerosim.grading.checks.different_weights", lambda mine, reference: [])
    monkeypatch.setattr(Zero2, "publish_params", lambda self, flat: None)
    found = grade(Mine, "zero2")
    assert found["weights"].passed is False
    assert found.points == 0


# -- what an answer forges ----------------------------------------------------------------------------
class PatchesNumPy(Own2):
    def publish_params(self, flat: Flat) -> None:
        np.array_equal = lambda *parts, **more: True


class PatchesTheExercise(Own2):
    def publish_params(self, flat: Flat) -> None:
        forged = lambda run: Check("weights", True, "as forged", "it is")  # noqa: E731
        object.__setattr__(find_exercise("zero2"), "judges", (("weights", forged),))


class SendsAVerdict(Own2):
    def publish_params(self, flat: Flat) -> None:
        names = ("runs", "weights", "bytes", "peak", "volume", "calls")
        checks = tuple(Check(name, True, "as forged", "it is") for name in names)
        forged = base64.b64encode(packed(Verdict(checks), VERDICTS)).decode()
        line = json.dumps(["verdict", forged]).encode() + b"\n"
        for number in range(3, 40):
            with contextlib.suppress(OSError):
                os.write(number, line)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@needs_posix
@pytest.mark.parametrize("answer", [PatchesNumPy, PatchesTheExercise, SendsAVerdict])
def test_what_an_answer_forges_in_its_own_process_reaches_no_verdict(answer: Any) -> None:
    found = grade(answer, "zero2")
    assert found.points == 0
    assert "as forged" not in str(found)
    if answer is SendsAVerdict:
        assert "ended the process: SIGKILL" in found["runs"].counted
    else:
        assert found["weights"].passed is False


def test_only_plain_data_comes_from_the_answers_process() -> None:
    class Number(int): ...

    values = [None, True, 3, 0.5, "a", b"b", (1, [2, {"c": 3}]), np.arange(3, dtype=np.float32), Slice(0, 1, 2)]
    for value, came in zip(values, map(plain, values), strict=True):
        assert type(came) is type(value)
        assert repr(came) == repr(value)
    assert plain(np.int64(7)) == 7
    odd = [Number(3), object, np.array([print], object), np.ma.masked_array([1]), {1}, Own2]
    assert {type(plain(value)) for value in odd} == {Odd}
    assert plain(Number(3)).text == "3"
    for data in (b"", b"garbage", pickle.dumps(Slice(0, 1, 2)), marshal.dumps(["record", 0, []]), marshal.dumps({1})):
        with pytest.raises(InputError, match="not plain data"):
            unpacked(data)
    verdict = verdict_on(marshal.dumps(3), find_exercise("zero2"), (), Watch())
    assert [check.passed for check in verdict.checks] == [False]


@pytest.mark.slow
def test_files_beside_the_answer_are_none_of_pythons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A student's queue.py is theirs; and it is the same zerosim that judges, wherever one has changed to."""
    for name in ("queue", "random", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not yours')", "utf-8")
    (tmp_path / "helper.py").write_text("def size(numel, ranks): return -(-numel // ranks)", "utf-8")
    (tmp_path / "other" / "zerosim").mkdir(parents=True)
    (tmp_path / "other" / "zerosim" / "__init__.py").write_text("raise SystemExit('not the one that grades')", "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    monkeypatch.syspath_prepend("")
    monkeypatch.chdir(tmp_path)
    helper = importlib.import_module("helper")

    found = grade(lambda n, rank, ranks: (rank * helper.size(n, ranks), (rank + 1) * helper.size(n, ranks)), "bounds")
    assert found.passed, str(found)


@pytest.mark.slow
def test_an_exercise_of_ones_own_goes_too() -> None:
    exercise = dataclasses.replace(find_exercise("zero2"), name="mine", cases=find_exercise("zero2").cases[:1])
    assert grade(Own2, exercise).passed


HELD: Any = None


def test_what_cannot_go_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(Own2):
        def publish_params(self, flat: Flat) -> None:
            HELD.read()

    with open(os.devnull, encoding="utf-8") as file:
        monkeypatch.setitem(globals(), "HELD", file)
        check = grade(Reads, "zero2")["answer"]
    assert "`HELD`, a TextIOWrapper, cannot be sent to the process that runs it" in check.counted
    assert check.hint.startswith("create it where it is used")

    class Refuses:
        def __reduce__(self) -> Any:
            raise ValueError("never")

    refuses = Refuses()
    counted = grade(lambda *parts: refuses, "bounds")["answer"].counted
    assert counted == "`refuses`, a Refuses, cannot be sent to the process that runs it: ValueError: never"

    class Holds(Own2):
        step_by_step = refuses

    assert grade(Holds, "zero2")["answer"].counted.startswith("`step_by_step`, a Refuses, cannot be sent")


@pytest.mark.slow
def test_what_cannot_be_made_again_is_said() -> None:
    class Bombs:
        def __reduce__(self) -> Any:
            return int, ("no number",)

    bomb = Bombs()
    found = grade(lambda *parts: bomb, "bounds")
    assert "it cannot be recreated in the process that runs it: ValueError" in found["answer"].counted


@pytest.mark.parametrize("answer", [Own2, Prefetches, lambda a, b, c: (a, b), functools.partial(max, 3), max])
def test_what_is_carried_is_what_it_was(answer: Any) -> None:
    again = unpack(pack(answer)[0])
    assert (again is answer) == (answer is max)
    assert getattr(again, "__qualname__", "") == getattr(answer, "__qualname__", "")
    if isinstance(answer, type):
        assert set(vars(again)) >= set(vars(answer)) - {"__annotations__"}
        assert [base.__name__ for base in again.__mro__] == [base.__name__ for base in answer.__mro__]


def count_up() -> None:
    global counted
    counted += 1


def count_is() -> int:
    return counted


counted = 0


def test_functions_share_the_globals_of_their_module_and_no_others() -> None:
    up, read = unpack(pack((count_up, count_is))[0])
    up()
    assert read() == 1
    assert counted == 0


def test_closures_share_what_they_shared() -> None:
    def pair() -> Any:
        count = 0

        def add() -> None:
            nonlocal count
            count += 1

        def read() -> int:
            return count if count else read.__code__.co_argcount  # names itself

        return add, read

    add, read = unpack(pack(pair())[0])
    assert read() == 0
    add()
    assert read() == 1


# -- who calls, and when ----------------------------------------------------------------------------
@pytest.mark.slow
def test_an_answer_does_not_grade() -> None:
    class Nests(Own2):
        def publish_params(self, flat: Flat) -> None:
            grade(Own2, "zero2")

    assert "the answer itself calls grade" in grade(Nests, "zero2")["runs"].counted


def test_no_pipe_stays_open_to_a_process_that_ended_before_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Kept(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            self.wait()
            started.append(self)

    monkeypatch.setattr("zerosim.grading.process._BEGIN", "raise SystemExit")
    monkeypatch.setattr(subprocess, "Popen", Kept)
    with pytest.raises(ZerosimError, match="did not start"):
        grade(lambda *parts, of=bytes(10**6): parts, "bounds")
    assert started[0].stdin is not None
    assert started[0].stdin.closed


def test_without_a_python_to_start_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(ZerosimError, match="grade starts Python in a separate process, which failed"):
        grade(Own2, "zero2")
    monkeypatch.setenv("ZEROSIM_GRADING", "1")
    with pytest.raises(InputError, match="call it outside the answer"):
        grade(Own2, "zero2")


@pytest.mark.slow
@needs_posix
def test_what_an_answer_starts_ends_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Starts(Own2):
        def end_backward(self) -> None:
            if self.comm.rank == 0:
                print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10000)"]).pid)

    assert grade(Starts, "zero2").passed
    started = [int(line) for line in capsys.readouterr().out.split()]
    assert len(started) == 4
    _await_end(*started)


SCRIPT = """
import os, signal, time
from zerosim.grading import Strategy, grade

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it

class Mine(Strategy):
    def pre_forward(self, unit):
        if self.comm.rank == 0:
            print(os.getpid())
        while True:
            time.sleep(1)
            self.comm.barrier()

try:
    print(grade(Mine, "zero1"))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
@needs_posix
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_with_the_one_who_waits_the_answer_ends(how: str, tmp_path: Path) -> None:
    """Also: a script's own class is graded, and the script, which has no main guard, is not run again for it."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, "utf-8")
    with ended(started([sys.executable, "-u", str(path)], stdout=subprocess.PIPE)) as script:
        assert script.stdout is not None
        process = int(script.stdout.readline())
        script.send_signal(getattr(signal, how))
        assert ("interrupted" in script.stdout.read()) == (how == "SIGINT")
    _await_end(process)


def _await_end(*processes: int) -> None:
    deadline = time.monotonic() + SECONDS
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, processes))


def _runs(process: int) -> bool:
    """Not so: one that has ended and that nobody has waited for (its parent is gone)."""
    try:
        os.kill(process, 0)
        status = Path(f"/proc/{process}/stat")
        return not status.exists() or status.read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
