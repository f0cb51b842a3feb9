"""The values of `--recompute`: nothing, parts of every block, or whole blocks.

    none                   everything that backward reads is kept
    selective              the attention core runs again (2205.05198, section 5)
    selective:PART,...     these parts of every block do
    selective:op           all but results of attention and of every second matmul (torchtitan's policy of that name)
    full                   every block keeps its input alone
    full:K                 every K-th block does, the others keep all (torchtitan's selective_ac_option K)

A part names discarded results: backward recomputes each when it reads it. Names are those of Megatron's
--recompute-modules (core_attn, layernorm, mlp) where it has one; mlp_act is its moe_act, and of dense blocks too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zerosim.errors import did_you_mean, wrong

FORMS = "none|selective[:PART,...]|full[:K]"
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


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What backward recomputes: `parts` of every block, or every `every`-th block whole (0: none)."""

    parts: frozenset[str] = frozenset()
    every: int = 0

    def wraps(self, block: int) -> bool:
        """Return whether block 0, 1, ... is recomputed whole: for every second one 1, 3, 5."""
        return self.every > 0 and (block + 1) % self.every == 0

    def of_block(self, block: int) -> str:
        """Return the word for this block alone, `full` or `none`, if blocks differ."""
        return "full" if self.wraps(block) else "none"


def read_recompute(text: str, attention: str = "eager") -> Recomputed:
    """Parse the value of `--recompute`. Under `op` a flash kernel's result is saved, and eager attention is recomputed.

    Raises: InputError for any other form.
    """
    form, colon, given = text.partition(":")
    if form not in ("none", "selective", "full") or (form == "none" and colon):
        hint = did_you_mean(form, ("none", "selective", "full"), "")
        parts = f"name parts of a block after a colon: selective:{form}" if form in PARTS else hint
        raise wrong("recompute", f" {text!r}: expected {FORMS}{'; ' * bool(parts)}{parts}")
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
