"""What a key of `zerosim step` does to the world, and how far a command goes before it looks for Ctrl-C.

How it looks is `report/stepper*.py`'s affair; what is read off a world for it, `step_picture.py`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from zerosim.cli.parser import nearest
from zerosim.cli.step_picture import picture_of, step_of
from zerosim.config import RunConfig
from zerosim.errors import HUNG_UP, InputError, ZerosimError, message_of
from zerosim.report import stepper_pages as pages
from zerosim.report.stepper import frame
from zerosim.report.stepper_terminal import Terminal
from zerosim.stepper import Match, Moment, debug
from zerosim.stepper.match import FIELDS

REDRAW_SECONDS = 0.2
DIGITS = "0123456789"


def parse_until(words: str) -> Match:
    """'all_gather', 'rank=2 phase=backward unit=h.1': as world.until takes them.

    Raises: InputError for a word that is neither an event nor name=value.
    """

    given: dict[str, str] = {}
    for word in words.replace(",", " ").split():
        name, is_named, value = word.partition("=")
        if not is_named:
            name, value = "what", word
        if name not in FIELDS or not value:
            near = nearest(name, FIELDS, "? for examples")
            raise InputError(f"{word!r}: expected an event's name, or {', '.join(FIELDS[1:])} with = and a value{near}")
        if name in given:
            raise InputError(f"{word!r}: {'an event' if name == 'what' else name} was named already: {given[name]!r}")
        given[name] = value.strip("'\"")
    numbers = {name: whole(name, given.pop(name)) for name in ("rank", "step") if name in given}
    return Match(**given, **numbers)  # type: ignore[arg-type]


def whole(name: str, text: str) -> int:
    """Raises: InputError for anything but digits."""
    if not text.isdecimal():
        raise InputError(f"{name} {text!r}: expected a whole number")
    return int(text)


class Stepper:
    """A world, and the keys and the screen that it is stepped with."""

    def __init__(self, config: RunConfig, terminal: Terminal) -> None:
        self.world = debug(config)
        self.terminal = terminal
        self.status = "placing the model ... Ctrl-C stops here"
        self._most: dict[str, int] = {}  # by kind, of what was drawn so far: the scale of the bars
        self._last_until = "all_gather"
        self._drawn = 0.0
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
            "l": lambda: self.show(self._live_page),
            "p": lambda: self.show(self._parameters_page),
            "o": lambda: self.show(self._ownership_page),
            "h": lambda: self.show(_help_page),
            "?": lambda: self.show(_help_page),
        }

    def run(self) -> int:
        """From the first collective of step 0 until q (0), Ctrl-C, which is raised, or the terminal has gone away."""
        try:
            self.draw()
            self.press("c")
            while True:
                self.draw()
                key = self.terminal.read_key()
                if key in ("q", "Q", "ctrl-d"):
                    return 0
                self.press(key)
        except EOFError:
            return HUNG_UP
        finally:
            self.world.close()

    def press(self, key: str) -> None:
        """What a key does. An error is told in the status line: the world stands where it was when it came."""
        if key == "ctrl-c":
            raise KeyboardInterrupt
        try:
            if key in DIGITS:
                self.next(int(key))
            elif key in self._actions:
                self._actions[key]()
            elif key != "resize":
                self.status = f"no key {key!r}: ? shows those that there are"
        except ZerosimError as error:
            self.status = " ".join(message_of(error).split())

    def draw(self) -> None:
        width, height = self.terminal.size
        picture = picture_of(self.world, width, self.status, self._most)
        self._most = dict(picture.most)
        self.terminal.draw(frame(picture, width, height, ascii=self.terminal.ascii))
        self._drawn = time.monotonic()

    # -- going on -------------------------------------------------------------------------------
    def next(self, rank: int | None = None) -> None:
        done = self.world.next(rank)
        self.status = f"rank {done.rank} went on by one event"

    def next_collective(self) -> None:
        for _ in self.world.until_collective():
            if self._is_stopped("all ranks to the next collective"):
                return
        over = "no collective came before the run ended; the world stands there"
        self.status = "all stand before the next collective" if self.world.peek() else over

    def until(self, words: str) -> None:
        match, coming = parse_until(words), self.world.peek()
        match.check(self.world.config.mesh.ranks, self.world.units, self.world.steps)
        last = match.step if match.step is not None else step_of(self.world, coming) if coming else math.inf

        def stop(coming: Moment | None) -> str | None:
            if coming is None or step_of(self.world, coming) > last:
                when = "the run" if coming is None else f"step {last:g}"
                return f"{match} did not come before {when} ended; the world stands there"
            return f"stands before {match}" if match.matches(coming.rank, coming.event) else None

        self._advance(f"until {match}", stop)

    def finish_step(self) -> None:
        coming = self.world.peek()
        step = step_of(self.world, coming) if coming else math.inf

        def stop(coming: Moment | None) -> str | None:
            is_over = coming is None or step_of(self.world, coming) > step
            return f"every rank has ended step {step:g}" if is_over else None

        self._advance(f"to the end of step {step:g}", stop)

    def finish(self) -> None:
        def stop(coming: Moment | None) -> str | None:
            if coming is not None:
                return None
            losses = self.world.result().mean_losses
            return f"the run is over: loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last"

        self._advance("to the end of the run", stop)

    def back(self, count: int) -> None:
        """As world.back does, but Ctrl-C can stop it on the way."""
        ranks = [rank for rank, _ in self.world.events]
        if count > len(ranks):
            raise InputError(f"back {count}: expected at most {len(ranks):,}, the events that have happened")
        self.world.close()
        self.world = debug(self.world.config)
        for rank in ranks[:-count]:
            self.world.next(rank)
            if self._is_stopped(f"back by {count}: running again up to there"):
                return
        self.status = f"back by {count}"

    def _advance(self, what: str, stop: Callable[[Moment | None], str | None]) -> None:
        """Event by event until `stop`, which is told what comes, says why; or until Ctrl-C."""
        while True:
            self.world.next()
            if (why := stop(self.world.peek())) is not None:
                self.status = why
                return
            if self._is_stopped(what):
                return

    def _is_stopped(self, what: str) -> bool:
        """Whether Ctrl-C was pressed; shows now and then how far it went."""
        if self.terminal.take_interrupt():
            self.status = f"stopped on the way ({what})"
            return True
        if time.monotonic() - self._drawn > REDRAW_SECONDS:
            self.status = f"{what} ... Ctrl-C stops here"
            self.draw()
        return False

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
        """A line that is typed below; None where Esc ended it."""
        typed = ""
        while True:
            self.status = f"{question}: {typed}_"
            self.draw()
            key = self.terminal.read_key()
            if key == "ctrl-c":
                raise KeyboardInterrupt
            if key in ("enter", "escape"):
                self.status = ""
                return typed if key == "enter" else None
            typed = typed[:-1] if key == "backspace" else typed + {"space": " "}.get(key, key if len(key) == 1 else "")

    # -- pages ----------------------------------------------------------------------------------
    def show(self, make: Callable[[int, int], pages.Page]) -> None:
        """A page until a key that it has no use for; `make(rank, width)` is asked again after each key."""
        rank, top, ranks = self.world.last.rank if self.world.last else 0, 0, self.world.config.mesh.ranks
        while True:
            width, height = self.terminal.size
            page = make(rank, width)
            top = max(0, min(top, pages.last_top(page, height)))
            self.terminal.draw(pages.page_frame(page, top, width, height, ascii=self.terminal.ascii))
            key, room = self.terminal.read_key(), height - 3
            scroll = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -room, "page down": room, "space": room}
            turn = {"left": rank - 1, "right": rank + 1, **{digit: int(digit) for digit in DIGITS}}
            if key in scroll or key in ("home", "end"):
                top = 0 if key == "home" else len(page.lines) if key == "end" else top + scroll[key]
            elif key in turn:
                rank = turn[key] if 0 <= turn[key] < ranks else rank
            elif key == "ctrl-c":
                raise KeyboardInterrupt
            elif key != "resize":
                return

    def _live_page(self, rank: int, width: int) -> pages.Page:
        return pages.live_page(rank, self.world.ranks[rank].live(), width)

    def _parameters_page(self, rank: int, width: int) -> pages.Page:
        return pages.parameters_page(rank, list(self.world.ranks[rank].parameters.values()), width)

    def _ownership_page(self, rank: int, width: int) -> pages.Page:
        owned = self.world.ownership()
        return pages.ownership_page(owned.rows, owned.ranks, width)


def _help_page(rank: int, width: int) -> pages.Page:
    return pages.help_page(width)
