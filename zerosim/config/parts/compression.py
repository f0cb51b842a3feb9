"""Compressed gradients: options of `reduction.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zerosim.config.option import Draft, Exclusion
from zerosim.config.parts.data import DataConfig
from zerosim.config.parts.grads import GradMemory
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.precision import PrecisionConfig
from zerosim.config.parts.reduction import CASTS, Reduction
from zerosim.dtypes import dtype
from zerosim.errors import InputError, wrong

EXCLUSIONS = (
    Exclusion("compress", "partition", "the owner reduces gradients in place"),
    Exclusion("compress", "grad_reduction", "compressed gradients arrive as local slices", (1, 2)),
)
_FINITE = "the residual waits for later steps, so it must be finite and have one scale"


def goes_on(reduction: Reduction) -> bool:
    """Return whether a step's gradients are sent as earlier steps left it: after a warmup, or with their errors."""
    return reduction.is_encoded


def settles(draft: Draft) -> Mapping[str, str]:
    """Take out a recipe's skipped steps where a residual is kept, its clipping beside 1-bit Adam, and its casts of
    gradients that have no more bits."""
    name, found = draft.values.get("compress", "none"), dict[str, str]()
    kept = draft.given.get("grad_dtype", "fp32")
    if name in CASTS and dtype(kept).itemsize <= dtype(name).itemsize:
        found |= draft.without("compress", f"not with grad_dtype {kept!r}: gradients are no wider")
    if name not in ("none", "int8", "int4", *CASTS):
        found |= draft.without("skip_nonfinite", f"not with compress {name!r}: {_FINITE}")
    if name == "onebit-adam":
        found |= draft.without("clip_norm", f"not with compress {name!r}: it does not clip")
    return found


def rules(
    reduction: Reduction, precision: PrecisionConfig, mesh: MeshConfig, parallel: ParallelConfig, optim: OptimConfig,
    data: DataConfig, grads: GradMemory,
) -> Iterator[InputError]:  # fmt: skip
    """Yield what a compression refuses of formats, ZeRO stage, optimizer and mesh."""
    name, kept = reduction.compress, precision.grad_dtype
    if name == "none":
        return
    if name in CASTS and dtype(kept).itemsize <= dtype(name).itemsize:
        yield wrong("compress", f" {name!r}: gradients are {kept}, which is not wider; choose grad_dtype fp32")
    if name in CASTS:
        return
    if dtype(kept).is_half:
        yield wrong(
            "compress", f" {name!r}: compresses fp32 gradients, but grad_dtype is {kept}; choose grad_dtype fp32"
        )
    if mesh.tp > 1:
        why = "the copies of a weight would be compressed differently on each rank"
        yield wrong("compress", f" {name!r}: not with tp {mesh.tp}, {why}; leave one of them out", beside="tp")
    if name in ("powersgd", "onebit-adam") and parallel.zero_stage:
        why = "whole matrices" if name == "powersgd" else "the whole momentum on every rank"
        yield wrong("compress", f" {name!r}: needs {why}; choose stage 0, or top-k or int8")
    if name == "dgc" and (optim.optimizer != "sgd" or not optim.momentum or optim.nesterov):
        yield wrong(
            "compress", " 'dgc': works only with SGD's momentum; choose optimizer sgd with a momentum, such as 0.9"
        )
    if name == "onebit-adam" and (optim.optimizer != "adam" or optim.clip_norm):
        yield wrong(
            "compress",
            " 'onebit-adam': works only with Adam, without clipping; choose optimizer adam and leave out clip_norm",
        )
    if name == "dgc" and parallel.zero_stage > 1 and data.accumulate > 1 and grads.sync:
        yield wrong(
            "compress",
            " 'dgc': updates its momentum once per step, not per microbatch; choose grad_sync off, or stage 1",
        )
    if name == "dgc" and optim.momentum_form != "torch":
        yield wrong("momentum_form", f" {optim.momentum_form!r}: DGC uses the form 'torch'; leave it out")
    if name not in ("int8", "int4"):
        for field, is_set in (
            ("loss_scale", precision.loss_scale is not None),
            ("skip_nonfinite", precision.skip_nonfinite),
        ):
            if is_set:
                yield wrong("compress", f" {name!r}: not with {field}: {_FINITE}; choose fp32 or bf16", beside=field)


def steps_until_coded(reduction: Reduction) -> int | None:
    """Return the number of steps before one that sends as little as later ones; None if the first send exactly."""
    return None if reduction.is_encoded and reduction.is_exact(0) else reduction.warmup


WORDS = (("communication_data_type", "--compress bf16 or fp16, with --grad-dtype fp32"),)
