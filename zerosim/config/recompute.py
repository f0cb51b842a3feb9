"""The values of `--recompute`: nothing, parts of every block, whole blocks, or one of these for each range of blocks.

    none                   everything that backward reads is kept
    selective              the attention core runs again (2205.05198, section 5)
    selective:PART,...     these parts of every block do
    selective:op           all but results of attention and of every second matmul (torchtitan's policy of that name)
    full                   every block keeps its input alone
    full:K                 every K-th block does, the others keep all (torchtitan's selective_ac_option K)
    0-9=full+10-27=selective:layernorm,mlp_act
                           blocks 0 to 9 keep their inputs, 10 to 27 recompute two parts, all others keep all (3=full
                           names one block). Shells, TOML and JSON take it as it is
    auto                   chosen before anything is planned, so that it fits (`analysis/auto_recompute.py`)

A part names discarded results: backward recomputes each when it reads it. Names are those of Megatron's
--recompute-modules (core_attn, layernorm, mlp) where it has one; mlp_act is its moe_act, and of dense blocks too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from zerosim.errors import did_you_mean, wrong

FORMS, AUTO = "none|selective[:PART,...]|full[:K]|auto", "auto"
RANGES = "0-9=full+10-27=selective:PART,..."
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "core_attn": ("core_attn",),  # scores, softmax and its mask; with flash attention its output too
        "mla_up_proj": ("mla_up",),  # latent attention's maps into heads: q, k and v
        "attn_proj": ("attn_proj",),  # attention's last map, dropout and the sum after it: the second norm's input
        "layernorm": ("layernorm",),  # both norms: the inputs of the linear maps behind them
        "mlp": ("fc1", "mlp_act"),  # the feed-forward without its last map, whose result no backward reads
        "mlp_act": ("mlp_act",),  # GELU or SwiGLU: the input of the last map
        "dropout": ("dropout",),  # the masks of both branches
        "op": ("core_attn", "attn_proj", "layernorm", "mlp_act", "dropout"),
    }
)


class Named(NamedTuple):
    """The blocks from `first` to `last`, the word for each of them, and what it recomputes."""

    first: int
    last: int
    word: str
    each: Recomputed


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What backward recomputes: `parts` of every block, or every `every`-th block whole (0: none); or, of the blocks in
    `ranges`, what each range says. Then `parts` are those that some block recomputes."""

    parts: frozenset[str] = frozenset()
    every: int = 0
    ranges: tuple[Named, ...] = ()

    @property
    def kinds(self) -> list[Recomputed]:
        """What the ranges recompute, or this where all blocks are alike."""
        return [one.each for one in self.ranges] or [self]

    @property
    def is_whole(self) -> bool:
        """Whether some block is recomputed whole."""
        return any(one.every for one in self.kinds)

    def wraps(self, block: int) -> bool:
        """Return whether block 0, 1, ... is recomputed whole: for every second one 1, 3, 5."""
        every = self._named(block).each.every if self.ranges else self.every
        return every > 0 and (block + 1) % every == 0

    def parts_of(self, block: int) -> frozenset[str]:
        """Return the parts that this block recomputes."""
        return self._named(block).each.parts if self.ranges else self.parts

    def of_block(self, block: int) -> str:
        """Return the word for this block alone, if blocks differ."""
        return self._named(block).word if self.ranges else "full" if self.wraps(block) else "none"

    def _named(self, block: int) -> Named:
        return next((one for one in self.ranges if one.first <= block <= one.last), Named(0, 0, "none", Recomputed()))


@cache  # each block asks
def read_recompute(text: str, attention: str = "eager") -> Recomputed:
    """Parse the value of `--recompute`. Under `op` a flash kernel's result is saved, and eager attention is recomputed.

    Raises: InputError for any other form.
    """
    if text == AUTO:
        return Recomputed()
    if "=" in text:
        return _read_ranges(text, attention)
    form, colon, given = text.partition(":")
    if form not in ("none", "selective", "full") or (form == "none" and colon):
        hint = did_you_mean(form, ("none", "selective", "full"), "")
        parts = f"name parts of a block after a colon: selective:{form}" if form in PARTS else hint
        raise wrong("recompute", f" {text!r}: expected {FORMS} or {RANGES}{'; ' * bool(parts)}{parts}")
    if form == "full":
        if colon and not (given.isdecimal() and len(given) < 10 and int(given) >= 1):
            raise wrong("recompute", f" {text!r}: K of full:K must be a whole number of at least 1, as in full:2")
        return Recomputed(every=int(given) if colon else 1)
    if form == "none":
        return Recomputed()
    found: dict[str, str] = {}
    for name in given.split(",") if colon else ["core_attn"]:
        if name not in PARTS:
            hint = did_you_mean(name, PARTS, f"they are {', '.join(PARTS)}")
            raise wrong("recompute", f" {text!r}: no part of a block is called {name!r}; {hint}")
        for part in PARTS[name]:
            if part in found:
                what = f"{name!r} twice" if name == found[part] else f"{name!r} and {found[part]!r}, which share {part}"
                raise wrong("recompute", f" {text!r}: names {what}; leave one out")
            found[part] = name
    keeps_core = found.get("core_attn") == "op" and attention == "flash"
    return Recomputed(frozenset(part for part in found if not (keeps_core and part == "core_attn")))


def _read_ranges(text: str, attention: str) -> Recomputed:
    """Parse values for ranges of blocks."""
    found: list[Named] = []
    for one in text.split("+"):
        blocks, _, word = one.partition("=")
        first, dash, last = blocks.partition("-")
        last = last if dash else first
        numbers = [int(each) for each in (first, last) if each.isdecimal() and len(each) < 10]
        if len(numbers) < 2 or numbers[0] > numbers[1] or not word:
            why = "is no range of blocks with its value; expected FIRST-LAST=VALUE, as in 0-9=full"
            raise wrong("recompute", f" {text!r}: {one!r} {why}")
        if "=" in word or word.startswith("full:") or word == AUTO:
            why = f"of {blocks} expected none, selective[:PART,...] or full, not {word!r}"
            raise wrong("recompute", f" {text!r}: {why}")
        found.append(Named(numbers[0], numbers[1], word, read_recompute(word, attention)))
    for before, after in pairwise(sorted(found)):
        if after.first <= before.last:
            raise wrong("recompute", f" {text!r}: names block {after.first} twice; leave one out")
    return Recomputed(frozenset[str]().union(*(one.each.parts for one in found)), ranges=tuple(sorted(found)))
