"""A terminal that draws whole screens and reads single keys; at the end it is restored.

Raw keys, the alternate screen, resizing and interrupts, for any content.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from types import FrameType
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from zerosim.errors import InputError

try:
    import termios
except ImportError:  # not a POSIX platform
    termios = None  # type: ignore[assignment]

_NAMED = {
    "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", "\x03": "ctrl-c", " ": "space", "\t": "tab",
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1b[5~": "page up", "\x1b[6~": "page down",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left", "\x1b": "escape", "\x04": "ctrl-d",
    "\x1b[H": "home", "\x1b[F": "end", "\x1b[1~": "home", "\x1b[4~": "end", "\x1bOH": "home", "\x1bOF": "end",
}  # fmt: skip
_OPEN, _CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[0m\x1b[?25h\x1b[?1049l"
_ESCAPE_SECONDS = 0.05  # a character that follows Escape this soon belongs to it
_KEY = re.compile(r"\x1b[\[O][^@-~]*[@-~]?|.", re.DOTALL)
_ASCII = str.maketrans({"─": "-", "│": "|", "→": ">", "▶": ">", "·": "-", "…": "~"})


def is_usable(keys: TextIO, screen: TextIO) -> bool:
    """Return whether screens can be drawn and keys be read; if not, only text can be printed."""
    if termios is None:  # Windows
        return False
    try:
        both = keys.isatty() and screen.isatty()
    except ValueError:  # closed
        return False
    return both and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


class Terminal:
    """Use it in a `with` of its `opened`, on the main thread.

    Raises: InputError on a platform whose keys cannot be read one by one.
    """

    def __init__(self, keys: TextIO, screen: TextIO) -> None:
        if termios is None:
            raise InputError(
                "this platform reads no single keys (it lacks termios); zerosim step --html step.html plays the step "
                "in a browser; into a pipe or file, events are printed as text"
            )
        self.ascii = not (screen.encoding or "utf-8").lower().startswith("utf")
        self._screen, self._input, self._output = screen, keys.fileno(), screen.fileno()
        self._typed: list[str] = []
        self._is_interrupted = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Take the terminal for a with block: raw keys, the alternate screen. At its end the terminal is as before."""
        before, handlers = termios.tcgetattr(self._input), dict[int, Any]()
        self._wake_out, wake_in = os.pipe()
        os.set_blocking(wake_in, False)
        wake_before = signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)  # each signal ends a select
        try:
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._raw_mode())
            for number, handler in (
                (signal.SIGINT, self._on_interrupt),
                (signal.SIGTERM, _end),
                (signal.SIGHUP, _end),
                (signal.SIGWINCH, lambda number, frame: None),
            ):
                handlers[number] = signal.signal(number, handler)
            self._write(_OPEN)
            yield
        finally:
            with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
                self._write(_CLOSE)
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self._input, termios.TCSADRAIN, before)
            for changed, handler_before in handlers.items():
                signal.signal(changed, handler_before)
            signal.set_wakeup_fd(wake_before)
            os.close(self._wake_out)
            os.close(wake_in)

    def _raw_mode(self) -> list[Any]:
        """Set the terminal's mode: each key comes at once and unseen, and none stops the program."""
        mode = termios.tcgetattr(self._input)
        mode[3] &= ~(termios.ICANON | termios.ECHO)
        mode[0] &= ~termios.IXON
        for key in (termios.VSUSP, termios.VQUIT):  # these would leave the screen as it is
            mode[6][key] = bytes([os.fpathconf(self._input, "PC_VDISABLE") & 255])
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        return mode

    # -- interrupts -----------------------------------------------------------------------------
    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Note Ctrl-C. The program asks for the first with `take_interrupt`; a second before it did ends the
        program."""
        if self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True

    def take_interrupt(self) -> bool:
        """Return whether Ctrl-C was pressed since the last call."""
        was, self._is_interrupted = self._is_interrupted, False
        return was

    # -- keys and screens -----------------------------------------------------------------------
    def read_key(self) -> str:
        """Read the next key: a letter, or a name such as 'enter'; also 'resize', and 'ctrl-c' for an interrupt.

        Raises: EOFError when the terminal is gone.
        """
        while not self._typed:
            ready, _, _ = select.select([self._input, self._wake_out], [], [])
            if self._wake_out in ready:
                os.read(self._wake_out, 1024)
                return "ctrl-c" if self.take_interrupt() else "resize"
            self._typed = split_keys(self._read())
        return self._typed.pop(0)

    def _read(self) -> str:
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(self._input, 1024)
        if not data:
            raise EOFError("the terminal is gone")
        if data == b"\x1b" and select.select([self._input], [], [], _ESCAPE_SECONDS)[0]:
            data += os.read(self._input, 1024)
        return data.decode(errors="replace")

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        try:
            size = os.get_terminal_size(self._output)
        except OSError:
            return 80, 24
        return (size.columns or 80), (size.lines or 24)

    def draw(self, lines: Sequence[Text]) -> None:
        """Show these lines, from the top."""
        width, height = self.size
        buffer = StringIO()
        console = Console(file=buffer, force_terminal=True, width=width + 1, height=height, highlight=False)
        for line in fitted(lines, width, height, ascii=self.ascii):
            console.print(line, soft_wrap=True)
        # A line is cleared before it is written: after a full line, some terminals would clear its last letter.
        self._write("\x1b[H" + "\r\n".join(f"\x1b[2K{line}" for line in buffer.getvalue().split("\n")[:-1]))

    def _write(self, text: str) -> None:
        encoding = self._screen.encoding or "utf-8"
        self._screen.write(text.encode(encoding, "replace").decode(encoding))
        self._screen.flush()


def _end(number: int, frame: FrameType | None) -> None:
    """Exit as programs do on a signal to end, so that the terminal is restored."""
    raise SystemExit(128 + number)


def fitted(lines: Sequence[Text], width: int, height: int, *, ascii: bool = False) -> list[Text]:
    """Return those lines, cut and filled to a screen, in printable characters."""
    shown = []
    for line in [*lines[:height], *[Text()] * (height - len(lines))]:
        cut = line.copy()
        if cut.cell_len > width:
            cut.truncate(width - 1)
            cut.append("…")
        if ascii:
            cut.plain = cut.plain.translate(_ASCII)
        shown.append(cut)
    return shown


def split_keys(typed: str) -> list[str]:
    """Split what was read at once into keys: pasted text is many, an escape sequence is one."""
    pieces = [piece for piece in _KEY.findall(typed) if len(piece) > 1 or piece in _NAMED or piece.isprintable()]
    return [_NAMED.get(piece, piece if len(piece) == 1 else "unknown") for piece in pieces]
