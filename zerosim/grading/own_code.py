"""The student's own code: which of its lines ran, and its exceptions and values in words.

A frame is the student's if its file lies neither in zerosim (except exercises' skeletons) nor in Python's library, nor
among installed packages. `str()` and `repr()` of foreign objects may raise, or return megabytes or no plain string:
none of that gets out.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Callable, Iterable
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from zerosim.errors import printable

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_GIVEN = os.path.join(_PACKAGE, "grading", "given") + os.sep
_ENGINE = (os.path.join(_PACKAGE, "train") + os.sep, os.path.join(_PACKAGE, "parallel") + os.sep)
_INSTALLED = {"site-packages", "dist-packages"}  # also the user's own, which no path below names
_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # means nothing, and differs from run to run

MOST = 500
"""The most characters of a text that are shown."""


def line_of_trace(trace: TracebackType | None) -> str:
    """Return the innermost line that is the student's: 'file.py, line 7: its text', or ''."""
    return _first_own(reversed(list(walk_tb(trace))))


def line_of_frame(frame: FrameType | None) -> str:
    """Return the same of a thread that still runs."""
    return _first_own(walk_stack(frame)) if frame is not None else ""


def _first_own(frames: Iterable[tuple[FrameType, int]]) -> str:
    # A frame that is just being entered, in a running thread, has no line yet.
    places = ((frame.f_code.co_filename, number or frame.f_code.co_firstlineno) for frame, number in frames)
    return next((line_words(file, number) for file, number in places if is_own(file)), "")


def is_own(file: str) -> bool:
    """Return whether a file, or the file name in a code object, is the student's."""
    if file.startswith(_PACKAGE):
        return file.startswith(_GIVEN)
    is_loose = _INSTALLED.isdisjoint(file.replace(os.sep, "/").split("/"))
    return is_loose and not file.startswith((*_LIBRARIES, "<frozen"))


class OwnLine(NamedTuple):
    """A line of the student's or, if none was running, of zerosim's engine; `function` with its class."""

    file: str
    number: int
    function: str
    text: str


class OwnLines:
    """The line of each of a rank's events, as indices into `sources`: the student's innermost one, else the engine's;
    -1 for none."""

    def __init__(self) -> None:
        self.sources: list[OwnLine] = []
        self._places: dict[tuple[str, int], int] = {}
        self._is_own: dict[str, bool] = {}

    def place(self, frame: FrameType | None) -> int:
        """Return the line of a frame, or of its callers."""
        engine: FrameType | None = None
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in self._is_own:
                self._is_own[file] = is_own(file)
            if self._is_own[file]:
                return self._place(frame)
            if engine is None and file.startswith(_ENGINE):
                engine = frame
            frame = frame.f_back
        return -1 if engine is None else self._place(engine)

    def _place(self, frame: FrameType) -> int:
        file, number = frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno
        if (file, number) not in self._places:
            self._places[file, number] = len(self.sources)
            text, function = linecache.getline(file, number).strip(), frame.f_code.co_qualname
            self.sources.append(OwnLine(_file_words(file), number, function.rpartition("<locals>.")[2], text))
        return self._places[file, number]


def line_words(file: str, number: int) -> str:
    """Return 'file.py, line 7: its text'."""
    text = printable(linecache.getline(file, number).strip())
    return f"{_file_words(file)}, line {number}" + (f": {text}" if text else "")


def _file_words(file: str) -> str:
    if file.startswith(_ENGINE):
        return file.removeprefix(_PACKAGE).replace(os.sep, "/")
    # A notebook's cells are files whose names change with every kernel.
    return "your cell" if "ipykernel_" in file else printable(os.path.basename(file))


def error_words(error: BaseException) -> str:
    """Return 'KeyError: its text', or the type alone without a text; one line."""
    name, text = text_of(type(error), lambda kind: kind.__name__), text_of(error)
    return f"{name}: {text}" if text else name


def text_of(value: Any, show: Callable[[Any], str] = str) -> str:
    """Return `show(value)` on one line, shortened; if that fails, words that say so."""
    try:
        whole = show(value)
        text = printable(_ADDRESS.sub("", " ".join(whole[: 20 * MOST].split())))
        return text if len(text) <= MOST else f"{text[:MOST]} ... ({len(whole):,} characters)"
    except BaseException as error:  # any exception: it comes from the object itself
        what = "__repr__" if show is repr else "__str__"
        return f"(no text: its {what} raises {type.__getattribute__(type(error), '__name__')})"
