"""A slide, and what slides are made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zerosim.lessons.lecture.counted import Plans
from zerosim.lessons.lecture.pieces import SvgOf


class Slide(NamedTuple):
    """A slide: its title, its body as HTML, the speaker's notes, the commands that count its figures, and the names of
    the player's moments that it links to."""

    title: str
    body: str
    notes: tuple[str, ...]
    commands: tuple[str, ...] = ()
    moments: tuple[str, ...] = ()
    kind: str = "claim"


class Show(NamedTuple):
    """What slides are made with: plans by their words, pictures by theirs, moments of the player by name."""

    plans: Plans
    svg_of: SvgOf
    moments: Mapping[str, tuple[str, str]]


def claimed(title: str, holds: object) -> str:
    """Return a title. Raises: AssertionError with the title if its plans do not bear it out."""
    if not bool(holds):
        raise AssertionError(f"claim does not hold: {title}")
    return title
