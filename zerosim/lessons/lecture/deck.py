"""The deck: its slides as one page, which moves by keys and prints one slide a page with the speaker's notes."""

from __future__ import annotations

import html
import json
import re

from zerosim.lessons.lecture.beyond import beyond
from zerosim.lessons.lecture.pieces import command
from zerosim.lessons.lecture.slide import Show, Slide
from zerosim.lessons.lecture.stages import opening, zero
from zerosim.playback.html import document, read
from zerosim.playback.looks import looks

TITLE = "ZeRO: keep a shard, gather the rest"
KEYS = (
    ("→ space", "show the answer, then the next slide"),
    ("←", "back"),
    ("1 to 9", "on a question: the room's choice. Elsewhere: a slide's number, then Enter"),
    ("Enter", "compare with the count; show the answer"),
    ("Home End", "first slide, last slide"),
    ("s", "speaker's notes"),
    ("t", "light or dark"),
    ("f", "full screen"),
    ("? Esc", "these keys; close"),
)


def slides(show: Show) -> list[Slide]:
    """Count every figure of the lecture and return its slides, in order."""
    return [*opening(show), *zero(show), *beyond(show)]


def deck(show: Show, all_slides: list[Slide]) -> str:
    """Return the deck's page."""
    sections = "".join(_section(show, slide, number, len(all_slides)) for number, slide in enumerate(all_slides, 1))
    keys = "".join(f"<tr><td>{keys}</td><td>{does}</td></tr>" for keys, does in KEYS)
    body = (
        f"{sections}<nav><button type=button data-key=ArrowLeft aria-label=back>‹</button><span></span>"
        "<button type=button data-key=ArrowRight aria-label=next>›</button>"
        "<button type=button data-key=? aria-label=keys>?</button></nav>"
        f'<section class="keys" hidden><h2>Keys</h2><table>{keys}</table></section>'
    )
    data = {
        "schema": "zerosim-lecture",
        "slides": [{"title": plain(one.title), "commands": list(map(whole, one.commands))} for one in all_slides],
    }
    script = f"\n(() => {{\n'use strict';\n{read('deck.js')}}})();\n"
    return document("deck", TITLE, style(), script, json.dumps(data, ensure_ascii=False), body)


def _section(show: Show, slide: Slide, number: int, of: int) -> str:
    links = "".join(
        f'<a href="player.html#{address}">{words}</a>'
        for words, address in (show.moments[one] for one in slide.moments)
    )
    links = f'<p class="moments">In the player: {links}</p>' if links else ""
    counted = f"<p>Counted by {', '.join(_grouped(slide.commands))}.</p>" if slide.commands else ""
    notes = "".join(f"<p>{note}</p>" for note in slide.notes) + counted
    return (
        f'<section class="slide {slide.kind}" id="s{number}" tabindex="-1" aria-label="slide {number} of {of}">'
        f'<div class="sheet"><h1>{slide.title}</h1><div class="body">{slide.body}</div>{links}</div>'
        f"<aside>{notes}</aside></section>"
    )


def _grouped(commands: tuple[str, ...]) -> list[str]:
    """Return commands as HTML, each once with the other ZeRO stages that it stands for."""
    stages: dict[str, list[str]] = {}
    for one in commands:
        words, flag, rest = whole(one).partition(" --stage ")
        stages.setdefault(f"{words}{flag}{{}}{rest[1:]}", []).append(rest[:1])
    return [
        command(words.format(first)) + (f" and --stage {', '.join(others)}" if others else "")
        for words, (first, *others) in stages.items()
    ]


def whole(words: str) -> str:
    """Return a command: `plan` unless the words begin with another verb."""
    return f"plan {words}" if words.startswith("-") else words


def plain(text: str) -> str:
    """Return text without tags."""
    return html.unescape(re.sub("<[^>]*>", "", text))


def style() -> str:
    """Return the style of the lecture's pages, with the colours that all reports share."""
    look = looks()
    rules = {
        theme: "".join(f"--{name}: {colour};" for name, colour in look["themes"][theme].items())
        + "".join(
            f"--{name}: {paint[theme]};" for part in ("kinds", "verbs") for name, paint in look[part].items() if name
        )
        + f"--in-{theme}: block; --in-{other}: none;"
        for theme, other in (("light", "dark"), ("dark", "light"))
    }
    fills = "".join(
        f".{name} {{ fill: var(--{name}); --fill: var(--{name}); }}\n"
        for part in ("kinds", "verbs")
        for name in look[part]
        if name
    )
    return (
        f"\n:root {{ {rules['light']} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {rules['dark']} }} }}\n"
        f"@media screen {{ :root[data-theme=dark] {{ {rules['dark']} }} }}\n"
        f"@media screen {{ :root[data-theme=light] {{ {rules['light']} }} }}\n"
        f"{fills}{read('deck.css')}"
    )
