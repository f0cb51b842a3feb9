"""Should I offload? Every way to offload at one ZeRO stage: whether it fits, its bytes in each memory, its seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerosim.analysis.offload_ways import Way, has_drive_rate
from zerosim.placement.memories import DEVICE, HOST, NVME
from zerosim.report import words
from zerosim.report.fit import Search, flags_of, values_of
from zerosim.report.interval import trust
from zerosim.report.look import Adaptive, Cell, Grid, Stack, right, titled
from zerosim.report.names import STAGES, counted, listed
from zerosim.report.time import step_values
from zerosim.report.verdict import taken_column, verdict
from zerosim.units import format_bytes

IN_WORDS = {DEVICE: "device", HOST: "host memory", NVME: "NVMe"}


def offload_report(search: Search, found: Sequence[Way], has: Mapping[str, int | None]) -> Stack:
    """Return the fastest way that fits, beside all others. `has`: a node's bytes of its other memories."""
    config, limit = search.config, search.limit
    stage, ranks = STAGES[config.parallel.zero_stage], counted(config.mesh.ranks, "rank")
    node = " and ".join(f"{format_bytes(has[one] or 0)} of {IN_WORDS[one]}" for one in (HOST, NVME) if has[one])
    of = limit.name or format_bytes(limit.nbytes)
    about = f"{words.model_name(config)}: {stage} on {ranks} of {of}" + (f", a node with {node}." if node else ".")
    best = None if found[0].too_small else found[0]
    rows = [_cells(search, one) for one in found]
    grid = Grid(*(name if name in ("offload", "fits") else right(name) for name in rows[0]))
    for row in rows:
        grid.add(*row.values(), style="bold" if row is rows[0] and best is not None else "")
    full = grid if search.all else grid.short()
    note = "Host memory and NVMe: the sum of a node's ranks."
    if search.cluster is not None:
        note += f" copies and CPU: how long compute waits for them. {trust(search.cluster, None)}"
    if search.cluster is not None and has[NVME] and not has_drive_rate(search.cluster):
        note += " The speed of the node's drives is unknown: states on NVMe take longer than this."
    shown = (full, full.short(), full.short().without("copies, s", "CPU, s", "tokens/s"))
    table = titled("Ways to offload", Adaptive(*shown), note)
    config_of, taken = (None, None) if best is None else (best.config, best.peak_bytes)
    return search.page(about, _answer(search, found), config_of, [], table, taken=taken)


def flags(way: Way) -> str:
    """Return the flags that run or plan it."""
    return flags_of(values_of(way.config, ("stage", "offload", "delayed_update")))


def _answer(search: Search, found: Sequence[Way]) -> str:
    limit, best = search.limit, found[0]
    alone = next(one for one in found if not one.where)
    if best.too_small:
        least = min(found, key=lambda one: one.peak_bytes)
        others = [IN_WORDS[memory] for memory in least.too_small if memory != DEVICE]
        text = f"Nothing fits. {flags(least) if least.where else 'No offload'} takes the least device memory. "
        return text + (f"It needs more {listed(others)}." if others else verdict(least.config, limit, least.peak_bytes))
    if not alone.too_small:
        return f"No need to offload. {verdict(alone.config, limit, alone.peak_bytes)}"
    return f"{flags(best)}. {verdict(best.config, limit, best.peak_bytes)}"


def _cells(search: Search, one: Way) -> dict[str, Cell]:
    cells: dict[str, Cell] = {
        "offload": one.where.replace(",", ", ") or "nothing",
        "fits": f"no: {', '.join(IN_WORDS[memory] for memory in one.too_small)}" if one.too_small else "yes",
    }
    if search.cluster is not None:
        values = None if one.time is None else step_values(one.config, one.time, search.cluster)
        cells |= {
            "step, s": None if one.time is None else f"{one.time.seconds:.4g}",
            "tokens/s": None if values is None else f"{values['tokens_per_s']:,.0f}",
            "copies, s": None if one.time is None else f"{one.time.copies:.3g}",
            "CPU, s": None if one.time is None else f"{one.time.cpu:.3g}",
        }
    return {
        **cells,
        taken_column(search.config): one.peak_bytes,
        "host, bytes": one.node_bytes[HOST],
        "NVMe, bytes": one.node_bytes[NVME],
    }
