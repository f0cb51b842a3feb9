"""The numbers of a model's function that no width says: windows, scales, caps, the rotary angles of its blocks.

A family's config.json has them, and a run takes them from there: no flag changes them. Blocks may differ: a block is a
function of its number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Kind(NamedTuple):
    """What differs from block to block: the keys that a query reads (0: all before it), the base of the rotary angles,
    whether q and k are rotated, whether the feed-forward has experts, in a model that has some, and the tokens of the
    chunks that attention stays within (0: none)."""

    window: int = 0
    rope_base: float = 0.0
    rotates: bool = True
    has_experts: bool = True
    chunk: int = 0


class Scaling(NamedTuple):
    """A change of the rotary angles for longer contexts: transformers' `rope_type` and the values beside it, by name.
    A value may be a list of numbers (longrope)."""

    kind: str = "default"
    values: tuple[tuple[str, float | str | bool | tuple[float, ...]], ...] = ()


UNSCALED = Scaling()


class Latents(NamedTuple):
    """The columns of latent attention: of the latents of queries (0: none) and of keys and values; of a head's plain
    and rotated part, and of its values."""

    q: int
    kv: int
    plain: int
    turned: int
    value: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers, with values that change nothing.

    window         the keys that a query reads in blocks with a window, itself among them; 0: all before it
    full_every     each block whose number, counted from 1, this divides reads all keys; 0: none does
    window_from    blocks from this number on, counted from 0, have the window
    plain_every    each block whose number, counted from 1, this divides does not rotate q and k; 0: all rotate
    plain_full     blocks rotate q and k exactly if they have a window (Command R7B), whatever `plain_every` says
    plain_slides   only blocks that do not rotate q and k have the window (SmolLM3), whatever the three above say
    rope_local     the base of the rotary angles in blocks with a window; 0: `rope_base` in all
    rotary_part    the part of a head's columns that is rotated
    scaling        of the rotary angles, in blocks without a window of their own base
    query_scale    the factor of attention's scores; 0: 1 / sqrt(head_dim)
    attn_cap       scores become cap * tanh(scores / cap); 0: none
    logit_cap      the same of the logits
    logit_scale    the factor of the logits
    embed_scale    the factor of the token table's rows
    residual_scale  the factor of a branch before it is added
    token_types    the rows of an encoder's table of token types
    decoder_layers  the blocks of a decoder beside an encoder; 0: as many as the encoder has
    decoder_start  the token that stands before the decoder's own ones
    chunk          in blocks that rotate q and k tokens read only their own chunk of so many; 0: every chunk
    temper, temper_every  in the other blocks q of the token at position t is multiplied by
                   1 + temper ln(1 + floor((t + 1) / temper_every)); 0: by 1
    latents        the columns of latent attention; None: they follow from a head's
    dense_first    the first blocks, which have no experts
    experts_every  among all blocks, those whose number, counted from 1, this divides have experts
    expert_groups, chosen_groups  the experts are in so many groups, and a token's are all in so many of them
    expert_scale   the factor of a token's weights of its experts
    bias_buckets, bias_largest  the buckets of T5's biases, and the distance from which on all are in the last one
    """

    window: int = 0
    full_every: int = 0
    window_from: int = 0
    plain_every: int = 0
    plain_full: bool = False
    plain_slides: bool = False
    rope_local: float = 0.0
    rotary_part: float = 1.0
    scaling: Scaling = UNSCALED
    query_scale: float = 0.0
    attn_cap: float = 0.0
    logit_cap: float = 0.0
    logit_scale: float = 1.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    token_types: int = 2
    decoder_layers: int = 0
    decoder_start: int = 0
    dense_first: int = 0
    experts_every: int = 1
    expert_groups: int = 1
    chosen_groups: int = 1
    expert_scale: float = 1.0
    bias_buckets: int = 32
    bias_largest: int = 128
    latents: Latents | None = None
    chunk: int = 0
    temper: float = 0.0
    temper_every: int = 0

    def kind(self, number: int, rope_base: float) -> Kind:
        """Return what block `number`, counted from 0, has of its own."""
        rotates = not (self.plain_every and (number + 1) % self.plain_every == 0)
        is_full = bool(self.full_every) and (number + 1) % self.full_every == 0
        is_full = rotates if self.plain_slides else is_full or number < self.window_from
        window = 0 if is_full else self.window
        rotates = bool(window) if self.plain_full else rotates
        base = self.rope_local if window and self.rope_local else rope_base
        has_experts = number >= self.dense_first and (number + 1) % self.experts_every == 0
        return Kind(window, base, rotates, has_experts, self.chunk if rotates else 0)


NEUTRAL = Numbers()
