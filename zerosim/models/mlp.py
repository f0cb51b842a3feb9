"""A multi-layer perceptron over bytes of context: the smallest model with units, for lessons and tests.

wte embeds each token; the tokens before a position are not mixed, so it learns a bigram-like table
through `layers` hidden maps with GELU. Units: wte, layers.0 .. layers.L-1, lm_head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zerosim import functional as F
from zerosim.device.device import Device
from zerosim.dtypes import DType
from zerosim.errors import InputError
from zerosim.models.model import Model
from zerosim.nn import Linear, Tensors, Unit
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """Sizes of an MLP: `layers` maps (hidden, hidden) between an embedding and a head.

    Raises: InputError for sizes below 1.
    """

    layers: int = 2
    hidden: int = 64
    vocab: int = 256

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "vocab"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: expected at least 1")


def build_mlp(config: MLPConfig, device: Device, dtype: DType, grad_dtype: DType, *, by_module: bool = False) -> Model:
    """The units of an MLP, declared and not yet placed: no memory is taken. Each is one module to begin with."""

    def flat(name: str) -> Flat | Tensors:
        return (Tensors if by_module else Flat)(name, device, dtype, grad_dtype)

    std = config.hidden**-0.5
    wte = flat("wte")
    table = wte.declare("wte.weight", (config.vocab, config.hidden), std=std, embedding=True)
    units = [Unit("wte", wte, lambda ids: F.embedding(ids.buffer, table))]
    for i in range(config.layers):
        layer = flat(f"layers.{i}")
        units.append(Unit(layer.name, layer, _hidden(Linear(layer, layer.name, config.hidden, config.hidden, std=std))))
    head = flat("lm_head")
    units.append(Unit("lm_head", head, Linear(head, "lm_head", config.hidden, config.vocab, std=std)))
    return Model(units)


def _hidden(linear: Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: F.gelu(linear(x))
