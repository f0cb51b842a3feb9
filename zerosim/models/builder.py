"""What a model's builder is given, and what builders of language models share: units, blocks, a table and a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim.config.model import ModelConfig
from zerosim.device.device import Device
from zerosim.dtypes import DType
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.models.model import Model
from zerosim.nn import Recompute, Tensors, Unit
from zerosim.nn.context import LayerContext, MakeLayer
from zerosim.nn.group import ONE_RANK, Group
from zerosim.nn.layers import TokenTable
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import DropoutKeys


@dataclass(frozen=True, slots=True)
class Builder:
    """The sizes of a model, and how it is to be built. Units are declared and not yet placed: no memory is taken.

    sizes       of the whole model
    device      where it will lie; stored in `dtype`, gradients in `grad_dtype`
    keys        which random numbers its dropout draws
    policy      what is kept for backward
    group       what its layers are divided over
    by_module   the layers of blocks are leaf modules (`nn/leaf.py`), and each tensor has a flat buffer
    flat        the class of flat buffers
    """

    sizes: ModelConfig
    device: Device
    dtype: DType
    grad_dtype: DType
    keys: DropoutKeys
    policy: ActivationPolicy = DEFAULT
    group: Group = ONE_RANK
    by_module: bool = False
    flat: type[Flat] = Flat

    def at(self, unit: str, prefix: str = "") -> LayerContext:
        """The context of a new unit's layers. Their parameters' names begin with `prefix`, then with the unit's."""
        formats = self.device, self.dtype, self.grad_dtype
        within = Tensors(unit, *formats, self.flat) if self.by_module else self.flat(unit, *formats)
        return LayerContext(self.sizes, within, prefix + unit, self.group, self.policy, self.keys)

    def unit(self, name: str, layer: MakeLayer, prefix: str = "") -> Unit:
        """A unit of one layer."""
        here = self.at(name, prefix)
        return Unit(name, here.within, layer(here))

    def blocks(self, names: str, block: MakeLayer, prefix: str = "") -> list[Unit]:
        """Units `names`.0 .. `names`.L-1. Full recompute wraps them."""
        units = [self.unit(f"{names}.{i}", block, prefix) for i in range(self.sizes.layers)]
        return [Recompute(unit) if self.policy.again.wraps(i) else unit for i, unit in enumerate(units)]

    def language_model(self, table: str, between: Sequence[Unit], prefix: str = "") -> Model:
        """A token table, the units `between`, and lm_head.

        A tied head is a second unit over the table's flat buffer: gathered at each use, reduced once, after the
        table's backward.
        """
        first, is_tied = self.at(table, prefix), self.sizes.tie_embeddings
        last = first if is_tied else self.at("lm_head")
        embed = TokenTable(first)
        head = embed if is_tied else TokenTable(last, embedding=False)
        units = [
            Unit(table, first.within, embed),
            *between,
            Unit("lm_head", last.within, head.logits, reduces=not is_tied),
        ]
        units[-1].defers = False  # the logits' gradient goes at once, and is not kept for a weight gradient to come
        return Model(units, self.group, head, width=self.sizes.hidden)
