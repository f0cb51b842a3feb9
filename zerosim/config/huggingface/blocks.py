"""Blocks that differ from one another: which have a window, and which do not rotate q and k.

A file says this by a list for all blocks, by a pattern, or by the first block with a window. The list is what counts;
`Numbers` must be able to say it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerosim.config.huggingface.draft import Draft
from zerosim.config.huggingface.keys import Keys, show

_KINDS = ("full_attention", "sliding_attention")


def read_windows(keys: Keys, draft: Draft) -> Draft:
    """Read which blocks have a window, as the family's class says without a list."""
    layers, window = draft.size("layers"), None
    slides = not keys.knows("use_sliding_window") or keys.flag("use_sliding_window")
    if keys.value("sliding_window") is not None and slides:
        window = keys.whole("sliding_window")
    first = keys.whole("max_window_layers") if keys.value("max_window_layers") else 0
    every = _pattern(keys) if keys.knows("sliding_window_pattern") else 0
    plain = keys.knows("no_rope_layers") and keys.value("layer_types") is None
    if keys.knows("layer_types") and keys.value("layer_types") is not None:
        sliding = _sliding(keys, layers)
        if any(sliding) and window is None:
            raise keys.fail("layer_types has sliding_attention, but there is no sliding_window")
        if not any(sliding):
            window, first, every = None, 0, 0
        elif sliding == [not draft.numbers.kind(number, 0.0).rotates for number in range(layers)]:
            plain = True
        elif sliding != _said(layers, first, every):
            first, every = sliding.index(True), 0
            every = _every([number for number in range(first, layers) if not sliding[number]])
            if sliding != _said(layers, first, every):
                raise keys.fail("layer_types: no model here has these windows; possible are a window in every block, "
                                "in all from one on, and in all but each n-th")  # fmt: skip
    if window is None:
        return draft
    if plain:
        return draft.numbered(window=window, plain_slides=True)
    return draft.numbered(window=window, full_every=every, window_from=min(first, layers))


def _pattern(keys: Keys) -> int:
    """Return the n of which each n-th block has no window, 0 where letters say it: those repeat what a list says."""
    key, listed = "sliding_window_pattern", keys.knows("layer_types") and keys.value("layer_types") is not None
    return 0 if listed and isinstance(keys.value(key), str) else keys.whole(key)


def read_plain(keys: Keys, draft: Draft) -> Draft:
    """Read which blocks do not rotate q and k (SmolLM3)."""
    layers = draft.size("layers")
    if keys.value("no_rope_layers") is None:
        return draft.numbered(plain_every=keys.whole("no_rope_layer_interval"))
    keys.value("no_rope_layer_interval")
    rotates = keys.each("no_rope_layers", int, layers, at_least=True)
    plain = [number for number in range(layers) if not rotates[number]]
    every = _every(plain)
    if plain != [number for number in range(layers) if every and (number + 1) % every == 0]:
        raise keys.fail("no_rope_layers: no model here has them; possible are none, and each n-th block")
    return draft.numbered(plain_every=every)


def plain_where_full(keys: Keys, draft: Draft) -> Draft:
    """Rotate q and k only in blocks with a window (Command R7B)."""
    return draft.numbered(plain_full=True)


def plain_beside_windows(keys: Keys, draft: Draft) -> Draft:
    """Rotate q and k only in blocks with a window if a window is given, else in all (K-EXAONE)."""
    return draft if keys.value("sliding_window") is None else plain_where_full(keys, draft)


def _sliding(keys: Keys, layers: int) -> list[bool]:
    kinds = keys.each("layer_types", str, layers)
    other = next((kind for kind in kinds if kind not in _KINDS), None)
    if other is not None:
        raise keys.fail(f"layer_types {show(other)} is not modelled: expected {' or '.join(_KINDS)}")
    return [kind == _KINDS[1] for kind in kinds]


def _said(layers: int, first: int, every: int) -> list[bool]:
    """Return which blocks have a window: those from `first` on, but each `every`-th."""
    return [number >= first and not (every and (number + 1) % every == 0) for number in range(layers)]


def _every(numbers: Sequence[int]) -> int:
    """Return what divides all block numbers, counted from 1; 0 for none."""
    return math.gcd(*(number + 1 for number in numbers)) if numbers else 0
