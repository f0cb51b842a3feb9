"""Outputs of notebooks, and what differs between two runs: text number by number, pictures by their size.

Integers exactly, other numbers to 1 part in 1,000 (BLAS libraries differ in the last bits).
"""

from __future__ import annotations

import base64
import json
import re
import struct
from pathlib import Path
from typing import Any

TOLERANCE = 1e-3
NUMBER = re.compile(r"(?:(?<![\w.)])-)?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")


# -- reading -----------------------------------------------------------------------------------------
def read(path: Path) -> list[dict[str, Any]]:
    """The code cells of a notebook that hold code."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]


def outputs(cell: dict[str, Any]) -> list[dict[str, str]]:
    """A cell's outputs as mime type to text. What a stream says in pieces is one output."""
    found: list[dict[str, str]] = []
    for output in cell["outputs"]:
        kind = output["output_type"]
        if kind == "stream":
            stream = f"stream/{output['name']}"
            if found and stream in found[-1]:
                found[-1][stream] += "".join(output["text"])
            else:
                found.append({stream: "".join(output["text"])})
        elif kind == "error":
            found.append({"error": f"{output['ename']}: {output['evalue']}"})
        else:
            found.append(
                {mime: data if isinstance(data, str) else _joined(data) for mime, data in output["data"].items()}
            )
    return found


def _joined(data: Any) -> str:
    is_text = isinstance(data, list) and all(isinstance(line, str) for line in data)
    return "".join(data) if is_text else json.dumps(data, sort_keys=True)


def texts(cell: dict[str, Any]) -> list[str]:
    """All that a cell put out as text."""
    return [text for output in outputs(cell) for mime, text in output.items() if not mime.startswith("image/")]


# -- comparing ---------------------------------------------------------------------------------------
def differences(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """In words, what changed from the outputs of some code cells to those of the same cells run again."""
    found = []
    for number, (before, after) in enumerate(zip(old, new, strict=True), 1):
        was, now = outputs(before), outputs(after)
        if [set(output) for output in was] != [set(output) for output in now]:
            said = "".join(text for output in now for mime, text in output.items() if mime == "stream/stderr")
            kinds = f"outputs were {[sorted(o) for o in was]}, now {[sorted(o) for o in now]}"
            found.append(f"code cell {number}: {kinds}" + f"; stderr: {said.strip()}" * bool(said))
            continue
        for one, other in zip(was, now, strict=True):
            for mime in one:
                what = _difference(mime, one[mime], other[mime])
                found += [f"code cell {number}, {mime}: {what}"] if what else []
    return found


def _difference(mime: str, was: str, now: str) -> str:
    if mime == "image/svg+xml":
        return ""
    if mime == "image/png":
        sizes = png_size(was), png_size(now)
        return "" if sizes[0] == sizes[1] else f"a picture of {sizes[0]} pixels, now {sizes[1]}"
    return text_difference(was, now)


def png_size(data: str) -> tuple[int, int]:
    """Width and height in pixels of a picture in base64."""
    header = base64.b64decode(data)[:24]
    assert header[12:16] == b"IHDR", "not a PNG picture"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


def text_difference(was: str, now: str) -> str:
    """Empty where the words are the same and the numbers close enough; else what differs first."""
    for one, other in zip(_words(was), _words(now), strict=False):
        if one != other:
            return f"{one!r}, now {other!r}"
    numbers = NUMBER.findall(was), NUMBER.findall(now)
    if len(_words(was)) != len(_words(now)) or len(numbers[0]) != len(numbers[1]):
        return f"{was!r}, now {now!r}"
    return next((f"{a}, now {b}" for a, b in zip(*numbers, strict=True) if not same_number(a, b)), "")


def _words(text: str) -> list[str]:
    """What stands between numbers. A number of another width moves blanks and rules, which do not count."""
    return [" ".join(re.sub(r"─+|-{3,}", "─", part).split()) for part in NUMBER.split(text)]


def same_number(was: str, now: str) -> bool:
    """Integers exactly, others to `TOLERANCE` of the larger."""
    if was == now:
        return True
    if was.lstrip("-").replace(",", "").isdigit() and now.lstrip("-").replace(",", "").isdigit():
        return False
    a, b = float(was.replace(",", "")), float(now.replace(",", ""))
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b))
