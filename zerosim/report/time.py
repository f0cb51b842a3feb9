"""The clock's seconds of a step, and their parts. Modelled, and marked as modelled where they are shown."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType

from zerosim.analysis.capabilities import notes_of
from zerosim.analysis.capabilities.delayed import can_delay
from zerosim.analysis.step_interval import is_host_bound, step_interval
from zerosim.config import RunConfig
from zerosim.config.parts.fp8 import is_in_8_bits
from zerosim.config.presets.cluster import Cluster
from zerosim.ledger.clock import StepTime
from zerosim.ledger.tracks import Track
from zerosim.placement.axes import what_for
from zerosim.placement.mesh import SHARES
from zerosim.report.experts import expert_links
from zerosim.report.interval import implausible, interval_values, interval_words, three_figures, trust
from zerosim.report.look import Adaptive, Grid, right, titled
from zerosim.report.names import listed
from zerosim.train.result import RunResult

_WORTH_IT = 0.05
_WORTH_SAYING = 0.01
_WAITS = {
    "states": "ZeRO's collectives",
    "node": "ZeRO's collectives within nodes",
    "nodes": "ZeRO's collectives across nodes",
    "replicas": "averages over replicas",
    "tp": "tensor parallelism's collectives",
    "cp": "context parallelism",
    **dict.fromkeys(("ep", "etp", "ep+etp"), "tokens on their way to experts and back"),
    "pp": "the neighbouring pipeline stage",
}
"""By the purpose of a mesh axis (`_purpose`)."""


def time_table(result: RunResult, cluster: Cluster | None) -> RenderableType | None:
    """Return the seconds of a step, their parts on the rank that ends last, and the resulting use of the hardware."""
    time, values = result.time, time_values(result, cluster)
    if time is None or cluster is None or values is None:
        return None
    grid = Grid("", right("seconds"), right("share"))
    for name, seconds in time_parts(time):
        grid.add(name, f"{seconds:.4g}", f"{100 * seconds / time.seconds:.1f} %")
    grid.rule()
    grid.add("step", f"{time.seconds:.4g}", None, style="bold")
    note = (
        f"Modelled on {place(cluster)}. {values['tokens_per_s']:,.0f} tokens/s; {values['model_tflops']:.1f} TFLOP/s "
        f"per GPU, {values['hardware_tflops']:.1f} with recompute. Times of kernels: {cluster.source}. "
        f"Of collectives inside a node: {cluster.collectives_source}."
    )
    if result.config.offload.cpu_steps:
        note += f" Of CPUs in the optimizer step: {cluster.cpu_rate / 1e9:.4g} GB/s of a node, {cluster.cpu_source}."
    note += expert_links(result, cluster)
    return titled(f"Time of a step, on rank {time.rank}, which ends last", Adaptive(grid), note)


def step_lines(result: RunResult, cluster: Cluster | None) -> list[str]:
    """Return how long a step takes, what it waits for, and how far such estimates were from measured steps; nothing
    without a clock."""
    time, values = result.time, time_values(result, cluster)
    if time is None or cluster is None or values is None:
        return []
    found = step_interval(result.config, time, cluster)
    lines = [speed_text(values, "" if found is None else interval_words(found, time.seconds))]
    if (warning := implausible(result.config, values["mfu"], cluster)) is not None:
        lines.append(warning)
    shares = [(name, seconds / time.seconds) for name, seconds in time_parts(time)[1:]]
    waits = [f"{100 * share:.1f} % {name}" for name, share in shares if share >= _WORTH_SAYING]
    wait = f"Of it, {listed(waits)}." if waits else "Less than 1 % of the step waits for communication."
    if flags := _hiding(result.config, time):
        wait += f" Part of the waiting for ZeRO's collectives can be hidden: {' '.join(flags)}."
    if time.cpu > _WORTH_IT * time.seconds and can_delay(result.config):
        wait += " --delayed-update 1 hides the CPU's step, but the weights lag by one update."
    lines += [wait, *notes_of(result.config, "first_step")]
    if is_in_8_bits(result.config.fp8):
        lines.append("MFU is a share of the peak of 16 bits, as in papers on training in 8.")
    precision = result.config.precision.stored
    if cluster.machine is not None and cluster.machine.precision != precision:
        lines.append(f"Kernels were measured in {cluster.machine.precision}: those of {precision} take other times.")
    if is_host_bound(time):
        has_graphs = result.config.clock.cuda_graphs
        lines.append(
            f"The host decides how long the step takes: launching its {time.kernels:,} kernels takes longer than "
            f"running them{', also with CUDA graphs' if has_graphs else ''}."
            + " --cuda-graphs launches a block's forward or backward at once."
            * (not has_graphs)
        )
    if cluster.machine is not None or found is None:
        return [*lines, trust(cluster, found)]
    return [*lines, "Modelled, not measured." + " Real steps like this one took longer." * (found.low > 1)]


def speed_text(values: Mapping[str, Any], interval: str) -> str:
    """Return `step_values` in three digits: two sentences if there is an interval."""
    step, tokens = three_figures(values["step_s"]), three_figures(values["tokens_per_s"])
    speed = f"{tokens} tokens/s, MFU {100 * values['mfu']:.1f} %."
    return (
        f"One step takes about {step} s ({interval}). {speed}"
        if interval
        else f"One step takes about {step} s: {speed}"
    )


def _hiding(config: RunConfig, time: StepTime) -> list[str]:
    """Return what would overlap more than was asked for, if waiting takes more than a twentieth of the step."""
    if sum(seconds for axis, seconds in time.exposed.items() if _purpose(axis) == "states") <= _WORTH_IT * time.seconds:
        return []
    return list(notes_of(config, "hiding"))


def time_values(result: RunResult, cluster: Cluster | None) -> dict[str, Any] | None:
    """Return the JSON form. `step_s` is the sum of `compute_s`, `slowed_s`, all of `exposed_s`, `bubble_s`, `host_s`,
    `copies_s` and `cpu_s`. `known_error` is a machine file's."""
    return None if result.time is None else step_values(result.config, result.time, cluster)


def step_values(config: RunConfig, time: StepTime, cluster: Cluster | None) -> dict[str, Any] | None:
    """Return `time_values` of a step of this configuration; None without a cluster, and if nothing is multiplied."""
    if cluster is None or not time.hardware_flops:
        return None
    ranks = config.mesh.ranks
    return {
        "modelled_on": cluster.name,
        "rank": time.rank,
        "step_s": time.seconds,
        **interval_values(config, time, cluster),
        "tokens_per_s": config.tokens / time.seconds,
        "hardware_tflops": _tera(time.hardware_flops, time, ranks),
        "model_tflops": _tera(time.model_flops, time, ranks),
        "mfu": time.model_flops / (time.seconds * ranks * cluster.peak_flops),
        **_part_values(time),
        "kernels": time.kernels,
        "known_error": None if cluster.machine is None else cluster.machine.known_error,
    }


def place(cluster: Cluster) -> str:
    """Return a cluster in words."""
    nics = "" if math.isinf(cluster.nic) else f" with {cluster.nic / 1e9:g} GB/s of NICs"
    return f"{cluster.name} in nodes of {cluster.node_gpus}{nics}"


def time_parts(time: StepTime) -> list[tuple[str, float]]:
    """Return the parts that take any time."""
    waits = defaultdict[str, float](float)
    for axis, seconds in time.exposed.items():
        waits[f"waits for {_WAITS.get(_purpose(axis), f'collectives along {axis}')}"] += seconds
    parts = [("kernels", time.compute), ("slowdown of kernels beside collectives", time.slowed), *waits.items()]
    parts += [("waits for other ranks (bubble)", time.bubble), ("waits for the host's launches", time.host)]
    parts += [("waits for the CPU's optimizer step", time.cpu), ("copies to and from the host", time.copies)]
    return [(name, seconds) for name, seconds in parts if seconds]


def _purpose(axis: str) -> str:
    """Return the purpose of a wait along an axis: along cp alone for activations, as the clock names it."""
    return axis if axis in SHARES else what_for(axis)


def _tera(flops: int, time: StepTime, ranks: int) -> float:
    """Return TFLOP/s of a GPU."""
    return flops / time.seconds / ranks / 1e12


def track_values(track: Track) -> dict[str, Any]:
    """Return the JSON form of one rank's step."""
    return {"rank": track.rank, "end_s": track.end, **_part_values(track)}


def _part_values(time: StepTime | Track) -> dict[str, Any]:
    return {
        "compute_s": time.compute,
        "slowed_s": time.slowed,
        "exposed_s": dict(time.exposed),
        "bubble_s": time.bubble,
        "host_s": time.host,
        "copies_s": time.copies,
        **({"cpu_s": time.cpu} if time.cpu else {}),
    }
