"""The table of one block's activations: the tensors that each op saves for backward, and the paper's closed form beside
them.

Saved bytes are read from the record (`ledger.ActivationLedger`); the closed forms are those of 2205.05198 and of the
ZeRO paper, section 3.2.

s tokens per row (of a rank, if others have more of it), b rows of a microbatch, h width, a heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from rich.console import RenderableType

from zerosim.analysis.blocks import block_unit, check_block, other_premises
from zerosim.analysis.capabilities import notes_of
from zerosim.analysis.capabilities.recompute import recomputes_all
from zerosim.analysis.check import Check
from zerosim.analysis.formulas import zero_paper_elements
from zerosim.analysis.recompute import recompute_of
from zerosim.analysis.weights import sizes
from zerosim.config import RunConfig
from zerosim.dtypes import dtype
from zerosim.ledger.activations import SavedRow
from zerosim.placement.stages import number_of
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.names import counted
from zerosim.units import format_bytes

_UNITS = {"softmax": "as²b", "dropped softmax": "as²b", "log-sum-exp": "asb", "mean": "sb", "rstd": "sb"}
"""Units of tensors whose size is no multiple of sbh."""


def activations_table(
    config: RunConfig,
    saved: Mapping[str, Sequence[SavedRow]],
    again: Mapping[str, Sequence[SavedRow]] | None = None,
) -> RenderableType:
    """Return the table of one block's saved tensors for one microbatch, op by op; then the paper's count, and the ZeRO
    paper's estimate.

    `saved` and `again` are `ActivationLedger.saved()` and `.saved_again()`; every block saves the same, or every K-th
    one is recomputed. Raises: InputError if no unit is a block.
    """
    unit = block_unit(saved)
    check = check_block(config, saved[unit], unit)
    held, of_row = sizes(config), f" of {config.model.seq}" if config.mesh.cp > 1 else ""
    said = f"s {held['s']}{of_row}, b {held['b']}, h {held['h']}, a {held['a']}"
    said += f", t {config.mesh.tp}" if config.mesh.tp > 1 else ""
    title = f"What {unit} keeps for backward, in bytes ({said})"
    grid = _grid(config, saved[unit], check)
    made_again = max((sum(row.nbytes for row in rows) for rows in (again or {}).values()), default=0)
    note = f"Formula: {', and '.join(['2205.05198, Table 2', *notes_of(config, 'sources')])}."
    if ":" in recompute_of(config, number_of(unit)):
        note = "Formula: 2205.05198, section 4.1, without recomputed tensors."
    if check.formula is None:
        note = (
            f"2205.05198 counts {check.text}. This is another count, because {'; '.join(other_premises(config, unit))}."
        )
    if not recomputes_all(config):
        inputs = [name for name, rows in saved.items() if [row.op for row in rows] == ["recompute"]]
        note += f" Of {_others(inputs)} the input alone is kept." if inputs else ""
    if made_again:
        note += f" Backward makes {made_again:,} B more of it again, one block at a time."
    return Stack(titled(title, Adaptive(grid, grid.stacked()), note), prose(_estimate(config, saved, unit), "dim"))


def _others(units: Sequence[str]) -> str:
    """Return some names, of which the first and the last are enough."""
    return " and ".join(units) if len(units) < 3 else f"{units[0]}, {units[1]} to {units[-1]}"


def _grid(config: RunConfig, rows: Sequence[SavedRow], check: Check) -> Grid:
    grid = Grid("op", "keeps", right("bytes"), right("in units"))
    for row in rows:
        grid.add(row.op, row.what, row.nbytes, _in_units(config, (row,)))
    grid.rule()
    grid.add("one block", None, check.counted[0], _in_units(config, rows))
    if check.formula is not None:
        grid.add("formula", None, check.formula, check.text, style="cyan")
        grid.add("agree", None, check.agrees)
    return grid


def _in_units(config: RunConfig, rows: Sequence[SavedRow]) -> str:
    """Return the rows' sum, such as '34sbh + 5as²b'; empty if a factor has more than two decimals."""
    s, tokens, heads = (sizes(config)[letter] for letter in ("s", "bs", "a"))
    size = {"sbh": tokens * config.model.hidden, "as²b": heads * s * tokens, "asb": heads * tokens}
    size["sb"] = tokens
    held = {unit: sum(row.nbytes for row in rows if _unit_of(config, row) == unit) for unit in size}
    factors = {unit: Fraction(nbytes, size[unit]) for unit, nbytes in held.items() if nbytes}
    if any(100 % factor.denominator for factor in factors.values()):
        return ""
    return " + ".join(f"{'' if factor == 1 else f'{float(factor):g}'}{unit}" for unit, factor in factors.items())


def _unit_of(config: RunConfig, row: SavedRow) -> str:
    """Return the unit of which a saved tensor is a multiple."""
    if row.op == "head_norm" and row.what != "q, k, v":  # statistics: of each head, or of all heads at once
        return "sb" if config.model.decoder.block.qk_norm == "all" else "asb"
    unit = "as²b" if (row.op, row.what) == ("attention", "mask") else "sbh"
    return _UNITS.get(row.what, unit)


def _estimate(config: RunConfig, saved: Mapping[str, Sequence[SavedRow]], unit: str) -> str:
    """Return all blocks and all units of a rank as counted, and the ZeRO paper's estimate of the whole model."""
    by_unit = {name: sum(row.nbytes for row in rows) for name, rows in saved.items()}
    blocks = [nbytes for name, nbytes in by_unit.items() if name.startswith(unit.removesuffix("0"))]
    elements = int(zero_paper_elements().at(sizes(config), l=config.model.layers))
    nbytes = elements * dtype(config.precision.stored).itemsize
    return (
        f"Of one microbatch rank 0 keeps {format_bytes(sum(blocks))} for {counted(len(blocks), 'block')}, "
        f"{format_bytes(sum(by_unit.values()))} for all its units. The ZeRO paper estimates 12hbsL = {elements:,} "
        f"elements for the whole model, {format_bytes(nbytes)} in {config.precision.param_dtype}: one number that "
        "names no tensors and has no term in s², where 2205.05198 counts tensor by tensor, scores included."
    )
