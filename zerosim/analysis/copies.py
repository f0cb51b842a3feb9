"""What a run counted of copies between its ranks' devices and the host, beside the closed forms.

Kept inputs of recomputed blocks wait in the host's memory (`--cpu-checkpointing`). What messages are staged through is
no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from zerosim.analysis import forms
from zerosim.analysis.letters import letters_of, live_micro_batches, shown
from zerosim.analysis.shares import share_of
from zerosim.analysis.traffic import sent_rows
from zerosim.config import RunConfig
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
    share, held = share_of(result, stage), letters_of(result, stage)
    rows = sent_rows(result, step, share, PURPOSE)
    ranks = list(dict.fromkeys(result.stands_for[rank] for rank in share.ranks))
    checks = []
    for (way, _), form in forms.of(forms.forms(result.config), "copied").items():
        own = [(rank, row) for rank, row in rows if row.op == way]
        counted = tuple(sum(row.payload_bytes for at, row in own if at == rank) for rank in ranks)
        calls = sum(row.calls for at, row in own if at == ranks[0])
        checks.append(CopyCheck(way, calls, counted, form.at(held), str(shown(form, held))))
    peaks, live = tuple(result.memory[rank].host_peak_bytes for rank in ranks), _live_inputs(result.config, stage, held)
    if live is None:
        return [*checks, CopyCheck("on the host", None, peaks, None, "")]
    at_once = held | {"r": live, "m": 1}
    return [*checks, CopyCheck("on the host", None, peaks, form.at(at_once), str(shown(form, at_once)))]


def _live_inputs(config: RunConfig, stage: int, held: Mapping[str, int]) -> int | None:
    """Inputs that a stage holds at most; None where chunks that keep unlike numbers are live."""
    chunks, layers = config.parallel.num_chunks, config.layers_by_chunk(config.model.layers)
    sizes = [layers[number] for number in config.chunks.of_stage(stage)]
    if len(set(sizes)) > 1 or (chunks > 1 and config.memory.again.every > 1):
        return None
    live = live_micro_batches(config).at(held)
    return int(live * held["r"]) // chunks
