"""The letters of the closed forms, with meaning and unit. Notes and the glossary read this table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Letter(NamedTuple):
    """The meaning of a letter, with the unit of its value ('' for a plain number)."""

    meaning: str
    unit: str = "elements"


LETTERS: Mapping[str, Letter] = MappingProxyType(
    {
        "Ψ": Letter("parameters of the whole model; a tied table counts once", "parameters"),
        "Ψ_r": Letter("parameters that a rank holds on a mesh, copies and padding for tp included", "parameters"),
        "Ψ_t": Letter("parameters that are trained", "parameters"),
        "Ψ_q": Letter("parameters that are kept in NF4", "parameters"),
        "Q": Letter("bytes of these: codes, their scales, and the scales' own", "bytes"),
        "N": Letter("ranks that model states are divided among, of one replica with hybrid sharding", "ranks"),
        "d": Letter("those of N that share a node", "ranks"),
        "n": Letter("that the N ranks lie on", "nodes"),
        "O": Letter("gradients of tensors of one dimension, which are reduced exactly"),
        "σ_f": Letter("scales of the weights' codes that all ranks gather for a step's forwards", ""),
        "σ_b": Letter("the same for its backwards", ""),
        "σ_g": Letter("scales of a rank's int4 codes of gradients", ""),
        "H": Letter("replicas of the model states (HSDP)", ""),
        "K": Letter("bytes of optimizer states per parameter", "bytes"),
        "G": Letter("elements that the optimizer copies and steps at once (DeepSpeed's sub_group_size)"),
        "VD": Letter("a tied table, which the first unit and the head both use"),
        "U": Letter("units that stay gathered because their next use follows"),
        "R": Letter("units outside the blocks, which stay gathered through a microbatch (FSDP2's root)"),
        "P": Letter("parameters that stay gathered through the step (DeepSpeed's persistence threshold)"),
        "M": Letter("modules that recompute runs a second time, where each is gathered alone"),
        "S": Letter("weights whose gradients all t ranks hold shares of"),
        "C": Letter("copied key-value heads, whose gradients neighbours hold shares of"),
        "E": Letter("a table that the first and the last pipeline stage hold, and add up the gradient of"),
        "B": Letter("parameters that backward gathers again, of units that it comes through"),
        "P_t": Letter("those of P that are trained, and gathered after each step"),
        "x": Letter("column-parallel maps whose input's gradient is wanted", ""),
        "y": Letter("row-parallel maps that backward comes through", ""),
        "z": Letter("column-parallel maps whose input is gathered again for weights' gradients", ""),
        "k": Letter("blocks that backward comes through", "blocks"),
        "j": Letter("chunks that send their input's gradient back", ""),
        "Z": Letter("bytes that all ranks together make of a step's gradients before they are sent", "bytes"),
        "Y": Letter("bytes that a compression keeps for later steps: residuals, errors, Q", "bytes"),
        "F": Letter("sums that an optimizer exchanges", "numbers"),
        "V": Letter("vocabulary; of the flat model its columns", ""),
        "s": Letter("tokens of a row", ""),
        "b": Letter("rows of a microbatch", ""),
        "h": Letter("width", ""),
        "f": Letter("width of the MLP", ""),
        "a": Letter("attention heads", ""),
        "bsh": Letter("the activation of one microbatch between two layers"),
        "bs": Letter("tokens of one microbatch", ""),
        "l": Letter("blocks that a rank holds", "blocks"),
        "r": Letter("blocks of which backward keeps the input alone, and runs them again", "blocks"),
        "m": Letter("microbatches of a step", ""),
        "t": Letter("tensor-parallel ranks", ""),
        "p": Letter("pipeline stages", ""),
        "i": Letter("a pipeline stage's number, from 0", ""),
        "v": Letter("chunks of layers on a pipeline stage", ""),
        "w": Letter("bytes of a parameter", "bytes"),
        "g": Letter("bytes of a gradient", "bytes"),
        "q": Letter("bytes that a gradient is cast to before it is sent", "bytes"),
        "c": Letter("bytes of a number in which sums are computed", "bytes"),
    }
)
COUNTS = ("l", "r", "x", "y", "z", "k", "j", "m", "v", "first", "last", "start", "end")
"""Letters replaced by numbers before a form is shown: '392bsh', not '8lmbsh + 2mbsh + ...'."""
