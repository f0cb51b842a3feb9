"""Folders that a command writes: checked before training, complete or absent after it.

A folder is written beside its place under another name, and then renamed in one step.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from zerosim.cli.outputs import Output, made_folder
from zerosim.device.interrupts import signals_postponed
from zerosim.errors import InputError, OutputError


class Folder(Output):
    """A folder to be written, and the flag that named it. `write` gets a function that fills an empty folder."""

    def __init__(self, flag: str, path: str) -> None:
        super().__init__(flag, path.rstrip("/" + os.sep) or path)

    def check(self, inputs: Iterable[str | None] = ()) -> None:
        """Check the folder. Raises: InputError for a file, a folder that is not empty, and where none can be."""
        try:
            self.path = Path(os.path.realpath(self.path))
            is_file = self.path.exists() and not self.path.is_dir()
            is_free = not is_file and not (self.path.is_dir() and any(self.path.iterdir()))
        except (OSError, ValueError) as error:
            raise self._refusal(error) from None
        if is_file:
            raise InputError(f"{self.name}: is a file; choose another name for the folder")
        if not is_free:
            raise InputError(f"{self.name}: exists and is not empty; choose another folder, or remove this one")
        if not self.path.parent.is_dir():
            raise InputError(f"{self.name}: folder {self.path.parent} does not exist; create it first")
        made_folder(self.name.partition(" ")[0], str(self.path.parent))

    def write(self, fill: Callable[[Any], object]) -> None:
        """Let `fill` write files into a new folder. Raises: OutputError when the disk refuses."""
        beside = self.path.with_name(f".zerosim-{secrets.token_hex(6)}.tmp")
        try:
            with signals_postponed() as signals:
                try:
                    beside.mkdir()
                    with signals.raised():
                        fill(beside)
                        for file in beside.rglob("*"):
                            if file.is_file():
                                _flush(file)
                    if self.path.is_dir():
                        self.path.rmdir()  # empty, or it is refused
                    beside.rename(self.path)
                except BaseException:  # also after an interrupt: leave nothing half written
                    shutil.rmtree(beside, ignore_errors=True)
                    raise
        except OSError as error:
            raise OutputError(f"{self.name}: cannot be written: {error.strerror or error}") from None


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
