"""Documents packed into a row: where each begins, and which labels are left. A pure value.

Several documents fill a row of T tokens. Attention stays within each, and a document's last token predicts nothing: its
label would be the next document's first token (Llama 3, arXiv 2407.21783, section 3.2; Megatron's
--reset-attention-mask and --eod-mask-loss). Rotary positions run on: within a document only their differences matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Packing:
    """Documents of `length` tokens each or, if that is 0, documents that end with the token `end`."""

    length: int = 0
    end: int = 0

    def starts(self, row: Any, tokens: int) -> Sequence[int]:
        """Return the positions, from 1 to `tokens`, at which a document begins after another in a row of token ids, an
        array of more than `tokens`."""
        if self.length:
            return range(self.length, tokens + 1, self.length)
        return tuple((1 + (row[:tokens] == self.end).nonzero()[0]).tolist())


def packing_of(text: str) -> Packing | None:
    """Parse 'N' or 'eod:ID'; None for any other text."""
    word, colon, number = text.partition(":") if ":" in text else ("", "", text)
    if not (number.isascii() and number.isdecimal() and len(number) < 10) or word != ("eod" if colon else ""):
        return None
    if colon:
        return Packing(end=int(number))
    return Packing(length=int(number)) if int(number) > 1 else None
