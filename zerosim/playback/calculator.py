"""The calculator: one page on which closed forms answer, for a model, ranks and a ZeRO stage of your choice.

    text = calculator(expressions(config_of, MODELS), words)

The page evaluates the forms that `analysis/expressions.py` exports, and has none of its own. Its frame is the player's:
one file, no network, no script but its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from zerosim.analysis.formulas.letters import LETTERS
from zerosim.config.presets import hardware
from zerosim.playback.html import document, read
from zerosim.playback.looks import looks

KINDS = ("param", "grad", "optim", "comm", "activation")
FIRST: Mapping[str, int | str] = {
    "model": "gpt2-xl", "ranks": 64, "tp": 1, "stage": 3, "precision": "bf16", "recompute": "none",
    "recipe": "paper", "micro_batch": 1, "gpu": "a100-80",
}  # fmt: skip
TITLE = "What does a GPU hold in ZeRO, and what does it send?"
OWN = ("N", "b", "s", "Ψ_r")
"""Letters of a control (ranks, microbatch, sequence), and what Ψ means on a mesh."""


def calculator(expressions: Mapping[str, Any], words: Sequence[str]) -> str:
    """Return the page. `words` are the options of the command that counts a point, in order."""
    shown = {name: kind for name, kind in looks()["kinds"].items() if name in KINDS}
    names = {
        letter for model in expressions["models"] for tp in model["tp"].values() for letter in tp.get("letters", ())
    }
    named = [model["name"] for model in expressions["models"]]
    data = {
        "schema": "zerosim-calculator",
        **expressions,
        "words": words,
        "title": TITLE,
        "first": {**FIRST, "model": first if (first := FIRST["model"]) in named else named[0]},
        "kinds": {name: shown[name]["word"] for name in KINDS},
        "letters": {x: LETTERS[x].meaning for x in sorted({*names, *OWN}) if x in LETTERS},
        "gpus": {device.name: device.memory_bytes for device in hardware.presets()},
    }
    return document("calculator", TITLE, _style(shown), _script(), json.dumps(data, separators=(",", ":")))


def _style(shown: Mapping[str, Mapping[str, str]]) -> str:
    """Return the style, with the kinds' and themes' colours that all reports share."""
    themes = looks()["themes"]
    rules = {
        theme: "".join(f"--{name}: {colour};" for name, colour in themes[theme].items())
        + "".join(f"--{name}: {kind[theme]};" for name, kind in shown.items())
        for theme in ("light", "dark")
    }
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {rules['dark']} }} }}"
    return f"\n:root {{ {rules['light']} }}\n{dark}\n{read('calculator.css')}"


def _script() -> str:
    return "\n(() => {\n'use strict';\n" + read("expressions.js") + read("calculator.js") + "})();\n"
