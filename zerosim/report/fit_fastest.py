"""The fastest configurations of a number of ranks, as a table."""

from __future__ import annotations

from zerosim.analysis.fastest import Fastest, Timed
from zerosim.analysis.meshes import MOST_TENSOR
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.report import words
from zerosim.report.fit_meshes import mesh_flags
from zerosim.report.look import Adaptive, Cell, Grid, Stack, prose, right, titled
from zerosim.report.names import counted
from zerosim.report.tables import set_aside_text
from zerosim.report.time import step_values
from zerosim.report.verdict import Limit, assumed, outside_table, taken_column


def fastest_report(config: RunConfig, batch: int, result: Fastest, limit: Limit, cluster: Cluster) -> Stack:
    """The flags of the best, then the best ten."""
    ranks = counted(config.mesh.ranks, "rank")
    headline = (
        f"{words.model_name(config)} on {ranks} of {cluster.name}, a global batch of {counted(batch, 'row')}: by speed"
    )
    how = (
        f"{result.candidates:,} ways to cut model and batch: tp up to {MOST_TENSOR}, with and without sequence "
        "parallelism; ZeRO-2 and 3 without a pipeline alone; micro-batches of powers of two. "
        f"{counted(result.tried, 'configuration')} were run on shapes alone, {result.too_much:,} of which do not fit. "
        "The others cannot be among these: a mesh and stage that one row does not fit, more rows than do not fit, more "
        "recompute than is needed, or kernels that alone take longer."
    )
    if not result.ended:
        how = f"Interrupted after {counted(result.tried, 'configuration')}: there may be faster ones."
    if not result.found:
        return Stack(prose(headline, "bold"), prose("Nothing fits.", "bold red"), prose(how, "dim"))
    best = result.found[0]
    figures = ("tokens/s", "MFU, %", "step, s", taken_column(config), "exposed, s", "bubble, s")
    grid = Grid(*map(right, ("tp", "pp", "dp")), "ZeRO", "SP", right("rows"), "recompute", *map(right, figures))
    for one in result.found:
        grid.add(*_cells(one, cluster), style="bold" if one is best else "")
    note = (
        f"Modelled on {cluster.name} in nodes of {cluster.node_gpus} with {cluster.nic / 1e9:g} GB/s of NICs, not "
        f"measured. Known error: {cluster.known_error}. Configurations that are closer than that cannot be told apart. "
        "rows: micro-batch x accumulation; SP: sequence parallelism; exposed: what compute waits for collectives, and "
        "bubble for other ranks, on the rank that ends last."
    )
    fewer = grid.without("SP", "exposed, s", "bubble, s")
    return Stack(
        prose(headline, "bold"),
        prose(fastest_flags(best.config), "bold green"),
        prose(assumed(best.config, limit), "dim"),
        set_aside_text(best.config),
        titled("The fastest", Adaptive(grid, grid.short(), fewer, fewer.without(taken_column(config))), note),
        prose(how, "dim" if result.ended else "bold red"),
        outside_table(best.config, limit),
    )


def _cells(one: Timed, cluster: Cluster) -> list[Cell]:
    mesh, data, time = one.config.mesh.axes, one.config.data, one.time
    values = step_values(one.config, time, cluster)
    assert values is not None  # blocks multiply
    return [
        *map(str, (mesh.tp, mesh.pp, mesh.shards)),
        str(one.config.parallel.zero_stage) if mesh.shards > 1 else "-",
        "yes" if one.config.parallel.sequence_parallel else "-",
        f"{data.micro_batch} x {data.accumulate}",
        one.config.memory.recompute,
        round(values["tokens_per_s"]),
        f"{100 * values['mfu']:.1f}",
        f"{time.seconds:.4g}",
        one.peak_bytes,
        f"{sum(time.exposed.values()):.3g}",
        f"{time.bubble:.3g}",
    ]


def fastest_flags(config: RunConfig) -> str:
    """What is passed to run or plan it."""
    data = config.data
    flags = [mesh_flags(config), *["--sequence-parallel"] * config.parallel.sequence_parallel]
    return " ".join([*flags, f"--micro-batch {data.micro_batch}", f"--accumulate {data.accumulate}"])
