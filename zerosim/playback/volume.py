"""What a rank should send for model states in a step: its closed form, and the words beside the page's bar."""

from __future__ import annotations

import math
import re
from typing import Any

from zerosim.analysis.checks import Checks
from zerosim.analysis.formulas.letters import LETTERS
from zerosim.analysis.shares import itemsizes
from zerosim.train.result import RunResult

_LETTER = re.compile(r"VD|[A-Za-zΨ](?:_\w+)?")


def volume_of(found: Checks, result: RunResult) -> dict[str, Any]:
    """Return the form, its bytes, the bytes of a Ψ on the bar, and the words."""
    total, letters = found.sent[-1], found.of.padded
    n, psi = letters["N"], math.ceil(letters["Ψ"])
    nbytes = math.ceil(total.with_padding)
    unit = math.ceil(letters["Ψ"] * itemsizes(result.config)[0]) * (n - 1) / n
    words = [f"The formula gives {total.text} for a step, {nbytes:,} B."]
    if n > 1:
        whose = "this rank's" if psi < result.num_parameters else "the"
        padded = ", with padding" if psi > result.num_parameters else ""
        words.append(
            f"Each Ψ on the bar is {n - 1}/{n} of {whose} {psi:,} parameters{padded}, {round(unit):,} B: "
            f"a rank does not send its own 1/{n}, {math.ceil(psi / n):,} parameters, to itself."
        )
    for name in dict.fromkeys(_LETTER.findall(total.text)):
        if name in letters and name not in ("Ψ", "N"):
            words.append(f"{name} = {math.ceil(letters[name]):,}: {LETTERS[name].meaning}.")
    none = "The formula gives 0 for a step: nobody else holds the same."
    return {"form": total.text, "bytes": nbytes, "unit": unit, "text": " ".join(words) if nbytes else none}
