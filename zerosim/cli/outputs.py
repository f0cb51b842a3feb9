"""What a command leaves behind: files, checked before training, complete or not there after it; JSON on stdout.

A file is written beside its place under another name and then moved there in one step, so that an
existing one stays until the new one is whole. What is open already (/dev/stdout, >(a command)) and
devices that take anything (/dev/null) cannot be moved over: they are written to. Nothing else is.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from zerosim.cli.parser import flag_of
from zerosim.errors import InputError, OutputError

if TYPE_CHECKING:
    from zerosim.config import RunConfig

Fill = Callable[[BinaryIO], None]


def output(
    args: argparse.Namespace, name: str, *configs: RunConfig, also: Iterable[str] = ()
) -> Output | Stdout | None:
    """What --name asks for: a file, stdout (--json -), or nothing. A file was found to be writable, and none of those
    that are read: by the configurations, and `also` these."""
    path = getattr(args, name)
    if path is None:
        return None
    if path == "-" and name == "json":
        return Stdout()
    file = Output(flag_of(name), path)
    file.check([*also, *_read_files(args, configs)])
    return file


def _read_files(args: argparse.Namespace, configs: Iterable[RunConfig]) -> Iterable[str | None]:
    """Every path that a command line and its scenario read; names of presets among them, which are no files."""
    paths = [getattr(args, name, None) for name in ("scenario", "gpu")]
    for config in configs:
        paths += [config.model.name, config.data.file, config.data.tokens, config.data.weights]
    return dict.fromkeys(paths)


def human_stream(args: argparse.Namespace) -> TextIO:
    """Where words go: stdout, unless JSON goes there."""
    return sys.stderr if args.json == "-" else sys.stdout


def as_json(values: Callable[[], dict[str, Any]]) -> Fill:
    """What writes values as strict JSON, on one line; they are asked for then."""

    def fill(file: BinaryIO) -> None:
        file.write((json.dumps(values(), allow_nan=False) + "\n").encode())

    return fill


def write_all(*files: tuple[Output | Stdout | None, Fill]) -> OutputError | None:
    """Write each, where there is one; what befalls one costs none of the others. The first failure."""
    failures = []
    for output, fill in files:
        try:
            if output is not None:
                output.write(fill)
        except OutputError as error:
            failures.append(error)
    return failures[0] if failures else None


class Stdout:
    """sys.stdout, written to as if it were a file."""

    def write(self, fill: Fill) -> None:
        written = io.BytesIO()
        fill(written)
        sys.stdout.write(written.getvalue().decode())


class Output:
    """One file to be written, and the flag that named it."""

    def __init__(self, flag: str, path: str) -> None:
        self.name = f"{flag} {path}"
        if not path:
            raise InputError(f"{flag}: expected a file name")
        if path.endswith(os.sep):
            raise InputError(f"{self.name}: is a folder: name a file")
        self.path = Path(path)
        self.is_regular = True

    def check(self, inputs: Iterable[str | None] = ()) -> None:
        """Raises: InputError when the file could not be written, or is one of those that are read."""
        for path in inputs:
            if path is not None and _is_one_file(self.path, path):
                raise InputError(f"{self.name}: would be written over the file that is read: name another file")
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
        self.path = Path(os.path.realpath(self.path))  # through a link: the link stays
        if not self.path.parent.is_dir():
            raise InputError(f"{self.name}: folder {self.path.parent} does not exist: make it first")
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
        descriptor, temporary = self._open_beside()
        try:
            with os.fdopen(descriptor, "wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            if self.path.exists():
                temporary.chmod(stat.S_IMODE(self.path.stat().st_mode))
            temporary.replace(self.path)
        except BaseException:  # an interrupt too leaves nothing half written
            temporary.unlink(missing_ok=True)
            raise

    def _check_present(self, there: os.stat_result) -> None:
        if stat.S_ISDIR(there.st_mode):
            raise InputError(f"{self.name}: is a folder: name a file")
        if stat.S_ISSOCK(there.st_mode) or stat.S_ISBLK(there.st_mode):
            raise InputError(f"{self.name}: is a {'socket' if stat.S_ISSOCK(there.st_mode) else 'disk'}: name a file")
        if stat.S_ISFIFO(there.st_mode) and not os.path.realpath(self.path).startswith(("/dev/", "/proc/")):
            raise InputError(f"{self.name}: is a pipe, and would wait for a reader: name a file, or /dev/stdout")
        if not os.access(self.path, os.W_OK):
            raise InputError(f"{self.name}: exists and may not be written: name another file")
        self.is_regular = stat.S_ISREG(there.st_mode)

    def _open_beside(self) -> tuple[int, Path]:
        """A new file in the same folder, with the modes that a new file has."""
        temporary = self.path.with_name(f".zerosim-{secrets.token_hex(6)}.tmp")
        return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), temporary

    def check_apart(self, other: Output | Stdout | None, flag: str) -> None:
        """Raises: InputError when `other`, checked too and named by `flag`, is the same file."""
        if isinstance(other, Output) and (self.path == other.path or _is_one_file(self.path, other.path)):
            raise InputError(f"{self.name}: {flag} names the same file: name another")

    def _refusal(self, error: Exception) -> InputError:
        why = error.strerror or str(error) if isinstance(error, OSError) else "no file has such a name"
        return InputError(f"{self.name}: cannot be written: {why}: name another file")


def _is_one_file(path: Path, other: str | Path) -> bool:
    """Whether both are there and one: by another spelling, a symbolic link or a hard one."""
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):
        return False
