"""The linear maps with adapters (`functional/lora.py`).

A target is a short word (q, k, v, o, gate, up, fc, down), a pattern of a map's name, or all maps. In
GPT's fused map q, k and v are columns with separate adapters. The map by its name has one adapter for all columns, as
in PEFT. Adapters are named as PEFT names them: h.0.attn.c_attn.lora_A.weight.

Under tensor parallelism an adapter is cut like its map, and adds no message in forward or backward:

    column-parallel    A whole, its gradient added over tp;  B by outputs
    row-parallel       A by inputs;  B whole, its gradient added over tp

With `adapter_dtype` each adapter keeps its own input if it is cast or dropped, as PEFT's does (peft 0.21,
tuners/lora/layer.py, Linear.forward). The base's weights are frozen then, and nothing keeps the map's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from zerosim import functional as F
from zerosim.config.parts.tuning import is_target, renames, widens_norms
from zerosim.device.device import Buffer
from zerosim.dtypes import dtype
from zerosim.errors import wrong
from zerosim.functional.linear import Linear, linear_result
from zerosim.functional.lora import PLAIN, Adapted, Adapter, Down, Drop, Way, add_adapters
from zerosim.nn.context import LayerContext
from zerosim.placement.block import target_words
from zerosim.placement.spec import unit_of
from zerosim.tensor.autograd import Rule
from zerosim.tensor.discarded import Readable
from zerosim.tensor.tensor import Operand, Outline, Tensor, apply, layer_of, outline


class Adaptable(NamedTuple):
    """Outputs of a map that may have an adapter.

    name    the map's, or that of some columns of a fused one
    inner   the whole's widths in and out
    first   the first local column
    words   its own words of `lora_target`
    is_part  it is some columns of a fused map
    cut     of a column-parallel map: how a group cuts B's outputs; None if it cannot, as neighbours hold copies of some
    """

    name: str
    inner: int
    wide: int
    first: int = 0
    words: tuple[str, ...] = ()
    is_part: bool = False
    cut: Mapping[str, Any] | None = MappingProxyType({})


def way_of(here: LayerContext) -> Way:
    """Return how adapters compute. Under autocast bitsandbytes' 4-bit maps do not cast their adapters' input
    (tuners/lora/bnb.py, Linear4bit.forward); others do."""
    tuning = here.tuning
    if tuning.adapter_dtype is None:
        return PLAIN
    autocast = None if tuning.autocast is None else dtype(tuning.autocast)
    widens = tuning.is_wide and (widens_norms(tuning, here.block) or not (autocast and tuning.base))
    keeps = not tuning.fused_lora and (tuning.lora_dropout > 0 or widens)
    return Way(keeps, widens, tuning.fused_lora, autocast, here.casts)


def as_4bit(layer: Callable[[Tensor], Tensor], here: LayerContext, name: str) -> Callable[[Tensor], Tensor]:
    """Return a map as bitsandbytes' Linear4bit: it computes in autocast's dtype, with a result of its input's, and the
    graph holds the input in versions to 0.41; the map itself, if it is none or neither differs."""
    tuning, casts = here.tuning, here.casts
    if tuning.bnb_saves_input and casts is not None:

        def keeping(x: Tensor, inner: Callable[[Tensor], Tensor] = layer) -> Tensor:
            casts.keep_input(x, name)
            return inner(x)

        layer = keeping
    if not widens_norms(tuning, here.block):
        return layer
    half = dtype(tuning.autocast or "bf16")
    return lambda x: F.cast(layer(F.cast(x, half)), x.dtype)


def before_kernel(here: LayerContext) -> list[Callable[[Tensor], Tensor]]:
    """Return the cast to autocast's dtype before flash attention or the head, if activations are fp32."""
    tuning = here.tuning
    is_wide = tuning.casts_weights or widens_norms(tuning, here.block)
    return [partial(F.cast, dtype=dtype(tuning.autocast or "bf16"))] if is_wide else []


def in_autocast(here: LayerContext, x: Tensor, *weights: Sequence[Operand]) -> tuple[list[Tensor], list[list[Operand]]]:
    """Return what linear maps read under autocast over fp32 weights: x as each of the first weights casts it for
    itself, and casts of all weights. Elsewhere return x, once, and the weights."""
    if not here.tuning.casts_weights:
        return [x], [list(each) for each in weights]
    half, cast = dtype(here.tuning.autocast or "bf16"), list[list[Operand]]()
    for each in weights:
        made = [F.cast_weight(one, half) for one in each]
        cast.append([*made])
        if here.casts is not None:
            for one in made:
                here.casts.keep(one.buffer)
    return [x] if x.dtype == half else [F.cast(x, half) for _ in weights[0]], cast


def row_of(
    weight: Operand, *, transposed: bool
) -> tuple[Callable[[Tensor, Operand | None], Buffer], Callable[[Readable | Outline, Operand | None], Rule]]:
    """Return a row-parallel map, whose bias is given in each use, and what makes its rule."""
    return (
        lambda x, bias: linear_result(x, weight, bias, transposed=transposed),
        lambda kept, bias: Linear(kept, weight, bias, transposed),
    )


class Adapters:
    """The adapters of one linear map, possibly none. `by_rows`: the map is row-parallel."""

    def __init__(self, here: LayerContext, targets: Iterable[Adaptable], *, by_rows: bool = False) -> None:
        maps, tuning = here.group.maps, here.tuning
        self.maps, self.keys, self.chance = maps, here.keys, tuning.lora_dropout
        self.own_rows = here.group.rows  # a cut map reads the rows of all shares
        if maps.size > 1:
            self.own_rows = replace(self.own_rows, parts=1, index=0)
        self.way = way_of(here)
        self.keeps_inputs = self.way.keeps_inputs
        self.targets, self.adapters = list[Adaptable](), list[Adapter]()
        if not tuning.lora_rank:
            return
        self.unit = unit_of(here.name)
        to_experts = renames(here.block, tuning)
        for one in targets:
            words = target_words(one.words, is_part=one.is_part, renames=to_experts)
            if any(is_target(word, one.name, words) for word in tuning.targets):
                self.targets.append(one)
                self.adapters.append(self._declare(here.named(one.name), one, by_rows=by_rows))
        if here.policy.is_litgpt and all(set(one.words) & {"q", "k", "v"} for one in self.targets):
            self.way = replace(self.way, merged=True, pads=len(self.targets) < 3)

    def _declare(self, at: LayerContext, one: Adaptable, *, by_rows: bool) -> Adapter:
        """Declare A and B. Raises: InputError for a map that cannot be cut."""
        maps, tuning = self.maps, at.tuning
        if one.cut is None:
            raise wrong(
                "lora_target",
                f" {tuning.lora_target!r}: an adapter of all columns of {one.name.rpartition('.')[2]} cannot be cut "
                f"over {maps.size} tensor-parallel ranks, which hold copies of its keys and values; choose q,k,v",
            )
        shape_a, shape_b = (tuning.lora_rank, one.inner), (one.wide, tuning.lora_rank)
        splits_a = maps.split(shape_a, 1) if by_rows else ()
        splits_b = () if by_rows else maps.split(shape_b, 0, **one.cut)
        whole = maps.summed(at.group.rows)
        of_a, of_b = (whole, whole or maps.axes) if by_rows else (whole or maps.axes, whole)
        std = float((3 * one.inner) ** -0.5)  # PEFT draws A uniformly, with this variance
        reads = not self.keeps_inputs
        a = at.declare("lora_A.weight", shape_a, std=std, reads_input=reads, splits=splits_a, summed=of_a)
        b = at.declare("lora_B.weight", shape_b, reads_input=False, splits=splits_b, summed=of_b)
        return Adapter(a, b, one.first, tuning.scale)

    def __bool__(self) -> bool:
        return bool(self.adapters)

    @property
    def weights(self) -> list[Operand]:
        return [one for adapter in self.adapters for one in (adapter.a, adapter.b)]

    def _add(self, x: Tensor, out: Buffer, saved: dict[str, Buffer]) -> list[Down]:
        """Add to the map's result, and put the buffers for backward into `saved`."""
        drops = [self._drop(x, one) for one in self.targets]
        downs = add_adapters(x, out, self.adapters, drops, self.way)
        for down in downs:
            saved |= down.saved(layer_of(down.adapter.a, "lora_A"))
        return downs

    def _drop(self, x: Tensor, target: Adaptable) -> Drop | None:
        if not self.chance or not x.device.is_training:
            return None
        own = x.shape[-1]  # this rank's columns of a row-parallel map's input
        windows = self.own_rows.windows(x, self.maps.index * own if own < target.inner else 0, target.inner)
        return Drop(self.chance, self.keys(target.name, self.unit), windows)

    def columns(
        self,
        x: Tensor,
        weights: Sequence[Operand],
        run: Callable[[Tensor], Buffer],
        rule_of: Callable[[Readable | Outline], Rule],
        saved: dict[str, Buffer] | None = None,
        readers: Sequence[Operand] | None = None,
    ) -> Tensor:
        """Apply a column-parallel map of `weights` and its adapters. `run`, `rule_of`, what it has `saved` and the
        weights for whose gradients it reads x are the map's."""
        downs, saved = list[Down](), {} if saved is None else saved
        readers = [*(weights if readers is None else readers), *self.weights]

        def run_both(whole: Tensor) -> Buffer:
            out = run(whole)
            downs.extend(self._add(whole, out, saved))
            return out

        def rule(kept: Readable | Outline) -> Rule:
            return Adapted(rule_of(kept), kept, downs)

        op = layer_of(weights[0], "linear")
        if self.keeps_inputs:
            out = run_both(x)
            return apply(rule(outline(x)), out, x, *weights, *self.weights, op=op, saved=saved)
        return self.maps.linear_columns(x, [*weights, *self.weights], run_both, rule, op, saved, readers)

    def rows(
        self,
        x: Tensor,
        weight: Operand,
        bias: Operand | None,
        run: Callable[[Tensor, Operand | None], Buffer],
        rule_of: Callable[[Readable | Outline, Operand | None], Rule],
        saved: dict[str, Buffer] | None = None,
        readers: Sequence[Operand] | None = None,
    ) -> Tensor:
        """Apply a row-parallel map and its adapters, whose results are summed over ranks in one call."""
        downs, saved = list[Down](), {} if saved is None else saved
        readers = [*([weight] if readers is None else readers), *self.weights]

        def run_both(x: Tensor, bias: Operand | None) -> Buffer:
            out = run(x, bias)
            downs.extend(self._add(x, out, saved))
            return out

        def rule(kept: Readable | Outline, bias: Operand | None) -> Rule:
            return Adapted(rule_of(kept, bias), kept, downs)

        op = layer_of(weight, "linear")
        if self.keeps_inputs:
            inputs, out = (x, weight) if bias is None else (x, weight, bias), run_both(x, bias)
            return apply(rule(outline(x), bias), out, *inputs, *self.weights, op=op, saved=saved)
        return self.maps.linear_rows(x, weight, bias, run_both, rule, op, self.weights, saved, readers)
