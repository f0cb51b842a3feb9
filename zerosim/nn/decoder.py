"""The layers of a decoder's block, from its row (`placement/block.py`): norms, maps, attention, feed-forward.

Each declares its parameters in its context, under its family's names, and is then a function of tensors: from x
(..., D), D the model's width, to y of the same shape unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add
from types import MappingProxyType
from typing import NamedTuple

from zerosim import functional as F
from zerosim.backends.forms import Scores
from zerosim.config.numbers import Kind
from zerosim.nn.aside import Aside
from zerosim.nn.context import LayerContext
from zerosim.nn.experts import ExpertsLayer
from zerosim.nn.head_norms import HeadNorms
from zerosim.nn.latent import LatentAttention
from zerosim.nn.layers import Dropout
from zerosim.nn.lora import before_kernel
from zerosim.nn.maps import Layer, back_to_width, into_columns, pieces_of
from zerosim.nn.norm import Norm
from zerosim.nn.rope import rope_of
from zerosim.placement.block import Branch, Role
from zerosim.tensor.order import ran_after, visited_last
from zerosim.tensor.tensor import Parameter, Tensor

Run = Callable[..., Tensor]
"""Runs a layer on tensors, as a part of the block or plainly."""
GATED = MappingProxyType({"swiglu": F.swiglu, "geglu": F.geglu})
BETWEEN = MappingProxyType(
    {"gelu_tanh": F.gelu, "gelu": F.gelu_erf, "relu": F.relu, "clamped_swiglu": F.clamped_swiglu}
)
"""The functions between a feed-forward's maps, by the row's word."""


class Attention:
    """Attention between two maps: q|k|v side by side, normed and rotated where the row says so, and back. Of
    cross-attention k|v are maps of what stands `beside` the stream. `bias`: what is added to the scores.

    H query heads share K key and value heads, H/K neighbours each. A group divides both; if it has more members
    than K, neighbours hold copies of one key-value head. Shapes: x and y (B, T, D).
    """

    def __init__(
        self,
        here: LayerContext,
        branch: Branch,
        number: int = 0,
        beside: Aside | None = None,
        bias: Aside | None = None,
    ) -> None:
        sizes, maps, kind = here.sizes, here.group.maps, here.sizes.kind(here.number)
        self.num_heads, self.num_kv_heads = sizes.heads // maps.size, sizes.kv_heads // pieces_of(here, "kv_heads")
        self.columns = into_columns(here, number, branch.columns)
        self.memory = None if branch.memory is None else into_columns(here, number, branch.memory, "memory")
        norms, rotary = self._norms(here), self._rotary(here, kind)
        self.placed = [
            *self._held(here),
            *(rotary + norms if here.block.rotates_first else norms + rotary),
            *self._plain(here, kind),
            *before_kernel(here),
            *self._repeated(here),
            *self._returned(here),
        ]
        core = Core(here, kind, (self.num_heads, self.num_kv_heads), self.memory, beside, bias)
        self.core: Layer = core
        if here.block.sinks:
            self.core = here.taking(Role(0, "between")).leaf("core", Sinks, core)
        self.proj = back_to_width(here, number, branch.rows, sizes.width("heads"))
        self.policy, self.part = here.policy, branch.rows.part

    def _norms(self, here: LayerContext) -> list[Layer]:
        """Return the layer that norms q and k, if the row has one."""
        if here.block.qk_norm in ("", "plain"):
            return []
        return [here.taking(Role(0, "between")).leaf("qk_norm", HeadNorms, self.num_heads, self.num_kv_heads)]

    def _rotary(self, here: LayerContext, kind: Kind) -> list[Layer]:
        """Return the layer that rotates q and k, if the block has one."""
        if here.decoder.positions != "rotary" or not kind.rotates:
            return []
        rotary, rope = here.group.rows.rotary, rope_of(here.sizes, kind)
        keeps = here.policy.is_litgpt and self.num_heads == self.num_kv_heads
        return [partial(rotary, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, rope=rope, keeps=keeps)]

    def _plain(self, here: LayerContext, kind: Kind) -> list[Layer]:
        """Return a norm of rotated q and k without weights, or the layer that multiplies q by numbers of the position
        where none is rotated."""
        numbers, rows, columns = here.sizes.numbers, here.group.rows, self.num_heads * here.sizes.head_dim
        if kind.rotates:
            return [HeadNorms(here, self.num_heads, self.num_kv_heads)] if here.block.qk_norm == "plain" else []
        if not numbers.temper:
            return []

        def tempered(qkv: Tensor) -> Tensor:
            positions = rows.tokens(qkv.shape[1] * rows.context.ranks)
            return F.tempered(qkv, columns, numbers.temper, numbers.temper_every, positions)

        return [tempered]

    def _returned(self, here: LayerContext) -> list[Layer]:
        """Return the layer whose keys and values outlive backward, if the model returns them."""
        if here.casts is None or not here.casts.returns:
            return []
        columns = 2 * self.num_kv_heads * here.sizes.head_dim
        return [partial(F.returned_kv, columns=columns, keep=here.casts.outputs.append)]

    def _held(self, here: LayerContext) -> list[Layer]:
        """Return the layer that holds the result of the first map, if the block returns keys and values of it."""
        casts = here.casts
        if not here.policy.return_kv or casts is None:
            return []

        def held(qkv: Tensor) -> Tensor:
            casts.hold(qkv.buffer)
            return qkv

        return [held]

    def _repeated(self, here: LayerContext) -> list[Layer]:
        """Return the layer that repeats keys and values to all heads, if the kernel wants it."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if not (here.policy.repeat_kv or here.policy.is_litgpt) or heads == kv_heads or self.memory is not None:
            return []
        self.num_kv_heads = heads
        return [partial(F.repeat_kv, num_heads=heads, num_kv_heads=kv_heads)]

    def __call__(self, x: Tensor) -> Tensor:
        # no name for q|k|v, so that it is freed when attention has read it
        y = self.core(through(self.placed, plainly, [self.columns(x)]))
        return self.policy.run(self.part, self.proj, F.copied(y) if self.policy.is_litgpt else y)


class Core:
    """The attention of a group to so many `heads` of queries and of keys, with what it reads beside them."""

    def __init__(
        self,
        here: LayerContext,
        kind: Kind,
        heads: tuple[int, int],
        memory: Layer | None,
        beside: Aside | None,
        bias: Aside | None,
    ) -> None:
        sizes, numbers, block = here.sizes, here.sizes.numbers, here.block
        attention = here.group.attention
        if kind.chunk and kind.chunk < sizes.seq:
            assert here.group.chunked is not None, "a strategy's group has attention within chunks"
            attention = here.group.chunked
        slopes = {"alibi": 1.0, "scaled alibi": sizes.head_dim**-0.5}.get(here.decoder.positions, 0.0)
        scale, is_causal = numbers.query_scale or block.query_scale, block.causal and memory is None
        self.attention = partial(
            attention,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            first_head=here.group.maps.index * heads[0],
            whole_heads=sizes.heads,
            policy=here.policy,
            form=Scores(scale, numbers.attn_cap, slopes, kind.window, is_causal),
        )
        self.memory, self.beside, self.bias = memory, beside, bias
        self.chance, self.keys, self.op = sizes.dropout, here.keys, "attn" if memory is None else "cross_attn"

    def __call__(self, qkv: Tensor, sinks: Parameter | None = None) -> Tensor:
        dropout = self.chance if qkv.device.is_training else 0.0
        more = {} if sinks is None else {"sinks": sinks}
        return self.attention(
            qkv,
            dropout=dropout,
            key=self.keys(self.op) if dropout else (0, 0),
            kv=None if self.memory is None or self.beside is None else self.memory(self.beside.read()),
            bias=None if self.bias is None else self.bias.read(),
            **more,
        )


class Sinks:
    """Attention's core with a trained number for each head (gpt-oss): the score of one more key, whose value is 0."""

    def __init__(self, here: LayerContext, core: Core) -> None:
        heads, at = (here.sizes.heads,), here.named(here.name.rpartition(".")[0])
        self.sinks = at.declare("sinks", heads, std=here.std, splits=here.group.maps.split(heads, 0))
        self.core = core

    def __call__(self, qkv: Tensor) -> Tensor:
        return self.core(qkv, self.sinks)


ATTENTIONS: Mapping[str, Callable[..., Layer]] = MappingProxyType({"heads": Attention, "latent": LatentAttention})
"""The layer of the attention branch, by the row's word."""


class FeedForward:
    """A map into the feed-forward's width, a function, dropout if the row has it there, a map back. The policy may
    want it in tiles of rows."""

    def __init__(self, here: LayerContext, branch: Branch) -> None:
        self.columns = into_columns(here, 1, branch.columns)
        self.proj = back_to_width(here, 1, branch.rows, here.sizes.width(branch.columns.outs[0].wide))
        self.between = between_of(here)
        self.dropout = Dropout(here, "mlp", of_columns=True) if here.block.inner_dropout else unchanged
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        tile = self.policy.mlp_tile
        return F.by_rows(self._of_rows, x, tile, "mlp") if tile else self._of_rows(x)

    def _of_rows(self, x: Tensor) -> Tensor:
        return self.back(self.into(x))

    def into(self, x: Tensor) -> Tensor:
        """Return the last map's input."""
        run = self.policy.run
        return self.dropout(run("mlp_act", self.between, run("fc1", self.columns, x)))

    def back(self, x: Tensor) -> Tensor:
        """Return the last map's result."""
        return self.proj(x)


def between_of(here: LayerContext) -> Layer:
    """Return the function between a feed-forward's maps."""
    gated = GATED.get(here.block.between)
    return partial(gated, policy=here.policy) if gated else BETWEEN[here.block.between]


def feed_forward(here: LayerContext, branch: Branch) -> Layer:
    """Declare a block's feed-forward: dense, or of experts."""
    if branch.experts is None:
        return FeedForward(here, branch)
    shared = partial(FeedForward, branch=found) if (found := branch.dense) and here.sizes.shared_experts else None
    above, _, last = here.taking(Role(1, "router")).name.rpartition(".")
    return (
        here.taking(Role(1, "router")).named(above).leaf(last, ExpertsLayer, branch.experts, between_of(here), shared)
    )


class Residual(NamedTuple):
    """One branch of a block: layers before it and after it, itself, the norms of the sum, the part of the sum."""

    before: Sequence[Layer]
    layer: Layer
    after: Sequence[Layer]
    of_sum: Sequence[Layer]
    part: str


class DecoderBlock:
    """x + attention(norm(x)), then x + feed-forward(norm(x)), as the row arranges it: norms may be of a branch or of a
    sum. Cross-attention may stand between the two. Shapes: x and y (B, T, D)."""

    def __init__(self, here: LayerContext, memory: Aside | None = None, bias: Aside | None = None) -> None:
        row, factor = here.block, here.sizes.numbers.residual_scale
        keep_mask = "dropout" not in here.policy.again.parts

        def norm(name: str, role: Role) -> list[Layer]:
            return [here.taking(role).leaf(name, Norm)] if name else []

        def branch(number: int, of: Branch, make: Callable[[LayerContext], Layer], op: str, part: str) -> Residual:
            inside = of.experts is not None and here.group.rows.axes and not here.group.experts.axes
            reread = "" if inside else "layernorm"  # experts inside f and g keep all rows
            before = norm("" if number == 1 and row.shares_norm else of.before, Role(number, "before", reread))
            layer = make(here / of.name if of.name else here)
            after = norm(of.after, Role(number, "after", part))
            last: list[Layer] = [Dropout(here, op, keep_mask=keep_mask)] if row.dropout else []
            last += [partial(F.scaled, factor=factor)] if factor != 1.0 else []
            both = (last, after) if row.norms_sum else ([*after, *last], [])
            return Residual(before, layer, *both, of.rows.part)

        def attention(number: int, of: Branch, op: str, **beside: Aside | None) -> Residual:
            make = partial(ATTENTIONS[row.core], branch=of, number=number, **beside)
            return branch(number, of, make, op, "layernorm" if row.norms_sum else of.rows.part)

        one, *cross, mlp = row.branches
        self.attentions = [attention(0, one, "resid_1", bias=bias)]
        self.attentions += [attention(2, of, "resid_cross", beside=memory) for of in cross]
        self.mlp = branch(1, mlp, partial(feed_forward, branch=mlp), "resid_2", mlp.rows.part)
        self.is_parallel, self.policy = row.parallel, here.policy
        self.add = F.promoted_sum if before_kernel(here) else add

    def __call__(self, x: Tensor) -> Tensor:
        run = self.policy.run  # no name for a branch, so that it is freed when it is added
        of_norm, branch = partial(run, "layernorm"), list[Tensor]()
        if self.is_parallel:
            return self._side_by_side(x, of_norm)
        for one in self.attentions:
            in_part = partial(run, one.part)
            branch.append(one.layer(through(one.before, of_norm, [x])))
            x = through(one.of_sum, of_norm, [in_part(self.add, x, through(one.after, in_part, branch))])
        branch.append(self.mlp.layer(through(self.mlp.before, of_norm, [x])))
        return through(self.mlp.of_sum, plainly, [self.add(x, through(self.mlp.after, plainly, branch))])

    def _side_by_side(self, x: Tensor, of_norm: Run) -> Tensor:
        """Return x + attention(norm(x)) + feed-forward(norm(x)). Without a norm of its own the second branch reads the
        first one's."""
        [one], two = self.attentions, self.mlp
        normed = [through(one.before, of_norm, [x])]
        branch = [one.layer(normed[0])]
        shared = x if two.before else normed[0]
        turn = unchanged if shared.requires_grad else visited_last  # `ran_after` orders by the op of what both read
        if two.before:
            normed = [through(two.before, of_norm, [ran_after(x, branch[0])])]
        else:
            normed = [ran_after(shared, branch[0])]
        del shared
        x = x + turn(through(one.after, plainly, branch))
        branch.append(two.layer(normed.pop()))
        return x + through(two.after, plainly, branch)


class DroppedNorm:
    """A norm with dropout after it; `op` names its random numbers."""

    def __init__(self, here: LayerContext, op: str) -> None:
        self.norm, self.dropout = Norm(here), Dropout(here, op)

    def __call__(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(x))


class Transform:
    """What an encoder has in front of its head: a map of the width, the function of the blocks, a norm. Every member of
    a group has the whole map."""

    def __init__(self, here: LayerContext) -> None:
        row, summed, hidden = here.decoder.masked, here.group.rows.axes, here.sizes.hidden
        assert row is not None
        here = here.named(row.transform)
        dense = here / "dense"
        self.weight = dense.declare("weight", (hidden, hidden), std=here.std, summed=summed)
        self.bias = dense.declare("bias", (hidden,), summed=summed)
        self.between = BETWEEN[here.block.between]
        self.norm = Norm(here / row.transform_norm)

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(self.between(F.linear(x, self.weight, self.bias, transposed=True)))


def unchanged(x: Tensor) -> Tensor:
    return x


def through(layers: Sequence[Layer], run: Run, holder: list[Tensor]) -> Tensor:
    """Pass a tensor through layers. `holder` has its only reference, so that it is freed when the next layer has read
    it."""
    for layer in layers:
        holder.append(run(layer, holder.pop()))
    return holder.pop()


def plainly(layer: Layer, x: Tensor) -> Tensor:
    return layer(x)
