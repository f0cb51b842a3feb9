"""What the whole fake machine shares: how many devices there are, each thread's current device and streams, and the
waits that were counted. Owns no memory and no clock."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSIDE = str(Path(__file__).parent.parent)
LOCK = threading.RLock()


class StandinError(RuntimeError):
    """The program did what CUDA forbids, or what this stand-in does not have."""


class RaceError(StandinError):
    """Two streams touch the same bytes and nothing orders them."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The host waited for a device: how, and where in the program."""

    kind: str
    place: str
    thread: str


class _Thread(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.devices: list[int] = []
        self.streams: dict[int, Any] = {}
        self.stack: list[tuple[int, Any]] = []
        self.allocators: list[Any] = []
        self.handles: dict[int, int] = {}
        self.group: list[Any] | None = None
        self.stacks: Any = None
        self.capturing: list[Any] = []  # the streams whose capture this thread has begun


class _Machine:
    def __init__(self) -> None:
        self.num_devices = int(os.environ.get("ZEROSIM_STANDIN_DEVICES", "1"))
        self.device_bytes = 80 * 10**9
        self.waits: list[Wait] = []
        self.launches = {"alone": 0, "captured": 0, "graphs": 0, "replayed": 0}


MACHINE = _Machine()
THREAD = _Thread()


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the program, put into words only when somebody asks."""

    code: Any
    line: int

    def __str__(self) -> str:
        return f"{Path(self.code.co_filename).name}:{self.line} {self.code.co_name}" if self.code else "?"


def place() -> Place:
    """The innermost frame outside the stand-in."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame = frame.f_back
    return Place(None, 0) if frame is None else Place(frame.f_code, frame.f_lineno)


def refuse_in_capture(what: str) -> None:
    """As CUDA in a capture of mode ThreadLocal: the call fails, and the capture with it. Raises: StandinError."""
    for stream in THREAD.capturing:
        stream.capture.broken = True
    if THREAD.capturing:
        raise StandinError(f"cudaErrorStreamCaptureUnsupported: {what} while this thread captures a stream")


def count_wait(kind: str) -> None:
    refuse_in_capture(kind)
    with LOCK:
        MACHINE.waits.append(Wait(kind, str(place()), threading.current_thread().name))


def absent(module: str, name: str) -> AttributeError:
    return AttributeError(
        f"{module}.{name} is not in the part of CuPy that zerosim uses: use what tests/standin has, or add it there"
    )
