"""The page: one file with its data, style and script, which loads nothing from the network.

A content security policy names the hashes of the one script and the one style, so nothing else runs. The data are JSON
in a block that no browser executes, with every '<', '>' and '&' escaped; the script inserts texts as text only. The
script is plain JavaScript, in files that are joined here as they are written.
"""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path

from zerosim.playback.encode import Data, as_text

_FOLDER = Path(__file__).parent / "page"
SCRIPTS = ("data", "moment", "words", "world", "travel", "lecture", "track", "panel", "player")
"""In this order they are joined: each uses the ones before it."""
_NO_SCRIPT = "<noscript>This page moves by its own script, and this browser runs none.</noscript>"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src '{script_hash}'; \
style-src '{style_hash}'; img-src data: blob:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="{main}">{frame}</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page(data: Data) -> str:
    """Return the page of data from `encode`."""
    return document("player", title_of(data), style_text(), script_text(), as_text(data), "\n" + read("player.html"))


def document(main: str, title: str, style: str, script: str, data: str, frame: str = _NO_SCRIPT) -> str:
    """Return a page of one file: its `main` element's name and content, its title, style, script, and data as JSON."""
    return _PAGE.format(
        main=main,
        frame=frame,
        script_hash=_hash(script),
        style_hash=_hash(style),
        title=html.escape(title),
        style=style,
        data=_escaped(data),
        script=script,
    )


def title_of(data: Data) -> str:
    """Return the page's title, such as 'ZeRO-3 on 4 ranks'."""
    first, *others = (run["about"] for run in data["runs"])
    more = "".join(f", {run['name']}" for run in data["runs"][1:])
    return f"{first}{' beside' + more[1:] if others else ''}: a step of zerosim"


def style_text() -> str:
    return "\n" + read("player.css")


def script_text() -> str:
    """Return the script: its files joined, in a scope of their own."""
    return "\n(() => {\n'use strict';\n" + "".join(read(f"{name}.js") for name in SCRIPTS) + "})();\n"


def read(name: str) -> str:
    """Return a file of the pages' folder."""
    return (_FOLDER / name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    """Return JSON that cannot end a block of the page, with any text in it."""
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
