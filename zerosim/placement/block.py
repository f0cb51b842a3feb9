"""A decoder as a row: the maps and norms of its block, their names, layouts, widths and roles, and what stands around.

Structure is here; numbers, such as widths, are in `config/parts/model.py`. Layers, adapters, recompute, reach and work
read which maps a block has from its row. Closed forms have a list of their own, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

Width = Literal["heads", "kv_heads", "ffn", "shared", "values", "q_latent", "kv_latent", "latent", "pairs"]
Between = Literal["gelu_tanh", "gelu", "relu", "swiglu", "geglu", "clamped_swiglu"]
Place = Literal[
    "before", "columns", "memory", "between", "up", "kv_columns", "kv_between", "kv_up", "rows", "after", "router"
]  # fmt: skip
BALANCE = "e_score_correction_bias"
"""The name of a router's biases that choose experts, a buffer."""
BOTH = (0, 1)
"""The numbers of a block's branches."""
_QUERIES, _KEYS = 3, 4
"""The two ways through latent attention, numbered as branches."""
WAYS = (*BOTH, _QUERIES, _KEYS)
KV = ("kv_columns", "kv_between", "kv_up")


class Role(NamedTuple):
    """What a weight is to its block: a norm before or after one of the two branches, a map in the branch, or between
    the maps.

    branch  0: attention, 1: feed-forward, 2: cross-attention, which stands between them
    place   in the order in which they run; 'memory': the map of what cross-attention reads, 'up': a map of a latent
            into heads; 'kv_': those of the latent of keys and values, beside the queries; 'router':
            what chooses experts, and weighs shared ones
    part    the part of the block that `--recompute` can name
    """

    branch: int
    place: Place
    part: str = ""

    @property
    def is_map(self) -> bool:
        """Whether it belongs to a linear map; its bias and its adapter do too."""
        return self.place in ("columns", "memory", "up", "kv_columns", "kv_up", "rows")


class Out(NamedTuple):
    """Outputs of a map into columns: a weight of its own, or columns of a fused weight.

    name   the weight's name beside the map's (q_proj); of columns, the name of their adapter (q), '' for none
    wide   how many: heads of queries, heads of keys and values, the feed-forward's width, or that of shared experts. Of
           latent attention: heads of `values`, the latent of queries, that of keys and values with the rotated columns
           that all heads share (kv_latent) or without (latent), heads of keys' other columns with values (pairs)
    words  the words of `lora_target` that mean it
    """

    name: str
    wide: Width
    words: tuple[str, ...] = ()


class Map(NamedTuple):
    """A linear map of a block. Without `outs` it goes back to the model's width, and `words` mean it.

    name    the leaf module's name in its branch, and a fused weight's
    fused   one weight has all outputs, side by side; without, each of `outs` has a weight
    layout  a weight's dims: 'in_out' as GPT-2's, 'out_in' as nn.Linear's
    inner   its inputs, if these are not the model's width
    stored  the order of a fused weight's outputs in released files: '' as `outs`, 'heads' q|k|v of one head after the
            other, 'groups' the queries that share a key, this key and its value
    """

    name: str
    outs: tuple[Out, ...] = ()
    fused: bool = True
    layout: Literal["in_out", "out_in"] = "out_in"
    bias: bool = False
    words: tuple[str, ...] = ()
    part: str = ""
    stored: Literal["", "heads", "groups"] = ""
    inner: Width | None = None


class Latent(NamedTuple):
    """The maps of multi-head latent attention beside the first one (arXiv 2405.04434). Without `q` that has queries as
    its columns, with it a latent, from which `q` makes them. `kv_a` has a latent and the rotated columns of keys that
    all heads share, `kv_b` makes the rest of it. `q_norm`, `kv_norm`: the names of the latents' norms."""

    kv_a: Map
    kv_b: Map
    kv_norm: str
    q: Map | None = None
    q_norm: str = ""

    @property
    def maps(self) -> tuple[Map, ...]:
        return (self.kv_a, self.kv_b) if self.q is None else (self.q, self.kv_a, self.kv_b)


class Experts(NamedTuple):
    """How a feed-forward has experts: a router's k best of E do a token's work. The two maps of all experts are stacks
    (E, O, I); the branch's own maps are those of shared experts, and of blocks that are dense.

    router    the experts' scores: 'softmax' or 'sigmoid' of the router's logits, or 'softmax of chosen' of the k best
    normed    a token's k weights are divided by their sum
    ranks     by what groups of experts are compared: their best score ('best'), or the sum of their two best ('two')
    applied   weights multiply the experts' 'results', their 'inputs', or what is 'between' their maps
    gate      the router's name; gate_bias: its logits have a bias; is_wide: they are fp32 beside half types
    stacks    the names of the two stacks; layout as a map's; bias: each expert's maps have biases
    shared    the name of shared experts, which work for every token, '' for none; shared_gate: of the map to one
              number, whose sigmoid multiplies their result
    biased    the router has biases of the scores, by which experts are chosen but not weighed (`BALANCE`)
    stored    an expert's maps in released files, in the order of the stacks' outputs: {} is its number. Empty: stacks
    in_files  parts of names here, each with what these files have in its place
    row_of_biases  the biases are one row, (1, E), in these files
    """

    router: Literal["softmax", "sigmoid", "softmax of chosen"] = "softmax"
    normed: bool = True
    ranks: Literal["best", "two"] = "best"
    applied: Literal["results", "inputs", "between"] = "results"
    gate: str = "gate"
    gate_bias: bool = False
    is_wide: bool = False
    stacks: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    layout: Literal["in_out", "out_in"] = "out_in"
    bias: bool = False
    shared: str = ""
    shared_gate: str = ""
    biased: bool = False
    stored: tuple[str, ...] = ("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj")
    in_files: tuple[tuple[str, str], ...] = ()
    row_of_biases: bool = False


class Branch(NamedTuple):
    """A residual branch: a norm, a map into columns, what is between, a map of rows, a norm. '' is no norm.

    name     of the module with the two maps; '': they are the block's own
    memory   of cross-attention: the map of an encoder's output into keys and values
    experts  of a feed-forward that has them
    latent   of latent attention: its other maps
    """

    name: str
    columns: Map
    rows: Map
    before: str = ""
    after: str = ""
    memory: Map | None = None
    latent: Latent | None = None
    experts: Experts | None = None

    @property
    def dense(self) -> Branch | None:
        """The maps that every token reads: its own or, beside experts, those of shared ones, if there are some."""
        if self.experts is None:
            return self
        shared, outs = self.experts.shared, tuple(out._replace(wide="shared") for out in self.columns.outs)
        columns = self.columns._replace(outs=outs, part="")  # a part of the leaf module that has them
        return self._replace(name=self.named(shared), columns=columns, experts=None) if shared else None

    @property
    def inward(self) -> tuple[Map, ...]:
        """Its maps but the last."""
        memory = () if self.memory is None else (self.memory,)
        return self.columns, *memory, *(() if self.latent is None else self.latent.maps)

    def named(self, name: str) -> str:
        """Return the name of one of its maps in the block."""
        return f"{self.name}.{name}" if self.name else name


class Target(NamedTuple):
    """A linear map, or some columns of a fused one: what one adapter adapts.

    weight   the name of the map, or of the map's weight
    map      its row
    columns  the outputs of the fused weight that it is; None: all
    words    the words of `lora_target` that mean it, ALL_LINEAR among them
    is_bare  it is a weight of no nn.Linear: the maps of all experts, or the router's
    """

    weight: str
    map: Map
    columns: Out | None = None
    words: tuple[str, ...] = ()
    is_bare: bool = False


ALL_LINEAR, ALL_MODULES = "all-linear", "all"
"""All maps: PEFT's word for them, or the names of all modules that are nn.Linear, which other programs give PEFT."""
FEED_FORWARD = ("gate", "up", "down")
LORA_WORDS = frozenset(("q", "k", "v", "o", "fc", *FEED_FORWARD, "experts", "router", ALL_LINEAR, ALL_MODULES))
"""The words of `lora_target` that are no patterns of names."""


def target_words(words: tuple[str, ...], *, is_part: bool = False, renames: bool = False) -> tuple[str, ...]:
    """Return the words of `lora_target` that mean a map with these own ones, or (`is_part`) columns of a fused one. A
    feed-forward's words go to the experts of the model, if it `renames` them (`Block.renames`)."""
    if renames and set(FEED_FORWARD) & set(words):
        return ()
    return words if is_part else (*words, ALL_LINEAR, ALL_MODULES)


def expert_words(row: Experts, *, renames: bool) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the words of `lora_target` that mean the stacks of experts' first and last maps, and the router. Shared
    experts have modules of the names that mean stacks."""
    if not renames:
        return ("experts",), ("experts",), ("router",)
    gate, up, down = FEED_FORWARD
    everything = (ALL_LINEAR, ALL_MODULES) if row.shared else (ALL_LINEAR,)
    return ("experts", gate, up, *everything), ("experts", down, *everything), ("router", ALL_LINEAR)


class Block(NamedTuple):
    """One block: two branches, attention and feed-forward; in a decoder beside an encoder cross-attention between them.

    norm      'layer', 'layer without bias', 'rms', or 'rms + 1': x / rms * (1 + weight)
    rounds_last  RMS norms multiply by their weight before they round, as OLMo 2's modules do; `eager` saves more then
    norms_sum  the norm after a branch norms x + branch, which goes on normed (post-norm)
    between   the feed-forward's function
    qk_norm   norms of q and k: 'head' the block's norm of each head, 'all' of all columns of
              each, 'heads' of each head with weights of its own, 'plain' of each head without weights, of those that
              have been rotated; '' none
    qk_names  the names of the two norms with weights
    rotates_first  these norms read q and k that have been rotated
    parallel  the branches read the same x, and are added together. A second branch with the first one's norm reads its
              result
    dropout   attention's scores and all branches have dropout; `inner_dropout`: the feed-forward's function too
    core      the kind of attention: 'heads' of queries, keys and values, or 'latent': heads that are made of latents
    sinks     attention has a trained number for each head, the score of one more key, whose value is 0
    query_scale  the factor of attention's scores, if a configuration has no other; 0: 1 / sqrt(head_dim)
    causal    a token reads those up to itself; without, all others too
    cross     a third branch, whose queries read an encoder's output
    biases    the name of a table in the first block, of a bias of scores for each head and distance, which all blocks
              read; '' none
    renames   PEFT takes the words of feed-forward maps, and all-linear, for experts' stacks and the router: linear maps
              in transformers 4 (peft 0.21, utils/transformers_weight_conversion.py). Dense maps then have no words
    """

    attention: Branch
    mlp: Branch
    norm: Literal["layer", "layer without bias", "rms", "rms + 1"]
    between: Between
    qk_norm: Literal["", "head", "all", "heads", "plain"] = ""
    qk_names: tuple[str, str] = ("q_norm", "k_norm")
    rotates_first: bool = False
    parallel: bool = False
    dropout: bool = False
    core: Literal["heads", "latent"] = "heads"
    norms_sum: bool = False
    causal: bool = True
    cross: Branch | None = None
    biases: str = ""
    query_scale: float = 0.0
    inner_dropout: bool = False
    sinks: bool = False
    renames: bool = False
    rounds_last: bool = False

    @property
    def without_experts(self) -> Block:
        """The same block with a dense feed-forward."""
        return self._replace(mlp=self.mlp._replace(experts=None))

    @property
    def is_gated(self) -> bool:
        """Whether the first map has two results, one of which gates the other."""
        return len(self.mlp.columns.outs) == 2

    @property
    def shares_norm(self) -> bool:
        """Whether the second branch reads the first one's norm."""
        return self.mlp.before == self.attention.before != ""

    def reached_from(self, branch: int, place: str) -> tuple[int, ...]:
        """Return the branches from which backward comes to a layer: one after the other, both reach each; side by side
        each has its own layers, and they may share the first norm. Latent attention has two ways side by side."""
        if self.core == "latent":
            ways = {"columns": _QUERIES, "between": _QUERIES, "up": _QUERIES} | dict.fromkeys(KV, _KEYS)
            return (ways[place],) if branch == 0 and place in ways else (*BOTH, _QUERIES, _KEYS)
        return BOTH if not self.parallel or (place == "before" and self.shares_norm) else (branch,)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The branches, in the order in which they run. Side by side no norm reads the sum after attention, so no part
        is recomputed for it."""
        attention = self.attention
        if self.parallel:
            attention = attention._replace(rows=attention.rows._replace(part=""))
        return attention, *([] if self.cross is None else [self.cross]), self.mlp

    def targets(self, *, by_module: bool = False) -> Iterator[tuple[str, Target]]:
        """Yield what may have an adapter: every map, the columns of fused ones that have names, experts' stacks, the
        router. `by_module`: no word is renamed."""
        renames = self.renames and not by_module
        words = partial(target_words, renames=renames)
        for branch in self.branches:
            if (experts := branch.experts) is not None:
                *of_stacks, of_router = expert_words(experts, renames=renames)
                for name, one, own in zip(experts.stacks, (branch.columns, branch.rows), of_stacks, strict=True):
                    at = branch.named(name)
                    yield at, Target(at, one._replace(layout=experts.layout), None, own, is_bare=True)
                at = branch.named(experts.gate)
                yield at, Target(f"{at}.weight", Map(experts.gate), None, of_router, is_bare=True)
        for branch in (found for one in self.branches if (found := one.dense) is not None):
            rows = branch.rows
            for columns in branch.inward:
                whole, only = branch.named(columns.name), columns.outs[0].words if len(columns.outs) == 1 else ()
                if columns.fused:
                    yield whole, Target(whole, columns, None, words(only))
                for out in columns.outs:
                    name = branch.named(out.name)
                    if not columns.fused:
                        yield name, Target(name, columns, None, words(out.words))
                    elif out.name:
                        yield name, Target(whole, columns, out, words(out.words, is_part=True))
            yield branch.named(rows.name), Target(branch.named(rows.name), rows, None, words(rows.words))


class Masked(NamedTuple):
    """An encoder's own: every token reads all others, and the model predicts tokens that were masked.

    types           the name of a table of token types beside that of positions; every token has the first type
    transform       the name of the map and the norm in front of the head, with the function of the blocks between
    transform_norm  the norm's name in it
    """

    types: str
    transform: str
    transform_norm: str


class Second(NamedTuple):
    """The decoder beside an encoder: its block, and the names of its blocks and of the norm after them."""

    block: Block
    blocks: str
    last_norm: str


class Decoder(NamedTuple):
    """A model of one stack of blocks: its block, and what stands around the blocks, by name. A decoder, or an encoder:
    of masked tokens, or with a `second` stack.

    prefix       of every parameter's name but the head's
    positions    'learned', 'rotary', 'alibi', 'scaled alibi' (slopes are divided by sqrt(head_dim) too) or 'none'
    interleaved  rotary positions turn neighbouring columns; without, the halves of a head
    table_norm   the name of a norm of the token table's rows; an encoder's norms them with their positions
    last_norm    the name of the norm after the blocks, '' for none
    scaled       the token table's rows are multiplied by sqrt(hidden)
    position_table  the name of learned positions
    first_position  the row of the first one
    head         the head's name in released files
    head_bias    it has a bias
    tied         the head is the token table, unless a configuration says otherwise
    shares_keys  several heads of queries may share one of keys and values
    scales_head  a tied head's logits are divided by sqrt(hidden)
    masked       of an encoder that predicts masked tokens
    second       of an encoder with a decoder, which predicts the next token of a text of its own
    """

    block: Block
    positions: Literal["learned", "rotary", "alibi", "scaled alibi", "none"]
    table: str
    blocks: str
    last_norm: str
    prefix: str = ""
    interleaved: bool = False
    table_norm: str = ""
    scaled: bool = False
    position_table: str = "wpe"
    first_position: int = 0
    head: str = "lm_head"
    head_bias: bool = False
    tied: bool = False
    shares_keys: bool = True
    scales_head: bool = False
    masked: Masked | None = None
    second: Second | None = None

    @property
    def stacks(self) -> tuple[tuple[Block, str], ...]:
        """The block of each stack, and its blocks' name."""
        second = self.second
        return (self.block, self.blocks), *([] if second is None else [(second.block, second.blocks)])
