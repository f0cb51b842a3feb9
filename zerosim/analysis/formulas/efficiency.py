"""The share of a step that computes, if its data arrive at a given bandwidth and nothing overlaps.

ZeRO-Infinity (arXiv 2104.07857, section 4): computing takes flops / peak, moving takes bytes / bandwidth, and their
ratio follows from the arithmetic intensity, flops per byte moved. A step with full recompute has 8 flops for each
parameter and token. A parameter is loaded three times and its gradient stored once, of 2 bytes each; its 16 bytes of
optimizer states are loaded and stored; of every `every`-th block's input 2 bytes are stored and loaded.

    intensity of   parameters and gradients    optimizer states    activations
    flops/byte     seq x rows                  seq x rows / 4      24 x hidden x every
"""

from __future__ import annotations

from fractions import Fraction

V100_PEAK = 70 * 10**12
"""The paper's flops per second of one V100: the mean of the 62 to 78 that it measured in products."""


def parameter_intensity(seq: int, rows: int) -> int:
    """Return the flops per byte of parameters and gradients; `rows` on one GPU."""
    return seq * rows


def optimizer_intensity(seq: int, rows: int) -> Fraction:
    """Return the flops per byte of optimizer states."""
    return Fraction(seq * rows, 4)


def activation_intensity(hidden: int, every: int = 1) -> int:
    """Return the flops per byte of blocks' inputs, one of `every` blocks."""
    return 24 * hidden * every


def efficiency(intensity: Fraction | int, bandwidth: int, peak: int = V100_PEAK) -> Fraction:
    """Return the share of the time that computes, without overlap: `bandwidth` in bytes per second."""
    moved = Fraction(intensity) * bandwidth
    return moved / (moved + peak)
