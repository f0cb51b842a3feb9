"""The `zerosim` command: it runs a verb and reports errors to the shell.

An error is one line on stderr, and a traceback only with `--debug`; `errors.py` lists the exit codes. A verb is a
module of this folder with `add_arguments(parser)` and `main(args) -> int`, imported when it is called; `--help`
imports neither numpy nor rich.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from zerosim.cli.help import USUAL, wrapped
from zerosim.cli.parser import Parser, nearest, sentence
from zerosim.cli.streams import heard, never_silent, standard_streams
from zerosim.comm.collective_errors import failure_of_all
from zerosim.device.interrupts import interrupt_in, no_interrupt_lost
from zerosim.errors import (
    BROKEN_PIPE,
    InputError,
    OutOfMemory,
    OutputError,
    ZerosimError,
    described,
    exit_code,
    message_of,
)
from zerosim.version import __version__

VERBS = {
    "run": "train a model over N ranks; every byte of memory and traffic is counted",
    "compare": "ZeRO stages, recipes, optimizers ... or two files side by side, trained or planned",
    "plan": "what any model needs on any number of ranks, and whether it fits, run on tensor shapes only",
    "fit": "the largest model or batch, or the fewest ranks, that fit on a device, found by running",
    "advise": "what to run on these GPUs: the simplest, the fastest and the longest plan, their price and launch files",
    "explain": "the closed forms with your numbers put in, term by term; runs nothing",
    "check": "scenarios with expected figures: papers' tables against zerosim's counts",
    "export": "files for other programs: a step in time for Perfetto, buffers for PyTorch's memory_viz",
    "plot": "a picture as PNG or SVG: memory, traffic, time, pipelines, optimizers",
    "page": "a page for the browser: a calculator of memory and traffic, by model, ranks and ZeRO stage",
    "step": "stop a run before any event, look into any rank, go on or back; piped, its events as text",
    "state": "look into a checkpoint: who wrote what, whether it is whole, how two differ",
    "convert": "a checkpoint of one framework as another's: weights, optimizer states and the step",
    "zoo": "the models, GPUs and recipes that are known by name",
    "doctor": "this machine's backends, GPUs, MPI and BLAS, and the install command for each missing part",
    "lecture": "a lecture on ZeRO in a folder: slides with counted figures, a player, a calculator, handouts",
    "course": "the course's notebooks, scenarios and exercises in a folder of your own; --check runs them",
    "homework": "an exercise as a file to start from: its text, its imports and the code to fill in",
    "grade": "grade the answers in a script or notebook: a failure names the rank, the event and the buffers",
    "calibrate": "measure this machine for the clock, and check how well the clock predicts measured steps",
    "bench": "measure how fast zerosim is, against bare NumPy and PyTorch",
}


WITH_A_VOICE = ("step", "grade", "course", "doctor", "calibrate", "bench")
"""Verbs that wait for keys, end within seconds, or report their own progress."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code (`errors.py` lists them)."""
    # A record is many small tuples, none in a cycle. Fewer garbage collections save a tenth of the time.
    gc.set_threshold(50_000, 20, 50)
    words = list(sys.argv[1:] if argv is None else argv)
    before = signal.getsignal(signal.SIGINT)
    try:
        return _main(words)
    finally:
        if argv is not None:  # else the process ends
            _on_interrupt(before)


def _main(words: list[str]) -> int:
    with standard_streams() as stdout:
        try:
            code = _run(words)
        except KeyboardInterrupt as again:  # an interrupt while another error was being reported
            code = _report(again)
        if stdout.failure is None:
            return code
        why = stdout.failure.strerror or str(stdout.failure)
        lost = _report(OutputError(f"stdout: cannot be written: {why}: the output is lost"))
        return code or lost


def _run(words: list[str]) -> int:
    debug = "--debug" in words
    try:
        try:
            with no_interrupt_lost():
                code = _dispatch([word for word in words if word != "--debug"])
        except SystemExit as stop:  # argparse's --help; a process of a world that is not the first
            code = stop.code if isinstance(stop.code, int) else 0
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, Exception) as error:
        failure, is_heard = failure_of_all(interrupt_in(error) or error, _is_for_mpi(words))
        with heard(is_heard):
            return _report(failure, debug=debug)


def _is_for_mpi(words: list[str]) -> bool:
    """Return whether the words, not yet checked, ask for a world of processes."""
    pairs = set(itertools.pairwise(words))
    return any(f"{flag}=mpi" in words or (flag, "mpi") in pairs for flag in ("--world", "--transport"))


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    name, *rest = words
    if name in ("-V", "--version"):
        print(f"zerosim {__version__}")
        return 0
    if name not in VERBS:
        what = "flag" if name.startswith("-") else "command"
        known = [one for one in (*VERBS, "--help", "--version") if one.startswith("-") == name.startswith("-")]
        raise InputError(f"unknown {what} {name!r}{nearest(name, known, 'zerosim --help')}")
    verb: Any = importlib.import_module(f"zerosim.cli.{name}")
    parser = Parser(f"zerosim {name}", sentence(VERBS[name]), USUAL.get(name, "").split())
    verb.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    args = parser.parse(rest)
    try:
        os.getcwd()
    except FileNotFoundError:  # no file can be opened from there
        raise InputError("the working directory no longer exists: cd to an existing one") from None
    speaks = name in WITH_A_VOICE or getattr(args, "quiet", False) or {"-q", "--quiet"} & set(rest) or _is_for_mpi(rest)
    with parser.naming_as_typed(rest), contextlib.nullcontext() if speaks else never_silent(f"zerosim {name}"):
        return int(verb.main(args))


def _usage() -> str:
    verbs = "\n".join(f"  {name:11}{text}" for name, text in VERBS.items())
    words = (
        "usage: zerosim COMMAND [FLAGS]\n\n"
        "Train a real GPT over N virtual ranks with DDP and ZeRO-1, 2, 3, and see every byte.\n\n"
        f"commands:\n{verbs}\n\n"
        "  zerosim COMMAND --help       its flags\n"
        "  zerosim COMMAND --help-all   all of them, for run, plan and step\n"
        "  zerosim --version            the version\n\n"
        "To begin: zerosim run --stage 3 --ranks 4"
    )
    return wrapped(words, shutil.get_terminal_size().columns)


def _report(error: BaseException, *, debug: bool = False) -> int:
    """Report on stderr how the run ended, and return the exit code. After one Ctrl-C further ones change nothing."""
    if isinstance(error, KeyboardInterrupt):
        _on_interrupt(signal.SIG_IGN)
    code = exit_code(error)
    with contextlib.suppress(BrokenPipeError):  # the reader is gone
        if debug:
            traceback.print_exception(error)
        if code != BROKEN_PIPE:  # SIGPIPE would end a program silently too
            print(f"zerosim: {_in_words(error)}", file=sys.stderr, flush=True)
            if isinstance(error, OutOfMemory):
                from zerosim.report.failures import out_of_memory
                from zerosim.report.look import emit

                emit(out_of_memory(error), sys.stderr)
    return code


def _on_interrupt(handler: Any) -> None:
    """Install this SIGINT handler, if this is the main thread and `handler` is a Python handler."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def _in_words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, InputError):
        return "error: " + " ".join(message_of(error).splitlines())
    if isinstance(error, ZerosimError):
        return f"error: {message_of(error)}"
    return f"internal error: {described(error)} (--debug shows where)"
