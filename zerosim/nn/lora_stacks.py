"""Adapters of experts' stacks, as PEFT's `target_parameters` have them: added to a copy of all experts' maps.

A (E r, I) and B (O, r E). The copy is made in forward and kept for backward, and has a gradient of its size: about as
many bytes as all experts of the layer, each. Source: peft 0.21, tuners/lora/layer.py, ParamWrapper.
"""

from __future__ import annotations

from collections.abc import Callable

from zerosim import functional as F
from zerosim.nn.context import LayerContext
from zerosim.nn.lora import is_target
from zerosim.tensor.tensor import Operand, Parameter


def reads_of(at: LayerContext, stack: Parameter, inner: int, wide: int, *, transposed: bool) -> Callable[[], Operand]:
    """Return how a stack of maps (`inner`, `wide`) is read: as it is or, if it is a target, with a new adapter."""
    tuning, rank = at.tuning, at.tuning.lora_rank * stack.shape[0]
    if not rank or not any(is_target(word, at.name, ("experts",), is_part=True) for word in tuning.targets):
        return lambda: stack
    std = float((3 * inner) ** -0.5)  # as of other adapters
    a = at.declare("lora_A.weight", (rank, inner), std=std, reads_input=False)
    b = at.declare("lora_B.weight", (wide, rank), reads_input=False)
    return lambda: F.stack_with_adapter(stack, a, b, tuning.scale, transposed=transposed)
