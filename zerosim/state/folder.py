"""A folder of saved steps: never half a checkpoint.

A step is written beside its place under another name, flushed to the drive, and renamed when every rank has written and
the manifest, the last file, is there. So a kill at any moment leaves either the step whole or no step. A lock is held
while a run saves here: two runs cannot write into one folder. Nothing else in the folder is touched.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zerosim.config import OPTIONS
from zerosim.device.interrupts import signals_postponed
from zerosim.errors import InputError, OutputError, wrong
from zerosim.state.manifest import MANIFEST, Entry, Manifest, checksum, damage, read_manifest

LOCK = "lock"
_STEP, _WRITING = re.compile(r"step-(\d{8,})"), re.compile(r"\.step-\d{8,}\.(writing|removed)")


def step_folder(folder: Path, step: int) -> Path:
    """Return where a step is saved."""
    return folder / f"step-{step:08}"


def saved_steps(folder: Path) -> list[int]:
    """Return the saved steps in a folder, the newest last, whole or not."""
    try:
        found = [match for entry in folder.iterdir() if (match := _STEP.fullmatch(entry.name)) and entry.is_dir()]
    except (OSError, ValueError):
        return []
    return sorted(int(match[1]) for match in found)


def newest(path: str) -> Path:
    """Return the newest whole step of a folder, or the folder itself if it is one.

    Raises: InputError if there is none, with what is wrong with the newest.
    """
    folder, first = Path(path), ""
    try:
        is_step = "\0" not in path and (folder / MANIFEST).is_file()
    except OSError as error:
        raise wrong(
            "resume", f" {path}: {error.strerror or error}; expected a folder that --save-state wrote"
        ) from None
    if is_step:
        if why := damage(folder, read_manifest(folder)):
            raise InputError(f"resume {path}: {why}")
        return folder
    steps = saved_steps(folder)
    for step in reversed(steps):
        why = damage_of(one := step_folder(folder, step))
        if not why:
            return one
        first = first or why
    if steps:
        raise wrong("resume", f" {path}: no saved step is whole: {first}")
    raise wrong("resume", f" {path}: {nothing_in(folder)}")


def nothing_in(folder: Path) -> str:
    """Return in words why a path has no saved step."""
    what = "has no saved step" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
    return f"{what}; expected a folder that --save-state wrote"


def damage_of(folder: Path) -> str:
    """Return in one line what is wrong with a saved step, '' if nothing is."""
    try:
        return damage(folder, read_manifest(folder))
    except InputError as error:
        return str(error)


def damaged_after(folder: Path) -> list[str]:
    """Return what is wrong with each step that is newer than this one, in the same folder."""
    steps = saved_steps(folder.parent)
    newer = [step for step in steps if step_folder(folder.parent, step).name > folder.name]
    return [why for step in newer if (why := damage_of(step_folder(folder.parent, step)))]


def saved_options(folder: Path, stage: int | None = None) -> dict[str, Any]:
    """Return the options of the run that saved a step: those that a ZeRO stage has, its own without one. Raises:
    InputError."""
    config = read_manifest(folder).config
    own = config.get("stage", OPTIONS["stage"].default) if stage is None else stage
    known = {name: value for name, value in config.items() if name in OPTIONS and own in OPTIONS[name].stages}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}


class StateFolder:
    """The folder of a run that saves. `keep`: how many of the newest steps stay; None: all."""

    def __init__(self, path: str, keep: int | None = None) -> None:
        self.path, self.keep = Path(path), keep

    def writing(self, step: int) -> Path:
        """Return the folder in which a step is written; it is made if it is not there. Raises: OutputError."""
        folder = self.path / f".step-{step:08}.writing"
        with failing_as_output(self.path):
            folder.mkdir(exist_ok=True)
        return folder

    def complete(self, step: int, manifest: Manifest) -> None:
        """Write the manifest of a step whose files are all there, and give the step its name. Then remove steps that
        are older than those to keep. Raises: OutputError."""
        folder, place = self.writing(step), step_folder(self.path, step)
        with failing_as_output(self.path):
            names = sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".entry")
            files = tuple(entry for name in names for entry in _take_entries(folder / name))
            write_json(folder / MANIFEST, manifest._replace(files=files).to_dict())
            sync(folder)
            folder.rename(place)
            sync(self.path)
        with failing_as_output(self.path, f"step {step} is saved, but older ones could not be removed"):
            for old in saved_steps(self.path)[: -self.keep] if self.keep else ():
                remove_step(self.path, old)

    @contextmanager
    def held(self, first_step: int = 0) -> Iterator[None]:
        """Hold the folder's lock, after removing what a killed run left. `first_step`: the run goes on after it.

        Raises: InputError for a folder that another run holds or has saved later steps in, and one that cannot be
        written; OutputError.
        """
        import fcntl  # Windows has none, and every command imports this room

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileExistsError, NotADirectoryError):
            raise wrong("save_state", f" {self.path}: is a file; name a folder") from None
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise wrong("save_state", f" {self.path}: cannot be written: {why}; choose another folder") from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise wrong("save_state", f" {self.path}: another run saves there; choose another folder") from None
            except OSError as error:
                why = f"cannot be locked: {error.strerror or error}"
                raise wrong("save_state", f" {self.path}: {why}; choose another folder") from None
            self._check_first(first_step)
            self._clean()
            with signals_postponed() as signals:
                try:
                    with signals.raised():
                        yield
                finally:
                    self._clean()
        finally:
            os.close(lock)

    def _check_first(self, first_step: int) -> None:
        """Raises: InputError if a later step than the first is here already."""
        later = max(saved_steps(self.path), default=0)
        if later <= first_step:
            return
        if why := damage_of(one := step_folder(self.path, later)):
            raise wrong("save_state", f" {self.path}: has step {later}, which is damaged: {why}; remove {one}")
        raise wrong(
            "save_state", f" {self.path}: has step {later} of an earlier run; go on from there with "
            f"--resume {self.path}, or choose another folder",
        )  # fmt: skip

    def _clean(self) -> None:
        """Remove steps that were not completed."""
        with suppress(OSError):
            for entry in [one for one in self.path.iterdir() if _WRITING.fullmatch(one.name)]:
                shutil.rmtree(entry, ignore_errors=True)


def remove_step(folder: Path, step: int) -> None:
    """Remove a saved step: first its name, so that a kill leaves no half of it."""
    gone = folder / f".step-{step:08}.removed"
    step_folder(folder, step).rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _take_entries(path: Path) -> list[Entry]:
    """Return the entries of a rank's files, which it left for the manifest."""
    entries = [Entry(**one) for one in json.loads(path.read_text("utf-8"))]
    path.unlink()
    return entries


def leave_entries(folder: Path, rank: int, *files: Path) -> None:
    """Leave the sizes and checksums of a rank's files for the manifest. Raises: OSError."""
    write_json(folder / f"rank-{rank:05}.entry", [checksum(file)._asdict() for file in files])


def write_json(path: Path, values: Any) -> None:
    """Write strict JSON, and flush it to the drive. Raises: OSError."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=None if isinstance(values, list) else 1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Write a folder's names to the drive. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network drives cannot
            raise
    finally:
        os.close(descriptor)


@contextmanager
def failing_as_output(folder: Path, so: str = "this step was not saved; earlier ones are whole") -> Iterator[None]:
    """Raise OutputError for a drive that fails inside the block; `so`: what that means for the folder."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"--save-state {folder}: {error.strerror or error}: {so}") from error
