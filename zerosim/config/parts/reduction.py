"""Reductions of gradients, in which the ZeRO of frameworks differs.

The defaults are the paper's; recipes (`presets/recipes.py`) set others.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Exclusion, Part, option
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

    group = "recipe"

    grad_reduction: str = option(
        "reduce_scatter", "stages 1 and 2: how gradients are reduced", choices=("reduce_scatter", "all_reduce"),
        follows=OF_RECIPE,
    )  # fmt: skip
    compress: str = option(
        "none", "how gradients are compressed before they are sent: cast to a half type, 8 or 4 bits per element, the "
        "largest or random elements, DGC with sgd's momentum, products of rank R, or 1-bit Adam", choices=COMPRESSIONS,
        follows=OF_RECIPE,
    )  # fmt: skip
    block: int = option(
        256, "int8, int4: number of elements that share a scale", flat="compress_block", low=2, high=10**6,
        metavar="COUNT",
    )  # fmt: skip
    ratio: float = option(
        0.01, "top-k, random-k, dgc: share of the elements that a rank sends", flat="compress_ratio", above=0, high=1,
        metavar="SHARE",
    )  # fmt: skip
    rank: int = option(1, "powersgd: the rank of the products", flat="compress_rank", low=1, high=10**4, metavar="R")
    warmup: int = option(
        0, "powersgd, onebit-adam: number of steps at the start without compression. dgc: number of steps in which the "
        "share falls from 0.25", flat="compress_warmup", low=0, high=10**7, metavar="STEPS",
    )  # fmt: skip
    quantized_gradients: bool = option(
        False, "qgZ: send gradients as int4 codes in two hops, within a node and across nodes, and average in between "
        "(ZeRO++; DeepSpeed's zero_quantized_gradients)", stages=(3,), also=("--qgz",), group="ZeRO++ and MiCS",
        after="quantized_weights", switches={"zero_quantized_gradients": True},
    )  # fmt: skip
    bucket: int = option(
        0, "stages 1 to 3: elements in the buffer of constant size (CB) from which gradients are reduced; 0: no "
        "buffer", flat="reduce_bucket", low=0, high=10**12, metavar="COUNT", parse=parse_count,
        also=("--reduce-bucket-size",), stages=(1, 2, 3), follows=OF_RECIPE,
    )  # fmt: skip
    buffers: int = option(
        1, "number of reduction buffers. 2: backward fills one while the other is reduced", flat="reduce_buffers",
        low=1, high=2, metavar="1|2", follows=OF_RECIPE,
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


EXCLUSIONS = (Exclusion("grad_reduction", "partition", "each gradient is reduced to its owner", (1, 2)),)
