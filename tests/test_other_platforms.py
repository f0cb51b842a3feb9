"""What a student meets where POSIX is missing: every module imports, and runs, plans and steps work, as on Windows.

Names that Windows lacks are taken away, except those with which this system's own `subprocess` ends processes. That is
no Windows: paths, consoles and processes there are not tried.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
from processes import SECONDS, ended, finished, started

WITHOUT = """\
import asyncio, os, select, shutil, signal, subprocess, sys, tempfile, threading  # the library keeps what it needs
for name in ("fork", "forkpty", "getpgid", "setsid", "sysconf", "sched_getaffinity", "getuid", "geteuid",
             "fchmod", "mkfifo", "nice", "fpathconf"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGWINCH", "SIGPIPE", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGQUIT"):
    if hasattr(signal, name):
        delattr(signal, name)
for name in ("termios", "tty", "pty", "fcntl", "resource", "pwd", "grp", "curses"):
    sys.modules[name] = None
"""


def without_posix(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return finished([sys.executable, "-c", WITHOUT + code, *words])


@pytest.mark.slow
def test_every_module_imports() -> None:
    code = """
import importlib, pkgutil, zerosim
for module in pkgutil.walk_packages(zerosim.__path__, "zerosim."):
    if not module.name.startswith(("zerosim.backends.cuda", "zerosim.comm.transports.mpi", "zerosim.__main__")):
        importlib.import_module(module.name)
print("all")
"""
    done = without_posix(code)
    assert done.stdout.strip() == "all", done.stderr[-2000:]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "words",
    [
        ("run", "--stage", "3", "--ranks", "2", "--steps", "1"),
        ("plan", "--model", "gpt2", "--ranks", "8"),
        ("step", "--stage", "1", "--ranks", "2"),
        ("doctor",),
        ("homework", "ddp"),
    ],
    ids=lambda words: words[0],
)
def test_commands_work(words: tuple[str, ...]) -> None:
    done = without_posix("from zerosim.cli.main import main; sys.exit(main())", *words)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
    assert done.stdout


@pytest.mark.slow
def test_without_single_keys_a_terminal_is_told_of_the_page() -> None:
    """Windows has no termios: the stepper prints events, and says what plays them."""
    pty = pytest.importorskip("pty", reason="needs POSIX terminals")
    ours, theirs = pty.openpty()
    code = WITHOUT + "from zerosim.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "step", "--stage", "1", "--ranks", "2"]
    with ended(started(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # Linux, once nobody else has the other end
            while os.read(ours, 1 << 16):
                pass
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(SECONDS) == 0, said[-2000:]
    os.close(ours)
    assert "zerosim step --html step.html" in said
    assert said.count("\n") == 1
