"""Compare counted copies between a rank's memories, and the contents of each memory, with the closed forms.

Checkpointed inputs of recomputed blocks are in the host's memory with `--cpu-checkpointing`, other saved buffers with
`--offload-activations` (counted, without a form). Model states are there or on NVMe with `--offload`, and optimizer
states with `--paged-states` (counted, without a form). Staging buffers of messages do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.analysis import forms, formulas
from zerosim.analysis.capabilities import offload, pipeline, recompute
from zerosim.analysis.capability import Key
from zerosim.analysis.check import Check, Compared
from zerosim.analysis.compare import MARK
from zerosim.analysis.facts import is_owned
from zerosim.analysis.shares import has_rows
from zerosim.analysis.traffic import Expected, expect
from zerosim.analysis.weights import passes_of, shown
from zerosim.config.parts.paging import moves_pages
from zerosim.device.copies import OFFLOAD, PAGES, SAVES
from zerosim.ledger.traffic import TrafficRow
from zerosim.placement.memories import DEVICE, HOST, NVME
from zerosim.train.memory import RankMemory

PURPOSE = OFFLOAD


def check_copies(of: Compared) -> list[Check]:
    """Check the copies out and back of a pipeline stage's ranks in a step, and each rank's peak on the host."""
    result, config, share = of.result, of.result.config, of.share
    rows, has_forms = of.rows(PURPOSE), not offload.is_uncounted(config)
    expected = {way: one for (way, _), one in expect(of, "copied").items() if has_forms}
    if any(not result.layout.is_counted(share.stage, name) for name in share.ends):  # the first reads it for the norm
        expected.pop(f"{NVME} to {HOST}", None)
    checks = [
        _of_rows(of, way, [(rank, row) for rank, row in rows if row.op == way], expected.get(way))
        for way in dict.fromkeys((*expected, *(row.op for _, row in rows)))
    ]
    saves, pages = of.rows(SAVES), of.rows(PAGES)
    for what, moved in (("saved", saves), ("paged", pages)):
        for way in dict.fromkeys(row.op for _, row in moved):
            checks.append(_of_rows(of, f"{what}, {way}", [(rank, row) for rank, row in moved if row.op == way], None))
    if forms.of(of.forms, "lies") or not (recompute.keeps_on_host(config) or saves or pages):
        return checks
    peaks = tuple(result.memory[rank].host_peak_bytes for rank in of.ranks)
    has_saved = any(row.saves for rank in of.ranks for row in result.traffic[rank])
    others = has_saved or saves or moves_pages(config.memory) or offload.is_loaded(config)  # they may be the peak
    live = None if others else pipeline.live_inputs(config, share.stage, of.held)
    if live is None:
        return [*checks, Check(Key("copied", "on the host"), peaks, None, None, ())]
    form = of.forms[Key("copied", "device to host")] / passes_of(result, of.step or 0)
    at_once = {**of.held, "r": live, "m": 1}
    number = form.at(at_once)
    return [*checks, Check(Key("copied", "on the host"), peaks, shown(form, at_once), number, (number,))]


def _of_rows(of: Compared, name: str, rows: Sequence[tuple[int, TrafficRow]], expected: Expected | None) -> Check:
    counted = tuple(sum(row.payload_bytes for at, row in rows if at == rank) for rank in of.ranks)
    calls, key = sum(row.calls for at, row in rows if at == of.ranks[0]), Key("copied", name)
    if expected is None:
        return Check(key, counted, None, None, (), calls=calls)
    due = None if has_rows(of.result) else expected.with_padding  # ranks may lack an adapter's states
    return Check(key, counted, expected.form, due, () if due is None else (due,), calls=calls)


def check_memories(of: Compared) -> list[Check]:
    """Check the memories that hold each model state of a pipeline stage when backward ends. Return nothing if all are
    on the device."""
    result, config = of.result, of.result.config
    checks = []
    for (kind, memory), form in forms.of(of.forms, "lies").items():
        counted = tuple(_lies(result.memory[rank], kind, memory) for rank in of.ranks)
        uneven = kind == "optim" and config.optim.optimizer not in formulas.UNIFORM
        uneven = uneven or (kind == "optim" and (moves_pages(config.memory) or has_rows(result)))
        number = None if uneven or is_owned(config) else form.at(of.padded)
        key = Key("lies", kind, memory or DEVICE)
        checks.append(Check(key, counted, of.shown(form), number, () if number is None else (number,)))
    return checks


def _lies(held: RankMemory, kind: str, memory: str) -> int:
    """Return a state's bytes in one memory, '' for the device. A rank that used no other memory has no record of
    one."""
    other = held.others.get(memory) if memory else held
    return 0 if other is None else other.marks[MARK].by_kind.get(kind, 0)
