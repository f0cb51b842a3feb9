"""GPT-2's architecture as units: wte, wpe, h.0 .. h.L-1, ln_f, lm_head. Names and layouts are GPT-2's.

The token table is a unit of its own, so that a tied head can share exactly it. Initial weights are normal with std
0.8 / sqrt(D), which is GPT-2's 0.02 at its largest width, 1600, and keeps narrow models from crawling; output
projections of the two branches are divided by sqrt(2L), as in GPT-2; biases are 0.
"""

from __future__ import annotations

from zerosim.models.builder import Builder
from zerosim.models.model import Model
from zerosim.nn.layers import Block, LayerNorm, Positions


def build_gpt(new: Builder) -> Model:
    """Build the units of a GPT. `seq` and `positions` are its longest context."""
    between = [new.unit("wpe", Positions), *new.blocks("h", Block), new.unit("ln_f", LayerNorm)]
    return new.language_model("wte", between)
