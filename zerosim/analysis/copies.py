"""What a run counted of copies between its ranks' devices and the host, beside the closed forms.

Kept inputs of recomputed blocks wait in the host's memory (`--cpu-checkpointing`). What messages are staged through is
no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.exchanges import blocks_run_again, border_numel, times_of
from zerosim.analysis.shares import share_of
from zerosim.analysis.traffic import sent_rows
from zerosim.config import RunConfig
from zerosim.dtypes import dtype
from zerosim.train.result import RunResult

PURPOSE = "offload"


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """Bytes that ranks copied in a step, or held on the host at once, beside a formula. None: there is no closed form.

    `calls` and `counted` are a rank's; ranks of a stage are alike.
    """

    name: str
    calls: int | None
    counted: tuple[int, ...]
    formula: Fraction | None
    text: str

    @property
    def agrees(self) -> bool | None:
        return None if self.formula is None else set(self.counted) == {self.formula}


def check_copies(result: RunResult, step: int, stage: int = 0) -> list[CopyCheck]:
    """What the ranks of a pipeline stage copied out and back in a step, and the most that each held on the host."""
    config, share = result.config, share_of(result, stage)
    rows = sent_rows(result, step, share, PURPOSE)
    ranks = list(dict.fromkeys(result.stands_for[rank] for rank in share.ranks))
    each = dtype(config.precision.stored).itemsize
    parts = config.mesh.tp if config.partitions_inputs or config.parallel.sequence_parallel else 1
    numel, unit = border_numel(config), "bsh/t" if parts > 1 else "bsh"
    blocks = blocks_run_again(config, share)
    moved = formulas.inputs_moved(blocks, config.data.accumulate, numel, parts) * each
    checks = []
    for way in ("device to host", "host to device"):
        own = [(rank, row) for rank, row in rows if row.op == way]
        counted = tuple(sum(row.payload_bytes for at, row in own if at == rank) for rank in ranks)
        calls = sum(row.calls for at, row in own if at == ranks[0])
        checks.append(CopyCheck(way, calls, counted, moved, times_of(blocks * config.data.accumulate, unit)))
    held, live = tuple(result.memory[rank].host_peak_bytes for rank in ranks), _live_inputs(config, stage, blocks)
    formula = None if live is None else formulas.inputs_moved(live, 1, numel, parts) * each
    return [*checks, CopyCheck("on the host", None, held, formula, "" if live is None else times_of(live, unit))]


def _live_inputs(config: RunConfig, stage: int, blocks: int) -> int | None:
    """Inputs that a stage holds at most; None where chunks that keep unlike numbers are live."""
    parallel, pp = config.parallel, config.mesh.pp
    chunks, layers = parallel.num_chunks, config.layers_by_chunk(config.model.layers)
    sizes = [layers[number] for number in config.chunks.of_stage(stage)]
    if len(set(sizes)) > 1 or (chunks > 1 and config.memory.again.every > 1):
        return None
    schedule = parallel.pipeline_schedule
    return formulas.live_micro_batches(schedule, stage, pp, config.data.accumulate, chunks) * blocks // chunks
