"""`zerosim lecture`: write a lecture on ZeRO into a folder: a deck, a player, a calculator, and a page a lesson."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from zerosim.cli import plot
from zerosim.cli.folders import Folder
from zerosim.cli.outputs import written
from zerosim.cli.page import calculator_page, config_of_words
from zerosim.cli.parser import Parser
from zerosim.errors import printable
from zerosim.units import format_bytes

if TYPE_CHECKING:
    from zerosim.lessons.lecture.slide import Show

MODELS = ("gpt2", "gpt2-xl", "gpt3-175b", "llama3.2-1b", "llama3.1-8b", "llama3.1-70b", "qwen3-32b")
"""The models of the lecture's calculator."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a new or empty folder for the lecture's pages")
    parser.epilog = (
        "deck.html        claims with counted figures, and questions for the room.\n"
        "                 Print it for a PDF with the speaker's notes.\n"
        "player.html      a step of DDP, ZeRO-1, 2 and 3, with links from the deck.\n"
        "calculator.html  memory and traffic of a model of your choice.\n"
        "handouts.html    a printed page for each lesson with exercises.\n\n"
        "The pages need neither network nor zerosim. In the deck, ? shows the keys."
    )


def main(args: argparse.Namespace) -> int:
    folder = Folder("DIR", args.folder)
    folder.check()
    pages = lecture_pages() | {"calculator.html": calculator_page(MODELS)}

    def fill(inside: Path) -> None:
        for name, text in pages.items():
            (inside / name).write_text(text, "utf-8")

    with written((folder, fill)):
        pass  # the text below is only true if nothing failed
    for name, text in pages.items():
        print(f"{printable(str(Path(args.folder) / name))}, {format_bytes(len(text.encode()))}")
    print("Open deck.html in a browser and press ? for its keys.")
    return 0


def lecture_pages() -> dict[str, str]:
    """Count every figure of the lecture, and return its pages by their names, the calculator apart."""
    from zerosim.lessons.lecture.counted import played
    from zerosim.lessons.lecture.deck import deck, slides
    from zerosim.lessons.lecture.handouts import handouts
    from zerosim.playback.html import page

    data = played()
    show = show_of(data)
    return {
        "deck.html": deck(show, slides(show)),
        "player.html": page(data),
        "handouts.html": handouts(),
    }


def show_of(data: dict[str, object]) -> Show:
    """Return what the lecture's slides are made with."""
    from zerosim.lessons.lecture.counted import Plans, moments
    from zerosim.lessons.lecture.slide import Show

    return Show(Plans(lambda words: config_of_words(words.split())), svg_of, moments(data))


def svg_of(words: str, theme: str) -> str:
    """Return the picture that `zerosim plot` draws for these words."""
    parser = Parser("zerosim plot", "")
    plot.add_arguments(parser)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.svg"
        plot.main(parser.parse([*words.split(), "--theme", theme, "--out", str(file), "--quiet"]))
        return file.read_text("utf-8")
