"""A multi-layer perceptron over bytes of context: the smallest model with units, for lessons and tests.

wte embeds each token; it does not mix tokens, so it learns a bigram-like table
through `layers` hidden maps with GELU. Units: wte, layers.0 .. layers.L-1, lm_head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zerosim import functional as F
from zerosim.models.builder import Builder
from zerosim.models.model import Model
from zerosim.nn import Linear
from zerosim.nn.context import LayerContext
from zerosim.tensor.tensor import Tensor


def build_mlp(new: Builder) -> Model:
    """Build the units of an MLP. Each is a single module, and none is cut over a group."""
    sizes, std = new.sizes, new.sizes.hidden**-0.5

    def table(here: LayerContext) -> Callable[[Tensor], Tensor]:
        weight = here.declare("weight", (sizes.vocab, sizes.hidden), std=std, embedding=True)
        return lambda ids: F.embedding(ids.buffer, weight)

    def hidden(here: LayerContext) -> Callable[[Tensor], Tensor]:
        linear = Linear(here, sizes.hidden, std=std)
        return lambda x: F.gelu(linear(x))

    layers = [new.unit(f"layers.{i}", hidden) for i in new.numbers(sizes.layers)]
    return new.model([new.unit("wte", table), *layers, new.unit("lm_head", partial(Linear, wide=sizes.vocab, std=std))])
