"""stdin, stdout and stderr of a command: a full disk or a closed stream is reported at the end and costs nothing else.

Writing to them may fail anywhere: in a rank's progress, in the middle of a table, at the exit of Python. So it never
raises, but for a reader that has gone away, which ends a command at once as SIGPIPE would. A letter that the encoding
lacks becomes '?'.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from zerosim.comm.collective_errors import on_every_process
from zerosim.errors import exit_code

DESCRIPTORS = range(3)
SILENT_S = (30.0, 10.0)
"""How long a command may work without a word: into a pipe or a file, and on a terminal."""


class Sink(io.RawIOBase):
    """The bytes below a stream; None for one that is closed. What it does not take is dropped, `failure` says why.

    Raises: BrokenPipeError.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.failure: OSError | None = None
        self.written_at = time.monotonic()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._raw is not None and bool(self._raw.isatty())

    def fileno(self) -> int:
        if self._raw is None:
            raise OSError(errno.EBADF, "the stream is closed")
        return int(self._raw.fileno())

    def write(self, data: Any) -> int:
        self.written_at = time.monotonic()
        if self.failure is None:
            try:
                return self._written(data)
            except BrokenPipeError:
                raise
            except OSError as error:
                self.failure = error
        return len(data)

    def _written(self, data: Any) -> int:
        if self._raw is None:
            raise OSError(errno.EBADF, "it is closed")
        while (count := self._raw.write(data)) is None:  # a pipe that does not block, and is full
            select.select([], [self._raw.fileno()], [])
        return int(count)


@contextmanager
def standard_streams() -> Iterator[Sink]:
    """While it lasts, sys.stdout and sys.stderr each stand on a Sink; stdout's is given.

    Only the process's own: what a caller has put in their place (a test, a notebook) stays.
    """
    _plug()
    before = sys.stdin, sys.stdout, sys.stderr
    out, err = Sink(_raw(sys.stdout)), Sink(_raw(sys.stderr))
    if sys.stdin is None:
        sys.stdin = io.StringIO()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _on(out, sys.stdout, "replace")
    if sys.stderr is sys.__stderr__:
        sys.stderr = _on(err, sys.stderr, "backslashreplace")
    try:
        yield out
    finally:
        _end(sys.stdout, out)
        _end(sys.stderr, err)
        sys.stdin, sys.stdout, sys.stderr = before


@contextmanager
def never_silent(command: str) -> Iterator[None]:
    """A block that says on stderr that it goes on wherever the process's own streams are silent for long."""
    began, over = time.monotonic(), threading.Event()
    sinks = [sink for stream in (sys.stdout, sys.stderr) if isinstance(sink := _raw(stream), Sink)]

    def watch() -> None:
        while not over.wait(min(SILENT_S) / 20):
            now, stream = time.monotonic(), sys.stderr
            silent = now - max(began, *(sink.written_at for sink in sinks))
            if silent > SILENT_S[stream.isatty()] and _raw(stream) in sinks:
                with contextlib.suppress(OSError, ValueError):
                    print(f"{command}: {now - began:.0f} s, still at work; Ctrl-C ends it", file=stream, flush=True)

    watcher = threading.Thread(target=watch, name="never silent", daemon=True)
    if sinks:
        watcher.start()
    try:
        yield
    finally:
        over.set()
        if sinks:
            watcher.join()


def stopwatch(*, quiet: bool = False) -> Callable[[str], None]:
    """What prints lines on stderr, each with the seconds since now."""
    began = time.perf_counter()

    def say(line: str) -> None:
        if not quiet:
            print(f"[{time.perf_counter() - began:5.1f} s] {line}", file=sys.stderr, flush=True)

    return say


@contextmanager
def heard(is_heard: bool) -> Iterator[None]:
    """A block whose words reach the screen, or go nowhere."""
    if is_heard:
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8", errors="replace") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


@contextmanager
def one_voice(world: str) -> Iterator[bool]:
    """A block that every process of a world runs `together`, and of which the first is heard. Gives whether it is this.

    Raises: in the first process what `together` raises; in the others SystemExit, with that error's code.
    """
    is_first = True
    try:
        with on_every_process(world) as session:
            is_first = session is None or session.process == 0
            with heard(is_first):
                yield is_first
    except (KeyboardInterrupt, Exception) as error:
        if is_first:
            raise
        raise SystemExit(exit_code(error)) from error


def _raw(stream: TextIO | None) -> Any:
    """What takes a stream's bytes at last: below its buffer, where it has one (with python -u it has none)."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _on(sink: Sink, stream: TextIO | None, errors: str) -> TextIO:
    """The same stream, its bytes passing through a sink."""
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(sink), encoding="utf-8", errors=errors)
    with contextlib.suppress(OSError):
        stream.flush()
    text = cast(io.TextIOWrapper, stream)
    return io.TextIOWrapper(
        cast(Any, sink) if text.write_through else io.BufferedWriter(sink),
        encoding=text.encoding,
        errors=errors,
        line_buffering=text.line_buffering,
        write_through=text.write_through,
    )


def _end(stream: TextIO, sink: Sink) -> None:
    """Let go of what is buffered, so that nothing fails for it when Python ends."""
    try:
        stream.flush()
    except OSError as error:  # its reader is gone
        sink.failure = error
        with contextlib.suppress(OSError):  # a caller's own stream
            stream.flush()


def _plug() -> None:
    """Let no file that is opened later take a closed stream's number, and with it what is meant for the stream."""
    for descriptor in DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            # A folder takes no bytes, and says so to whoever opens /dev/stdout.
            os.open(os.devnull if descriptor == 0 or os.name == "nt" else os.sep, os.O_RDONLY)
