"""What stage 3 gathers at a time, what stays gathered, and what is prefetched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Draft, Exclusion, Part, option
from zerosim.config.parts.mesh import RANKS
from zerosim.units import parse_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering(Part):
    """What stage 3 gathers in one call, what stays gathered, and what is prefetched."""

    group = "recipe"

    reshard_after_forward: bool = option(
        True, "stage 3: free a unit after forward. Otherwise the unit stays gathered (FSDP's 2Psi)",
        group="ranks and stage",
    )  # fmt: skip
    quantized_weights: bool = option(
        False, "qwZ: gather weights as int8 codes (ZeRO++; DeepSpeed's zero_quantized_weights)", stages=(3,),
        also=("--qwz",), group="ZeRO++ and MiCS", switches={"zero_quantized_weights": True},
    )  # fmt: skip
    hierarchical_gather: bool = option(
        False, "gather weights in two hops, first across nodes and then within a node (MiCS's "
        "mics_hierarchical_params_gather)", stages=(3,), group="ZeRO++ and MiCS",
    )  # fmt: skip
    keep_last_unit: bool = option(
        False, "stage 3: keep the last unit gathered from forward to backward", group="ranks and stage"
    )
    keep_root_units: bool = option(
        False, "stage 3: keep units outside the blocks gathered from forward to backward", follows=OF_RECIPE
    )
    keep_last_output: bool = option(
        False, "stage 3, under transformers' losses: the buffer in which the last block arrived stays until forward "
        "ends, beside the loss (FSDP2, whose root computes the loss there)", stages=(3,), follows=OF_RECIPE,
    )  # fmt: skip
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
        "elements", low=0, metavar="COUNT", follows=OF_RECIPE,
    )  # fmt: skip
    cast_shards: bool = option(
        False, "stage 3: cast 2-byte shards from the masters at each gather instead of storing them", follows=OF_RECIPE
    )
    prefetch: int = option(
        0, "stage 3: number of units to prefetch while the unit before them computes", low=0, high=4096,
        metavar="UNITS", stages=(3,), follows=OF_RECIPE,
    )  # fmt: skip
    forward_prefetch: bool = option(
        True, "with --prefetch: prefetch in forward too, not only in backward (FSDP1's forward_prefetch)", stages=(3,),
        follows=OF_RECIPE,
    )  # fmt: skip
    prefetch_elements: int = option(
        0, "stage 3: number of elements to prefetch at each unit's turn, rounded up to whole buffers (DeepSpeed's "
        "stage3_prefetch_bucket_size)", low=0, high=10**12, metavar="COUNT", parse=parse_count,
        also=("--stage3-prefetch-bucket-size",), stages=(3,), follows=OF_RECIPE,
    )  # fmt: skip
    max_live: int = option(
        0, "with --prefetch-elements: prefetch up to COUNT gathered elements, those in flight included. A unit's own "
        "parameters are gathered regardless (DeepSpeed's stage3_max_live_parameters); 0: no limit", low=0, high=10**13,
        metavar="COUNT", parse=parse_count, also=("--stage3-max-live-parameters",), stages=(3,), follows=OF_RECIPE,
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


EXCLUSIONS = (
    Exclusion("prefetch_elements", "prefetch", "one counts elements, the other counts units"),
    Exclusion("max_live", "prefetch_elements", needs=True),
)


def settles(draft: Draft) -> Mapping[str, str]:
    """Take out what fully_shard does with gathers, where one rank has whole shards: PyTorch 2.13 then copies a unit's
    shards at its turn (`_fsdp_param_group.py`, unshard, wait_for_unshard)."""
    ranks, shares = draft.given.get("ranks", RANKS), ("tp", "pp", "dp_replicate")
    if draft.values["recipe"] != "fsdp2" or ranks != math.prod(draft.given.get(axis, 1) for axis in shares):
        return {}
    why = f"not with ranks {ranks}: on one rank of shards FSDP2 copies each unit at its turn, and gathers nothing"
    draft.without("keep_last_output", "")
    return draft.without("prefetch", why)


WORDS = (
    (
        "*fsdp_reshard_after_forward torch_fsdp2_no_reshard_after_forward",
        "--reshard-after-forward or --no-reshard-after-forward, with --stage 3",
    ),
    ("*backward_prefetch", "--prefetch 1"),
    ("fsdp_forward_prefetch", "--prefetch 1 with --forward-prefetch or --no-forward-prefetch"),
    ("*param_persistence_threshold", "--persistent-numel COUNT, with --gather module"),
)
