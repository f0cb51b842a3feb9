"""The memory of gradients, in which the ZeRO of frameworks differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Draft, Exclusion, Part, option
from zerosim.config.parts.mesh import RANKS
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.reduction import Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class GradMemory(Part):
    """Which gradient buffers exist, and for how long. The paper's: from backward until the step.

    Megatron's `persistent` buffer is contiguous, and each weight's gradient is added to it; DeepSpeed's is stage 3's
    flat buffer of the local slice.
    """

    group = "recipe"

    persistent: bool = option(
        False, "keep the buffer of the stored gradients (all of them, or the local slice) for the whole run",
        flat="persistent_grads", follows=OF_RECIPE, after="overlap_param_gather",
    )  # fmt: skip
    param_dtype: bool = option(
        False, "backward computes gradients in the parameters' dtype, and casts them when they are stored or reduced",
        flat="param_dtype_grads", follows=OF_RECIPE, after="persistent_grads",
    )  # fmt: skip
    own_only: bool = option(
        False, "stage 1: a rank frees all gradients except its own slice when backward ends", flat="own_grads_only",
        stages=(1,), follows=OF_RECIPE, after="param_dtype_grads",
    )  # fmt: skip
    sync: bool = option(
        True, "stages 2 and 3: reduce gradients in every microbatch. Otherwise each rank accumulates whole gradients "
        "and reduces them in the last microbatch (FSDP2's set_requires_gradient_sync(False))", flat="grad_sync",
        also=("--sync",), stages=(2, 3), after="own_grads_only",
    )  # fmt: skip
    sum_computed: bool = option(
        False, "with --no-grad-sync: add microbatches in the dtype in which backward computes gradients, whatever they "
        "are reduced in (FSDP1)", flat="sum_computed_grads", stages=(2, 3), follows=OF_RECIPE, after="grad_sync",
    )  # fmt: skip
    buckets: str = option(
        "none", "stage 0: reduce gradients in place (none), reduce in permanent buckets and copy back (copies), or let "
        "gradients live in such buckets (views; DDP's gradient_as_bucket_view)", flat="grad_buckets",
        choices=("none", "copies", "views"),
        stages=(0,), follows=OF_RECIPE, after="overlap_param_gather", switches={"gradient_as_bucket_view": "views"},
    )  # fmt: skip
    fused: bool = option(
        False, "with --persistent-grads: matrix products of a block's linear maps add to the gradient buffer. "
        "Transformer Engine returns a dummy in place of each gradient, and keeps one dummy for each shape of weight",
        flat="gradient_accumulation_fusion", stages=(0, 1), follows=OF_RECIPE, after="transformer_engine",
    )  # fmt: skip
    upcast: bool = option(
        False, "the optimizer step first copies its gradients to fp32", flat="upcast_grads", follows=OF_RECIPE,
        after="grad_sync",
    )  # fmt: skip
    flatten: bool = option(
        False, "with --upcast-grads: the optimizer step first copies its gradients into one flat buffer, and casts "
        "that one (DeepSpeed)", flat="flatten_grads", stages=(1, 2, 3), follows=OF_RECIPE, after="upcast_grads",
    )  # fmt: skip
    in_partition: bool = option(
        False, "stage 2, with --reduce-bucket: the first gradient of each backward allocates the local slice of all "
        "gradients. A later microbatch has a second one, added when its backward ends (DeepSpeed)",
        flat="grads_in_partition", stages=(2,), follows=OF_RECIPE, after="own_grads_only",
    )  # fmt: skip
    keep_upcast: bool = option(
        False, "with --upcast-grads: keep the fp32 copies until the next step begins (as Megatron does in fp16)",
        follows=OF_RECIPE, after="upcast_grads",
    )  # fmt: skip

    keep_shards: bool = option(
        False, "stages 2 and 3: local slices of gradients stay until the next step begins (FSDP1's use_orig_params)",
        flat="keep_grads", stages=(2, 3), follows=OF_RECIPE, after="keep_upcast",
    )  # fmt: skip

    late: int = option(
        0, "with --offload optimizer=host: from this step on, counted from 1, the CPU's update runs beside the next "
        "step's forward and backward. Their parameters then lag by one update (ZeRO-Offload's delayed parameter "
        "update). 0: never", low=0, high=10**9, metavar="STEP", flat="delayed_update", stages=(1, 2, 3),
        group="offload", after="offload",
    )  # fmt: skip

    host_buffers: bool = option(
        False, "stage 2, with --offload optimizer=host and half types: the host holds an fp32 gradient and a half-type "
        "copy of the local slice from start to end (DeepSpeed)", stages=(2,), follows=OF_RECIPE, group="offload",
        after="delayed_update",
    )  # fmt: skip
    in_backward: bool = option(
        False, "update each flat buffer inside backward, as soon as its gradient is reduced, and free the gradient. "
        "Nothing is accumulated or clipped (LOMO; torchtune's optimizer_in_bwd)", flat="optimizer_in_backward",
        after="upcast_grads", switches={"optimizer_in_bwd": True, "optimizer.early_step_in_backward": True},
    )  # fmt: skip

    @property
    def lasts(self) -> bool:
        """Whether the buffer of stored gradients exists from start to end."""
        return self.persistent or self.buckets == "views"

    @property
    def bucket_copies(self) -> bool:
        """Whether gradients that are stored whole are reduced in permanent buckets, and copied back."""
        return self.buckets == "copies"


PLAIN = GradMemory()
"""The paper's gradient buffers."""


def stage_of_states(grads: GradMemory, parallel: ParallelConfig, reduction: Reduction) -> int:
    """Return the ZeRO stage whose model states exist when backward ends."""
    stage = parallel.zero_stage
    return 2 if stage == 1 and (grads.own_only or reduction.bucket) and not grads.lasts else stage


def settles(draft: Draft) -> Mapping[str, str]:
    """Take out a recipe's DDP buckets, where one rank has all of the data."""
    ranks = draft.given.get("ranks", RANKS)
    if ranks != draft.given.get("tp", 1) * draft.given.get("pp", 1):
        return {}
    why = f"not with ranks {ranks}: nobody wraps a model in DDP for one data-parallel rank"
    return draft.without("grad_buckets", why)


EXCLUSIONS = (
    Exclusion("keep_grads", "partition", "the owner reduces gradients in place"),
    Exclusion("keep_upcast", "upcast_grads", needs=True),
    Exclusion("flatten_grads", "upcast_grads", needs=True),
    Exclusion("grads_in_partition", "reduce_bucket", needs=True),
    Exclusion("grads_in_partition", "offload", "reduced gradients leave the device"),
    Exclusion("flatten_grads", "offload", "gradients are cast outside the device"),
    Exclusion("grads_in_partition", "persistent_grads", "the permanent buffer has them"),
    Exclusion("grads_in_partition", "optimizer_in_backward", "each gradient is freed when its buffer is updated"),
    Exclusion("gradient_accumulation_fusion", "persistent_grads", needs=True),
    Exclusion("gradient_accumulation_fusion", "transformer_engine", needs=True),
)
OF_STAGE_1 = (Exclusion("own_grads_only", "persistent_grads", "a permanent gradient buffer is never freed"),)
