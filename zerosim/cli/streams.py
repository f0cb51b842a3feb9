"""stdin, stdout and stderr of a command: a full disk or a closed stream is reported at the end and breaks nothing else.

A write may fail anywhere: in a rank's progress, in the middle of a table, at Python's exit. So it never
raises, except if the reader is gone: that ends a command at once, as SIGPIPE would. A letter missing from the encoding
becomes '?'.
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
"""How long a command may be silent: in a pipe or a file, and on a terminal."""


class Sink(io.RawIOBase):
    """The raw file below a stream; None for a closed one. Bytes that it refuses are dropped, and `failure` says why.

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
        while (count := self._raw.write(data)) is None:  # a full non-blocking pipe
            select.select([], [self._raw.fileno()], [])
        return int(count)


@contextmanager
def standard_streams() -> Iterator[Sink]:
    """Put a Sink below sys.stdout and sys.stderr inside the block, and yield stdout's.

    Only the process's own streams change. A caller's replacement (a test, a notebook) stays.
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
    """Print on stderr that the block is still working, whenever the process's own streams are silent for long."""
    began, over = time.monotonic(), threading.Event()
    sinks = [sink for stream in (sys.stdout, sys.stderr) if isinstance(sink := _raw(stream), Sink)]

    def watch() -> None:
        while not over.wait(min(SILENT_S) / 20):
            now, stream = time.monotonic(), sys.stderr
            silent = now - max(began, *(sink.written_at for sink in sinks))
            if silent > SILENT_S[stream.isatty()] and _raw(stream) in sinks:
                with contextlib.suppress(OSError, ValueError):
                    print(f"{command}: {now - began:.0f} s, still running; Ctrl-C ends it", file=stream, flush=True)

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
    """Return a function that prints lines on stderr, each with the seconds since now."""
    began = time.perf_counter()

    def say(line: str) -> None:
        if not quiet:
            print(f"[{time.perf_counter() - began:5.1f} s] {line}", file=sys.stderr, flush=True)

    return say


@contextmanager
def heard(is_heard: bool) -> Iterator[None]:
    """Let the block's output reach the screen, or discard it."""
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
    """Run a block in every process of a world `together`; only the first process prints. Yield whether this is the
    first.

    Raises: in the first process the error of `together`; in the others SystemExit with that error's code.
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
    """Return the raw file of a stream, below its buffer if it has one (with python -u it has none)."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _on(sink: Sink, stream: TextIO | None, errors: str) -> TextIO:
    """Return the same stream with its bytes passing through a sink."""
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
    """Drop buffered bytes, so that they cause no failure when Python ends."""
    try:
        stream.flush()
    except OSError as error:  # the reader is gone
        sink.failure = error
        with contextlib.suppress(OSError):  # a caller's replacement
            stream.flush()


def _plug() -> None:
    """Keep a later file from getting a closed stream's descriptor, and with it the stream's text."""
    for descriptor in DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            # A folder accepts no bytes, and gives an error to a program that opens /dev/stdout.
            os.open(os.devnull if descriptor == 0 or os.name == "nt" else os.sep, os.O_RDONLY)
