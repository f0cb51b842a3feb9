"""The `zerosim` command: which verb, and how every ending looks to the shell.

    0 done    2 bad input    3 out of memory    4 a rank failed    130 interrupted

An error is one line on stderr and no traceback, unless `--debug` asks for it. A verb is a module of
this folder with `add_arguments(parser)` and `main(args) -> int`, imported when it is called; `--help`
imports neither numpy nor rich.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Protocol, cast

from zerosim import __version__
from zerosim.cli.parser import Parser, nearest
from zerosim.comm.together import failure_of_all
from zerosim.errors import InputError, OutOfMemory, ZerosimError
from zerosim.mpirun import mpirun_rank

VERBS = {
    "run": "train a model over N ranks; every byte of memory and traffic is counted",
    "compare": "run several ZeRO stages and show them side by side",
    "plan": "what any model takes on any number of ranks, and whether it fits, run on shapes alone",
    "fit": "the largest model or batch, or the fewest ranks, that fit on a device, found by running",
    "explain": "the closed forms with your numbers put in, term by term; runs nothing",
    "check": "scenarios that expect printed figures: papers' tables against what is counted",
    "plot": "a picture of memory, scaling, one step's timeline or traffic, as PNG or SVG",
    "step": "stop a run before any event, look into any rank, go on or back; piped, its events as text",
    "zoo": "the models, GPUs and recipes that are known by name",
    "doctor": "what this machine has: backends, GPUs, MPI, BLAS; and the command for what is missing",
    "bench": "measure how fast zerosim is, against bare NumPy and PyTorch",
}
INTERRUPTED = 130
BROKEN_PIPE = 141  # 128 + SIGPIPE: what a shell sees of a program whose reader went away


class Verb(Protocol):
    """What a verb's module offers."""

    def add_arguments(self, parser: Parser) -> None: ...
    def main(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. Of the processes that mpirun started, the first speaks for all."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not mpirun_rank():
        return _run(words)
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        return _run(words)


def _run(words: list[str]) -> int:
    debug = "--debug" in words
    try:
        code = _dispatch([word for word in words if word != "--debug"])
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse's --help
        return stop.code if isinstance(stop.code, int) else 0
    except (KeyboardInterrupt, Exception) as error:
        failure = failure_of_all(error, "mpi" in words) if isinstance(error, Exception) else error
        if debug:
            traceback.print_exception(failure)
        return _report(failure)


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
        raise InputError(f"unknown {what} {name!r}{nearest(name, [*VERBS, '--help', '--version'], 'zerosim --help')}")
    verb = _load(name)
    parser = Parser(f"zerosim {name}", VERBS[name][0].upper() + VERBS[name][1:] + ".")
    verb.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    return verb.main(parser.parse(rest))


def _load(name: str) -> Verb:
    module = f"zerosim.cli.{name}"
    if importlib.util.find_spec(module) is None:
        raise InputError(f"zerosim {name} is not part of this version")
    return cast(Verb, importlib.import_module(module))


def _usage() -> str:
    verbs = "\n".join(f"  {name:9}{text}" for name, text in VERBS.items())
    return (
        "usage: zerosim COMMAND [FLAGS]\n\n"
        "Train a real GPT over N virtual ranks with DDP and ZeRO-1, 2, 3, and see every byte.\n\n"
        f"commands:\n{verbs}\n\n"
        "  zerosim COMMAND --help   its flags\n"
        "  zerosim --version        the version\n\n"
        "To begin: zerosim run --stage 3 --ranks 4"
    )


def _report(error: BaseException) -> int:
    """Say on stderr how the run ended; the exit code."""
    if isinstance(error, BrokenPipeError) or isinstance(error.__cause__, BrokenPipeError):
        _swallow_stdout()
        return BROKEN_PIPE
    if isinstance(error, KeyboardInterrupt):
        _say("zerosim: interrupted")
        return INTERRUPTED
    if isinstance(error, OutOfMemory):
        _say(f"zerosim: error: {error}")
        from zerosim.report.failures import print_out_of_memory

        print_out_of_memory(error)
        return error.exit_code
    if isinstance(error, InputError):
        _say("zerosim: error: " + " ".join(str(error).splitlines()))
        return error.exit_code
    if isinstance(error, ZerosimError):
        _say(f"zerosim: error: {error}")
        return error.exit_code
    if isinstance(error, OSError):
        _swallow_stdout()  # a full disk would fail again at exit
        _say(f"zerosim: error: {error.strerror or error}")
        return ZerosimError.exit_code
    _say(f"zerosim: internal error: {type(error).__name__}: {error} (--debug shows where)")
    return ZerosimError.exit_code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _swallow_stdout() -> None:
    """The reader of stdout is gone: what is still buffered goes nowhere, at exit too."""
    with contextlib.suppress(OSError, ValueError):  # there may be no real stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
