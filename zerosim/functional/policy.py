"""How ops treat what their backward will need: three choices that change bytes and work, never the meaning.

What each one keeps is documented with the ops (`norm.py`, `attention.py`) and with recompute (`nn/recompute.py`).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from zerosim.errors import InputError

SAVES = ("lean", "megatron")
ATTENTIONS = ("eager", "flash")
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """What is kept from forward to backward.

    saves       'lean': what zerosim's own kernels need; 'megatron': what Megatron's keep (2205.05198, section 4)
    attention   'eager': scores are materialised (B, H, T, T); 'flash': they never are
    recompute   'none'; 'selective': the attention core runs again in backward; 'full': the whole block does

    `saves` and `recompute` change no bit of any result. 'flash' adds in another order than 'eager'
    and is within rounding of it. Raises: InputError for a name that is none of these.
    """

    saves: str = "lean"
    attention: str = "eager"
    recompute: str = "none"

    def __post_init__(self) -> None:
        for name, known in (("saves", SAVES), ("attention", ATTENTIONS), ("recompute", RECOMPUTES)):
            value = getattr(self, name)
            if value not in known:
                near = difflib.get_close_matches(str(value), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InputError(f"{name} {value!r}: expected one of {', '.join(known)}{hint}")


DEFAULT = ActivationPolicy()
