"""NVMe drives of a run on real numbers: each buffer is a file in a folder of the run's own, and goes with it.

The folder stands in the one that `--nvme` names, and a lock in it is held while the run lives. It is removed when the
run ends, however it ends; what a run that was killed left, the next start removes. No other file is touched.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from zerosim.backends.kernels import Array
from zerosim.backends.numpy.files import failed, new_file
from zerosim.device.interrupts import signals_postponed
from zerosim.device.node import NodePool, Share
from zerosim.dtypes import DType
from zerosim.errors import InputError, OutputError, wrong

T = TypeVar("T")

LOCK = "lock"
_TRIES = 20
_FOLDER, _FILE = re.compile(r"zerosim-nvme-[0-9a-f]{16}"), re.compile(r"rank\d+-\d+\.bin")


class Files(Share):
    """What one rank holds on its node's drives: grants as `Share` does, and makes the files."""

    def __init__(self, folder: Path, rank: int, pool: NodePool) -> None:
        super().__init__(pool, rank)
        self.folder = folder

    def array(self, id: int, shape: tuple[int, ...], dtype: DType) -> Array:
        """Create a file of zeros. Raises: OutputError."""
        return new_file(self._path(id), shape, dtype)

    def release(self, id: int) -> None:
        super().release(id)
        with suppress(OSError):  # a drive that is gone has no file
            self._path(id).unlink()

    def _path(self, id: int) -> Path:
        return self.folder / f"rank{self.rank}-{id}.bin"


def in_run_folder(where: str | None, run: Callable[[Path | None], T], *, writes: bool) -> T:
    """Return `run(folder)`, with a folder of the run's own in `where`, or None if the run writes nothing there. First
    remove what killed runs left.

    Raises: InputError where there is no such folder; OutputError where nothing can be written there.
    """
    if where is None:
        return run(None)
    if importlib.util.find_spec("fcntl") is None:
        raise wrong("nvme", f" {where}: needs the file locks of Linux or macOS; leave it out on this platform")
    place = Path(where)
    if not place.is_dir():
        why = "is not a folder" if place.exists() else "does not exist"
        raise wrong("nvme", f" {where}: {why}; name an existing folder on the drive")
    try:
        for left in [entry for entry in place.iterdir() if _FOLDER.fullmatch(entry.name)]:
            _remove_left(left)
    except OSError as error:
        raise failed(place, error) from error
    if not writes:
        return run(None)
    with signals_postponed() as signals:
        folder, lock = _made(place)
        try:
            with signals.raised():
                return run(folder)
        finally:
            with suppress(OSError):  # under its new name a rank that has not heard of the end makes no more files
                folder = folder.rename(_new_folder(place))
            for _ in range(_TRIES):  # a file may be in the making
                _remove(folder)
            os.close(lock)


def _new_folder(place: Path) -> Path:
    return place / f"zerosim-nvme-{secrets.token_hex(8)}"


def _made(place: Path) -> tuple[Path, int]:
    """A new folder and its lock, which is held. Another start may take a folder that has no lock yet: then again."""
    for left in reversed(range(_TRIES)):
        folder = _new_folder(place)
        try:
            folder.mkdir(0o700)
            lock = _lock(folder)
        except FileNotFoundError as error:
            if not left or not place.is_dir():
                raise failed(place, error) from error
            continue
        except OSError as error:
            _remove(folder)
            raise failed(place, error) from error
        if lock is not None:
            return folder, lock
    raise OutputError(f"--nvme {place}: another program locks every folder made there; choose another place")


def _lock(folder: Path) -> int | None:
    """Hold the folder's lock; None where somebody else does, or has removed it."""
    import fcntl  # Windows has none, and every command imports this room

    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _remove_left(folder: Path) -> None:
    """Remove what a run left that no longer holds its lock. A folder that cannot be locked stays: another user's."""
    with suppress(OSError):
        lock = _lock(folder)
        if lock is not None:
            _remove(folder)
            os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a run's files, its lock and the folder; what else lies there stays, and the folder with it."""
    with suppress(OSError):  # the drive is gone, and all on it
        for name in [*filter(_FILE.fullmatch, os.listdir(folder)), LOCK]:
            with suppress(FileNotFoundError):
                os.unlink(folder / name)
        folder.rmdir()


def asks_for_folder(where: str | None, offload: str) -> None:
    """Check that a run with states on NVMe names a folder. Raises: InputError if it does not."""
    if where is None:
        raise InputError(
            f"--offload {offload!r} writes files and needs a folder; pass --nvme DIR, an existing folder on the "
            "drive, or use zerosim plan, which writes none",
            field="nvme",
        )
