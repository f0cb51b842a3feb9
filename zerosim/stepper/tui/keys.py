"""The keys of `zerosim step`: each steps the world, or shows a page.

Ctrl-C stops a long step, between two events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from zerosim.config import RunConfig
from zerosim.errors import HUNG_UP, InputError, ZerosimError, did_you_mean, message_of
from zerosim.stepper import Match, debug
from zerosim.stepper.tui.page import PAGES, page_frame, text_of
from zerosim.stepper.tui.picture import frame, most_bytes
from zerosim.stepper.tui.terminal import Terminal

REDRAW_SECONDS = 0.2
DIGITS = "0123456789"


def parse_until(words: str) -> Match:
    """Parse 'all_gather', 'rank=2 phase=backward unit=h.1' into arguments of world.until.

    Raises: InputError for a word that is neither an event nor name=value.
    """

    given: dict[str, str] = {}
    for word in words.replace(",", " ").split():
        name, is_named, value = word.partition("=")
        if not is_named:
            name, value = "what", word
        if name not in Match._fields or not value:
            fields = ", ".join(Match._fields[1:])
            near = did_you_mean(name, Match._fields, "see ? for examples", quote=str)
            raise InputError(f"{word!r}: expected an event's name, or {fields} with = and a value: {near}")
        if name in given:
            raise InputError(f"{word!r}: {'an event' if name == 'what' else name} was named already: {given[name]!r}")
        given[name] = value.strip("'\"")
    numbers = {name: whole(name, given.pop(name)) for name in ("rank", "step") if name in given}
    return Match(**given, **numbers)  # type: ignore[arg-type]


def whole(name: str, text: str) -> int:
    """Parse digits. Raises: InputError for anything else."""
    if not text.isdecimal():
        raise InputError(f"{name} {text!r}: expected a whole number")
    return int(text)


class Stopped(ZerosimError):
    """Ctrl-C during a step: the world stands between two events."""


class Stepper:
    """A world, with the keys and the screen by which it is stepped."""

    def __init__(self, config: RunConfig, terminal: Terminal) -> None:
        self.world = debug(config)
        self.world.after_event = self._look_for_ctrl_c
        self.terminal = terminal
        self.status = "placing the model ... Ctrl-C stops here"
        self._most: dict[str, int] = {}  # by kind, of everything drawn so far: the scale of the bars
        self._last_until = "all_gather"
        self._drawn = 0.0
        self._in_flight = ""
        self._actions: dict[str, Callable[[], None]] = {
            "n": self.next,
            "space": self.next,
            "c": self.next_collective,
            "#": self.ask_rank,
            "u": self.ask_until,
            "g": lambda: self.until("launch"),
            "f": self.finish_step,
            "r": self.finish,
            "b": lambda: self.back(1),
            "B": lambda: self.back(10),
            "h": lambda: self.show("?"),
            **{page: partial(self.show, page) for page in PAGES},
        }

    def run(self) -> int:
        """Step from the first collective of step 0 until q (returns 0), Ctrl-C, which is raised, or the end of the
        terminal."""
        try:
            self.draw()
            self.press("c")
            while True:
                self.draw()
                key = self._read_key()
                if key in ("q", "Q", "ctrl-d"):
                    return 0
                self.press(key)
        except EOFError:
            return HUNG_UP
        finally:
            self.world.close()

    def press(self, key: str) -> None:
        """Do what a key says. The status line shows an error: the world stays where it was."""
        try:
            if key in DIGITS:
                self.next(int(key))
            elif key in self._actions:
                self._actions[key]()
            elif key != "resize":
                self.status = f"unknown key {key!r}: press ? for help"
        except ZerosimError as error:
            self.status = message_of(error)

    def _read_key(self) -> str:
        """Read the next key. Raises: KeyboardInterrupt for Ctrl-C."""
        key = self.terminal.read_key()
        if key == "ctrl-c":
            raise KeyboardInterrupt
        return key

    def draw(self) -> None:
        width, height = self.terminal.size
        self._most = most_bytes(self.world, self._most)
        self.terminal.draw(frame(self.world, self._most, self.status, width, height))
        self._drawn = time.monotonic()

    # -- going on -------------------------------------------------------------------------------
    def next(self, rank: int | None = None) -> None:
        self._in_flight = "the next event"
        self.status = f"rank {self.world.next(rank).rank} performed one event"

    def next_collective(self) -> None:
        self._go(
            self.world.next_collective,
            "all ranks to the next collective",
            "every rank is waiting at the next collective",
        )

    def until(self, words: str) -> None:
        match = parse_until(words)
        self._go(lambda: self.world.until(**match._asdict()), f"until {match}", f"stands before {match}")

    def finish_step(self) -> None:
        step = f"step {self.world.step:g}"
        self._go(self.world.finish_step, f"to the end of {step}", f"every rank has ended {step}")

    def finish(self) -> None:
        self._in_flight = "to the end of the run"
        losses = self.world.finish().mean_losses
        self.status = f"the run is over: loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last"

    def back(self, count: int) -> None:
        words = f"back by {count}"
        self._go(lambda: self.world.back(count), f"{words}: running again from the start", words)

    def _go(self, step: Callable[[], object], doing: str, done: str) -> None:
        """Let the world take a step, with the status line's words for the meantime and for the end."""
        self._in_flight = doing
        step()
        self.status = done

    def _look_for_ctrl_c(self) -> None:
        """Show progress now and then, after an event. Raises: Stopped if Ctrl-C was pressed."""
        if self.terminal.take_interrupt():
            raise Stopped(f"stopped early ({self._in_flight})")
        if time.monotonic() - self._drawn > REDRAW_SECONDS:
            self.status = f"{self._in_flight} ... Ctrl-C stops here"
            self.draw()

    # -- asking ---------------------------------------------------------------------------------
    def ask_until(self) -> None:
        words = self._ask(f"until [{self._last_until}]")
        if words is not None:
            words = words.strip() or self._last_until
            self.until(words)
            self._last_until = words

    def ask_rank(self) -> None:
        if (words := self._ask("rank")) is not None:
            self.next(whole("rank", words.strip()))

    def _ask(self, question: str) -> str | None:
        """Read a line that is typed below; None if Esc ended it."""
        typed = ""
        while True:
            self.status = f"{question}: {typed}_"
            self.draw()
            key = self._read_key()
            if key in ("enter", "escape"):
                self.status = ""
                return typed if key == "enter" else None
            typed = typed[:-1] if key == "backspace" else typed + {"space": " "}.get(key, key if len(key) == 1 else "")

    # -- the page of text -----------------------------------------------------------------------
    def show(self, page: str) -> None:
        """Show a page, or another one that is asked for, until a key that no page uses."""
        rank, top, ranks = self.world.last.rank if self.world.last else 0, 0, self.world.config.mesh.ranks
        while True:
            width, height = self.terminal.size
            title, lines = text_of(page, self.world, rank, self.status, width)
            room = height - 2
            top = max(0, min(top, len(lines) - room))
            self.terminal.draw(page_frame(title, lines, top, width, height))
            key = self._read_key()
            scroll = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": 1 - room, "page down": room - 1}
            scroll |= {"space": room - 1, "home": -top, "end": len(lines)}
            turn = {"left": rank - 1, "right": rank + 1, **{digit: int(digit) for digit in DIGITS}}
            if key in scroll:
                top += scroll[key]
            elif key in turn:
                rank = turn[key] if 0 <= turn[key] < ranks else rank
            elif key in PAGES and key != page:
                page, top = key, 0
            elif key != "resize":
                return
