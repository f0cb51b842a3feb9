"""Whose kernels the clock times. No bit, byte or message depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Exclusion, Part, option
from zerosim.config.presets.kernel_tables import FLASH_KERNELS

KERNELS = ("eager", "compiled", "fused")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockConfig(Part):
    """Whose kernels the clock times, with --gpu."""

    group = "time"

    kernels: str = option(
        "fused", "which kernels the framework launches for one operator: several as in eager PyTorch, those of "
        "torch.compile, or one hand-written kernel", choices=KERNELS, follows=OF_RECIPE,
        switches={"torch_compile": "compiled", "compile.enable": "compiled"},
    )  # fmt: skip
    flash_kernel: str = option(
        "fa2", "whose FlashAttention kernel the clock times. For a GPU that was not measured with this kernel, the "
        "clock takes one that was", choices=FLASH_KERNELS, follows=OF_RECIPE,
    )  # fmt: skip
    cuda_graphs: bool = option(
        False, "the modelled host launches a block's forward or backward as one CUDA graph instead of kernel by "
        "kernel",
    )  # fmt: skip
    tp_comm_overlap: bool = option(
        False, "with --sequence-parallel: the clock overlaps tensor parallelism's collectives with the neighbouring "
        "matrix products, chunk by chunk, as Transformer Engine does",
    )  # fmt: skip
    overlap_comm: bool = option(
        False, "DeepSpeed's overlap_comm. Stage 3: the clock runs the reductions of --reduce-bucket on a side stream. "
        "Stages 1 and 2: a second reduction buffer (--reduce-buffers 2)", stages=(1, 2, 3), follows=OF_RECIPE,
    )  # fmt: skip


CLOCK = tuple(ClockConfig.options())
"""The flat names of its fields: flags of the verbs that have a clock."""


EXCLUSIONS = (
    Exclusion("overlap_comm", "reduce_bucket", needs=True),
    Exclusion("tp_comm_overlap", "sequence_parallel", needs=True),
)


WORDS = (
    ("*async_tp *enable_async_tensor_parallel* tp_comm_overlap_*", "--tp-comm-overlap, with --sequence-parallel"),
    ("*enable_cuda_graph* cuda_graph cuda_graph_* disable_cuda_graphs", "--cuda-graphs"),
)
