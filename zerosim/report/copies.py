"""The table of copies between device and host: kept inputs on their way out and back, beside the closed forms."""

from __future__ import annotations

from rich.console import RenderableType

from zerosim.analysis.compare import last_whole_step
from zerosim.analysis.copies import check_copies
from zerosim.analysis.letters import sizes
from zerosim.analysis.shares import alike_stages
from zerosim.report.look import Adaptive, Grid, right, spread, titled
from zerosim.report.mesh_words import stage_name
from zerosim.train.result import RunResult


def copies_table(result: RunResult) -> RenderableType | None:
    """What a rank copied in the last whole step and held on the host, by pipeline stage; None where nothing is."""
    step, pp = last_whole_step(result), result.layout.mesh.pp
    if not result.config.memory.cpu_checkpointing or step is None:
        return None
    checks = [check_copies(result, step, stage) for stage in range(pp)]
    formula = (right("volume", style="cyan"), right("in bytes", style="cyan"))
    grid = Grid("", "kept inputs", right("calls"), right("bytes"), *formula, "agree")
    for run in alike_stages(checks):
        for at, check in enumerate(checks[run[0]]):
            where = stage_name(run, pp) if not at else ""
            grid.add(where, check.name, check.calls, spread(check.counted), check.text, check.formula, check.agrees)
        grid.rule()
    note = (
        f"bsh = {sizes(result.config)['bsh']:,} elements, one micro-batch's input of a block. On the host: the most at "
        "once; the device's bytes above have none of it. Copies pass over PCIe, and are no part of what ranks send."
    )
    body = Adaptive(grid, grid.without("calls"), grid.without("calls", "volume"))
    return titled("Copies between device and host per rank and step", body, note)
