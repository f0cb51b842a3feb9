"""A terminal for as long as a program draws whole screens on it: keys as they are typed, and all as before at the end.

Owns raw keys, the alternate screen, resizing and interrupts. Knows nothing of what is drawn.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Sequence
from io import StringIO
from types import FrameType, TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from zerosim.errors import InputError

try:
    import termios
except ImportError:  # not a POSIX platform
    termios = None  # type: ignore[assignment]

RESIZE = "resize"
INTERRUPT = "ctrl-c"
ENTER, ESCAPE, BACKSPACE = "enter", "escape", "backspace"
_NAMED = {
    "\r": ENTER, "\n": ENTER, "\x7f": BACKSPACE, "\b": BACKSPACE, "\x03": INTERRUPT, " ": "space", "\t": "tab",
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1b[5~": "page up", "\x1b[6~": "page down",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left", "\x1b": ESCAPE, "\x04": "ctrl-d",
    "\x1b[H": "home", "\x1b[F": "end", "\x1b[1~": "home", "\x1b[4~": "end", "\x1bOH": "home", "\x1bOF": "end",
}  # fmt: skip
_OPEN, _CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[0m\x1b[?25h\x1b[?1049l"
_ESCAPE_SECONDS = 0.05  # what follows an Escape so soon belongs to it


def is_usable(keys: TextIO, screen: TextIO) -> bool:
    """Whether screens can be drawn and keys read; else text is all that can be had."""
    try:
        both = keys.isatty() and screen.isatty()
    except ValueError:  # closed
        return False
    return both and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


class Terminal:
    """Use it in a `with`, on the main thread.

    Raises: InputError on a platform whose keys cannot be read one by one.
    """

    def __init__(self, keys: TextIO, screen: TextIO) -> None:
        if termios is None:
            raise InputError(
                "this platform reads no single keys (it lacks termios): into a pipe or file, events are printed as text"
            )
        self.ascii = not (screen.encoding or "utf-8").lower().startswith("utf")
        self._screen, self._input, self._output = screen, keys.fileno(), screen.fileno()
        self._typed: list[str] = []
        self._is_interrupted = False
        self._handlers: dict[int, Any] = {}

    # -- from begin to end ----------------------------------------------------------------------
    def __enter__(self) -> Terminal:
        self._before = termios.tcgetattr(self._input)
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)
        try:
            mode = termios.tcgetattr(self._input)
            mode[3] &= ~(termios.ICANON | termios.ECHO)
            mode[0] &= ~termios.IXON
            nothing = bytes([os.fpathconf(self._input, "PC_VDISABLE") & 255])
            for key in (termios.VSUSP, termios.VQUIT):  # these would leave the screen as it is
                mode[6][key] = nothing
            mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self._input, termios.TCSADRAIN, mode)
            self._handle(signal.SIGINT, self._on_interrupt)
            self._handle(signal.SIGTERM, _end)
            self._handle(signal.SIGHUP, _end)
            self._handle(signal.SIGWINCH, self._on_resize)
            self._write(_OPEN)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _handle(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handlers[number] = signal.signal(number, handler)

    def _restore(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self._write(_CLOSE)
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._wake_out)
        os.close(self._wake_in)

    # -- interrupts -----------------------------------------------------------------------------
    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """The first is for the program to notice; a second that finds it unnoticed ends the program."""
        if self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True
        self._wake()

    def _on_resize(self, number: int, frame: FrameType | None) -> None:
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # so many wake-ups are waiting that one more tells nothing
            os.write(self._wake_in, b"!")

    def take_interrupt(self) -> bool:
        """Whether Ctrl-C was pressed since this was last asked."""
        was, self._is_interrupted = self._is_interrupted, False
        return was

    # -- keys and screens -----------------------------------------------------------------------
    def read_key(self) -> str:
        """The next key: a letter, or a name such as 'enter'; also 'resize', and 'ctrl-c' for an interrupt.

        Raises: EOFError when the terminal has gone away.
        """
        while not self._typed:
            ready, _, _ = select.select([self._input, self._wake_out], [], [])
            if self._wake_out in ready:
                os.read(self._wake_out, 1024)
                return INTERRUPT if self.take_interrupt() else RESIZE
            self._typed = _split(self._read())
        return self._typed.pop(0)

    def _read(self) -> str:
        try:
            data = os.read(self._input, 1024)
        except OSError as error:
            raise EOFError("the terminal has gone away") from error
        if not data:
            raise EOFError("the terminal has gone away")
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
        """Show these lines from the top; each is no wider than the terminal."""
        width, height = self.size
        buffer = StringIO()
        console = Console(file=buffer, force_terminal=True, width=width + 1, height=height, highlight=False)
        shown = []
        for line in lines[:height]:
            console.print(line, end="", soft_wrap=True)
            shown.append(buffer.getvalue())
            buffer.seek(0)
            buffer.truncate()
        # A line is cleared before it is written: after one that fills it, some terminals would clear its last letter.
        self._write("\x1b[H" + "\r\n".join(f"\x1b[2K{line}" for line in shown))
        if len(shown) < height:
            self._write("\r\n\x1b[J")

    def _write(self, text: str) -> None:
        encoding = self._screen.encoding or "utf-8"
        self._screen.write(text.encode(encoding, "replace").decode(encoding))
        self._screen.flush()


def _end(number: int, frame: FrameType | None) -> None:
    """Asked to end, by a signal: as any exit does, so that the terminal is restored."""
    raise SystemExit(128 + number)


def _split(typed: str) -> list[str]:
    """Keys in what was read at once: pasted text is many, an escape sequence is one."""
    keys, at = [], 0
    while at < len(typed):
        length = 1
        if typed[at] == "\x1b" and typed[at + 1 : at + 2] in ("[", "O"):
            length = 2
            while at + length < len(typed) and not "@" <= typed[at + length] <= "~":
                length += 1
            length += 1
        piece = typed[at : at + length]
        name = _NAMED.get(piece, piece)
        if len(name) > 1 or name.isprintable():
            keys.append(name if piece in _NAMED or length == 1 else "unknown")
        at += length
    return keys
