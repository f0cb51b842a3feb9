"""What a layer is told while it is declared: the model's sizes, the place of its parameters, how it is to run.

A layer's constructor takes one of these, and beside it only what two layers of one kind differ in, such as a width.
The field's `prefix`, `config` and process groups, which other code hands down one by one, are this one value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from zerosim.config.model import ModelConfig
from zerosim.functional.policy import ActivationPolicy
from zerosim.nn.group import Group
from zerosim.nn.leaf import LeafModule, Tensors
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import DropoutKeys
from zerosim.tensor.tensor import Parameter, Tensor

Layer = TypeVar("Layer", bound=Callable[[Tensor], Tensor])
More = ParamSpec("More")


class LayerContext(NamedTuple):
    """Where a layer stands in a model, while it is declared.

    sizes    the model's
    within   what takes its parameters: its unit's flat buffer or, by module, a buffer for each tensor
    name     what its parameters' names begin with
    group    what its work is divided over
    policy   what it keeps for backward
    keys     which random numbers its dropout draws
    """

    sizes: ModelConfig
    within: Flat | Tensors
    name: str
    group: Group
    policy: ActivationPolicy
    keys: DropoutKeys

    def __truediv__(self, name: str) -> LayerContext:
        """The same, for a layer of this layer."""
        return self._named(f"{self.name}.{name}", self.within)

    def beside(self, name: str) -> LayerContext:
        """The same under another last name: of attn.qkv_proj, `beside("q_proj")` is attn.q_proj."""
        return self._named(f"{self.name.rpartition('.')[0]}.{name}", self.within)

    def declare(self, name: str, shape: tuple[int, ...], **how: Any) -> Parameter:
        """A parameter of this layer; see `Flat.declare`."""
        return self.within.declare(f"{self.name}.{name}", shape, **how)

    def leaf(
        self,
        name: str,
        layer: Callable[Concatenate[LayerContext, More], Layer],
        *more: More.args,
        **named: More.kwargs,
    ) -> Layer | LeafModule:
        """`layer` of this layer, in its unit's flat buffer or, by module, as a leaf with buffers of its own."""
        here = self / name
        if isinstance(self.within, Flat):
            return layer(here, *more, **named)
        return self.within.leaf(here.name, lambda own: layer(here._named(here.name, own), *more, **named))

    def _named(self, name: str, within: Flat | Tensors) -> LayerContext:
        return LayerContext(self.sizes, within, name, self.group, self.policy, self.keys)

    @property
    def std(self) -> float:
        """Of a weight's initial normals: 0.8 / sqrt(D), which is GPT-2's 0.02 at its largest width, 1600."""
        return float(0.8 / self.sizes.hidden**0.5)

    @property
    def std_out(self) -> float:
        """The same for the last map of a branch, divided by sqrt(2L) as in GPT-2."""
        return float(0.8 / (2 * self.sizes.layers * self.sizes.hidden) ** 0.5)


MakeLayer = Callable[[LayerContext], Callable[[Tensor], Tensor]]
"""A layer's class, or a function that gives one."""
