"""What every model is: a list of units over flat buffers, in forward order.

Its full weights are read and stored by name (`state_dict`, `load_state_dict`). Building a model declares its
layout and takes no memory; a strategy places one flat after the other (`parallel/base.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from zerosim.device.device import Buffer
from zerosim.dtypes import DType
from zerosim.errors import InputError
from zerosim.functional.chunked_loss import ChunkedLoss
from zerosim.functional.labels import sample_labels
from zerosim.functional.loss import LogitsGrad
from zerosim.functional.loss_modes import FUSED, MODES, MakeGrad
from zerosim.nn import Group, TokenTable, Unit
from zerosim.nn.group import ONE_RANK, WHOLE_MAPS, WholeMaps
from zerosim.placement.spec import Split, WeightSpec
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import LabelKeys, normal
from zerosim.tensor.tensor import Tensor
from zerosim.units import few

Shapes = dict[str, tuple[int, ...]]


class Model:
    """Units in forward order. `flats` are the distinct buffers, in the order of their first use.

    `group` is what its layers are divided over. `head` is the table that makes the logits, where the last unit is one:
    a group cuts its rows, and so the columns of the logits. `width` is that of what passes between units.
    `chunks` are the units that run one after the other on a rank: all of them, unless a pipeline cuts them.
    `loss_mode` says what a training step holds of its logits (`functional/loss_modes.py`), `label_keys` which
    random numbers labels are drawn with.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        group: Group = ONE_RANK,
        head: TokenTable | None = None,
        *,
        width: int = 0,
    ) -> None:
        self.units = list(units)
        self.chunks = [self.units]
        self.spans = [range(len(self.units))]  # of the chunks, in the units of the whole model
        self.lowest = 0  # of the whole model's units the first one that is trained: backward ends there
        self.group = group
        self.head = head
        self.width = width
        self.loss_mode = "lean"
        self.label_keys: LabelKeys | None = None
        self.flats: list[Flat] = list({id(flat): flat for unit in units for flat in unit.all_flats}.values())

    def cut(self, chunks: Sequence[range]) -> Model:
        """What a pipeline stage holds of this model: these runs of its units. A table that is tied to a unit of another
        stage is reduced here, too."""
        part = Model([self.units[i] for chunk in chunks for i in chunk], self.group, self.head, width=self.width)
        part.chunks = [[self.units[i] for i in chunk] for chunk in chunks]
        part.spans, part.lowest = list(chunks), self.lowest
        part.loss_mode, part.label_keys = self.loss_mode, self.label_keys
        first_uses: list[Flat] = []
        for unit in part.units:
            unit.reduces = all(flat is not other for flat in unit.flats for other in first_uses)
            first_uses += unit.flats
        return part

    def reach(self, trained: Collection[str]) -> None:
        """How far back gradients go, by the names of the flat buffers that are trained (`Unit.reach`)."""
        self.lowest = len(self.units)
        for index, unit in enumerate(self.units):
            unit.reach(self.lowest < index, trained)
            self.lowest = min(self.lowest, index) if unit.goes_back else self.lowest

    def goes_back(self, chunk: int) -> bool:
        """Whether the gradient of a chunk's output is wanted."""
        return self.spans[chunk].stop > self.lowest

    def sends_back(self, chunk: int) -> bool:
        """Whether that of its input is."""
        return self.spans[chunk].start > self.lowest

    @property
    def dtype(self) -> DType:
        """Of parameters, and of what passes between units."""
        return self.flats[0].dtype

    def border(self, rows: int, tokens: int) -> tuple[int, int, int]:
        """The shape of what passes from unit to unit of one micro-batch."""
        return rows, self.group.rows.own(tokens), self.width

    @property
    def num_parameters(self) -> int:
        """Psi: every parameter of the whole model once, a tied one included once, padding not."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def loss(self, logits: list[Buffer], targets: Buffer, *, scale: float, count: int) -> tuple[Buffer, MakeGrad]:
        """The sum of the tokens' losses, and what makes scale / count times its gradient when backward begins.

        The logits are taken out of the list, so that they can die.
        """
        maps, split = self._of_logits

        def sums(own: Buffer) -> tuple[Buffer, Buffer]:
            return maps.cross_entropy_sum(own, targets, split, fused=self.loss_mode in FUSED)

        return MODES[self.loss_mode](logits, sums, LogitsGrad(targets, scale, count, *maps.vocabulary(split)))

    def draw_labels(self, logits: Buffer, labels: Buffer, row: int = 0, of: int = 0) -> None:
        """Fill `labels`, int64, one for each row of logits: what the model itself draws there, y ~ softmax(logits).

        They are a whole micro-batch's or, of a chunk, those from `row` on of a micro-batch's `of` targets.
        """
        assert self.label_keys is not None
        key, first = self.label_keys(of or labels.numel)
        sample_labels(logits, key, first + row, labels)

    def chunked_loss(
        self, targets: Buffer, *, scale: float, count: int, drawn: bool = False
    ) -> Callable[[Tensor], Tensor]:
        """In place of the last unit's function: the sum of the tokens' losses, whose gradient is made in backward.

        `drawn`: the targets are drawn, chunk by chunk, before each chunk's loss.
        """
        assert self.head is not None
        weight, (maps, split) = self.head.weight, self._of_logits
        loss = ChunkedLoss(
            weight,
            lambda logits, ids: maps.cross_entropy_sum(logits, ids, split),
            LogitsGrad(targets, scale, count, *maps.vocabulary(split)),
            [],
            partial(self.draw_labels, of=targets.numel) if drawn else None,
        )
        return lambda x: maps.columns(x, [weight], loss.run, loss.rule, "chunked_loss")

    def whole_logits(self, logits: Tensor) -> Buffer:
        """All columns of logits (B, T, V)."""
        maps, split = self._of_logits
        return maps.whole_logits(logits, split)

    @property
    def _of_logits(self) -> tuple[WholeMaps, Split | None]:
        """What computes with logits, and how their columns are cut. Without a head every rank has all of them."""
        return (WHOLE_MAPS, None) if self.head is None else (self.group.maps, self.head.split)

    @property
    def tied_numel(self) -> int:
        """Elements of the buffers that two units share: the tied table."""
        return sum(flat.spec.num_parameters for unit in self.units if not unit.reduces for flat in unit.flats)

    def shapes(self) -> Shapes:
        """Name and shape of every parameter of the whole model, in the order of the layout."""
        return {weight.name: weight.whole_shape for flat in self.flats for weight in flat.spec.weights}

    def state_dict(self) -> dict[str, Any]:
        """Full parameters by name as host arrays (the fp32 masters where there are any).

        Raises: InputError where this rank holds a slice only.
        """
        return {name: value for flat in self.flats for name, value in _whole_values(flat)}

    def load_state_dict(self, weights: Mapping[str, Any], *, exact_master: bool = False) -> None:
        """Store full host arrays in whatever part of them this rank holds.

        Raises: InputError naming what is missing, unknown, or of another shape.
        """
        check_names(weights, self.shapes())
        check_shapes({name: tuple(array.shape) for name, array in weights.items()}, self.shapes())
        for flat in self.flats:
            load_flat(flat, weights, self.group, exact_master=exact_master)


def check_names(given: Iterable[str], expected: Shapes, whose: str = "the weights") -> None:
    """Raises: InputError naming the first few names that are missing or unknown."""
    given = set(given)
    missing = [name for name in expected if name not in given]
    unknown = sorted(given - set(expected))
    if missing or unknown:
        parts = [f"missing {few(missing)}"] if missing else []
        parts += [f"unknown {few(unknown)}"] if unknown else []
        raise InputError(f"{whose} do not fit the model: {'; '.join(parts)}")


def check_shapes(given: Shapes, expected: Shapes, whose: str = "the weights") -> None:
    """Raises: InputError naming the first of another shape."""
    for name, shape in expected.items():
        if given[name] != shape:
            raise InputError(f"{whose} do not fit the model: {name} has shape {given[name]}, expected {shape}")


def load_flat(flat: Flat, weights: Mapping[str, Any], group: Group = ONE_RANK, *, exact_master: bool) -> None:
    """Store whole host arrays by name in what this rank holds of one flat; see `Flat.write`."""
    for index, weight in enumerate(flat.spec.weights):
        flat.write(index, _own(weight, weights[weight.name], group), exact_master=exact_master)


def draw_flat(flat: Flat, seed: int, group: Group = ONE_RANK, *, exact_master: bool) -> None:
    """Initial weights of one flat: a function of (seed, name) alone, one whole parameter at a time."""
    for index, weight in enumerate(flat.spec.weights):
        flat.write(index, _own(weight, initial_values(weight, seed), group), exact_master=exact_master)


def _own(weight: WeightSpec, whole: Any, group: Group) -> Any:
    """What this member of a group holds of a weight."""
    return whole if weight.split is None else weight.split.take(whole, group.maps.index, group.maps.size)


def initial_values(weight: WeightSpec, seed: int) -> Any:
    """A whole parameter's initial values, a host array in float32: normals of its std, or its fill."""
    import numpy as np

    if weight.std is None:
        return np.full(weight.whole_shape, weight.fill, np.float32)
    return normal(weight.whole_shape, weight.std, "weight", seed, weight.name)


def _whole_values(flat: Flat) -> list[tuple[str, Any]]:
    source = flat.param if flat.master is None else flat.master
    if source is None or source.numel < flat.numel:
        raise InputError(f"{flat.name} is sharded on rank {flat.device.rank}: gather it before asking for its weights")
    to_host = flat.device.backend.to_host
    return [(weight.name, to_host(flat.window(source, i).array)) for i, weight in enumerate(flat.spec.weights)]
