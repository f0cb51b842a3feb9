"""Compare counted copies between a rank's memories, and the contents of each memory, with the closed forms.

Checkpointed inputs of recomputed blocks are in the host's memory with `--cpu-checkpointing`, other saved buffers with
`--offload-activations` (counted, without a form). Model states are there or
on NVMe with `--offload`. Staging buffers of messages do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from zerosim.analysis import forms, formulas
from zerosim.analysis.capabilities.pipeline import live_micro_batches
from zerosim.analysis.capability import Key, Step
from zerosim.analysis.compare import MARK, has_late, held_cost
from zerosim.analysis.facts import is_owned
from zerosim.analysis.letters import letters_of
from zerosim.analysis.shares import share_of
from zerosim.analysis.traffic import expect, sent_rows
from zerosim.analysis.weights import shown
from zerosim.config import RunConfig
from zerosim.device.copies import OFFLOAD, SAVES
from zerosim.placement.memories import HOST, NVME
from zerosim.train.memory import RankMemory
from zerosim.train.result import RunResult

PURPOSE = OFFLOAD


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """Bytes that ranks copied in a step, or held on the host at once, beside a formula. None: there is no closed form.

    `calls` and `counted` are per rank; the ranks of a pipeline stage are alike.
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
    """Check the copies out and back of a pipeline stage's ranks in a step, and each rank's peak on the host."""
    share, held = share_of(result, stage), letters_of(result, stage)
    rows = sent_rows(result, step, share, PURPOSE)
    ranks = list(dict.fromkeys(result.stands_for[rank] for rank in share.ranks))
    checks = []
    has_forms = not (result.config.offload.is_on and is_owned(result.config))
    expected = {way: one for (way, _), one in expect(result, share, "copied", 1).items() if has_forms}
    if any(not result.layout.is_counted(stage, name) for name in share.ends):  # the first reads it for the norm
        expected.pop(f"{NVME} to {HOST}", None)
    for way in dict.fromkeys((*expected, *(row.op for _, row in rows))):
        own = [(rank, row) for rank, row in rows if row.op == way]
        counted = tuple(sum(row.payload_bytes for at, row in own if at == rank) for rank in ranks)
        calls, one = sum(row.calls for at, row in own if at == ranks[0]), expected.get(way)
        checks.append(CopyCheck(way, calls, counted, one and one.with_padding, "" if one is None else str(one.form)))
    saves = sent_rows(result, step, share, SAVES)
    for way in dict.fromkeys(row.op for _, row in saves):
        counted = tuple(sum(row.payload_bytes for at, row in saves if at == rank and row.op == way) for rank in ranks)
        calls = sum(row.calls for at, row in saves if at == ranks[0] and row.op == way)
        checks.append(CopyCheck(f"saved, {way}", calls, counted, None, ""))
    if result.config.offload.is_on or not (result.config.memory.cpu_checkpointing or saves):
        return checks
    if saves:
        peaks = tuple(result.memory[rank].host_peak_bytes for rank in ranks)
        return [*checks, CopyCheck("on the host", None, peaks, None, "")]
    form = forms.forms(result.config)[Key("copied", "device to host")]
    peaks, live = tuple(result.memory[rank].host_peak_bytes for rank in ranks), _live_inputs(result.config, stage, held)
    if live is None:
        return [*checks, CopyCheck("on the host", None, peaks, None, "")]
    at_once = held | {"r": live, "m": 1}
    return [*checks, CopyCheck("on the host", None, peaks, form.at(at_once), str(shown(form, at_once)))]


def check_memories(result: RunResult, stage: int = 0) -> list[CopyCheck]:
    """Check the memories that hold each model state of a pipeline stage when backward ends. Return nothing if all are
    on the device."""
    config, cost, share = result.config, held_cost(result, stage), share_of(result, stage)
    held, padded = (letters_of(result, stage, padded=padded) for padded in (False, True))
    ranks = list(dict.fromkeys(result.stands_for[rank] for rank in share.ranks))
    checks = []
    for (kind, memory), form in forms.of(forms.forms(config, cost, Step(late=has_late(result))), "lies").items():
        counted = tuple(_lies(result.memory[rank], kind, memory) for rank in ranks)
        uneven = kind == "optim" and config.optim.optimizer not in formulas.UNIFORM
        number = None if uneven or is_owned(config) else form.at(padded)
        checks.append(CopyCheck(f"{kind} in {memory or 'device'}", None, counted, number, str(shown(form, held))))
    return checks


def _lies(held: RankMemory, kind: str, memory: str) -> int:
    """Return a state's bytes in one memory, '' for the device. A rank that used no other memory has no record of
    one."""
    other = held.others.get(memory) if memory else held
    return 0 if other is None else other.marks[MARK].by_kind.get(kind, 0)


def _live_inputs(config: RunConfig, stage: int, held: Mapping[str, int]) -> int | None:
    """Return the most inputs that a pipeline stage holds; None if live chunks have different numbers of blocks."""
    chunks, layers = config.parallel.num_chunks, config.layers_by_chunk(config.model.layers)
    sizes = [layers[number] for number in config.chunks.of_stage(stage)]
    if len(set(sizes)) > 1 or (chunks > 1 and config.memory.again.every > 1):
        return None
    live = live_micro_batches(config).at(held)
    return int(live * held["r"]) // chunks
