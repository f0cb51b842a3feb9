"""NVMe drives of a run on real numbers: each buffer is a file in a folder of the run's own, and goes with it.

The folder stands in the one that `--nvme` names, and a lock in it is held while the run lives. It is removed when the
run ends, however it ends; what a run that was killed left, the next start removes. No other file is touched.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from zerosim.backends.kernels import Array
from zerosim.backends.numpy.files import failed, new_file
from zerosim.device.node import NodePool, Share
from zerosim.dtypes import DType
from zerosim.errors import Ended, InputError, OutputError, wrong

LOCK = "lock"
_TRIES, _PAUSE_S = 20, 0.02
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


@contextmanager
def run_folder(where: str | None, *, writes: bool) -> Iterator[Path | None]:
    """Open a folder of the run's own in `where` for a with block; None if the run writes nothing there. First remove
    what killed runs left.

    Raises: InputError where there is no such folder; OutputError where nothing can be written there.
    """
    if where is None:
        yield None
        return
    if importlib.util.find_spec("fcntl") is None:
        raise wrong("nvme", f" {where}: needs the file locks of Linux or macOS; leave it out on this platform")
    place = Path(where)
    if not place.is_dir():
        why = "is not a folder" if place.exists() else "does not exist"
        raise wrong("nvme", f" {where}: {why}; name an existing folder on the drive")
    try:
        for left in [entry for entry in place.iterdir() if _FOLDER.fullmatch(entry.name)]:
            _remove_left(left)
        if not writes:
            yield None
            return
    except OSError as error:
        raise failed(place, error) from error
    with _ends_on_signals():
        made: list[tuple[Path, int]] = []
        remove = partial(_remove_made, made)
        try:
            with _signals_later():
                made.append(_made(place))
                atexit.register(remove)  # where another signal comes while the first one ends the run
            yield made[0][0]
        finally:
            with _signals_later():
                remove()
                atexit.unregister(remove)


def _made(place: Path) -> tuple[Path, int]:
    """A new folder and its lock, which is held. Another start may take a folder that has no lock yet: then again."""
    for left in reversed(range(_TRIES)):
        folder = place / f"zerosim-nvme-{secrets.token_hex(8)}"
        try:
            folder.mkdir(0o700)
            lock = _lock(folder)
        except FileNotFoundError as error:
            if not left or not place.is_dir():
                raise failed(place, error) from error
            continue
        except OSError as error:
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
    """Remove what a run left that no longer holds its lock."""
    with suppress(FileNotFoundError, NotADirectoryError):
        lock = _lock(folder)
        if lock is not None:
            _remove(folder)
            os.close(lock)


def _remove_made(made: list[tuple[Path, int]]) -> None:
    """Remove the run's own folder, once; again where a rank that has not heard of the end writes one more file."""
    while made:
        folder, lock = made.pop()
        for left in reversed(range(_TRIES)):
            _remove(folder)
            if not left or not folder.exists():
                break
            time.sleep(_PAUSE_S)
        os.close(lock)


def _remove(folder: Path) -> None:
    """A run's files, its lock and the folder; what else lies there stays, and the folder with it."""
    with suppress(OSError):  # the drive is gone, and all on it
        for entry in os.listdir(folder):
            if _FILE.fullmatch(entry):
                os.unlink(folder / entry)
        os.unlink(folder / LOCK)
        folder.rmdir()


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """A block that SIGTERM and SIGHUP end as Ctrl-C does, so that what it made is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise Ended(number)

    asked = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    with _handled({number: end for number in asked if signal.getsignal(number) is signal.SIG_DFL}):
        yield


@contextmanager
def _signals_later() -> Iterator[None]:
    """A block that no signal interrupts; one that comes in it is raised at its end. So who presses Ctrl-C twice has no
    files left either."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    came: list[int] = []
    with _handled(
        {number: lambda number, _: came.append(number) for number in asked if callable(signal.getsignal(number))}
    ):
        yield
    for number in came[:1]:
        signal.raise_signal(number)


@contextmanager
def _handled(handlers: Mapping[int, Any]) -> Iterator[None]:
    """A block with these handlers of signals, on the main thread."""
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def asks_for_folder(where: str | None, offload: str) -> None:
    """Check that a run with states on NVMe names a folder. Raises: InputError if it does not."""
    if where is None:
        raise InputError(
            f"--offload {offload!r} writes files and needs a folder; pass --nvme DIR, an existing folder on the "
            "drive, or use zerosim plan, which writes none",
            field="nvme",
        )
