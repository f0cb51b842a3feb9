"""`zerosim step`: driven by keys in a real pseudo-terminal, and piped; the screen at every size."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import SECONDS, finished, started
from rich.text import Text

import zerosim
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.stepper import DebugWorld, Match, Moment
from zerosim.stepper.tui.keys import Stepper, parse_until
from zerosim.stepper.tui.page import KEYS, PAGES, page_frame, text_of
from zerosim.stepper.tui.picture import frame, most_bytes, shown_ranks
from zerosim.stepper.tui.terminal import fitted, split_keys

fcntl, pty, termios = (
    pytest.importorskip(name, reason="needs POSIX terminals") for name in ("fcntl", "pty", "termios")
)
SMALL = dict(layers=1, hidden=16, heads=2, seq=7, micro_batch=1, steps=2)
FLAGS = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "7", "--micro-batch", "1"]
SIZES = [(60, 20), (80, 24), (120, 40), (40, 12), (200, 60)]
STATUS, DID, NEXT = -2, 1, 2


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{**SMALL, **dict(stage=3, ranks=3), **changes})


def picture(world: DebugWorld, width: int, height: int, status: str = "") -> list[Text]:
    """The screen of a terminal of that size on which nothing was drawn before."""
    return fitted(frame(world, most_bytes(world, {}), status, width, height), width, height)


def status_of(lines: list[str]) -> str:
    """The status takes up to three lines."""
    return " ".join(lines[-4:-1])


def in_words(moment: Moment | None) -> str:
    """The beginning of a moment in the screen's words; its step is in the title."""
    return repr(moment).replace(", step 0, ", ", ")[:60]


class Term:
    """A program in a pseudo-terminal: keys go in, the screen that is drawn last comes out."""

    def __init__(self, *flags: str, size: tuple[int, int] = (80, 24), **env: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(self.slave)
        self.process = started(
            [sys.executable, "-m", "zerosim", "step", *FLAGS, *flags],
            stdin=self.slave, stdout=self.slave, stderr=self.slave,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm-256color", **env},
        )  # fmt: skip
        self.output = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read(self, seconds: float = 0.05) -> None:
        while select.select([self.master], [], [], seconds)[0]:
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:
                return
            if not data:
                return
            self.output += data.decode(errors="replace")

    @property
    def screen(self) -> list[str]:
        """The lines of the last screen drawn, without colours."""
        last = self.output.rpartition("\x1b[H")[2].partition("\x1b[?1049l")[0]
        return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip() for line in last.split("\r\n")]

    def wait_for(self, text: str, at: int | None = None, *, there: bool = True) -> list[str]:
        """The screen, once it (or its line `at`; for STATUS, the last but the keys) holds `text`, or does not."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            self.read()
            lines = self.screen
            held = lines if at is None else [status_of(lines)] if at == STATUS else lines[at : at + 1]
            if len(lines) > 5 and any(text in line for line in held) == there:
                return lines
        raise AssertionError(f"{text!r} did not come:\n" + "\n".join(self.screen))

    def end(self) -> int:
        end = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            self.read()
        self.read()
        return self.process.wait(SECONDS)

    def is_restored(self) -> bool:
        closed = self.output.rpartition("\x1b[?1049h")[2]
        return "\x1b[?1049l" in closed and "\x1b[?25h" in closed and termios.tcgetattr(self.slave) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=SECONDS)
        os.close(self.master)
        os.close(self.slave)


@contextlib.contextmanager
def term(*flags: str, **options: Any) -> Iterator[Term]:
    opened = Term(*flags, **options)
    try:
        if options.get("TERM") != "dumb":
            opened.wait_for("quit")
        yield opened
    finally:
        opened.close()


@pytest.mark.slow
def test_a_session_of_keys_stands_where_the_world_does() -> None:
    with zerosim.debug(config(), start="collective") as world, term("--stage", "3", "--ranks", "3") as shown:
        first = shown.wait_for("every rank is waiting at the next collective", STATUS)
        assert f"step 0 · {len(world.events):,} events" in first[0]
        assert "all_gather #0 of" in first[NEXT]
        shown.press("n")
        world.next()
        assert in_words(world.last) in shown.wait_for("rank 0 performed one event", STATUS)[DID]
        shown.press("2")
        world.next(rank=2)
        assert in_words(world.last) in shown.wait_for("rank 2 performed", STATUS)[DID]
        shown.press("u\r")
        coming = world.until("all_gather")
        assert coming.text.split(",")[0] in shown.wait_for("stands before all_gather", STATUS)[NEXT]
        shown.press("urank=1 phase=backward unit=h.0\r")
        world.until(rank=1, phase="backward", unit="h.0")
        lines = shown.wait_for("stands before rank 1, phase backward, unit h.0", STATUS)
        assert f"{len(world.events):,} events" in lines[0]
        assert f"{world.ranks[1].memory().total_bytes:,}" in "\n".join(lines)
        assert "backward of h.0" in "\n".join(lines)
        shown.press("B")
        world.back(10)
        shown.wait_for(f"{len(world.events):,} events", 0)  # on a slow machine it shows meanwhile how far it is
        shown.wait_for("back by 10", STATUS)
        shown.press("c")
        world.next_collective()
        shown.wait_for("every rank is waiting at the next collective", STATUS)
        shown.wait_for(f"{len(world.events):,} events", 0)
        shown.press("g")
        world.until("launch")
        lines = shown.wait_for("stands before launch", STATUS)
        assert f"{len(world.events):,} events" in lines[0]
        shown.press("f")
        world.finish_step()
        lines = shown.wait_for("every rank has ended step 0", STATUS)
        assert f"step 1 · {len(world.events):,} events" in lines[0]
        shown.press("q")
        assert shown.end() == 0
        assert shown.is_restored()


@pytest.mark.slow
def test_messages_are_arrows_and_ranks_say_for_whom_they_wait() -> None:
    with term("--stage", "3", "--ranks", "3") as shown:
        shown.press("umessage\r")
        shown.wait_for("stands before message", STATUS)
        shown.press("n")
        lines = "\n".join(shown.wait_for("joined"))
        assert re.search(r"all_gather #0: rank 0 joined, waits for ranks 1-2", lines)
        assert re.search(r"rank 0 ──[\d,]+ B→ each of the others", lines)
        assert "in all_gather #0," in lines


@pytest.mark.slow
def test_words_that_mean_nothing_are_reported_and_the_world_stays() -> None:
    with zerosim.debug(config(stage=2, ranks=2), start="collective") as world:
        events = f"{len(world.events):,} events"
    with term("--ranks", "2", "--stage", "2") as shown:
        for words, message in (
            ("al_gather", "did you mean all_gather?"),
            ("rank=two", "rank 'two': expected a whole number"),
            ("rank=2", "ranks 0 to 1"),
            ("color=red", "'color=red': expected"),
            ("alloc free", "was named already"),
        ):
            shown.press(f"u{words}\r")
            assert f"step 0 · {events}" in shown.wait_for(message, STATUS)[0]
        shown.press("5")
        shown.wait_for("rank 5: this world has ranks 0 to 1", STATUS)
        shown.press("x")
        shown.wait_for("unknown key 'x'", STATUS)
        shown.press("uabx\x7fc")
        shown.wait_for("until [all_gather]: abc_", STATUS)
        shown.press("\x1b")
        shown.wait_for("abc_", STATUS, there=False)  # else Escape is taken for the beginning of what follows
        shown.press("#1\r")
        shown.wait_for("rank 1 performed one event", STATUS)


@pytest.mark.slow
def test_pages_open_scroll_and_close() -> None:
    with term("--ranks", "3", "--stage", "3") as shown:
        shown.press("uend_of_backward\r")
        shown.wait_for("stands before end_of_backward", STATUS)
        for key, title in (("l", "live buffers"), ("o", "who updates which slice"), ("p", "parameters"), ("?", "keys")):
            shown.press(key)
            lines = shown.wait_for(title, 0)
            assert len(lines) == 24
            shown.press("\x1b")
            shown.wait_for("ZeRO-3 on 3 ranks", 0)
        shown.press("l0")
        shown.wait_for("rank 0:", 0)
        shown.press("\x1b[C")
        shown.wait_for("rank 1:", 0)
        shown.press("\x1b[B")
        shown.wait_for("lines 2 to", 0)
        shown.press("p")  # from one page to another, as of the same rank
        shown.wait_for("rank 1: 16 parameters", 0)
        shown.press("p")
        shown.wait_for("ZeRO-3 on 3 ranks", 0)


@pytest.mark.slow
def test_ctrl_c_stops_a_jump_and_then_quits() -> None:
    with term("--ranks", "4", "--stage", "3", "--steps", "500") as shown:
        shown.press("r")
        shown.wait_for("Ctrl-C stops here", STATUS)
        shown.press("\x03")
        shown.wait_for("stopped early", STATUS)
        shown.press("n")
        shown.wait_for("performed one event", STATUS)
        shown.press("\x03")
        assert shown.end() == 130
        assert shown.is_restored()


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_restores_the_terminal(number: signal.Signals, code: int) -> None:
    with term("--ranks", "2") as shown:
        shown.process.send_signal(number)
        assert shown.end() == code
        assert shown.is_restored()


@pytest.mark.slow
def test_it_is_drawn_anew_when_the_terminal_changes_its_size() -> None:
    with term("--ranks", "8", size=(80, 24)) as shown:
        assert "ranks 0-3 of 8" in shown.screen[3]
        shown.resize(120, 40)
        shown.process.send_signal(signal.SIGWINCH)
        assert len(shown.wait_for("ranks 0-5 of 8")) == 40
        shown.resize(30, 8)
        shown.process.send_signal(signal.SIGWINCH)
        shown.wait_for("30 x 8 is too small")


@pytest.mark.slow
def test_a_failing_run_is_reported_and_can_be_looked_at() -> None:
    with term("--ranks", "2", "--stage", "0", "--capacity", "80KB") as shown:
        shown.press("f")
        lines = shown.wait_for("the run has failed", 0)
        assert "rank 0 is out of memory" in status_of(lines)
        shown.press("e")
        assert "rank 0 is out of memory" in "\n".join(shown.wait_for("the last message", 0))
        shown.press("\x1b")
        shown.wait_for("the run has failed", 0)
        shown.press("l")
        shown.wait_for("live buffer", 0)
        shown.press("\x1bb")
        shown.wait_for("back by 1", STATUS)
        shown.press("q")
        assert shown.end() == 0


@pytest.mark.slow
def test_no_color_and_an_encoding_without_arrows() -> None:
    with term("--ranks", "2", NO_COLOR="1", PYTHONIOENCODING="ascii") as shown:
        shown.press("umessage\rnn")
        shown.wait_for("B> each of the others")
        assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|4[0-7]|38|48)[;m]", shown.output)
        assert shown.output.isascii()


@pytest.mark.slow
def test_a_dumb_terminal_gets_text() -> None:
    with term("--ranks", "2", "--steps", "1", TERM="dumb") as shown:
        assert shown.end() == 0
        assert "\x1b" not in shown.output
        assert "rank 1" in shown.output


# -- piped --------------------------------------------------------------------------------------
def piped(*flags: str) -> list[str]:
    done = finished([sys.executable, "-m", "zerosim", "step", *FLAGS, *flags])
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("steps", [1, 2])
def test_piped_it_prints_every_event_of_its_steps(steps: int) -> None:
    flags = ["--steps", str(steps)] if steps > 1 else []
    with zerosim.debug(config()) as world:
        for _ in range(steps):
            coming = world.finish_step()
        number_of_events = len(world.events)
        assert coming is not None
        world.back(number_of_events)
        done = [world.next() for _ in range(number_of_events)]
        expected = [(moment.rank, moment.number, moment.text) for moment in done]
    lines = piped("--stage", "3", "--ranks", "3", *flags)
    assert [re.fullmatch(r"rank (\d+) +(\d+)  (.*)", line).groups() for line in lines] == [  # type: ignore[union-attr]
        (str(rank), str(number), text) for rank, number, text in expected
    ]
    assert {rank for rank, _, _ in expected} == {0, 1, 2}


def test_on_too_small_a_device_it_says_what_run_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes that were live at the refusal, and a change that fits; on a page, too."""
    words = ["--layers", "2", "--capacity", "700KB"]
    assert main(["run", *words, "--quiet"]) == 3
    said = capsys.readouterr().err
    assert "Tried for you: --attention flash" in said
    assert main(["step", *words]) == 3
    assert capsys.readouterr().err == said
    assert main(["step", *words, "--html", str(tmp_path / "step.html")]) == 3
    assert capsys.readouterr().err == said


# -- the screen ---------------------------------------------------------------------------------
@pytest.mark.quick(1)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [1, 3, 24])
def test_a_screen_is_as_large_as_the_terminal(size: tuple[int, int], ranks: int) -> None:
    width, height = size
    with zerosim.debug(config(ranks=ranks, stage=3)) as world:
        for _ in range(4):
            drawn = frame(world, most_bytes(world, {}), "status", width, height)
            lines = fitted(drawn, width, height)
            assert len(drawn) == len(lines) == height
            assert max(line.cell_len for line in lines) <= width
            if world.last:
                assert any(f"▶rank {world.last.rank}" in line.plain for line in lines)
            ascii_lines = fitted(drawn, width, height, ascii=True)
            assert all(line.plain.isascii() and line.cell_len <= width for line in ascii_lines)
            world.next(rank=ranks - 1, count=30)
        for page in PAGES:
            for wide, high in (size, (3, 2)):
                title, text = text_of(page, world, 0, "a message\n\nof two lines", wide)
                lines = page_frame(title, text, 0, wide, high)
                assert len(lines) == high
                assert max(line.cell_len for line in fitted(lines, wide, high)) <= wide


class NoTerminal:
    """Draws nothing; on every page or question Escape is pressed."""

    size = (80, 24)

    def draw(self, lines: list[Text]) -> None: ...

    def take_interrupt(self) -> bool:
        return False

    def read_key(self) -> str:
        return "escape"


def test_every_key_of_the_help_does_something() -> None:
    stepper = Stepper(config(ranks=2, steps=1), NoTerminal())  # type: ignore[arg-type]
    with contextlib.closing(stepper.world):
        stepper.press("c")
        for key in [key for keys, _, _ in KEYS for key in keys.split(", ")]:
            if key not in ("q", "Ctrl-C"):  # `run` sees to these
                stepper.press({"0-9": "1"}.get(key, key))
                assert not stepper.status.startswith("unknown key")
        stepper.press("x")
        assert stepper.status.startswith("unknown key")
    stepper.world.close()


def test_bytes_on_the_screen_are_the_ledgers() -> None:
    with zerosim.debug(config(ranks=2)) as world:
        world.until("end_of_backward")
        lines = [line.plain for line in picture(world, 120, 40)]
        cells = [[cell.split() for cell in line.split("│")] for line in lines if "│" in line]
        for rank in world.ranks:
            memory = rank.memory()
            column = [row[rank.rank] for row in cells]
            assert ["bytes", f"{memory.total_bytes:,}"] in column
            for nbytes in memory.by_kind.values():
                assert any(cell and cell[-1] == f"{nbytes:,}" for cell in column)


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (200, 60)])
def test_bars_of_all_ranks_share_one_scale_and_the_longest_has_the_room_there_is(size: tuple[int, int]) -> None:
    width, height = size
    with zerosim.debug(config(ranks=3, partition="owner", layers=2)) as world:
        world.until("end_of_backward", rank=2)
        lines = [line.plain for line in picture(world, width, height)]
        memories = [rank.memory().by_kind for rank in world.ranks]
    cells = [line.split("│") for line in lines if "│" in line]
    bars = [
        (by_kind.get(kind, 0), max(len(re.match(f"{letter}*", row[rank]).group()) for row in cells))  # type: ignore[union-attr]
        for rank, by_kind in enumerate(memories)
        for letter, kind in (("P", "param"), ("O", "optim"), ("G", "grad"))
    ]
    most, longest = max(bars)
    column = len(cells[0][0])
    number = 0 if height >= 40 else len(f"{most:,}") + 1  # in a line of its own, or beside the bar
    assert longest >= column - number - 2
    assert len(set(bars)) > 5
    for nbytes, length in bars:
        assert abs(length - longest * nbytes / most) <= 1, nbytes


def test_a_bar_keeps_its_row_when_its_bytes_are_gone() -> None:
    with zerosim.debug(config(ranks=2), start="collective") as world:
        before = most_bytes(world, {})
        world.until("free", kind=None, rank=0, unit="wte")
        gathered = most_bytes(world, before)
        world.until("end_of_forward", rank=1)
        assert "unsharded_param" in gathered
        assert "unsharded_param" not in world.ranks[1].memory().by_kind
        after = fitted(frame(world, most_bytes(world, gathered), "", 80, 24), 80, 24)
    lines = [line.plain.partition("│")[2] for line in after]
    assert any(re.match(r"p +0 ", line) for line in lines)


def test_a_long_status_is_shown_in_full() -> None:
    words = " ".join(f"word{number}" for number in range(20))
    with zerosim.debug(config(ranks=2)) as world:
        lines = [line.plain for line in picture(world, 60, 20, words)]
    assert len(lines) == 20
    assert words in " ".join(line.strip() for line in lines)


@pytest.mark.parametrize("size", [(60, 20), (40, 12)])
def test_a_status_longer_than_its_room_says_where_all_of_it_is(size: tuple[int, int]) -> None:
    with zerosim.debug(config(ranks=2)) as world:
        lines = [line.plain for line in picture(world, *size, "many words " * 20)]
        page = text_of("e", world, 0, "many words " * 20, size[0])[1]
    assert lines[-2].endswith(" … e: all of it")
    assert any("rank 0" in line for line in lines[3:])
    assert " ".join(line.plain for line in page).split() == ["many", "words"] * 20


def test_colour_ends_where_the_letters_do() -> None:
    with zerosim.debug(config(ranks=2)) as world:
        world.until("end_of_forward")
        lines = picture(world, 80, 24)
    coloured = [
        line.plain[span.start : span.end] for line in lines for span in line.spans if "white on" in str(span.style)
    ]
    assert len(coloured) > 4
    assert all(len(set(letters)) == 1 and letters[0].isalpha() for letters in coloured)
    assert not any("white on" in str(line.style) for line in lines)


def test_ranks_that_fit_stand_around_the_last() -> None:
    assert list(shown_ranks(4, 80, 0)) == [0, 1, 2, 3]
    assert list(shown_ranks(64, 80, 30)) == [28, 29, 30, 31]
    assert list(shown_ranks(64, 60, 63)) == [61, 62, 63]
    assert list(shown_ranks(64, 10, 7)) == [7]


def test_until_has_the_grammar_of_the_world() -> None:
    assert parse_until("all_gather") == Match("all_gather")
    assert parse_until("all-to-all").checked(2, [], 1) == Match("all_to_all")
    assert parse_until("rank=2 phase=backward, unit='h.1'") == Match(rank=2, phase="backward", unit="h.1")
    assert parse_until("alloc kind=unsharded_param step=3") == Match("alloc", kind="unsharded_param", step=3)
    with pytest.raises(InputError, match="did you mean phase"):
        parse_until("phas=backward")


def test_keys_in_what_was_typed() -> None:
    assert split_keys("n\x1b[A\x1b[5~q\x1b") == ["n", "up", "page up", "q", "escape"]
    assert split_keys("\x1b[200~x\x7f\r \x00") == ["unknown", "x", "backspace", "enter", "space"]


def test_columns_of_a_mesh_say_where_their_ranks_stand() -> None:
    """Below each rank's name its coordinates; a mesh of one axis has no such line."""
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "seq": 8, "micro_batch": 1, "accumulate": 2, "stage": 1}
    with zerosim.debug(RunConfig(**sizes, ranks=4, tp=2, pp=2)) as world:
        lines = [line.plain for line in picture(world, 160, 30)]
        assert len(lines) <= 30
        assert lines[5].split("│")[0].strip() == "pp 0 tp 0"
        assert lines[5].split("│")[3].strip() == "pp 1 tp 1"
        assert "pp 2 x tp 2" in lines[0]


def test_tokens_on_their_way_to_experts_are_rows() -> None:
    """A line for each rank that has joined, with an arrow to each other one."""
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "seq": 8, "micro_batch": 1, "experts": 3, "top_k": 2}
    with zerosim.debug(RunConfig(**sizes, ranks=3, ep=3, steps=1)) as world:
        while not (rows := [line.plain for line in picture(world, 160, 40) if line.plain.count(" rows, ") == 2]):
            world.next()
    arrow = r"──\d+ rows?, [\d,]+ B→ rank \d"
    assert re.fullmatch(rf"rank \d {arrow}  {arrow}", rows[0].rstrip())
