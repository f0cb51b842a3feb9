"""A part of a configuration: whose kernels the clock times. No bit, byte or message depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Part, option

KERNELS = ("eager", "compiled", "fused")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockConfig(Part):
    """Whose kernels the clock times, with --gpu."""

    kernels: str = option(
        "fused", "kernels that the framework launches for one operator: eager PyTorch's several, torch.compile's, or a "
        "hand-written one", choices=KERNELS, follows=OF_RECIPE,
    )  # fmt: skip
    flash_kernel: str = option(
        "auto", "whose FlashAttention kernel the clock times; auto: cuDNN's with Transformer Engine on Hopper and "
        "later, else FlashAttention 2", choices=("auto", "fa1", "fa2", "fa3", "cudnn", "triton", "xformers"),
    )  # fmt: skip


CLOCK = tuple(ClockConfig.options())
"""The flat names of its fields: flags of the verbs that have a clock."""
