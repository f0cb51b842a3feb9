"""Compare the activations that one block saves with 2205.05198's count, where its premises hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerosim.analysis.capabilities import notes_of
from zerosim.analysis.capabilities.recompute import block_form, has_wide_input
from zerosim.analysis.capability import Key
from zerosim.analysis.check import Check
from zerosim.analysis.formulas import keeps_scores
from zerosim.analysis.formulas.form import symbol
from zerosim.analysis.recompute import parts_again, recompute_of
from zerosim.analysis.weights import sizes
from zerosim.config import RunConfig
from zerosim.dtypes import dtype
from zerosim.errors import InputError
from zerosim.ledger.activations import SavedRow
from zerosim.placement.stages import number_of
from zerosim.train.result import RunResult


def check_block(config: RunConfig, rows: Sequence[SavedRow], unit: str = "h.0") -> Check:
    """Check one block's saved bytes against 2205.05198's count under the same recompute. `unit`: which block."""
    form, is_other = block_form(config, number_of(unit)), any(other_premises(config, unit))
    number = None if is_other else form.at(sizes(config))
    text = form.where(f=4 * symbol("h"), **({"t": 1} if config.mesh.tp == 1 else {}))
    counted = (sum(row.nbytes for row in rows),)
    return Check(Key("kept", "block"), counted, text, number, () if number is None else (number,))


def other_premises(config: RunConfig, unit: str = "h.0") -> list[str]:
    """Return how the run differs from the block that the paper counts."""
    recompute = recompute_of(config, number_of(unit))
    itemsize = dtype(config.precision.stored).itemsize
    found = [f"an element takes {itemsize} bytes, not 2"] if itemsize != 2 else []
    found += ["the first block's input is fp32"] if has_wide_input(config) else []
    if recompute == "full":
        return found
    found += notes_of(config, "premises")
    if config.model.family != "gpt":
        found.append(f"the paper's block is a GPT's, not {config.model.family}'s")
    elif config.model.ffn != 4 * config.model.hidden:
        found.append(f"the feed-forward is {config.model.ffn} wide, not 4h = {4 * config.model.hidden}")
    has_scores = keeps_scores(recompute)
    eager = has_scores and config.memory.attention == "eager"
    if not config.model.dropout:
        found.append("without dropout there are no masks" + (" and no second softmax" if eager else ""))
    if config.memory.saves != "megatron":
        found.append(
            f"--saves {config.memory.saves} keeps the norms' statistics"
            + (" and no second softmax" if eager and config.model.dropout else "")
        )
    if config.memory.attention == "flash" and "core_attn" not in parts_again(config, unit):
        found.append(f"flash attention keeps {'no scores' if has_scores else 'its log-sum-exp'}")
    return found


def has_block(result: RunResult) -> bool:
    """Return whether rank 0 saved anything of the first block of a model. A first pipeline stage may have no block."""
    names = ("h.0", "layers.0", "encoder.layer.0", "encoder.block.0")  # an MLP's first layer has such a name too
    return result.config.model.has_blocks and any(unit in names for unit in result.saved)


def block_unit(saved: Mapping[str, Sequence[SavedRow]]) -> str:
    """Return the first block of a model, by its unit's name: h.0, layers.0. Raises: InputError if there is none."""
    for unit in saved:
        if unit.endswith(".0"):
            return unit
    raise InputError(f"the record has no block's activations, only those of: {', '.join(saved) or 'no unit'}")
