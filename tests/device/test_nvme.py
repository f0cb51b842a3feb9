"""NVMe's files: a folder of the run's own, which goes with the run however it ends; nobody else's file is touched."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from zerosim.backends.numpy import files
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.device.node import NodePool
from zerosim.device.nvme import LOCK, Files, run_folder
from zerosim.dtypes import bf16, fp32
from zerosim.errors import InputError, OutputError, RankFailed
from zerosim.train.run import run

OFFLOAD = "optimizer=nvme,params=nvme"
WORDS = ["run", "--stage", "3", "--ranks", "2", "--offload", OFFLOAD, "--layers", "2", "--hidden", "16", "--heads", "2"]


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_a_file_is_an_array_that_is_read_and_written(tmp_path: Path) -> None:
    with run_folder(str(tmp_path), writes=True) as folder:
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
    assert names(tmp_path) == []


def test_what_a_killed_run_left_goes_and_nothing_else(tmp_path: Path) -> None:
    left, alive, odd = (tmp_path / f"zerosim-nvme-{letter * 16}" for letter in "abc")
    for folder in (left, alive, odd):
        folder.mkdir()
        (folder / LOCK).touch()
        (folder / "rank0-1.bin").write_bytes(b"x")
    (odd / "mine.txt").write_text("not a run's", encoding="utf-8")
    others = ["data.bin", "zerosim-nvme-notes", "zerosim-nvme-0123456789abcdef"]
    for name in others:
        (tmp_path / name).write_text("mine", encoding="utf-8")
    held = os.open(alive / LOCK, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    with run_folder(str(tmp_path), writes=False) as folder:
        assert folder is None
    os.close(held)
    assert names(tmp_path) == sorted([alive.name, odd.name, *others])
    assert "mine.txt" in names(odd)
    assert "rank0-1.bin" in names(alive)


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
        with pytest.raises(InputError, match=said), run_folder(str(tmp_path / name), writes=True):
            pass


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
        ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False, timeout=10
    ).returncode
)
DRIVE = """
mount -t tmpfs -o size={size} tmpfs {place} || exit 99
({python} -m zerosim {words} --nvme {place}; echo $? > {code}) &
{then}
wait
ls -A {place} > {left}
"""
WRITES = "until ls {place}/*/*.bin > /dev/null 2>&1; do sleep 0.05; done; "


@pytest.mark.skipif(not NAMESPACE, reason="no drive can be mounted here")
@pytest.mark.parametrize(
    ("size", "then", "said"),
    [
        pytest.param("50k", "", "No space left on device", id="full"),
        pytest.param(
            "8m",
            WRITES + "head -c 20M /dev/zero 2> /dev/null > {place}/other",
            "No space left on device",
            id="fills up",
        ),
        pytest.param("8m,ro", "", "Read-only file system", id="read-only"),
        pytest.param("8m", WRITES + "rm -rf {place}/*", "No such file or directory", id="removed"),
        pytest.param("8m", WRITES + "umount -l {place}", "No such file or directory", id="gone"),
    ],
)
def test_a_real_drive_that_fails_ends_the_run_in_a_line(tmp_path: Path, size: str, then: str, said: str) -> None:
    place, code, left = (tmp_path / name for name in ("drive", "code", "left"))
    place.mkdir()
    words = " ".join([*WORDS, "--steps", "1000000", "-q"])
    then = then.format(place=place)
    script = DRIVE.format(size=size, place=place, python=sys.executable, words=words, code=code, left=left, then=then)
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert code.read_text("utf-8") == "5\n"
    assert f"--nvme {place}: {said}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert left.read_text("utf-8").split() in ([], ["other"])


def test_a_file_that_may_not_grow_ends_the_run_in_a_line(tmp_path: Path) -> None:
    """The shell's limit of a file's size, which a drive's quota is like."""
    words = [sys.executable, "-m", "zerosim", *WORDS, "--nvme", str(tmp_path), "-q"]
    command = f"ulimit -f 4; exec {' '.join(words)}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert done.returncode == 5
    assert "File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert names(tmp_path) == []


LONG = [*WORDS, "--steps", "1000000", "-q"]
"""Nothing but a signal ends it."""


def started(place: Path, program: str = "") -> subprocess.Popen[bytes]:
    """A long run, in a process of its own, after what `program` does there."""
    first = ["-c", f"{program}\nimport sys; from zerosim.__main__ import main; sys.exit(main())"]
    words = [sys.executable, *(first if program else ["-m", "zerosim"]), *LONG, "--nvme", str(place)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def code_of(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; a run that does not end fails the test."""
    try:
        return process.wait(60)
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_a_run_that_writes_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = started(tmp_path)
    while not any(path.suffix == ".bin" for path in tmp_path.glob("*/*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert code_of(process) == 128 + number
    assert names(tmp_path) == []


def test_who_presses_ctrl_c_again_and_again_has_no_files_left_either(tmp_path: Path) -> None:
    process = started(tmp_path)
    while not any(path.suffix == ".bin" for path in tmp_path.glob("*/*")):
        time.sleep(0.05)
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    assert code_of(process) == 128 + signal.SIGINT
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
    assert code_of(started(tmp_path, SWALLOWS.format(number=int(number)) + where)) == 128 + number
    assert names(tmp_path) == []


@pytest.mark.slow
def test_sixty_signals_at_random_moments_end_each_run_and_leave_nothing_after_the_next_start(tmp_path: Path) -> None:
    rng = random.Random(31)
    for _ in range(60):
        number = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGKILL])
        process = started(tmp_path)
        time.sleep(rng.uniform(0.05, 3.0))
        process.send_signal(number)
        # Before zerosim's first line the signal itself ends Python, or Ctrl-C its start with 1.
        assert code_of(process) in (128 + number, -number, *([1] if number == signal.SIGINT else []))
        with run_folder(str(tmp_path), writes=False):
            assert names(tmp_path) == []
