"""Three parts of a configuration in which the ZeRO of frameworks differs: reductions, gathers and gradients' memory.

The defaults are the paper's; recipes (`presets/recipes.py`) set others.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Part, option
from zerosim.errors import wrong
from zerosim.units import parse_count

COMPRESSIONS = ("none", "fp16", "bf16", "int8", "int4", "top-k", "random-k", "dgc", "powersgd", "onebit-adam")
CASTS = ("fp16", "bf16")
COMPRESSION_OPTIONS = {
    "compress_block": ("int8", "int4"),
    "compress_ratio": ("top-k", "random-k", "dgc"),
    "compress_rank": ("powersgd",),
    "compress_warmup": ("powersgd", "onebit-adam", "dgc"),
}
"""The compressions that have each option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction(Part):
    """How gradients are reduced, and how new parameters arrive."""

    grad_reduction: str = option(
        "reduce_scatter", "stages 1 and 2: how gradients are reduced", choices=("reduce_scatter", "all_reduce"),
        follows=OF_RECIPE,
    )  # fmt: skip
    compress: str = option(
        "none", "how gradients are compressed before they are sent: cast to a half type, 8 or 4 bits per element, the "
        "largest or random elements, DGC with sgd's momentum, products of rank R, or 1-bit Adam", choices=COMPRESSIONS,
    )  # fmt: skip
    block: int = option(
        256,
        "int8, int4: number of elements that share a scale",
        flat="compress_block",
        low=2,
        high=10**6,
        metavar="COUNT",
    )
    ratio: float = option(
        0.01, "top-k, random-k, dgc: share of the elements that a rank sends", flat="compress_ratio", above=0, high=1,
        metavar="SHARE",
    )  # fmt: skip
    rank: int = option(1, "powersgd: the rank of the products", flat="compress_rank", low=1, high=10**4, metavar="R")
    warmup: int = option(
        0, "powersgd, onebit-adam: number of steps at the start without compression. dgc: number of steps in which the "
        "share falls from 0.25",
        flat="compress_warmup", low=0, high=10**7, metavar="STEPS",
    )  # fmt: skip
    quantized_gradients: bool = option(
        False, "qgZ: send gradients as int4 codes in two hops, within a node and across nodes, and average in between "
        "(ZeRO++; DeepSpeed's zero_quantized_gradients)", stages=(3,), also=("--qgz",),
    )  # fmt: skip
    bucket: int = option(
        0, "stages 1 to 3: elements in the buffer of constant size (CB) from which gradients are reduced; 0: no "
        "buffer",
        flat="reduce_bucket", low=0, high=10**12, metavar="COUNT", parse=parse_count, also=("--reduce-bucket-size",),
        stages=(1, 2, 3), follows=OF_RECIPE,
    )  # fmt: skip
    buffers: int = option(
        1, "number of reduction buffers. 2: backward fills one while the other is reduced", flat="reduce_buffers",
        low=1, high=2,
        metavar="1|2", follows=OF_RECIPE,
    )  # fmt: skip
    overlaps: bool = option(
        False, "continue backward while gradients are reduced. Stages 0 and 1 wait for all reductions when backward "
        "ends, stages 2 and 3 for each reduction when the next one begins. With --reduce-bucket, --reduce-buffers 2 "
        "overlaps instead. Without overlap, stages 0 and 1 reduce after a pipeline has drained",
        flat="overlap_reduction", also=("--overlap-grad-reduce",), follows=OF_RECIPE,
    )  # fmt: skip
    allgather_bucket: int = option(
        0, "stages 1 and 2: elements in the buffer through which new parameters are gathered; 0: no "
        "buffer", low=0, high=10**12,
        metavar="COUNT", parse=parse_count, also=("--allgather-bucket-size",), stages=(1, 2), follows=OF_RECIPE,
    )  # fmt: skip
    in_forward: bool = option(
        False, "stages 1 and 2: gather new parameters in the next step's forward, not in the optimizer step "
        "(Megatron's distributed optimizer)", flat="overlap_param_gather", stages=(1, 2), follows=OF_RECIPE,
    )  # fmt: skip

    def _check(self) -> None:
        for flat, declared in self.options().items():
            value = getattr(self, declared.attribute)
            if (
                flat in COMPRESSION_OPTIONS
                and value != declared.default
                and self.compress not in COMPRESSION_OPTIONS[flat]
            ):
                raise wrong(
                    flat, f" {value}: works only with compress {' or '.join(COMPRESSION_OPTIONS[flat])}; leave it out"
                )
        if self.compress == "int4" and self.block % 2:
            raise wrong("compress_block", f" {self.block}: two codes of int4 share a byte; choose an even number")
        if self.compress == "onebit-adam" and self.warmup < 1:
            raise wrong("compress", " 'onebit-adam': must begin with steps of plain Adam; choose a compress_warmup")

    @property
    def is_encoded(self) -> bool:
        """Whether gradients are sent as codes, not as numbers of a format."""
        return self.compress != "none" and self.compress not in CASTS

    def is_exact(self, step: int) -> bool:
        """Return whether a step, counted from 0, sends gradients exactly."""
        return self.compress == "none" or (self.compress in ("powersgd", "onebit-adam") and step < self.warmup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering(Part):
    """What stage 3 gathers in one call, what stays gathered, and what is prefetched."""

    reshard_after_forward: bool = option(
        True, "stage 3: free a unit after forward. Otherwise the unit stays gathered (FSDP's 2Psi)"
    )
    quantized_weights: bool = option(
        False, "qwZ: gather weights as int8 codes (ZeRO++; DeepSpeed's zero_quantized_weights)", stages=(3,),
        also=("--qwz",),
    )  # fmt: skip
    hierarchical_gather: bool = option(
        False, "gather weights in two hops, first across nodes and then within a node (MiCS's "
        "mics_hierarchical_params_gather)", stages=(3,),
    )  # fmt: skip
    keep_last_unit: bool = option(False, "stage 3: keep the last unit gathered from forward to backward")
    keep_root_units: bool = option(
        False, "stage 3: keep units outside the blocks gathered from forward to backward", follows=OF_RECIPE
    )
    gather: str = option(
        "unit", "stage 3: gather, use and free a whole unit at a time (a block, the table, the head), or a leaf "
        "module as DeepSpeed does (a linear map, a norm). Each tensor of a module has its own slices. Under an "
        "optimizer that needs whole matrices, at any stage: one rank owns a unit, or a tensor",
        choices=("unit", "module"), stages=(3,), follows=f"module for such an optimizer, else {OF_RECIPE}",
    )  # fmt: skip
    tiles: int = option(
        1, "stage 3, with --gather module: split each linear map of a block into T tiles of its outputs, and gather "
        "one tile at a time (ZeRO-Infinity's memory-centric tiling; DeepSpeed's TiledLinear)", low=1, high=4096,
        metavar="T", stages=(3,),
    )  # fmt: skip
    persistent_numel: int = option(
        0, "stage 3: keep units with fewer elements gathered; with --gather module, tensors with at most COUNT "
        "elements",
        low=0, metavar="COUNT", follows=OF_RECIPE,
    )  # fmt: skip
    cast_shards: bool = option(
        False, "stage 3: cast 2-byte shards from the masters at each gather instead of storing them", follows=OF_RECIPE
    )
    prefetch: int = option(
        0, "stage 3: number of units to prefetch while the unit before them computes", low=0, high=4096,
        metavar="UNITS", stages=(3,), follows=OF_RECIPE,
    )  # fmt: skip
    prefetch_elements: int = option(
        0, "stage 3: number of elements to prefetch at each unit's turn, rounded up to whole buffers (DeepSpeed's "
        "stage3_prefetch_bucket_size)", low=0, high=10**12, metavar="COUNT", parse=parse_count,
        also=("--stage3-prefetch-bucket-size",), stages=(3,), follows=OF_RECIPE,
    )  # fmt: skip
    max_live: int = option(
        0, "with --prefetch-elements: prefetch up to COUNT gathered elements, those in flight included. A unit's own "
        "parameters are gathered regardless (DeepSpeed's stage3_max_live_parameters); 0: no limit",
        low=0, high=10**13, metavar="COUNT",
        parse=parse_count, also=("--stage3-max-live-parameters",), stages=(3,), follows=OF_RECIPE,
    )  # fmt: skip

    @property
    def by_module(self) -> bool:
        """Whether each tensor has its own flat buffer, and leaf modules are gathered."""
        return self.gather == "module"

    @property
    def piece(self) -> str:
        """The owner of a flat buffer: a 'unit' or a 'tensor'."""
        return "tensor" if self.by_module else "unit"

    def stays(self, numel: int) -> bool:
        """Return whether a flat buffer of so many elements stays gathered for good, in stage 3."""
        return numel <= self.persistent_numel if self.by_module else numel < self.persistent_numel


@dataclass(frozen=True, slots=True, kw_only=True)
class GradMemory(Part):
    """Which gradient buffers exist, and for how long. The paper's: from backward until the step.

    Megatron's `persistent` buffer is contiguous, and each weight's gradient is added to it; DeepSpeed's is stage 3's
    flat buffer of the local slice.
    """

    persistent: bool = option(
        False, "keep the buffer of the stored gradients (all of them, or the local slice) for the whole run",
        flat="persistent_grads", follows=OF_RECIPE,
    )  # fmt: skip
    param_dtype: bool = option(
        False, "backward computes gradients in the parameters' dtype, and casts them when they are stored or reduced",
        flat="param_dtype_grads", follows=OF_RECIPE,
    )  # fmt: skip
    own_only: bool = option(
        False, "stage 1: a rank frees all gradients except its own slice when backward ends", flat="own_grads_only",
        stages=(1,), follows=OF_RECIPE,
    )  # fmt: skip
    sync: bool = option(
        True, "stages 2 and 3: reduce gradients in every microbatch. Otherwise each rank accumulates whole gradients "
        "and reduces them in the last microbatch (FSDP2's set_requires_gradient_sync(False))", flat="grad_sync",
        also=("--sync",), stages=(2, 3),
    )  # fmt: skip
    buckets: str = option(
        "none", "stage 0: reduce gradients in place (none), reduce in permanent buckets and copy back (copies), or let "
        "gradients live in such buckets (views; DDP's gradient_as_bucket_view)", flat="grad_buckets",
        choices=("none", "copies", "views"),
        stages=(0,), follows=OF_RECIPE,
    )  # fmt: skip
    fused: bool = option(
        False, "with --persistent-grads: matrix products of a block's linear maps add to the gradient buffer. "
        "Transformer Engine returns a dummy in place of each gradient, and keeps one dummy for each shape of weight",
        flat="gradient_accumulation_fusion", stages=(0, 1), follows=OF_RECIPE,
    )  # fmt: skip
    upcast: bool = option(
        False, "the optimizer step first copies its gradients to fp32", flat="upcast_grads", follows=OF_RECIPE
    )
    keep_upcast: bool = option(
        False, "with --upcast-grads: keep the fp32 copies until the next step begins (as Megatron does in fp16)",
        follows=OF_RECIPE,
    )  # fmt: skip

    late: int = option(
        0, "with --offload optimizer=host: from this step on, counted from 1, the CPU's update runs beside the next "
        "step's forward and backward. Their parameters then lag by one update (ZeRO-Offload's delayed parameter "
        "update). 0: never", low=0, high=10**9, metavar="STEP", flat="delayed_update", stages=(1, 2, 3),
    )  # fmt: skip

    @property
    def lasts(self) -> bool:
        """Whether the buffer of stored gradients exists from start to end."""
        return self.persistent or self.buckets == "views"

    @property
    def bucket_copies(self) -> bool:
        """Whether gradients that are stored whole are reduced in permanent buckets, and copied back."""
        return self.buckets == "copies"
