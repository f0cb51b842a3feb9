"""NVMe's files: a folder of the run's own, which goes with the run however it ends; nobody else's file is touched."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctrl_c import pressed
from processes import SECONDS, ended, finished, started

from zerosim.backends.numpy import files
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.device import nvme
from zerosim.device.node import NodePool
from zerosim.device.nvme import LOCK, Files, in_run_folder
from zerosim.dtypes import bf16, fp32
from zerosim.errors import InputError, OutputError, RankFailed
from zerosim.train.run import run

OFFLOAD = "optimizer=nvme,params=nvme"
WORDS = ["run", "--stage", "3", "--ranks", "2", "--offload", OFFLOAD, "--layers", "2", "--hidden", "16", "--heads", "2"]


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def cleared(place: Path) -> None:
    """What a start of a run that writes nothing does to `place`."""
    assert in_run_folder(str(place), lambda folder: folder, writes=False) is None


def test_a_file_is_an_array_that_is_read_and_written(tmp_path: Path) -> None:
    def run(folder: Path | None) -> None:
        assert folder is not None
        shares = Files(folder, 3, NodePool("node 0", 100))
        assert shares.reserve(7, 40) == 40
        array, values = shares.array(7, (10,), fp32), np.arange(10, dtype=np.float32)
        assert names(folder) == [LOCK, "rank3-7.bin"]
        assert (array.size, array.nbytes, array.shape) == (10, 40, (10,))
        array.write(values)
        array[2:5].write(values[:3])
        got = np.empty(10, np.float32)
        array.read(got)
        assert got.tolist() == [0, 1, 0, 1, 2, 5, 6, 7, 8, 9]
        assert shares.reserve(8, 61) is None
        assert np.asarray(shares.array(9, (3,), bf16)).astype(float).tolist() == [0, 0, 0]
        shares.release(7)
        assert names(folder) == [LOCK, "rank3-9.bin"]

    in_run_folder(str(tmp_path), run, writes=True)
    assert names(tmp_path) == []


def left_over(place: Path, letter: str) -> Path:
    """What a run left that was killed."""
    folder = place / f"zerosim-nvme-{letter * 16}"
    folder.mkdir()
    (folder / LOCK).touch()
    (folder / "rank0-1.bin").write_bytes(b"x")
    return folder


def test_what_a_killed_run_left_goes_and_nothing_else(tmp_path: Path) -> None:
    _, alive, odd, no_lock = (left_over(tmp_path, letter) for letter in "abcd")
    (odd / "mine.txt").write_text("not a run's", encoding="utf-8")
    (no_lock / LOCK).unlink()
    others = ["data.bin", "zerosim-nvme-notes", "zerosim-nvme-0123456789abcdef"]
    for name in others:
        (tmp_path / name).write_text("mine", encoding="utf-8")
    held = os.open(alive / LOCK, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    cleared(tmp_path)
    os.close(held)
    assert names(tmp_path) == sorted([alive.name, odd.name, *others])
    assert names(odd) == ["mine.txt"]
    assert names(alive) == [LOCK, "rank0-1.bin"]


def test_what_another_user_s_run_left_keeps_nobody_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, real = left_over(tmp_path, "a"), os.open

    def may_not(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if Path(path).parent == theirs:  # the tests' user may be root, who may
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", may_not)
    assert in_run_folder(str(tmp_path), lambda folder: len(names(tmp_path)), writes=True) == 2
    assert names(tmp_path) == [theirs.name]


def test_a_folder_without_a_lock_that_another_start_removes_is_not_lost_with_what_is_made_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other start has taken the new folder for a killed run's and removed its own lock; now this run locks it."""
    opens, removes, removed, has_files = os.open, os.rmdir, threading.Event(), threading.Event()
    other = threading.Thread(target=cleared, args=[tmp_path])

    def opened(path: Any, *words: Any, **named: Any) -> int:
        if Path(path).name == LOCK and threading.current_thread() is threading.main_thread() and not other.ident:
            other.start()
            removed.wait(SECONDS)
        return opens(path, *words, **named)

    def rmdir(path: Any) -> None:
        if threading.current_thread() is other:
            removed.set()
            has_files.wait(SECONDS)
        removes(path)

    def run(folder: Path | None) -> None:
        assert folder is not None
        Files(folder, 0, NodePool("node 0", 100)).array(1, (10,), fp32)
        has_files.set()
        other.join(SECONDS)
        assert names(folder) == [LOCK, "rank0-1.bin"]

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "rmdir", rmdir)
    in_run_folder(str(tmp_path), run, writes=True)
    assert names(tmp_path) == []


@pytest.mark.parametrize("when", ["before the lock is made", "before the lock is held", "once the lock is held"])
def test_a_folder_belongs_to_the_run_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Whatever another start does meanwhile, the run has a folder that nobody removes from under it."""
    opens, locks, others = os.open, fcntl.flock, ["one"]

    def another_start() -> None:
        if others:
            others.clear()
            cleared(tmp_path)

    def opened(path: Any, *words: Any, **named: Any) -> int:
        if when == "before the lock is made" and Path(path).name == LOCK:
            another_start()
        return opens(path, *words, **named)

    def locked(file: int, how: int) -> None:
        if when == "before the lock is held":
            another_start()
        locks(file, how)
        if when == "once the lock is held":
            another_start()

    def run(folder: Path | None) -> None:
        assert folder is not None
        cleared(tmp_path)
        Files(folder, 0, NodePool("node 0", 100)).array(1, (10,), fp32)
        assert names(folder) == [LOCK, "rank0-1.bin"]

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(fcntl, "flock", locked)
    in_run_folder(str(tmp_path), run, writes=True)
    assert names(tmp_path) == []


def test_a_run_whose_lock_was_removed_leaves_no_folder(tmp_path: Path) -> None:
    def run(folder: Path | None) -> None:
        assert folder is not None
        (folder / LOCK).unlink()

    in_run_folder(str(tmp_path), run, writes=True)
    assert names(tmp_path) == []


def test_a_rank_that_goes_on_writing_after_the_end_keeps_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not heard of the end, and is always faster; one file was in the making."""
    real, made, in_the_making = os.rmdir, 0, ["rank0-99.bin"]

    def run(folder: Path | None) -> None:
        assert folder is not None
        files = Files(folder, 0, NodePool("node 0", 100))

        def rmdir(path: Any) -> None:
            nonlocal made
            for name in in_the_making:
                (Path(path) / name).touch()
            in_the_making.clear()
            if made < 20:
                with contextlib.suppress(OutputError):
                    files.array(made, (1,), fp32)
                    made += 1
            real(path)

        monkeypatch.setattr(os, "rmdir", rmdir)

    in_run_folder(str(tmp_path), run, writes=True)
    assert made == 0
    assert names(tmp_path) == []


def test_a_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(rank: int, step: int, loss: float) -> None:
        raise ValueError("of a callback")

    config = RunConfig(stage=3, ranks=2, offload=OFFLOAD, nvme=str(tmp_path), layers=2, hidden=16, heads=2)
    with pytest.raises(RankFailed):
        run(config, progress=fails)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "No space left"), (errno.EIO, "Input/output"), (errno.EROFS, "Read-only")]
)
def test_a_drive_that_fails_in_the_middle_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, said: str
) -> None:
    left, real = [150], os.pwritev

    def write(file: int, buffers: list[memoryview], at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        return real(file, buffers, at)

    monkeypatch.setattr(files.os, "pwritev", write)
    assert main([*WORDS, "--nvme", str(tmp_path), "-q"]) == 5
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 1
    assert names(tmp_path) == []


def test_a_drive_that_is_gone_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(stage=3, offload=OFFLOAD, nvme=str(tmp_path), layers=2, hidden=16, heads=2)

    def gone(rank: int, step: int, loss: float) -> None:
        for folder in tmp_path.iterdir():
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()

    with pytest.raises(OutputError, match="No such file"):
        run(config, progress=gone)


def test_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, said in (("absent", "does not exist"), ("file", "is not a folder")):
        with pytest.raises(InputError, match=said):
            in_run_folder(str(tmp_path / name), lambda folder: folder, writes=True)


def test_a_path_is_taken_where_nothing_goes_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--ranks", "2", "--steps", "1", "-q", "--nvme", str(tmp_path)]) == 0
    assert main([*WORDS, "-q"]) == 2
    assert "--nvme DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--stage 3 --offload optimizer=ram", 2, "'ram' is none of device, host, nvme"),
        ("--stage 3 --offload optimizer=nvme", 2, "writes files and needs a folder"),
        ("--stage 3 --offload optimizer=nvme --nvme absent", 2, "--nvme absent: does not exist"),
        ("--stage 2 --offload params=host,optimizer=host", 2, "DeepSpeed takes offload_param there and ignores it"),
        ("--stage 3 --offload optimizer=host --host-memory 10KB", 3, "node 0 is out of host memory in init of wte"),
        ("--stage 3 --offload optimizer=host --host-memory 0", 2, "--host-memory"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    small = "run --ranks 2 --layers 2 --hidden 16 --heads 2 --steps 1 -q"
    assert main([*small.split(), *words.split()]) == code
    first, *rest = capsys.readouterr().err.splitlines()
    assert said in first
    assert not rest or code == 3  # whose table follows
    assert names(tmp_path) == []


NAMESPACE = (
    shutil.which("unshare") is not None
    and not subprocess.run(
        ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False, timeout=60
    ).returncode
)
DRIVE = """
mount -t tmpfs -o size={size} tmpfs {place} || exit 99
({python} -c '{program}' {words} --nvme {place}; echo $? > {code}) &
{then}
wait
ls -A {place} > {left}
"""
MAIN = "import sys; from zerosim.__main__ import main; sys.exit(main())"
STOPS = """
import os
write, left = os.pwritev, [{writes}]
def writes(*words):
    left[0] -= 1
    if not left[0]:
        open("{there}", "w").close()
        open("{on}").close()
    return write(*words)
os.pwritev = writes
"""
"""A run stops at one of its writes: two pipes wait for the shell, so that nothing depends on who is faster."""


@pytest.mark.quick(1)
@pytest.mark.skipif(not NAMESPACE, reason="no drive can be mounted here")
@pytest.mark.parametrize(
    ("size", "writes", "then", "said"),
    [
        pytest.param("50k", 0, "", "No space left on device", id="full"),
        pytest.param("8m", 3, "head -c 20M /dev/zero > {place}/other", "No space left on device", id="fills up"),
        pytest.param("8m,nr_inodes=2", 0, "", "No space left on device", id="no room for a lock"),
        pytest.param("8m,ro", 0, "", "Read-only file system", id="read-only"),
        pytest.param("8m", 3, "rm -r {place}/*", "No such file or directory", id="removed at the start"),
        pytest.param("8m", 300, "rm -r {place}/*", "No such file or directory", id="removed in a step"),
        pytest.param("8m", 300, "umount -l {place}", "No such file or directory", id="gone"),
    ],
)
def test_a_real_drive_that_fails_ends_the_run_in_a_line(
    tmp_path: Path, size: str, writes: int, then: str, said: str
) -> None:
    place, code, left, there, on = (tmp_path / name for name in ("drive", "code", "left", "there", "on"))
    place.mkdir()
    program = STOPS.format(writes=writes, there=there, on=on) + MAIN
    if writes:
        os.mkfifo(there)
        os.mkfifo(on)
        then = f"cat {there}; {then.format(place=place)} 2> /dev/null; : > {on}"
    words = " ".join([*WORDS, "--steps", "1000000", "-q"])
    names = {"size": size, "place": place, "code": code, "left": left, "then": then}
    script = DRIVE.format(**names, python=sys.executable, program=program, words=words)
    done = finished(["unshare", "-rm", "sh", "-c", script])
    assert code.read_text("utf-8") == "5\n"
    assert f"--nvme {place}: {said}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert left.read_text("utf-8").split() in ([], ["other"])


@pytest.mark.slow
def test_a_file_that_may_not_grow_ends_the_run_in_a_line(tmp_path: Path) -> None:
    """The shell's limit of a file's size, which a drive's quota is like."""
    words = [sys.executable, "-m", "zerosim", *WORDS, "--nvme", str(tmp_path), "-q"]
    done = finished(["sh", "-c", f"ulimit -f 4; exec {' '.join(words)}"])
    assert done.returncode == 5
    assert "File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert names(tmp_path) == []


# -- signals ----------------------------------------------------------------------------------------
LONG = [*WORDS, "--steps", "1000000", "-q"]
"""Nothing but a signal ends it."""


@contextlib.contextmanager
def long_run(place: Path, program: str = "") -> Iterator[subprocess.Popen[str]]:
    """A long run, in a process of its own, after what `program` does there."""
    words = [sys.executable, "-c", program + MAIN, *LONG, "--nvme", str(place)]
    with ended(started(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)) as process:
        yield process


def await_files(process: subprocess.Popen[str], place: Path) -> None:
    while not any(path.suffix == ".bin" for path in place.glob("*/*")):
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_a_run_that_writes_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with long_run(tmp_path) as process:
        await_files(process, tmp_path)
        process.send_signal(number)
        assert process.wait(SECONDS) == 128 + number
    assert names(tmp_path) == []


def test_who_presses_ctrl_c_again_and_again_has_no_files_left_either(tmp_path: Path) -> None:
    """Until the run has ended."""
    with long_run(tmp_path) as process:
        assert process.stderr is not None
        await_files(process, tmp_path)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.001)
        assert process.returncode == 128 + signal.SIGINT
        assert process.stderr.read() == "zerosim: interrupted\n"
    assert names(tmp_path) == []


def writes(folder: Path | None) -> None:
    assert folder is not None
    (folder / "rank0-1.bin").touch()


def test_ctrl_c_at_any_line_leaves_no_folder(tmp_path: Path) -> None:
    """Of what opens and closes a run's folder."""
    first, lines = 0, [0]

    def run(folder: Path | None) -> None:
        assert lines[0] < first  # what came before ends the run before it begins
        writes(folder)

    while lines[0] >= first:
        first += 1
        with pressed(range(first, first + 1), nvme) as (lines, trace):
            sys.settrace(trace)
            in_run_folder(str(tmp_path), run, writes=True)
            sys.settrace(None)
        assert names(tmp_path) == []
    assert first > 100


@pytest.mark.parametrize("first", range(1, 21))
def test_ctrl_c_at_every_line_after_the_first_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """And whenever a file is removed, where lines may no longer be traced."""
    real = os.unlink

    def unlink(path: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        real(path)

    def ends(folder: Path | None) -> None:
        writes(folder)
        monkeypatch.setattr(os, "unlink", unlink)
        sys.settrace(trace)
        signal.raise_signal(signal.SIGINT)

    with pressed(range(first, 10_000), nvme) as (_, trace):
        in_run_folder(str(tmp_path), ends, writes=True)
    assert names(tmp_path) == []


SWALLOWS = """
import os, sys
class Swallows:
    def __del__(self):
        os.kill(os.getpid(), {number})
        for _ in range(1000):
            pass
"""
IMPORTED = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            Swallows()
sys.meta_path.insert(0, Finder())
"""
MADE = """
from zerosim.device import nvme
made = nvme._made
nvme._made = lambda place: (made(place), Swallows())[0]
"""
LAUNCHED = """
import threading
start = threading.Thread.start
threading.Thread.start = lambda thread: (start(thread), Swallows())[0]
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("number", "where"),
    [
        (signal.SIGINT, IMPORTED),
        (signal.SIGINT, MADE),
        (signal.SIGTERM, MADE),
        (signal.SIGTERM, LAUNCHED),
    ],
    ids=["SIGINT imports", "SIGINT made", "SIGTERM made", "SIGTERM launched"],
)
def test_a_signal_that_a_destructor_swallows_ends_a_run(tmp_path: Path, number: int, where: str) -> None:
    """While a module is imported, when the folder has been made, when ranks start."""
    with long_run(tmp_path, SWALLOWS.format(number=int(number)) + where) as process:
        assert process.wait(SECONDS) == 128 + number
    assert names(tmp_path) == []


@pytest.mark.slow
def test_twelve_signals_at_random_moments_end_each_run_and_leave_nothing_after_the_next_start(tmp_path: Path) -> None:
    rng = random.Random(31)
    for _ in range(12):
        number = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGKILL])
        with long_run(tmp_path) as process:
            time.sleep(rng.uniform(0.05, 3.0))
            process.send_signal(number)
            # Before zerosim's first line the signal itself ends Python, or Ctrl-C its start with 1.
            assert process.wait(SECONDS) in (128 + number, -number, *([1] if number == signal.SIGINT else []))
        cleared(tmp_path)
        assert names(tmp_path) == []
