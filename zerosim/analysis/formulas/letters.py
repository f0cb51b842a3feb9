"""The letters of the closed forms, with meaning and unit. Notes and the glossary read this table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from zerosim.analysis.formulas.experts import OF_EXPERTS


class Letter(NamedTuple):
    """The meaning of a letter, with the unit of its value ('' for a plain number)."""

    meaning: str
    unit: str = "elements"


_OF_ALL: Mapping[str, Letter] = MappingProxyType(
    {
        "Ψ": Letter("parameters of the whole model; a tied table counts once", "parameters"),
        "Ψ_r": Letter("parameters that a rank holds on a mesh, copies and padding for tp included", "parameters"),
        "Ψ_t": Letter("parameters that are trained", "parameters"),
        "Ψ_q": Letter("parameters stored as codes (NF4 or GPTQ)", "parameters"),
        "Q": Letter("bytes of weights stored as codes: codes, their scales, and the scales' own", "bytes"),
        "Q_s": Letter("bytes of scales that are whole on every rank (FSDP); Q is then of the codes alone", "bytes"),
        "Ψ_d": Letter(
            "parameters that a rank holds besides its experts, where these are divided otherwise", "parameters"
        ),
        "Ψ_e": Letter(
            "parameters of the experts of a rank, whose states are cut over N_e ranks; Ψ has the others", "parameters"
        ),
        "N_e": Letter("ranks that an expert's states are divided among (edp)", "ranks"),
        "k": Letter("rows of experts for each token: its experts, but for a capacity", ""),
        "N": Letter("ranks that model states are divided among, of one replica with hybrid sharding", "ranks"),
        "d": Letter("ranks of one node", "ranks"),
        "n": Letter("nodes of the N ranks", "nodes"),
        "O": Letter("gradients of tensors of one dimension, which are reduced exactly"),
        "σ_f": Letter("scales of the weights' codes that all ranks gather for a step's forwards", ""),
        "σ_b": Letter("scales of the weights' codes that all ranks gather for a step's backwards", ""),
        "σ_g": Letter("scales of a rank's int4 codes of gradients", ""),
        "Ψ_8": Letter("parameters of a rank whose maps multiply in 8 bits", "parameters"),
        "Ψ_u": Letter("parameters stored as codes of 8 bits, in place of the parameters' own format", "parameters"),
        "σ_8": Letter("bytes of the scales of weights' codes that stay", "bytes"),
        "η": Letter("bytes of amax histories (delayed scaling)", "bytes"),
        "l_8": Letter("blocks of a rank whose maps multiply in 8 bits", "blocks"),
        "r_8": Letter("recomputed ones among them", "blocks"),
        "Ψ_w": Letter("parameters of a pipeline stage that are saved, of several copies one", "parameters"),
        "W": Letter("ranks of a pipeline stage, each of which saves a part of its parameters", "ranks"),
        "H": Letter("replicas of the model states (HSDP)", ""),
        "K": Letter("bytes of optimizer states per parameter", "bytes"),
        "G": Letter("elements that the optimizer updates at a time (DeepSpeed's sub_group_size)"),
        "VD": Letter("a tied table, which the first unit and the head both use"),
        "U": Letter("units that stay gathered because their next use follows"),
        "R": Letter("units outside the blocks, which stay gathered through a microbatch (FSDP2's root)"),
        "P": Letter("parameters that stay gathered through the step (DeepSpeed's persistence threshold)"),
        "M": Letter("recomputed modules, where each module is gathered separately"),
        "S": Letter("weights of whose gradients each of the t ranks holds a share"),
        "C": Letter("copied key-value heads: neighbours hold shares of their gradients"),
        "E": Letter("a table on the first and the last pipeline stage, which add up its gradient"),
        "B": Letter("parameters of units in backward's path, which are gathered again"),
        "x": Letter("column-parallel maps whose input's gradient is needed", ""),
        "y": Letter("row-parallel maps in backward's path", ""),
        "z": Letter("column-parallel maps whose input is gathered again for weights' gradients", ""),
        "y_q": Letter("blocks whose queries and keys are in backward's path", "blocks"),
        "k_f": Letter("blocks whose feed-forward backward runs again", "blocks"),
        "k_g": Letter("blocks whose last map of attention backward runs again", "blocks"),
        "k_u": Letter("blocks whose latents backward maps into heads again", "blocks"),
        "k_a": Letter("blocks whose attention core backward runs again", "blocks"),
        "j": Letter("chunks that send their input's gradient back", ""),
        "Z": Letter("bytes of a step's encoded gradients on all ranks together", "bytes"),
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
        "l_e": Letter("blocks with experts that a rank holds", "blocks"),
        "r_e": Letter("recomputed blocks with experts", "blocks"),
        "x_e": Letter("blocks whose experts' input has a gradient", "blocks"),
        "y_e": Letter("blocks whose experts' results have a gradient", "blocks"),
        "l_d": Letter("blocks of a decoder beside an encoder", "blocks"),
        "bsh_d": Letter("the activation of one microbatch between two layers of a decoder beside an encoder"),
        "bs_d": Letter("tokens of one microbatch that a decoder beside an encoder reads", ""),
        "r_d": Letter("recomputed blocks of a decoder beside an encoder", "blocks"),
        "l_f": Letter("blocks of a rank that predict further tokens", "blocks"),
        "r_f": Letter("recomputed blocks that predict further tokens", "blocks"),
        "VF": Letter("the token table and the head, once for each further token that is predicted"),
        "r": Letter("recomputed blocks, which store only their input", "blocks"),
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
LETTERS: Mapping[str, Letter] = MappingProxyType(
    {own: Letter(f"{_OF_ALL[one].meaning}, of experts", _OF_ALL[one].unit) for one, own in OF_EXPERTS.items()}
    | dict(_OF_ALL)
)
COUNTS = (
    "l", "l_e", "l_d", "l_f", "r", "r_e", "r_d", "r_f", "l_8", "r_8", "x", "x_e", "y", "y_e", "z", "y_q", "k_f", "k_g",
    "k_u", "k_a", "j", "m", "v", "first", "last", "start", "end",
)  # fmt: skip
"""Letters replaced by numbers before a form is shown: '392bsh', not '8lmbsh + 2mbsh + ...'."""
