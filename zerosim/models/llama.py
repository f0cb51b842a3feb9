"""Llama's architecture as units: embed_tokens, layers.0 .. layers.L-1, norm, lm_head.

Parameters are named and laid out as in Hugging Face's LlamaForCausalLM. Initial weights are drawn as in `gpt.py`.
There is no dropout.

Source: arXiv 2302.13971, section 2.2; grouped-query attention, arXiv 2307.09288, section 2.2.
"""

from __future__ import annotations

from zerosim.models.builder import Builder
from zerosim.models.model import Model
from zerosim.nn.llama import LlamaBlock, RMSNorm


def build_llama(new: Builder) -> Model:
    """Build the units of a Llama."""
    between = [*new.blocks("layers", LlamaBlock, "model."), new.unit("norm", RMSNorm, "model.")]
    return new.language_model("embed_tokens", between, "model.")
