"""How many parameters a model has, by its shape; what zerosim's own models hold is counted.

L blocks, h width, V vocabulary, s learned positions, f width of the MLP, a heads.
Source of the approximations: ZeRO paper (arXiv 1910.02054) 12Lh², Megatron (arXiv 2104.04473, section 5).
"""

from __future__ import annotations

from fractions import Fraction


def decoder_parameters(
    layers: int,
    hidden: int,
    ffn: int,
    vocab: int,
    *,
    queries: int,
    keys: int,
    gated: bool,
    biases: tuple[bool, bool, bool, bool],
    norms: int,
    norm_params: int,
    between: int = 0,
    positions: int = 0,
    around: int = 1,
    head_bias: bool = False,
    tied: bool = False,
    types: int = 0,
    transform: bool = False,
    attention: int | None = None,
) -> int:
    """Return the exact number for a decoder, or an encoder of masked tokens: its heads' columns need not add up to the
    width, and maps may have biases.

    A block has queries (hq) and output (qh) of q columns, keys and values of k each (2hk), the feed-forward's two or,
    `gated`, three matrices (hf each), `norms` norms of `norm_params` h each, `between` parameters for norms of q and k.
    `biases`: of queries, keys and values (q + 2k), of the output (h), of the maps into the feed-forward (f each) and of
    the map back (h). `around` norms stand outside of blocks. Then come the table (Vh), `positions` (sh) and, unless it
    is tied, a head (Vh). An encoder has a table of token `types` (h each), and a `transform`, a map with a bias
    (h² + h), in front of its head. `attention`: the parameters of a block's attention, if its maps are others.
    """
    into = (2 if gated else 1) * ffn
    maps = 2 * hidden * (queries + keys) if attention is None else attention
    added = (queries + 2 * keys, hidden, into, hidden) if attention is None else (0, 0, into, hidden)
    block = maps + hidden * (into + ffn) + sum(number for number, there in zip(added, biases, strict=True) if there)
    block += norms * norm_params * hidden + between
    ends = (vocab * (1 if tied else 2) + positions + types + around * norm_params) * hidden + vocab * head_bias
    return layers * block + ends + (hidden * hidden + hidden) * transform


def further_parameters(depths: int, hidden: int, norm_params: int) -> int:
    """Return what blocks that predict further tokens have beside a block: a map of 2h columns to h, and three norms
    (arXiv 2412.19437, section 2.2)."""
    return depths * (2 * hidden * hidden + 3 * norm_params * hidden)


def latent_parameters(
    hidden: int, heads: int, q: int, kv: int, plain: int, turned: int, value: int, *, bias: bool = False
) -> int:
    """Return the parameters of latent attention: queries of plain + turned columns a head or, of a latent of `q`, its
    map, norm and the map from it; keys and values of a latent of `kv` with `turned` columns beside it, its norm and the
    map from it; the output of `value` columns a head. `bias`: of the maps of latents, and the output."""
    columns = heads * (plain + turned)
    queries = hidden * q + q + q * columns if q else hidden * columns
    keys = hidden * (kv + turned) + kv + kv * heads * (plain + value)
    return queries + keys + heads * value * hidden + bias * (q + kv + turned + hidden)


def experts_parameters(
    layers: int,
    hidden: int,
    ffn: int,
    expert_ffn: int,
    experts: int,
    chosen: int,
    shared_ffn: int,
    *,
    gated: bool,
    biases: tuple[bool, bool],
    shared_gate: bool = False,
    gate_bias: bool = False,
    expert_biases: bool = False,
) -> int:
    """Return what blocks with experts have beside dense ones; of `experts` count `chosen`, all of them or a token's.

    In place of the feed-forward's two or, `gated`, three matrices (hf each) such a block has a router (Eh), as many
    matrices of width f' in each expert that counts, shared ones of width `shared_ffn` together, and a gate of these
    (h). `biases`: of the dense maps into the feed-forward (f each) and back (h), which shared experts have as one
    feed-forward. `gate_bias`: the router has one (E), `expert_biases`: so has each matrix of an expert (f' or h).
    """
    into = 2 if gated else 1
    dense = hidden * (into + 1) * ffn + into * ffn * biases[0] + hidden * biases[1]
    more = into * shared_ffn * biases[0] + hidden * biases[1] + hidden * shared_gate
    beside = hidden * (into + 1) * shared_ffn + more * (shared_ffn > 0)
    each = hidden * (into + 1) * expert_ffn + (into * expert_ffn + hidden) * expert_biases
    return layers * ((hidden + gate_bias) * experts + chosen * each + beside - dense)


def second_parameters(layers: int, hidden: int, queries: int, keys: int, heads: int, buckets: int) -> int:
    """Return what T5 has beside the parameters of as many blocks of one stack: cross-attention in each block of the
    decoder, queries and output of q columns, keys and values of k each, with a norm; and two tables of biases."""
    return layers * (2 * hidden * (queries + keys) + hidden) + 2 * buckets * heads


def twelve_l_h_squared(layers: int, hidden: int) -> int:
    """Return 12Lh²: the matrices of the blocks alone (how the ZeRO paper names its models)."""
    return 12 * layers * hidden**2


def megatron_parameters(layers: int, hidden: int, vocab: int, positions: int) -> Fraction:
    """Return P = 12Lh² (1 + 13/(12h) + (V+s)/(12Lh)) (2104.04473, section 5): all but the last norm's 2h."""
    factor = 1 + Fraction(13, 12 * hidden) + Fraction(vocab + positions, 12 * layers * hidden)
    return twelve_l_h_squared(layers, hidden) * factor
