"""The inputs of a model's builder, and the shared code of language models' builders: units, blocks, a table and a
head."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from zerosim.backends.forms import LogitForm
from zerosim.config.parts.experts import DROPLESS, ExpertsConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.mtp import NO_FURTHER, MtpConfig
from zerosim.config.parts.tuning import ALL_TRAINED, TuningConfig, format_of, tells_apart, trained_dtype
from zerosim.device.device import Device
from zerosim.dtypes import DType, dtype, fp32
from zerosim.functional.lora import Casts
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.models.model import Model
from zerosim.nn import Tensors, Unit
from zerosim.nn.alike import alike, share
from zerosim.nn.aside import Aside
from zerosim.nn.context import LayerContext, MakeLayer
from zerosim.nn.group import ONE_RANK, Group
from zerosim.nn.halves import CODED, FROZEN_FP32, TRAINED, Halves, buffers_of
from zerosim.nn.layers import TokenTable
from zerosim.nn.mtp import Further
from zerosim.placement.block import Block
from zerosim.placement.mesh import STATES
from zerosim.placement.spec import FlatSpec, is_block
from zerosim.placement.stages import number_of
from zerosim.tensor.coded_flat import CodedFlat
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import DropoutKeys, LabelKeys
from zerosim.tensor.tensor import Tensor


class Flats(NamedTuple):
    """The classes of flat buffers: of numbers, and of codes."""

    plain: type[Flat] = Flat
    coded: type[CodedFlat] = CodedFlat


FLATS = Flats()


class Use(NamedTuple):
    """A table, and the store of its parameters, for another unit of them."""

    table: TokenTable
    within: Flat | Halves | Tensors


class Ahead(NamedTuple):
    """What units before the head read of a microbatch, and a function that builds them of another use of the table and
    of the head."""

    further: Further
    units: Callable[[Use, Use], Sequence[Unit]]


@dataclass(frozen=True, slots=True)
class Builder:
    """The sizes and settings of a model to build. Units are declared but not yet placed, so no memory is allocated.

    sizes       the whole model's sizes
    device      the device; parameters are stored in `dtype`, gradients in `grad_dtype`
    keys        the keys of dropout's random numbers
    policy      the choices about buffers saved for backward
    group       the group that divides its layers
    by_module   the layers of blocks are leaf modules (`nn/leaf.py`), and each tensor has a flat buffer
    flats       the classes of flat buffers
    tuning      the trained parameters, and the maps with adapters
    tiles       the number of tiles of each linear map of a block, by module
    only        the names of the blocks to build; None: all
    wrap        puts a unit around a block, by the block's number
    loss_mode, label_keys   the model's (`models/model.py`)
    block, members   of trained buffers' specs, for an optimizer with blocks
    casts       holds adapters' weights that autocast has cast
    experts     how tokens get to experts
    mtp         the blocks that predict further tokens
    builds_all  every block has its layers; else only the first of its kind (`nn/alike.py`)
    declared    the buffers of the declared model, by name, whose specs a rank's own model shares
    """

    sizes: ModelConfig
    device: Device
    dtype: DType
    grad_dtype: DType
    keys: DropoutKeys
    policy: ActivationPolicy = DEFAULT
    group: Group = ONE_RANK
    by_module: bool = False
    flats: Flats = FLATS
    tuning: TuningConfig = ALL_TRAINED
    tiles: int = 1
    only: Collection[str] | None = None
    wrap: Callable[[int, Unit], Unit] = lambda number, unit: unit
    loss_mode: str = "lean"
    label_keys: LabelKeys | None = None
    block: int = 1
    members: int = 1
    casts: Casts | None = None
    experts: ExpertsConfig = DROPLESS
    mtp: MtpConfig = NO_FURTHER
    builds_all: bool = True
    declared: Mapping[str, FlatSpec] = field(default_factory=dict)

    def buffer(self, name: str, module: str, kind: str, axes: tuple[str, ...]) -> Flat:
        """Make a flat buffer, for parameters of this kind (`nn/halves.py`), whose states are cut over `axes`."""
        dtypes = self.device, fp32 if kind == FROZEN_FP32 else self.dtype, self.grad_dtype
        if kind not in (TRAINED, CODED):
            return self.flats.plain(name, *dtypes, module, format_of(self.tuning, kind), is_trained=False, axes=axes)
        own = dtype(trained_dtype(self.tuning, self.dtype.name))
        members = self.members if axes == STATES or self.block == 1 else self.group.device_mesh.edp
        how: dict[str, Any] = {"block": self.block, "members": members, "axes": axes}
        if kind == CODED and (products := self.group.products(number_of(module))) is not None:
            return self.flats.coded(products.forward.right, name, self.device, own, self.grad_dtype, module, **how)
        return self.flats.plain(name, self.device, own, self.grad_dtype, module, **how)

    def at(self, unit: str, prefix: str = "") -> LayerContext:
        """Return the context of a new unit's layers. Their parameters' names begin with `prefix`, then the unit's
        name."""
        products = self.group.products(number_of(unit)) if is_block(unit) else None
        coded = products is not None and products.stores_codes
        stores = Tensors if self.by_module else partial(buffers_of, apart=self.group.device_mesh.is_folded, coded=coded)
        within = stores(unit, self.buffer, self.tuning)
        return LayerContext(
            self.sizes,
            within,
            prefix + unit,
            self.group,
            self.policy,
            self.keys,
            self.tuning,
            self.tiles,
            casts=self.casts,
            experts=self.experts,
        )

    def unit(
        self, name: str, layer: MakeLayer, prefix: str = "", number: int = 0, own: Block | None = None,
        makes: Sequence[Aside] = (), reads: Sequence[Aside] = (),
    ) -> Unit:  # fmt: skip
        """Build a unit of one layer; of a block, `number` counts from 0, and `own` is its row, if it is not the first
        stack's. It `makes` and `reads` these asides."""
        here = self.at(name, prefix)._replace(number=number, own=own, policy=self.policy.of_block(number))
        return Unit(name, here.within, layer(here), makes=makes, reads=reads)

    def blocks(
        self, names: str, block: MakeLayer, prefix: str = "", own: Block | None = None, reads: Sequence[Aside] = ()
    ) -> list[Unit]:
        """Build units `names`.0 .. `names`.L-1, which read these asides, wrapped."""
        count = self.sizes.layers if own is None else self.sizes.depths[-1]
        units, first = dict[int, Unit](), dict[object, Unit]()
        for i in self.numbers(names, count):
            like = first.get(kind := self._kind(i))
            if like is None:
                units[i] = first[kind] = self.unit(f"{names}.{i}", block, prefix, i, own, reads=reads)
                share(first[kind], self.declared)
            else:
                units[i] = alike(like, f"{names}.{i}", self.declared)
        return [self.wrap(i, unit) for i, unit in units.items()]

    def _kind(self, number: int) -> object:
        """Return what tells blocks apart whose layers are built: their own numbers where all are, where names decide
        what is trained, and where maps or routers keep something from step to step."""
        keeps = self.group.products(number) is not None or self.group.balance is not None
        return number if self.builds_all or keeps or tells_apart(self.tuning) else self.sizes.kind(number)

    def numbers(self, names: str, count: int) -> Sequence[int]:
        """Return the numbers of the blocks to build, of `count` in the model, called `names`."""
        every = range(count)
        return every if self.only is None else [number for number in every if f"{names}.{number}" in self.only]

    def language_model(
        self,
        table: str,
        between: Sequence[Unit],
        prefix: str = "",
        reading: Callable[[LayerContext, TokenTable], Callable[[Tensor], Tensor]] = lambda here, table: table,
        makes: Sequence[Aside] = (),
        further: Ahead | None = None,
    ) -> Model:
        """Build a token table, of which `reading` may make another layer, the units `between`, and lm_head. Before the
        head there may be `further` units of table and head.

        A tied head is a second unit over the table's flat buffer: gathered at each use, reduced once, after the
        table's backward.
        """
        first, is_tied = self.at(table, prefix), self.sizes.tie_embeddings
        last = first if is_tied else self.at("lm_head")
        embed = TokenTable(first)
        head = embed if is_tied else TokenTable(last, embedding=False)
        units = [
            Unit(table, first.within, reading(first, embed), makes=makes),
            *between,
            *([] if further is None else further.units(Use(embed, first.within), Use(head, last.within))),
            Unit("lm_head", last.within, head.logits, reduces=not is_tied and further is None),
        ]
        units[-1].defers = False  # the logits' gradient is freed at once, not held for a later weight gradient
        sizes = self.sizes
        form = LogitForm(sizes.logit_scale, sizes.numbers.logit_cap)
        apart = sizes.seq if sizes.is_masked else sizes.decoder_tokens
        how = {"is_masked": sizes.is_masked, "apart": apart, "further": further and further.further}
        return self.model(units, head, width=sizes.hidden, logit_form=form, **how)

    def model(self, units: Sequence[Unit], head: TokenTable | None = None, **how: Any) -> Model:
        """Return the model of these units; `how`: other arguments of `Model`."""
        return Model(
            units, self.group, head, loss_mode=self.loss_mode, label_keys=self.label_keys, casts=self.casts, **how
        )
