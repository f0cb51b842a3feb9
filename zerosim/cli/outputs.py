"""A command's outputs: files, which are checked before training and are complete or absent after it, and JSON on
stdout.

A file is written under another name in its folder and then renamed in one step. So an
existing file stays until the new one is complete. Open descriptors (/dev/stdout, >(a command)) and
devices (/dev/null) cannot be replaced, so they are written directly.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from zerosim.cli.parser import flag_of
from zerosim.device.interrupts import signals_postponed
from zerosim.errors import InputError, OutputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zerosim.config import RunConfig

Fill = Callable[[BinaryIO], object]
READ = ("model", "data", "tokens", "weights", "adapters", "tokenizer")
"""A run's options that may name a file to read."""


def output(
    args: argparse.Namespace,
    name: str,
    *configs: RunConfig,
    also: Iterable[str] = (),
    apart: Iterable[Output | None] = (),
    kind: type[Output] | None = None,
) -> Output | None:
    """Return the output of --name: a file (or of another `kind`), stdout (--json -), or nothing. Check that a file is
    writable, that neither the configurations nor `also` read it, and that it is none of the outputs in `apart`."""
    path = getattr(args, name)
    if path is None:
        return None
    if path == "-" and name == "json":
        return Stdout("--json", path)
    # Some paths are names of presets, not files.
    paths = [*also, getattr(args, "scenario", None), getattr(args, "gpu", None)]
    for config in configs:
        paths += map(config.value, READ)
    file = (kind or Output)(flag_of(name), path)
    file.check(dict.fromkeys(inner for one in paths if one is not None for inner in _files(one)))
    for other in apart:
        if other is not None and (file.path == other.path or _is_one_file(file.path, other.path)):
            raise InputError(f"{other.name}: {flag_of(name)} names the same file; choose another")
    return file


def made_folder(flag: str, path: str) -> Path:
    """Return the folder that `flag` names; create it if missing. Raises: InputError if it is not writable."""
    folder = Path(path)
    try:
        folder.mkdir(exist_ok=True)
        with signals_postponed():
            (probe := folder / f".zerosim-{secrets.token_hex(6)}.tmp").touch(exist_ok=False)
            probe.unlink()
    except FileExistsError:
        raise InputError(f"{flag} {path}: is a file; pass the name of a folder") from None
    except (OSError, ValueError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else "this cannot be a folder name"
        raise InputError(f"{flag} {path}: cannot be written: {why}; choose another folder") from None
    return folder


def human_stream(args: argparse.Namespace) -> TextIO:
    """Return the stream for text: stdout, unless JSON goes there."""
    return sys.stderr if args.json == "-" else sys.stdout


def show(args: argparse.Namespace, report: RenderableType) -> None:
    """Print a report on the stream for text."""
    from zerosim.report.look import emit

    emit(report, human_stream(args))


def as_json(values: Callable[[], dict[str, Any]]) -> Fill:
    """Return a function that writes values as strict JSON on one line; it computes the values only then."""
    return lambda file: file.write((json.dumps(values(), allow_nan=False) + "\n").encode())


def leave(
    args: argparse.Namespace,
    figures: Output | None,
    values: Callable[[], dict[str, Any]],
    report: Callable[[], RenderableType],
    *,
    after_progress: bool = False,
) -> None:
    """Write the values as JSON if requested, then show the report, unless --quiet, one line below the
    progress messages."""
    with written((figures, as_json(values))):
        if not getattr(args, "quiet", False):
            print(end="\n" * after_progress, file=human_stream(args))
            show(args, report())


@contextmanager
def written(*files: tuple[Output | None, Callable[[Any], object]]) -> Iterator[None]:
    """Write each file, then run the block, which reports their contents.

    A failed file stops neither the other files nor the block. Raises: the first OutputError, after the block.
    """
    failures = []
    for output, fill in files:
        try:
            if output is not None:
                output.write(fill)
        except OutputError as error:
            failures.append(error)
    yield
    if failures:
        raise failures[0]


class Output:
    """One file to be written, and the flag that named it."""

    def __init__(self, flag: str, path: str) -> None:
        self.name = f"{flag} {path}"
        if not path:
            raise InputError(f"{flag}: expected a file name")
        if path.endswith(("/", os.sep)):
            raise InputError(f"{self.name}: is a folder; pass the name of a file")
        self.path = Path(path)
        self.is_regular = True

    def check(self, inputs: Iterable[str | None] = ()) -> None:
        """Check the file. Raises: InputError if it is not writable, or is one of the inputs."""
        for path in inputs:
            if path is not None and _is_one_file(self.path, path):
                raise InputError(f"{self.name}: would overwrite the input file; choose another file")
        try:
            self._check_present(self.path.stat())
        except FileNotFoundError:
            pass
        except InputError:
            raise
        except (OSError, ValueError) as error:
            raise self._refusal(error) from None
        if not self.is_regular:
            return
        self.path = Path(os.path.realpath(self.path))  # follow a symbolic link, so that the link stays
        if not self.path.parent.is_dir():
            raise InputError(f"{self.name}: folder {self.path.parent} does not exist; create it first")
        with signals_postponed():
            try:
                descriptor, temporary = self._open_beside()
            except OSError as error:
                raise self._refusal(error) from None
            os.close(descriptor)
            temporary.unlink()

    def write(self, fill: Fill) -> None:
        """Let `fill` write the file. Raises: OutputError when the disk refuses; BrokenPipeError."""
        try:
            if self.is_regular:
                self._write_beside(fill)
            else:
                with self.path.open("wb") as file:
                    fill(file)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"{self.name}: cannot be written: {error.strerror or error}") from None

    def _write_beside(self, fill: Fill) -> None:
        with signals_postponed() as signals:
            descriptor, temporary = self._open_beside()
            try:
                with os.fdopen(descriptor, "wb") as file, signals.raised():
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                if self.path.exists():
                    temporary.chmod(stat.S_IMODE(self.path.stat().st_mode))
                temporary.replace(self.path)
            except BaseException:  # also after an interrupt: leave nothing half written
                temporary.unlink(missing_ok=True)
                raise

    def _check_present(self, there: os.stat_result) -> None:
        for is_one, what in ((stat.S_ISDIR, "folder"), (stat.S_ISSOCK, "socket"), (stat.S_ISBLK, "disk")):
            if is_one(there.st_mode):
                raise InputError(f"{self.name}: is a {what}; pass the name of a file")
        if stat.S_ISFIFO(there.st_mode) and not os.path.realpath(self.path).startswith(("/dev/", "/proc/")):
            raise InputError(f"{self.name}: is a pipe and would wait for a reader; choose a file, or /dev/stdout")
        if not os.access(self.path, os.W_OK):
            raise InputError(f"{self.name}: exists and is not writable; choose another file")
        self.is_regular = stat.S_ISREG(there.st_mode)

    def _open_beside(self) -> tuple[int, Path]:
        """Open a new file in the same folder, with a new file's permissions."""
        temporary = self.path.with_name(f".zerosim-{secrets.token_hex(6)}.tmp")
        return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), temporary

    def _refusal(self, error: Exception) -> InputError:
        why = error.strerror or str(error) if isinstance(error, OSError) else "this cannot be a file name"
        return InputError(f"{self.name}: cannot be written: {why}; choose another file")


class Stdout(Output):
    """sys.stdout as a file."""

    def write(self, fill: Fill) -> None:
        text = io.BytesIO()
        fill(text)
        sys.stdout.write(text.getvalue().decode())


def _files(path: str) -> list[str]:
    """Return a path, and the files of the folder that it names."""
    return [path, *(os.path.join(path, name) for name in os.listdir(path))] if os.path.isdir(path) else [path]


def _is_one_file(path: Path, other: str | Path) -> bool:
    """Return whether both paths exist and are the same file: by spelling, symbolic link or hard link."""
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):
        return False
