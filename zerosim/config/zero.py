"""Three parts of a configuration in which frameworks' ZeRO differs: reductions, gathers and gradients' memory.

The defaults are the paper's; recipes (`presets/recipes.py`) have their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Part, option
from zerosim.units import parse_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction(Part):
    """How gradients are reduced, and how new parameters arrive."""

    grad_reduction: str = option(
        "reduce_scatter", "stages 1 and 2: how gradients are reduced", choices=("reduce_scatter", "all_reduce"),
        follows=OF_RECIPE,
    )  # fmt: skip
    compress: str = option(
        "none", "gradients are cast to this before they are sent, and back when they have arrived",
        choices=("none", "fp16", "bf16"),
    )  # fmt: skip
    bucket: int = option(
        0, "stages 1 to 3: elements of a buffer of constant size (CB) out of which gradients are reduced; 0: none",
        flat="reduce_bucket", low=0, high=10**12, metavar="COUNT", parse=parse_count, also=("--reduce-bucket-size",),
        stages=(1, 2, 3), follows=OF_RECIPE,
    )  # fmt: skip
    buffers: int = option(
        1, "how many such buffers; 2: one is filled while the other is reduced", flat="reduce_buffers", low=1, high=2,
        metavar="1|2", follows=OF_RECIPE,
    )  # fmt: skip
    overlaps: bool = option(
        False, "backward goes on while gradients are reduced: stages 0 and 1 wait for all of it when backward is over, "
        "2 and 3 for each reduction when the next one begins; out of buffers it is --reduce-buffers 2 that overlaps. "
        "Without, stages 0 and 1 of a pipeline reduce after it has drained",
        flat="overlap_reduction", also=("--overlap-grad-reduce",), follows=OF_RECIPE,
    )  # fmt: skip
    allgather_bucket: int = option(
        0, "stages 1 and 2: elements of a buffer through which new parameters arrive; 0: none", low=0, high=10**12,
        metavar="COUNT", parse=parse_count, also=("--allgather-bucket-size",), stages=(1, 2), follows=OF_RECIPE,
    )  # fmt: skip
    in_forward: bool = option(
        False, "stages 1 and 2: gather new parameters in the next step's forward, not in the optimizer step "
        "(Megatron's distributed optimizer)", flat="overlap_param_gather", stages=(1, 2), follows=OF_RECIPE,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering(Part):
    """What stage 3 gathers at a time, what of it stays, and what is gathered ahead."""

    reshard_after_forward: bool = option(
        True, "stage 3: free a unit after forward; without, it stays gathered (FSDP's 2Psi)"
    )
    keep_last_unit: bool = option(False, "stage 3: the last unit stays gathered from forward to backward")
    keep_root_units: bool = option(
        False, "stage 3: units outside the blocks stay gathered from forward to backward", follows=OF_RECIPE
    )
    gather: str = option(
        "unit", "stage 3: what is gathered, used and freed at a time: a unit (a block, the table, the head) or, as "
        "DeepSpeed does, a leaf module (a linear map, a norm), each of its tensors in slices of its own. Under an "
        "optimizer that wants whole matrices, at any stage: what has one owner, a unit or a tensor",
        choices=("unit", "module"), stages=(3,), follows=f"module for such an optimizer, else {OF_RECIPE}",
    )  # fmt: skip
    persistent_numel: int = option(
        0, "stage 3: units with fewer elements stay gathered; by module, tensors with at most so many",
        low=0, metavar="COUNT", follows=OF_RECIPE,
    )  # fmt: skip
    cast_shards: bool = option(
        False, "stage 3: 2-byte shards are cast from the masters at each gather, not stored", follows=OF_RECIPE
    )
    prefetch: int = option(
        0, "stage 3: units that are gathered ahead, while the one before them computes", low=0, high=4096,
        metavar="UNITS", stages=(3,), follows=OF_RECIPE,
    )  # fmt: skip
    prefetch_elements: int = option(
        0, "stage 3: at each turn so many elements are gathered ahead, and the rest of the last buffer (DeepSpeed's "
        "stage3_prefetch_bucket_size)", low=0, high=10**12, metavar="COUNT", parse=parse_count,
        also=("--stage3-prefetch-bucket-size",), stages=(3,), follows=OF_RECIPE,
    )  # fmt: skip
    max_live: int = option(
        0, "with --prefetch-elements: nothing is gathered ahead while so many elements are there; what a turn needs "
        "comes regardless (DeepSpeed's stage3_max_live_parameters); 0: no limit", low=0, high=10**13, metavar="COUNT",
        parse=parse_count, also=("--stage3-max-live-parameters",), stages=(3,), follows=OF_RECIPE,
    )  # fmt: skip

    @property
    def by_module(self) -> bool:
        """Whether each tensor has a flat buffer of its own, and leaf modules are gathered."""
        return self.gather == "module"

    @property
    def piece(self) -> str:
        """What has a flat buffer of its own: a 'unit' or a 'tensor'."""
        return "tensor" if self.by_module else "unit"

    def stays(self, numel: int) -> bool:
        """Whether a flat buffer of so many elements stays gathered for good, in stage 3."""
        return numel <= self.persistent_numel if self.by_module else numel < self.persistent_numel


@dataclass(frozen=True, slots=True, kw_only=True)
class GradMemory(Part):
    """Which gradient buffers there are, and for how long. The paper's: as backward reaches them, until the step.

    Megatron's `persistent` buffer is contiguous, and each weight's gradient is added to it; DeepSpeed's is stage 3's
    flat buffer of the own slice.
    """

    persistent: bool = option(
        False, "gradients that are kept (all of them, or the own slice) have their buffer from start to end",
        flat="persistent_grads", follows=OF_RECIPE,
    )  # fmt: skip
    param_dtype: bool = option(
        False, "backward makes gradients in the parameters' dtype, and casts them when they are kept or reduced",
        flat="param_dtype_grads", follows=OF_RECIPE,
    )  # fmt: skip
    own_only: bool = option(
        False, "stage 1: a rank frees all gradients but its own slice when backward ends", flat="own_grads_only",
        stages=(1,), follows=OF_RECIPE,
    )  # fmt: skip
    sync: bool = option(
        True, "stages 2 and 3: gradients are reduced in every micro-batch; without, each rank adds up whole gradients "
        "and reduces them in the last one (FSDP2's set_requires_gradient_sync(False))", flat="grad_sync",
        also=("--sync",), stages=(2, 3),
    )  # fmt: skip
    buckets: str = option(
        "none", "stage 0: gradients are reduced where they are, in buckets that stay and are copied back, or live in "
        "such buckets (DDP's gradient_as_bucket_view)", flat="grad_buckets", choices=("none", "copies", "views"),
        stages=(0,), follows=OF_RECIPE,
    )  # fmt: skip
    fused: bool = option(
        False, "with --persistent-grads: products of a block's linear maps add to the gradient buffer. Transformer "
        "Engine returns a dummy in place of each gradient and keeps one for each shape of weight",
        flat="gradient_accumulation_fusion", stages=(0, 1), follows=OF_RECIPE,
    )  # fmt: skip
    upcast: bool = option(
        False, "the optimizer step copies its gradients to fp32 first", flat="upcast_grads", follows=OF_RECIPE
    )
    keep_upcast: bool = option(
        False, "with --upcast-grads: these copies stay until the next step begins (Megatron in fp16)",
        follows=OF_RECIPE,
    )  # fmt: skip

    @property
    def lasts(self) -> bool:
        """Whether the buffer of what is kept of the gradients is there from start to end."""
        return self.persistent or self.buckets == "views"

    @property
    def bucket_copies(self) -> bool:
        """Whether gradients that are kept whole are reduced in buckets that stay, and copied back."""
        return self.buckets == "copies"
