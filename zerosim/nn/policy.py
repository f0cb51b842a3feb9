"""How a model treats what backward will need: three choices that change bytes and work, never bits.

Owns the choices and their names. What each one keeps stands with the ops (`functional/`) and with
recompute (`nn/recompute.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """What is kept from forward to backward.

    saves       'lean': what zerosim's own kernels need; 'megatron': what Megatron's keep (2205.05198, section 4)
    attention   'eager': scores are materialised (B, H, T, T); 'flash': they never are
    recompute   'none'; 'selective': the attention core runs again in backward; 'full': the whole block does
    """

    saves: str = "lean"
    attention: str = "eager"
    recompute: str = "none"
