"""LLaMA-Factory's fp8: what its Trainer makes accelerate do.

Read in LLaMA-Factory, train/fp8_utils.py after pull request 9705, and accelerate 1.15, accelerator.py.
"""

from __future__ import annotations

from zerosim.dialects.accelerate.fp8 import HEAD, SKIPPED
from zerosim.dialects.fp8 import RECIPES, gathers_codes, history_of, of_te
from zerosim.dialects.huggingface import value
from zerosim.dialects.reading import Notes

_BY = "LLaMA-Factory ff6d4d1"
_HISTORY = 16
"""patch_accelerator_for_fp8: a history of 16 steps, of which max gives the scale."""
_SILENT = (
    "beside bf16 or fp16 some versions of transformers keep 16 bits without a word (LLaMA-Factory issue 9500): "
    "look for fp8_enabled in the log"
)


def eight_bits(notes: Notes) -> None:
    """Set the products of fp8 and its backend."""
    backend, gather = value(notes, "fp8_backend", _BY, "auto"), "fp8_enable_fsdp_float8_all_gather"
    if not value(notes, "fp8", _BY, False):
        notes.tell("fp8", "understood", "off")
        for key in ("fp8_backend", gather):
            notes.tell(key, "ignored", "without fp8")
        return
    if value(notes, "quantization_bit", _BY) is not None:
        why = "ValueError: FP8 training is not compatible with quantization. Please disable one of them."
        notes.refuse("fp8, quantization_bit", _BY, why, "leave one of them out")
    if backend == "msamp":
        notes.lacks("fp8_backend", "MS-AMP", costs=True, advice="write te or torchao")
        return
    if backend == "te":
        notes.sets("fp8_backend", **of_te("delayed", "hybrid"), **history_of(_HISTORY, "max", 0))
        notes.tell("fp8", "understood", "Transformer Engine's products")
        notes.tell(gather, "ignored", "only torchao gathers in 8 bits")
        notes.note(HEAD)
        return
    # create_fp8_kwargs builds a rowwise configuration, and passes it to no Accelerator: accelerate makes its own.
    notes.sets("fp8", **RECIPES["tensorwise"])
    notes.tell("fp8_backend", "understood", "torchao, tensorwise")
    notes.note(SKIPPED)
    if notes.values.get("recipe") == "fsdp2":
        gathers_codes(notes, gather, is_on=value(notes, gather, _BY, False))
    else:
        notes.tell(gather, "ignored", "only FSDP2 gathers in 8 bits")
    if value(notes, "bf16", _BY, False) or value(notes, "fp16", _BY, False):
        notes.note(_SILENT)
