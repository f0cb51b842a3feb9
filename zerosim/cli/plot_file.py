"""The files that `zerosim plot` leaves: a picture as PNG or SVG, and its numbers as JSON."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from zerosim.cli.outputs import Output, as_json, human_stream, output, written
from zerosim.cli.parser import Parser
from zerosim.config import RunConfig
from zerosim.errors import InputError, printable

Drawn = tuple[Any, dict[str, Any]]  # matplotlib's Figure, and its numbers


class Files(NamedTuple):
    """Where the picture goes, in which form, and where its numbers go."""

    picture: Output | None
    form: str
    figures: Output | None


def add_picture_flags(parser: Parser) -> Any:
    """The flags of every picture; what adds others to their group."""
    add = parser.add_argument_group("the picture").add_argument
    add("--out", "-o", metavar="FILE", help="where it goes: a name that ends in .png or .svg")
    add("--theme", choices=("light", "dark"), default="light", help="colours of the sheet (default: light)")
    add("--size", metavar="WxH", type=_inches, help="inches, such as 8x4.5 (default: the figure's)")
    return add


def add_output_flags(parser: Parser) -> None:
    group = parser.add_argument_group("what it leaves")
    group.add_argument("--json", metavar="OUT.json", help="the numbers that are drawn; - for stdout")
    group.add_argument("--quiet", "-q", action="store_true", help="do not say what was written")


def figure_files(args: argparse.Namespace, *configs: RunConfig) -> Files:
    """Raises: InputError for a file that cannot be drawn into or written, or that the configurations read."""
    form = (args.out or "").rpartition(".")[2].lower()
    if args.out is None:
        raise InputError("--out: expected a file to draw into, such as -o memory.svg")
    if form not in ("png", "svg"):
        raise InputError(f"--out {args.out}: expected a name that ends in .png or .svg")
    picture = output(args, "out", *configs)
    return Files(picture, form, output(args, "json", *configs, apart=picture))


def check_sheet(args: argparse.Namespace) -> None:
    """Raises: InputError for a size that no picture has; matplotlib is there from here on."""
    with _no_backend():
        from zerosim.report.plots.page import check_size
    if args.size is not None:
        check_size(args.size)


def leave(args: argparse.Namespace, files: Files, drawn: Drawn, about: dict[str, Any], said: str = "") -> None:
    """Write the picture, and its numbers after `about` them; then say so, and what else is `said`."""
    from zerosim.report.plots.page import write_figure

    figure, numbers = drawn
    values = {"schema": 1, **about, **numbers}
    picture = files.picture, lambda file: write_figure(figure, file, files.form)
    with written(picture, (files.figures, as_json(lambda: values))):
        pass  # what is said below is only true where nothing failed
    if not args.quiet:
        print(f"wrote {printable(args.out)}{said}", file=human_stream(args))


@contextmanager
def _no_backend() -> Iterator[None]:
    """matplotlib is not to read MPLBACKEND: a picture goes into a file, and no window is named wrongly."""
    named = os.environ.pop("MPLBACKEND", None)
    try:
        yield
    finally:
        if named is not None:
            os.environ["MPLBACKEND"] = named


def _inches(text: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d+(?:\.\d*)?)[x×](\d+(?:\.\d*)?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected inches, width x height, such as 8x4.5")
    return float(match[1]), float(match[2])
