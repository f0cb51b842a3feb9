"""Names and colours in all reports: ZeRO stages, optimizers, kinds of memory.

Light to import: a notebook reads it before it has shown anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from zerosim.config.presets.optimizers import OPTIMIZERS as PRESETS
from zerosim.units import counted as counted

STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
ALLOCATORS = {"caching": "PyTorch's caching allocator", "arena": "one contiguous region"}
OPTIMIZERS = {name: preset.title for name, preset in PRESETS.items()}


class KindLook(NamedTuple):
    """A kind of memory in words, its letter, its tone in HTML, and its paint (light, dark, hatch) in pictures."""

    meaning: str
    letter: str
    tone: str
    light: str
    dark: str
    hatch: str = ""


# In stacking order: permanent kinds first, temporary ones after them. Blue, orange and green for parameters, gradients
# and optimizer states are those of the ZeRO paper's Figure 1. A tone is the same on light and on dark pages, with a
# contrast of 3:1 to both; colour-blind eyes can distinguish any two (tested).
KINDS: Mapping[str, KindLook] = {
    "param": KindLook("parameters that stay on this rank", "P", "#3d5cc1", "#0053ba", "#2f67cf"),
    "grad": KindLook("gradients that stay on this rank", "G", "#ae4708", "#a74006", "#ed833c", "//"),
    "optim": KindLook("optimizer state: masters and moments", "O", "#00a576", "#00a962", "#22ba8c", ".."),
    "unsharded_param": KindLook("a unit's parameters, gathered for use", "p", "#3e90ff", "#3989ed", "#94d6fd", "\\\\"),
    "prefetched_param": KindLook("parameters of a unit to come, gathered ahead", "f", "#fb5d71", "#550011", "#bb3333"),
    "unsharded_grad": KindLook("a unit's whole gradient, not reduced yet", "g", "#bd8a03", "#c07800", "#fdce3c", "xx"),
    "activation": KindLook("kept by forward for backward", "A", "#924982", "#8e3670", "#ca7aab"),
    "activation_grad": KindLook("gradients of activations, going back", "a", "#b47dbb", "#3d0564", "#9f96f5", "--"),
    "kept": KindLook("inputs kept to compute activations again", "K", "#5a7742", "#5f513c", "#c3e19c", "||"),
    "temp": KindLook("a kernel's working memory", "T", "#949098", "#82888b", "#606d6f", "oo"),
    "comm": KindLook("a collective's working memory", "C", "#706260", "#2f313b", "#ecd7dd", "++"),
}


KIND_WORDS: Mapping[str, str] = {
    "param": "parameters",
    "grad": "gradients",
    "optim": "optimizer states",
    "activation": "activations",
    "activation_grad": "gradients of activations",
    "kept": "inputs kept for recompute",
    "temp": "working memory of kernels",
    "comm": "buffers of collectives",
    "unsharded_param": "gathered parameters",
    "prefetched_param": "parameters gathered ahead",
    "unsharded_grad": "whole gradients of units",
}
"""Kinds of memory in plain words."""


def kind_words(name: str) -> str:
    """Return a kind of memory in plain words; any other name unchanged."""
    return KIND_WORDS.get(name, name)


def listed(names: Sequence[object]) -> str:
    """Return '0 and 1', '0, 1 and 2'."""
    *most, last = map(str, names)
    return f"{', '.join(most)} and {last}" if most else last


def show(value: Fraction | int) -> str:
    """Return an exact number with thousands separators; a fraction with two digits."""
    if isinstance(value, Fraction) and value.denominator != 1:
        return f"{float(value):,.2f}"
    return f"{int(value):,}"
