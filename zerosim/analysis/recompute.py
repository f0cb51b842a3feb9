"""What backward recomputes, as closed forms and searches ask for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from zerosim.config import RunConfig
from zerosim.placement.spec import is_block
from zerosim.placement.stages import number_of

_MEGATRONS = {"eager": ("selective",), "flash": ("selective:layernorm", "selective:layernorm,mlp")}
_TITANS = {"eager": ("selective:op", "full:2"), "flash": ("selective:op", "full:2")}
_NOTHING: Mapping[str, tuple[str, ...]] = {"eager": (), "flash": ()}
_MORE: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "paper": {"eager": ("selective",), "flash": ("selective:layernorm,mlp_act", "selective:layernorm,mlp")},
        "megatron": _MEGATRONS,
        "fsdp2": _TITANS,
        **dict.fromkeys(("ddp", "fsdp1", "deepspeed", "hf-deepspeed"), _NOTHING),
    }
)
"""By recipe and attention: --recompute-modules of Megatron-LM, torchtitan's two policies beside whole blocks, and
gradient checkpointing, which knows whole blocks alone."""


def recompute_of(config: RunConfig, block: int | None = None) -> str:
    """Return `--recompute`; for this block alone its own word, if blocks differ."""
    own = block is not None and (differ(config) or config.memory.again.every)
    return config.memory.again.of_block(block or 0) if own else config.memory.recompute


def parts_again(config: RunConfig, unit: str = "") -> Collection[str]:
    """Return the parts of this block whose results backward computes again, or those of some block."""
    again = config.memory.again
    return again.parts_of(number_of(unit)) if differ(config) and is_block(unit) else again.parts


def differ(config: RunConfig) -> bool:
    """Return whether ranges of blocks say what each of them recomputes."""
    return bool(config.memory.again.ranges)


def blocks_again(config: RunConfig, part: str, units: Iterable[str]) -> int:
    """Return how many of these units recompute this part."""
    return sum(part in parts_again(config, unit) for unit in units)


def tiles_rows(config: RunConfig) -> bool:
    """Return whether backward recomputes every feed-forward, tile by tile."""
    return config.memory.mlp_tile > 0


def period_of(config: RunConfig) -> int:
    """Return K if every K-th block is recomputed whole, or has experts, else 1: after so many blocks a model repeats
    itself. Ranges of blocks are its beginning: behind them all blocks are alike."""
    again = config.memory.again
    of_ranges = 1 + max((one.last for one in again.ranges), default=0)
    return math.lcm(max(again.every, of_ranges), config.model.numbers.experts_every)


def first_period(config: RunConfig) -> int:
    """Return the number of periods up to the end of the first one that is like all later ones."""
    return 1 + -(-config.model.numbers.dense_first // period_of(config))


def is_wrapped(config: RunConfig, unit: str) -> bool:
    """Return whether backward recomputes this whole unit."""
    return config.model.has_blocks and is_block(unit) and config.memory.again.wraps(number_of(unit))


def described(config: RunConfig) -> str:
    """Return how many blocks recompute what: '12 of 32 blocks whole, 8 in layernorm and mlp_act, 12 not at all'."""
    layers, found = config.model.depths[0], list[str]()
    for word, count in Counter(recompute_of(config, block) for block in range(layers)).items():
        parts = " and ".join((word.partition(":")[2] or "core_attn").rsplit(",", 1)).replace(",", ", ")
        of = "" if found else f" of {layers} blocks"
        found.append(f"{count}{of} {({'full': 'whole', 'none': 'not at all'}).get(word, f'in {parts}')}")
    return ", ".join(found)


def ever_more_recompute(config: RunConfig) -> tuple[str, ...]:
    """Return the configuration's recompute, then settings that recompute more, as far as the recipe's framework has
    them. Whole blocks follow a list of parts. Flash attention saves no scores, so its core is not recomputed."""
    own, attention = config.memory.recompute, config.memory.attention
    if not config.model.has_blocks or own == "full":
        return (own,)
    more = _MORE[config.parallel.recipe][attention]
    more = more if own == "none" else more[more.index(own) + 1 :] if own in more else ()
    return own, *more, "full"
