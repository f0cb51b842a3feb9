"""The page: one file with its data, its style and its script, that asks nothing of the network.

A content security policy names the hashes of the one script and the one style, so that nothing else runs. The data are
JSON in a block that no browser executes, with every '<', '>' and '&' escaped; the script puts texts into the page as
text alone. The script is plain JavaScript, in files that are read on their own and joined here.
"""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path

from zerosim.playback.encode import Data, as_text
from zerosim.playback.squeeze import squeezed

_FOLDER = Path(__file__).parent / "page"
SCRIPTS = ("data", "moment", "words", "world", "track", "panel", "player")
"""In the order in which they are joined: each uses what comes before it."""
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
<main id="player"><noscript>This page moves by its own script, and this browser runs none.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page(data: Data) -> str:
    """The page of the data that `encode` made."""
    style, script = style_text(), script_text()
    return _PAGE.format(
        script_hash=_hash(script),
        style_hash=_hash(style),
        title=html.escape(title_of(data)),
        style=style,
        data=_escaped(as_text(data)),
        script=script,
    )


def title_of(data: Data) -> str:
    """'ZeRO-3 on 4 ranks': what the page is called."""
    first, *others = (run["about"] for run in data["runs"])
    more = "".join(f", {run['name']}" for run in data["runs"][1:])
    return f"{first}{' beside' + more[1:] if others else ''}: a step of zerosim"


def style_text() -> str:
    return "\n" + _read("player.css")


def script_text() -> str:
    """The script: its files joined, in a scope of their own."""
    return "\n(() => {\n'use strict';\n" + squeezed("".join(_read(f"{name}.js") for name in SCRIPTS)) + "})();\n"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    """JSON that ends no block of a page, whatever its texts say."""
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
