"""The context of a layer while it is declared: the model's sizes, the buffer for its parameters, its settings.

A layer's constructor takes a context, and besides it only properties in which two layers of one kind differ, such as a
width. Other code bases pass `prefix`, `config` and process groups one by one. Here they are this one value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from zerosim.config.parts.experts import DROPLESS, ExpertsConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.tuning import ALL_TRAINED, TuningConfig
from zerosim.functional.lora import Casts
from zerosim.functional.policy import ActivationPolicy
from zerosim.nn.group import Group
from zerosim.nn.halves import Halves
from zerosim.nn.leaf import LeafModule, Tensors
from zerosim.nn.tiles import Tiled
from zerosim.placement.block import BOTH, Block, Decoder, Role
from zerosim.placement.split import Split, Tile
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import DropoutKeys
from zerosim.tensor.tensor import Parameter, Tensor

Layer = TypeVar("Layer", bound=Callable[[Tensor], Tensor])
More = ParamSpec("More")


class LayerContext(NamedTuple):
    """A layer's place in a model, while it is declared.

    sizes    the model's sizes
    within   the store of its parameters: its unit's flat buffer or, by module, a buffer for each tensor
    name     the prefix of its parameters' names
    group    the group that divides its work
    policy   the choices about buffers saved for backward
    keys     the keys of dropout's random numbers
    tuning   the maps with adapters
    tiles    the number of tiles of each linear map of a block
    tile     the number of the tile that a map is; None: it is whole
    role     what its weights are to their block; None: they are outside of blocks
    number   its block's number, counted from 0
    own      the row of its block, where that is not the first stack's
    casts    holds adapters' weights that autocast has cast
    experts  how tokens get to experts
    """

    sizes: ModelConfig
    within: Flat | Halves | Tensors
    name: str
    group: Group
    policy: ActivationPolicy
    keys: DropoutKeys
    tuning: TuningConfig = ALL_TRAINED
    tiles: int = 1
    tile: int | None = None
    role: Role | None = None
    number: int = 0
    own: Block | None = None
    casts: Casts | None = None
    experts: ExpertsConfig = DROPLESS

    def __truediv__(self, name: str) -> LayerContext:
        """Return the context for a layer inside this layer."""
        return self.named(f"{self.name}.{name}")

    def beside(self, name: str) -> LayerContext:
        """Return the context with another last name: for attn.qkv_proj, `beside("q_proj")` is attn.q_proj."""
        return self.named(f"{self.name.rpartition('.')[0]}.{name}")

    def named(self, name: str) -> LayerContext:
        """Return the context with another name."""
        return LayerContext(self.sizes, self.within, name, *self[3:])  # faster than _replace

    def taking(self, role: Role) -> LayerContext:
        """Return the context for a layer whose weights have this role."""
        return self._replace(role=role)

    def declare(self, name: str, shape: tuple[int, ...], *, outputs: int | None = None, **how: Any) -> Parameter:
        """Declare a parameter of this layer; see `Flat.declare`. In a tile it is cut along `outputs`, the dim of the
        map's outputs."""
        if self.tile is not None and outputs is not None:
            how["tile"] = Tile(Split(shape, outputs, self.tiles), self.tile)
        return self.within.declare(f"{self.name}.{name}", shape, role=self.role, **how)

    def leaf(
        self,
        name: str,
        layer: Callable[Concatenate[LayerContext, More], Layer],
        *more: More.args,
        **named: More.kwargs,
    ) -> Layer | LeafModule:
        """Declare `layer` inside this layer, in its unit's flat buffer or, by module, as a leaf with its own
        buffers. A leaf has no leaves."""
        here = self / name
        if not isinstance(self.within, Tensors) or self.within.is_leaf:
            return layer(here, *more, **named)
        make = lambda own: layer(here._replace(within=own), *more, **named)  # noqa: E731
        return self.within.leaf(here.name, make, self.branches)

    def map(
        self,
        name: str,
        layer: Callable[Concatenate[LayerContext, More], Layer],
        *more: More.args,
        **named: More.kwargs,
    ) -> Layer | LeafModule | Tiled:
        """Declare a linear map as `leaf` does or, in tiles, as so many leaves, each with a tile of every parameter."""
        if self.tiles == 1:
            return self.leaf(name, layer, *more, **named)
        assert isinstance(self.within, Tensors), "tiles are leaves"
        here, leaves = self / name, list[LeafModule]()
        for index in range(self.tiles):
            tile = partial(here._replace, tile=index)
            make = lambda own, tile=tile: layer(tile(within=own), *more, **named)  # noqa: E731
            leaves.append(self.within.leaf(f"{here.name}.tile{index}", make, self.branches))
        return Tiled(leaves)

    @property
    def decoder(self) -> Decoder:
        """The row of the model."""
        return self.sizes.decoder

    @property
    def block(self) -> Block:
        """The row of its block."""
        return self.sizes.block_at(self.number, self.own)

    @property
    def branches(self) -> Sequence[int]:
        """The branches of its block from which backward comes to it."""
        return BOTH if self.role is None else self.block.reached_from(*self.role[:2])

    @property
    def std(self) -> float:
        """The std of a weight's initial normals: 0.8 / sqrt(D), which is GPT-2's 0.02 at its largest width, 1600."""
        return float(0.8 / self.sizes.hidden**0.5)

    @property
    def std_out(self) -> float:
        """The same for the last map of a branch, divided by sqrt(2L) as in GPT-2."""
        return float(0.8 / (2 * self.sizes.layers * self.sizes.hidden) ** 0.5)


MakeLayer = Callable[[LayerContext], Callable[[Tensor], Tensor]]
"""A layer's class, or a function that returns a layer."""
