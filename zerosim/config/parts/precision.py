"""The formats of numbers, and the loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Draft, Part, option
from zerosim.errors import InputError, wrong

FLOATS = ("fp32", "bf16", "fp16", "fp64")
PURE = "bf16-pure"
ROUNDINGS = ("nearest", "stochastic", "kahan")


def _of_parameters(word: str) -> str:
    """Return a word for a dtype. Raises: InputError for one of 8 bits, which products have."""
    if word.lower() in ("fp8", "float8", "mxfp8", "fp8_e4m3", "fp8_hybrid"):
        raise InputError(f"{word!r}: products have 8 bits, not parameters; pass --fp8 tensorwise beside precision bf16")
    return word


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig(Part):
    """Number formats, and the loss scale for half types."""

    group = "precision"

    param_dtype: str = option(
        "bf16", "dtype of the parameters. Half types have fp32 masters; bf16-pure has none", flat="precision",
        choices=(*FLOATS, PURE), also=("--dtype",), switches={"pure_bf16": "bf16-pure"}, parse=_of_parameters,
    )  # fmt: skip
    grad_dtype: str = option(
        "bf16", "dtype in which gradients are stored and sent", choices=FLOATS,
        follows="the recipe's, or the parameters'",
        switches={"grad_reduce_in_bf16": "bf16", "accumulate_allreduce_grads_in_fp32": "fp32"},
    )  # fmt: skip
    master_init: str = option(
        "rounded", "fp32 masters start from rounded or exact weights", choices=("rounded", "exact")
    )
    rounding: str | None = option(
        None, "bf16-pure: how updated weights are rounded. kahan stores the rounding error in 2 more bytes",
        choices=ROUNDINGS, follows="nearest", after="precision",
    )  # fmt: skip
    loss_scale: str | float | None = option(
        None, "factor that the loss is multiplied by", metavar="dynamic|NUMBER", follows="dynamic for fp16, else none"
    )
    initial_scale_power: int = option(16, "the dynamic scale starts at 2^P", low=0, high=126, metavar="P")
    loss_scale_window: int = option(1000, "steps without an overflow until the scale doubles", low=1, metavar="STEPS")
    hysteresis: int = option(2, "the scale halves at the H-th overflow", low=1, metavar="H")
    min_loss_scale: float = option(1.0, "an overflow at this scale is an error", above=0, metavar="SCALE")
    skip_nonfinite: bool = option(
        False, "skip a step whose gradients are not finite instead of stopping", follows=OF_RECIPE
    )

    def _check(self) -> None:
        scale = self.loss_scale
        if scale is not None and scale != "dynamic" and (isinstance(scale, str) or not scale > 0):
            raise wrong("loss_scale", f" {scale!r}: expected 'dynamic' or a number more than 0")
        if self.param_dtype != PURE:
            if self.rounding is not None:
                raise wrong(
                    "rounding", f" {self.rounding!r}: only a pure half type is rounded; choose precision {PURE}"
                )
        elif scale is not None:
            raise wrong("loss_scale", f" {scale!r}: {PURE} has the range of fp32 and needs no loss scale; leave it out")
        elif self.master_init == "exact":
            raise wrong("master_init", f" 'exact': {PURE} has no masters; leave it out, or choose precision bf16")

    @property
    def is_pure(self) -> bool:
        """Whether 2-byte parameters have no fp32 masters."""
        return self.param_dtype == PURE

    @property
    def stored(self) -> str:
        """The format in which parameters are stored."""
        return "bf16" if self.is_pure else self.param_dtype

    @property
    def has_masters(self) -> bool:
        """Whether parameters have fp32 masters."""
        return self.param_dtype in ("bf16", "fp16")


def settles(draft: Draft) -> Mapping[str, str]:
    """Refuse what needs masters, where there are none. Raises: InputError."""
    masters = next((name for name in ("cast_shards", "upcast_grads") if draft.values.get(name)), "")
    if draft.given.get("precision") == PURE and masters:
        recipe = draft.source[masters]
        who, right = recipe or masters, "choose recipe paper" if recipe else f"leave out {masters}"
        raise wrong(
            "precision", f" {PURE!r}: {who} needs fp32 masters, and this precision has none; {right}, or use bf16"
        )
    return {}


WORDS = (
    (
        "bf16 bf16.enabled bfloat16",
        "--precision bf16, the default: bf16 parameters and fp32 masters. The Trainer's autocast over fp32 "
        "parameters, its bf16 without DeepSpeed and FSDP, is --precision fp32 --autocast bf16",
    ),
    ("fp16 fp16.enabled", "--precision fp16: fp16 parameters, fp32 masters and a loss scale. Autocast is not modelled"),
    (
        "mixed_precision torch_dtype params_dtype training.dtype training.mixed_precision_param",
        "--precision bf16, fp16 or fp32, or bf16-pure without fp32 masters",
    ),
    ("training.mixed_precision_reduce main_grads_dtype *grad_accum_dtype", "--grad-dtype fp32 or bf16"),
    ("initial_loss_scale", "--initial-scale-power P, for 2^P"),
)
