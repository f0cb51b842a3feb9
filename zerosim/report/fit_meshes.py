"""The meshes that fit on a device, as a table: fewest ranks, then least traffic."""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.analysis import formulas
from zerosim.analysis.letters import sizes
from zerosim.analysis.meshes import MOST_TENSOR, Fitting
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.report import words
from zerosim.report.look import Adaptive, Cell, Grid, Stack, prose, right, titled
from zerosim.report.names import STAGES, counted
from zerosim.report.tables import set_aside_text
from zerosim.report.time import step_values
from zerosim.report.verdict import Limit, assumed, outside_table, taken_column
from zerosim.units import format_bytes


def meshes_report(
    config: RunConfig,
    found: Sequence[Fitting],
    tried: int,
    most_ranks: int,
    limit: Limit,
    cluster: Cluster | None = None,
) -> Stack:
    """The answer, then every mesh of so many ranks that fits, with its speed on a cluster."""
    device = limit.name or format_bytes(limit.nbytes)
    headline = f"{words.model_name(config)} on {device}, the cheapest meshes"
    batches = counted(config.data.accumulate, "micro-batch", "micro-batches")
    how = (
        f"{counted(tried, 'configuration')} of 1, 2, 4 ... ranks were run on shapes alone, one step of {batches} of "
        f"{counted(config.data.micro_batch, 'row')} of {config.model.seq:,} tokens on each data rank; tp up to "
        f"{MOST_TENSOR}, ZeRO-2 and 3 without a pipeline alone, the least recompute that fits."
    )
    if not found:
        answer = f"Nothing fits on up to {counted(most_ranks, 'rank')} of {format_bytes(limit.nbytes)}."
        return Stack(
            prose(headline, "bold"), prose(answer, "bold red"), prose(assumed(config, limit), "dim"), prose(how)
        )
    best = found[0].config
    answer = f"{counted(best.mesh.ranks, 'rank')}: {mesh_flags(best)}"
    figures = [right(taken_column(config)), right("sent per token, bytes"), right("bubble")]
    figures += [] if cluster is None else [right("tokens/s")]
    grid = Grid(right("tp"), right("pp"), right("dp"), "ZeRO", "recompute", *figures)
    for one in found:
        mesh, asked = one.config.mesh.axes, one.config
        stage = STAGES[asked.parallel.zero_stage] if mesh.shards > 1 else "-"
        bubble = str(formulas.bubble(asked.parallel.pipeline_schedule).at(sizes(asked)))
        cells: list[Cell] = [stage, asked.memory.recompute, one.peak_bytes, round(one.sent_per_token), bubble]
        values = one.time and step_values(asked, one.time, cluster)
        cells += [] if cluster is None else [round(values["tokens_per_s"]) if values else None]
        grid.add(*map(str, (mesh.tp, mesh.pp, mesh.shards)), *cells, style="bold" if one is found[0] else "")
    note = (
        "Sent: by all ranks, of model states and activations. With one data rank every ZeRO stage is the same. The "
        f"bubble is what a pipeline's ranks wait, {formulas.bubble(best.parallel.pipeline_schedule)} of the time of "
        "their slots."
    )
    if cluster is not None:
        note += f" tokens/s are modelled on {cluster.name}, not measured; known error: {cluster.known_error}."
    return Stack(
        prose(headline, "bold"),
        prose(answer, "bold green"),
        prose(assumed(best, limit), "dim"),
        set_aside_text(best),
        titled(f"What fits on {counted(best.mesh.ranks, 'rank')}", Adaptive(grid, grid.short()), note),
        prose(how, "dim"),
        outside_table(best, limit),
    )


def mesh_flags(config: RunConfig) -> str:
    """What is passed to run or plan it."""
    mesh, parallel = config.mesh, config.parallel
    flags = [f"--ranks {mesh.ranks}", *(f"--{axis} {getattr(mesh, axis)}" for axis in ("tp", "pp"))]
    flags += [f"--stage {parallel.zero_stage}"] + ["--pad-vocab"] * parallel.pad_vocab
    flags += [f"--recompute {config.memory.recompute}"] if config.memory.recompute != "none" else []
    return " ".join(flag for flag in flags if not flag.endswith(("tp 1", "pp 1")))
