"""A model: a list of units over flat buffers, in forward order.

Its full weights are read and stored by name (`state_dict`, `load_state_dict`). Building a model declares its
layout without allocating memory. A strategy then places one flat after the other (`parallel/base.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from zerosim.backends.forms import PLAIN, LogitForm
from zerosim.device.device import Buffer
from zerosim.dtypes import DType
from zerosim.errors import InputError
from zerosim.functional.beside import OfLogits
from zerosim.functional.chunked_loss import ChunkedLoss
from zerosim.functional.labels import predicted, sample_labels
from zerosim.functional.liger_loss import LIGER, LigerLoss
from zerosim.functional.lora import Casts
from zerosim.functional.loss import LogitsGrad, MakeGrad, form_rows
from zerosim.functional.loss_modes import FUSED, MODES
from zerosim.nn import Group, TokenTable, Unit
from zerosim.nn.group import ONE_RANK, WHOLE_MAPS, WholeMaps
from zerosim.nn.mtp import Further
from zerosim.placement.spec import WeightSpec
from zerosim.placement.split import Splits, take
from zerosim.tensor.autograd import Node
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import LabelKeys, normal
from zerosim.tensor.tensor import Tensor
from zerosim.units import few

Shapes = dict[str, tuple[int, ...]]


class Model:
    """Units in forward order. `flats` are the distinct buffers, in the order of their first use.

    `group` divides its layers. `head` is the table that computes the logits, if the last unit is one:
    a group cuts its rows, and so the columns of the logits. `width` is the width of the activations between units.
    `logit_form` is what becomes of its logits before a softmax. `is_masked`: it predicts masked tokens, not next ones.
    `apart`: a batch's last so many columns are its targets; 0: the targets are the next tokens of the input.
    `chunks` are the units that run one after the other on a rank: all of them, unless a pipeline cuts them.
    `loss_mode` says how a training step holds its logits (`functional/loss_modes.py`), `label_keys` are the keys of
    the random numbers for drawn labels. `casts` are those that autocast caches until a forward ends. `further` is what
    blocks that predict further tokens read (`nn/mtp.py`).
    """

    def __init__(
        self,
        units: Sequence[Unit],
        group: Group = ONE_RANK,
        head: TokenTable | None = None,
        *,
        width: int = 0,
        logit_form: LogitForm = PLAIN,
        is_masked: bool = False,
        apart: int = 0,
        loss_mode: str = "lean",
        label_keys: LabelKeys | None = None,
        casts: Casts | None = None,
        further: Further | None = None,
    ) -> None:
        self.units = list(units)
        self.chunks = [self.units]
        self.spans = [range(len(self.units))]  # the chunks' positions among the units of the whole model
        self.lowest = 0  # the first trained unit of the whole model, where backward ends
        self.trained: Collection[str] = ()  # the names of its trained flat buffers
        self.group = group
        self.head = head
        self.width = width
        self.logit_form = logit_form
        self.is_masked = is_masked
        self.apart = apart
        self.loss_mode = loss_mode
        self.label_keys = label_keys
        self.casts = casts or Casts()
        self.further = further
        self.asides = [one for unit in units for one in unit.makes]
        self.flats: list[Flat] = list({id(flat): flat for unit in units for flat in unit.all_flats}.values())

    def cut(self, whole: Model, chunks: Sequence[range]) -> Model:
        """Return a pipeline stage's share: these runs of the `whole` model's units, as this model has them. A table
        tied to a unit of another stage is reduced here too."""
        own, trained = {unit.name: unit for unit in self.units}, whole.trained
        held = [[own[whole.units[i].name] for i in chunk] for chunk in chunks]
        for unit, like in ((own[like.name], like) for like in whole.units if like.name in own):
            unit.reach(like.sends_back, trained)
            unit.ends = like.ends
        part = Model(
            [unit for units in held for unit in units],
            self.group,
            self.head,
            width=self.width,
            logit_form=self.logit_form,
            is_masked=self.is_masked,
            apart=self.apart,
            loss_mode=self.loss_mode,
            label_keys=self.label_keys,
            casts=self.casts,
            further=self.further,
        )
        part.chunks, part.spans, part.lowest = held, list(chunks), whole.lowest
        first_uses: list[Flat] = []
        for unit in part.units:
            unit.reduces = all(flat is not other for flat in unit.flats for other in first_uses)
            first_uses += unit.flats
        return part

    def reach(self, trained: Collection[str]) -> None:
        """Set how far backward goes, by the names of the trained flat buffers (`Unit.reach`)."""
        self.lowest, self.trained = len(self.units), trained
        for index, unit in enumerate(self.units):
            unit.reach(self.lowest < index, trained)
            self.lowest = min(self.lowest, index) if unit.goes_back else self.lowest
        for unit in self.units:
            if not unit.reduces:
                sharing = (one for one in self.units if any(flat in unit.flats for flat in one.flats))
                unit.ends = not any(one.goes_back for one in sharing if one is not unit)

    def goes_back(self, chunk: int) -> bool:
        """Return whether the gradient of a chunk's output is needed."""
        return self.spans[chunk].stop > self.lowest

    def sends_back(self, chunk: int) -> bool:
        """Return whether the gradient of a chunk's input is needed."""
        return self.spans[chunk].start > self.lowest

    @property
    def dtype(self) -> DType:
        """The dtype of parameters, and of the activations between units."""
        return self.flats[0].value_dtype

    def border(self, rows: int, tokens: int) -> tuple[int, int, int]:
        """Return the shape of a microbatch's activations between units."""
        return rows, self.group.rows.own(tokens), self.width

    def num_targets(self, shape: tuple[int, int]) -> int:
        """Return the number of tokens that a training step predicts of a batch of this shape."""
        rows, columns = shape
        own = sum(map(len, self.group.rows.tokens(self.apart or columns - 1)))
        return rows * (predicted(own) if self.is_masked else own)

    def see(self, batch: Any) -> None:
        """Find where documents begin in a microbatch that is about to run, if its rows have several."""
        if self.group.documents is not None:
            self.group.documents.see(batch)

    def count(self, micro_batches: Sequence[Any]) -> float:
        """Return by what a rank divides a step's sum of losses, so that the mean over ranks is the mean over all
        labels: its own labels, or an equal share of all where some tokens are not predicted. The mean over tokens and
        microbatches is one true division, by their product."""
        if self.group.documents is not None:
            return self.group.documents.share
        return self.num_targets(micro_batches[0].shape) * len(micro_batches)

    def parted(self, batch: Any) -> tuple[Any, Any]:
        """Return a batch's input and its targets."""
        if self.group.documents is not None:
            return batch[:, :-1], self.group.documents.targets(batch)
        if self.apart:
            return batch[:, : -self.apart], batch[:, -self.apart :]
        return batch[:, :-1], batch[:, 1:]

    def end_forward(self) -> None:
        """Drop what units read beside the stream until a microbatch's forward ends."""
        self.casts.held.clear()
        if self.further is not None:
            self.further.close()

    def forget(self) -> None:
        """Drop what stands beside the stream, and what units keep until then, at the end of a microbatch."""
        for one in self.asides:
            one.forget()
        for unit in self.units:
            unit.close()
        self.casts.inputs.clear()
        if not self.casts.returns:
            self.casts.outputs.clear()

    @property
    def num_parameters(self) -> int:
        """Psi: every parameter of the whole model, a tied one counted once, without padding."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def loss(self, logits: list[Buffer], targets: Buffer, *, scale: float, count: float) -> tuple[Buffer, MakeGrad]:
        """Return the sum of the tokens' losses, and a function that computes scale / count times its gradient when
        backward begins.

        The logits are taken out of the list, so that they can be freed.
        """
        maps, splits = self._of_logits

        def sums(own: Buffer) -> tuple[Buffer, Buffer]:
            return maps.cross_entropy_sum(own, targets, splits, fused=self.loss_mode in FUSED, form=self.logit_form)

        grad_of = LogitsGrad(targets, scale, count, *maps.vocabulary(splits), self.logit_form, self.casts.outputs)
        made = MODES[self.loss_mode](logits, sums, grad_of)
        self.casts.outputs.clear()  # only now: until the forward returns, the caller's name has the last one's
        return made

    def further_loss(self, state: Tensor, targets: Buffer, factor: float, *, scale: float, count: float) -> Tensor:
        """Return the sum of a further token's losses, of a state before the head; its backward starts with `factor`
        times the model's own `scale`."""
        assert self.head is not None
        if self.loss_mode not in MODES:
            return self.chunked_loss(targets, scale=scale * factor, count=count)(state)
        made = self.head.logits(state)
        node, logits = made.node, [made.buffer]
        del made  # the loss frees them as soon as it can
        total, make_grad = self.loss(logits, targets, scale=scale * factor, count=count)
        return Tensor(total, None if node is None else Node(OfLogits(make_grad), (node,)))

    def draw_labels(self, logits: Buffer, labels: Buffer, row: int = 0, of: Buffer | None = None) -> None:
        """Fill `labels`, int64, with one label per row of logits, drawn from the model itself: y ~ softmax(logits).

        They are a whole microbatch's (B, T) or, for a chunk, those from `row` on of a microbatch's targets `of`.
        """
        assert self.label_keys is not None
        targets, rows = labels if of is None else of, self.group.rows
        key, first = self.label_keys(targets.numel * rows.context.ranks)
        flat, into, own = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), targets.shape[-1]
        for here, at in rows.runs(own * rows.context.ranks, row, into.numel):
            sample_labels(flat[here], key, first + at, into[here], self.logit_form)

    def chunked_loss(
        self, targets: Buffer, *, scale: float, count: float, drawn: bool = False
    ) -> Callable[[Tensor], Tensor]:
        """Replace the last unit's function: return the sum of the tokens' losses. The gradient is computed in backward,
        or by Liger's in forward.

        `drawn`: the targets are drawn, chunk by chunk, before each chunk's loss.
        """
        assert self.head is not None
        weights = [one for one in (self.head.weight, self.head.bias) if one is not None]
        maps, splits = self._of_logits
        loss = ChunkedLoss(
            weights,
            lambda logits, ids: maps.cross_entropy_sum(logits, ids, splits, form=self.logit_form),
            LogitsGrad(targets, scale, count, *maps.vocabulary(splits), self.logit_form),
            [],
            partial(self.draw_labels, of=targets) if drawn else None,
            self.head.tile,
        )
        if self.loss_mode not in LIGER:
            return lambda x: maps.columns(x, weights, loss.run, loss.rule, "chunked_loss")
        liger = LigerLoss(loss, LIGER[self.loss_mode], {})
        return lambda x: maps.columns(x, weights, liger.run, liger.rule, "liger_loss", liger.saved, reads=False)

    def whole_logits(self, logits: Tensor) -> Buffer:
        """Return all columns of logits (B, T, V), multiplied and capped as the model says; in place."""
        maps, splits = self._of_logits
        whole = maps.whole_logits(logits, splits)
        form_rows(whole, self.logit_form)
        return whole

    @property
    def _of_logits(self) -> tuple[WholeMaps, Splits]:
        """Return the maps for logits, and the cut of their columns. Without a head every rank has all columns."""
        return (WHOLE_MAPS, ()) if self.head is None else (self.group.maps, self.head.splits)

    @property
    def tied_numel(self) -> int:
        """The elements of buffers that the first unit and the last share: the tied table."""
        first, last = self.units[0].flats, self.units[-1].flats if len(self.units) > 1 else ()
        return sum(flat.spec.num_parameters for flat in last if any(flat is other for other in first))

    def shapes(self) -> Shapes:
        """Return name and shape of every parameter of the whole model, in the order of the layout."""
        return {weight.name: weight.whole_shape for flat in self.flats for weight in flat.spec.weights}

    def state_dict(self) -> dict[str, Any]:
        """Return full parameters by name as host arrays (the fp32 masters if there are any).

        Raises: InputError if this rank holds only a slice.
        """
        return {name: value for flat in self.flats for name, value in _whole_values(flat)}

    def load_state_dict(self, weights: Mapping[str, Any], *, exact_master: bool = False) -> None:
        """Store full host arrays in this rank's share of them.

        Raises: InputError that names missing and unknown arrays, or a wrong shape.
        """
        check_names(weights, self.shapes())
        check_shapes({name: tuple(array.shape) for name, array in weights.items()}, self.shapes())
        for flat in self.flats:
            load_flat(flat, weights, self.group, exact_master=exact_master)


def check_names(given: Iterable[str], expected: Shapes, whose: str = "the weights") -> None:
    """Check the names. Raises: InputError with the first few missing or unknown names."""
    given = set(given)
    missing = [name for name in expected if name not in given]
    unknown = sorted(given - set(expected))
    if missing or unknown:
        parts = [f"missing {few(missing)}"] if missing else []
        parts += [f"unknown {few(unknown)}"] if unknown else []
        raise InputError(f"{whose} do not fit the model: {'; '.join(parts)}")


def check_shapes(given: Shapes, expected: Shapes, whose: str = "the weights") -> None:
    """Check the shapes. Raises: InputError with the first wrong shape."""
    for name, shape in expected.items():
        if given[name] != shape:
            raise InputError(f"{whose} do not fit the model: {name} has shape {given[name]}, expected {shape}")


def load_flat(flat: Flat, weights: Mapping[str, Any], group: Group = ONE_RANK, *, exact_master: bool) -> None:
    """Store whole host arrays by name in this rank's share of one flat; see `Flat.write`."""
    for index, weight in enumerate(flat.spec.weights):
        flat.write(index, _own(weight, weights[weight.name], group, flat.device.rank), exact_master=exact_master)


def draw_flat(
    flat: Flat,
    seed: int,
    group: Group = ONE_RANK,
    *,
    exact_master: bool,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the initial weights of one flat, a function of (seed, name) alone, one whole parameter at a time. `given`
    are weights that are not drawn."""
    for index, weight in enumerate(flat.spec.weights):
        whole = given[weight.name] if weight.name in given else initial_values(weight, seed)
        flat.write(index, _own(weight, whole, group, flat.device.rank), exact_master=exact_master)


def _own(weight: WeightSpec, whole: Any, group: Group, rank: int) -> Any:
    """Return a rank's share of a weight that a group cuts."""
    return take(whole, weight.cuts(group.device_mesh, rank))


def initial_values(weight: WeightSpec, seed: int) -> Any:
    """Return a whole parameter's initial values, a host array in float32: normals of its std, or its fill."""
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
