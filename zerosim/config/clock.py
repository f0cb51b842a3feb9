"""A part of a configuration: whose kernels the clock times. No bit, byte or message depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Part, option
from zerosim.config.presets.kernel_tables import FLASH_KERNELS

KERNELS = ("eager", "compiled", "fused")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockConfig(Part):
    """Whose kernels the clock times, with --gpu."""

    kernels: str = option(
        "fused", "kernels that the framework launches for one operator: eager PyTorch's several, torch.compile's, or a "
        "hand-written one", choices=KERNELS, follows=OF_RECIPE,
    )  # fmt: skip
    flash_kernel: str = option(
        "fa2", "whose FlashAttention kernel the clock times: of a GPU that was not measured with it, the one that was",
        choices=FLASH_KERNELS, follows=OF_RECIPE,
    )  # fmt: skip
    cuda_graphs: bool = option(
        False, "the clock's host launches a block's forward, or its backward, as one CUDA graph instead of kernel by "
        "kernel",
    )  # fmt: skip
    tp_comm_overlap: bool = option(
        False, "with --sequence-parallel: the clock overlaps tensor parallelism's collectives with the products beside "
        "them, chunk by chunk, as Transformer Engine does",
    )  # fmt: skip
    overlap_comm: bool = option(
        False, "the clock runs stage 3's reductions out of --reduce-bucket in a side stream, as DeepSpeed does under "
        "overlap_comm",
        stages=(3,), follows=OF_RECIPE,
    )  # fmt: skip


CLOCK = tuple(ClockConfig.options())
"""The flat names of its fields: flags of the verbs that have a clock."""
