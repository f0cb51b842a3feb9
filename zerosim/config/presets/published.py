"""The best MFU published for a GPU, in 16 bits: a modelled step above it is not credible.

MFU counts the whole square of attention and nothing that is recomputed, like zerosim's. Figures in another convention
were converted, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from zerosim.config.parts.fp8 import Fp8Config, is_in_8_bits


class Published(NamedTuple):
    """A share of the peak, and who reached it."""

    mfu: float
    source: str


BEST: Mapping[str, Published] = MappingProxyType(
    {
        "v100": Published(0.40, "ZeRO-Infinity, arXiv 2104.07857: 25 PFLOP/s on 512 V100, which counts recompute"),
        "a100": Published(0.706, "Aleph Alpha, arXiv 2311.05610: Llama-13B on 64 A100"),
        "h100": Published(0.49, "Megatron-LM f2e5db402c, model_table.png: GPT 16B on 192 H100"),
        "h200": Published(
            0.525, "stas00/ml-engineering 744d01e: Llama-8B on 8 H200, 461 TFLOP/s with half of the square, converted"
        ),
        "b200": Published(0.424, "SimuMax 1.2: 12 layers of Llama-70B on 8 B200, converted from seconds"),
    }
)
"""By generation."""


def best_published(gpu: str, fp8: Fp8Config) -> Published | None:
    """Return a device's figure by its name; None if nothing is known.

    MFU of products in 8 bits is a share of the peak of 16 bits too, so it may be twice as high. None is listed here.
    """
    return None if is_in_8_bits(fp8) else next((BEST[word] for word in gpu.split("-") if word in BEST), None)
