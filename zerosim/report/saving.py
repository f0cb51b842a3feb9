"""A save for people: its bytes beside the closed forms, its seconds, and how often to save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from zerosim.analysis.capabilities.saving import is_beside, is_gathered, mtbf_hours, save_way, writes_files
from zerosim.analysis.checks import Checks
from zerosim.analysis.formulas.saving import GPU_HOURS, LLAMA3, YOUNG
from zerosim.analysis.saving import Interval, SaveTime, interval_of, node_host, save_time
from zerosim.config.presets.cluster import Cluster
from zerosim.placement.memories import NVME
from zerosim.report.interval import three_figures
from zerosim.report.look import Adaptive, Grid, right, spread, titled
from zerosim.report.names import listed
from zerosim.train.result import RunResult
from zerosim.units import counted, format_bytes

_WRITES = {
    "sharded": "each GPU writes its shards",
    "gathered": "the first GPU of each group gathers and writes all",
    "async": "each GPU copies its shards to its host, which writes them beside the next steps",
}


def save_lines(result: RunResult, cluster: Cluster | None) -> list[str]:
    """Return what a planned save takes, in sentences; nothing without one."""
    if (save := result.save) is None:
        return []
    written, hosts = [one.written for one in save.counts], [one.host for one in save.counts]
    most, total, beside = max(written), sum(written), max(one.device for one in save.counts)
    whose = "each rank" if min(written) == most else "rank 0" if total == most else "the largest rank"
    of = f", {format_bytes(total)} in all" if total > most else ""
    lines = [f"Saving the state ({save.how}): {_WRITES[save.how]}."]
    lines[0] += f" The drives get {format_bytes(most)} from {whose}{of}."
    of_node = "" if len(hosts) == 1 else f", {format_bytes(node_host(save, result.node_ranks))} on the fullest node"
    has = "" if cluster is None or cluster.host_bytes is None else f" of {format_bytes(cluster.host_bytes)}"
    held = "until they are written" if is_beside(result.config) else "at the most"
    if max(hosts):
        lines.append(f"Its copies take {format_bytes(max(hosts))} of host memory for a rank{of_node}{has}, {held}.")
    own = max(node.host_bytes for node in result.nodes)
    if (
        cluster is not None
        and cluster.host_bytes is not None
        and own + node_host(save, result.node_ranks) > cluster.host_bytes
    ):
        lines.append("That is more than the node's host has left: choose --save-as sharded, or more nodes.")
    if received := max(one.received for one in save.counts):
        lines.append(f"Each rank receives {format_bytes(received)} over the network.")
    if beside:
        peak = f"The device then holds {format_bytes(save.device_peak)}."
        lines.append(f"On the device the gathered states take {format_bytes(beside)} beside its own. {peak}")
    return lines + _time_lines(result, cluster)


def _time_lines(result: RunResult, cluster: Cluster | None) -> list[str]:
    if cluster is None:
        return ["For the seconds of a save pass --gpu NAME, and --drive-rate SIZE."]
    cost = save_time(result, cluster)
    parts = [
        f"{_seconds(seconds)} {name}"
        for name, seconds in (("of gathers", cost.gathers), ("of copies to the host", cost.to_host))
        if seconds
    ]
    if cost.drives is not None and not cost.beside:
        parts.append(f"{_seconds(cost.drives)} of writing")
    rate = "" if cost.drives is None else f" at {cluster.nvme_rate / 1e9:.3g} GB/s of a node's drives"
    lines, asks = list[str](), "pass --drive-rate SIZE, or a --node whose drives' rate is known"
    if cost.stands is None:
        lines.append(f"A save takes {listed([*parts, 'the time of writing'])}, which is not known: {asks}.")
    elif parts:
        of = f"{listed(parts)}{'' if cost.beside else rate}"
        lines.append(f"Training stands still for {_seconds(cost.stands)} a save: {of}.")
    else:
        lines.append("Its copies stay in the host's memory, and their time is not modelled.")
    if cost.beside:
        lines.append(
            f"Writing takes {_seconds(cost.drives)}{rate}, beside the next steps. An earlier save waits for it."
            if cost.drives is not None
            else f"How long writing takes beside the next steps is not known: {asks}."
        )
    if (found := interval_of(result, cost)) is not None:
        lines.append(_interval_text(result, cost, found))
    return lines


def _interval_text(result: RunResult, cost: SaveTime, found: Interval) -> str:
    hours, given = mtbf_hours(result.config, len(result.memory))
    why = "--mtbf" if given else f"{float(GPU_HOURS):,.0f} GPU hours each, as in Llama 3's training, {LLAMA3}"
    steps = "" if found.steps is None else f", {found.steps:,} step{'s' if found.steps > 1 else ''}"
    stands = cost.stands or 0.0
    how = f"Young's sqrt(2 · {_seconds(stands)} · {_duration(hours * 3600)}), {YOUNG}"
    if cost.drives is not None and cost.beside and found.seconds <= cost.drives:
        how = "as long as writing takes, which is more than Young's interval"
    return (
        f"Save every {_duration(found.seconds)}{steps}: {how}. A failure is expected every {_duration(hours * 3600)} "
        f"({why}). Saves and lost work then cost {100 * found.lost:.2g} % of the time."
    )


def save_table(found: Sequence[Checks]) -> RenderableType | None:
    """Return the bytes of a planned save beside the closed forms; None without a save or a form."""
    if not any(one.saved for one in found):
        return None
    grid = Grid("pipeline", "what", right("bytes"), right("formula", style="cyan"), right("in bytes"), "agree")
    for stage, one in enumerate(found):
        for at, check in enumerate(one.saved):
            name = f"stage {stage}" if not at and len(found) > 1 else ""
            grid.add(name, check.name, spread(check.counted), check.text, check.formula, check.agrees)
    gathered = is_gathered(found[0].of.result.config)
    note = "The mean over ranks is compared. Padding is never written."
    if gathered:
        note = "On the drives and on the host: of the ranks that gather. Slices are gathered with their padding."
    if any("Ψ_w" in check.text for one in found for check in one.saved):
        note += " Ψ_w: parameters of a pipeline stage, of several copies one. W: its ranks."
    return titled("What a save takes, bytes per rank", Adaptive(grid.filled(), grid.filled().without("in bytes")), note)


def save_values(result: RunResult, cluster: Cluster | None) -> dict[str, Any]:
    """Return the JSON form under the key `save`; nothing without a planned save."""
    if (save := result.save) is None:
        return {}
    counts, cost = save.counts, None if cluster is None else save_time(result, cluster)
    found = None if cost is None else interval_of(result, cost)
    values: dict[str, Any] = {
        "how": save.how,
        "written_bytes": max(one.written for one in counts),
        "all_written_bytes": sum(one.written for one in counts),
        "host_bytes": max(one.host for one in counts),
        "node_host_bytes": node_host(save, result.node_ranks),
        "device_bytes": max(one.device for one in counts),
        "device_peak_bytes": save.device_peak,
        "sent_bytes": max(one.sent for one in counts),
        "received_bytes": max(one.received for one in counts),
        "seconds": None,
        "interval": None,
    }
    if cost is not None:
        values["seconds"] = {
            "gathers": cost.gathers,
            "to_host": cost.to_host,
            "drives": cost.drives,
            "stands_still": cost.stands,
        }
    if found is not None:
        values["interval"] = {"formula": YOUNG, **found._asdict()}
    return {"save": values}


def run_save_text(result: RunResult) -> str:
    """Return what the last save of a run wrote and sent; '' without one."""
    saves = {rank: [row for row in result.traffic[rank] if row.saves] for rank in result.ran}
    steps = sorted({row.step for rows in saves.values() for row in rows})
    if not steps:
        return ""
    last = [[row for row in rows if row.step == steps[-1]] for rows in saves.values()]
    written = [sum(row.payload_bytes for row in rows if row.op.endswith(NVME)) for rows in last]
    sent = max(sum(row.wire_bytes for row in rows) for rows in last)
    is_kept = writes_files(result.config)
    text = (
        f"The state was saved {counted(len(steps), 'time')}, at last after step {steps[-1]} "
        f"({save_way(result.config)}): {format_bytes(sum(written))} in all, at most {format_bytes(max(written))} from "
        f"a rank.{'' if is_kept else ' It was counted, and not written: pass --save-state DIR.'}"
    )
    return text + (f" For that a rank sent {format_bytes(sent)}." if sent else "")


def _seconds(seconds: float) -> str:
    return f"{three_figures(seconds)} s"


def _duration(seconds: float) -> str:
    """Return '12.3 s', '4.56 min', '7.89 h'."""
    for unit, most in (("s", 120.0), ("min", 7200.0)):
        if seconds < most:
            return f"{three_figures(seconds / {'s': 1, 'min': 60}[unit])} {unit}"
    return f"{three_figures(seconds / 3600)} h"
