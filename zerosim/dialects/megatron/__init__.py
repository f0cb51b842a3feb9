"""Reader of Megatron-LM's command lines, and of ms-swift's `megatron sft`, which translates underscores.

Read as Megatron-LM d98e8a6: its argparse takes no abbreviations, `--a=b`, and the last of two values.
"""

from __future__ import annotations

from zerosim.dialects.fp8 import check_codes
from zerosim.dialects.megatron.args import MEGATRON, SWIFT_READER, arguments_of, say_rest
from zerosim.dialects.megatron.layout import layout_of
from zerosim.dialects.megatron.model import model_of
from zerosim.dialects.megatron.states import states_of
from zerosim.dialects.megatron.step import step_of
from zerosim.dialects.megatron.step_keys import TABLE
from zerosim.dialects.megatron.training import training_of
from zerosim.dialects.reading import Context, Document, Reading


def read(document: Document, context: Context) -> Reading:
    """Read a training command's arguments as a run's values."""
    arguments = arguments_of(document, context)
    program = arguments.environment.get("(command)", "pretrain_gpt.py")
    if any(word in program for word in ("bert", "t5", "mamba", "hybrid", "vlm", "vision", "retro", "ict")):
        why = f"{program}: reads models of pretrain_gpt.py alone"
        arguments.refuse("--num-layers", why, "pass --model NAME, and --without its own arguments", by="zerosim")
    if arguments.is_swift:
        arguments.notes.note("underscores: Megatron's own parser refuses them (argparse exits 2); ms-swift translates")
    layout = layout_of(arguments)
    model_of(arguments, layout.tp)
    states_of(arguments, layout)
    step_of(arguments, layout)
    training_of(arguments)
    check_codes(arguments.notes)
    say_rest(arguments)
    return arguments.notes.reading(SWIFT_READER if arguments.is_swift else MEGATRON)


__all__ = ["TABLE", "read"]
