"""The byte layout of a weight in NF4: one run of bytes, placed, cut and gathered like any buffer.

    scales   fp32, one for each 256 absmax values
    mean     fp32: subtracted from the absmax values before they became codes
    absmax   a byte for each quantization block of 64 elements: the code of its largest magnitude
    codes    half a byte for each element, the first one of two in the high half
    0 to 3 bytes up to a multiple of four

4.127 bits an element. Source: QLoRA (arXiv 2305.14314, section 3); bitsandbytes 0.50.2, functional.quantize_4bit with
compress_statistics.
"""

from __future__ import annotations

from typing import NamedTuple

NF4_BLOCK, ABSMAX_BLOCK = 64, 256
"""Elements that share an absmax, and absmax values that share a scale."""


class Nf4Parts(NamedTuple):
    """The starts of the parts of a weight's bytes, and their total."""

    mean: int
    absmax: int
    codes: int
    nbytes: int


def nf4_parts(numel: int) -> Nf4Parts:
    """Return the parts of a weight of that many elements; its scales begin at 0."""
    blocks = -(-numel // NF4_BLOCK)
    mean = 4 * -(-blocks // ABSMAX_BLOCK)
    absmax = mean + 4
    codes = absmax + blocks
    return Nf4Parts(mean, absmax, codes, -(-(codes + -(-numel // 2)) // 4) * 4)
