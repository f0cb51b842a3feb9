"""`zerosim fit --find fastest`: meshes, ZeRO stages, micro-batches and recompute of a number of ranks, by tokens/s."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from zerosim.cli.outputs import as_json, output, show, written
from zerosim.cli.parser import flag_of
from zerosim.cli.plan import device_cluster, device_limit, outside_values, planned_config
from zerosim.config import RunConfig
from zerosim.errors import InputError

if TYPE_CHECKING:
    from zerosim.train.plan import Figures

SEARCHED = ("tp", "pp", "dp_replicate", "stage", "stage_layers", "recompute", "sequence_parallel")


def find_fastest(args: argparse.Namespace) -> int:
    """0 if something fits, 3 if nothing does; what is looked for may not be given. Ctrl-C shows the best so far."""
    for name in SEARCHED:
        if hasattr(args, name):
            raise InputError(f"{flag_of(name)}: it is what is looked for; leave it out")
    for name in ("micro_batch", "accumulate"):
        if args.global_batch is not None and hasattr(args, name):
            raise InputError(f"--global-batch and {flag_of(name)} are both given: choose one")
    for name in ("partition_activations", "cpu_checkpointing"):
        if hasattr(args, name):
            raise InputError(f"{flag_of(name)}: recompute is what is looked for; leave it out, and plan with it then")
    config = planned_config(args)
    if not config.model.has_blocks:
        raise InputError(f"--find fastest: {config.model.name} has no blocks to compute with; choose another --model")
    limit, figures = device_limit(args, config.memory.capacity), output(args, "json", config)
    cluster = device_cluster(args, limit)
    if limit is None or cluster is None:
        raise InputError("--find fastest: by which clock? pass --gpu NAME, such as h100-80")
    batch = config.global_batch if args.global_batch is None else args.global_batch
    if batch < 1:
        raise InputError(f"--global-batch {batch}: expected at least 1 row")
    config = config.replace(capacity=None)
    from zerosim.analysis.fastest import fastest, least_seconds
    from zerosim.report.time import step_values
    from zerosim.train.plan import figures_within

    started = time.perf_counter()

    def say(asked: RunConfig, took: Figures | None) -> None:
        if not args.quiet and sys.stderr.isatty():
            mesh, passed = asked.mesh, time.perf_counter() - started
            which = f"tp {mesh.tp} x pp {mesh.pp}, stage {asked.parallel.zero_stage}, {asked.data.micro_batch} rows"
            how = "too much" if took is None or took.time is None else f"{took.time.seconds:.4g} s"
            print(f"[{passed:5.1f} s] {which}, recompute {asked.memory.recompute}: {how}", file=sys.stderr)

    nbytes, reserve = limit.nbytes, limit.reserve

    def trial(asked: RunConfig) -> Figures | None:
        return figures_within(asked, nbytes - reserve(asked), cluster)

    def room(asked: RunConfig) -> bool:
        return figures_within(asked, nbytes - reserve(asked)) is not None

    result = fastest(config, batch, trial, least_seconds(cluster), room, say)
    if not result.candidates:
        raise InputError(
            f"a global batch of {batch:,} rows is too few, or not divided, for any mesh of {config.mesh.ranks} ranks: "
            "choose another --global-batch"
        )
    values = {
        "schema": 1,
        "find": "fastest",
        "global_batch": batch,
        "found": [{**one.to_dict(), "time": step_values(one.config, one.time, cluster)} for one in result.found],
        "candidates": result.candidates,
        "tried": result.tried,
        "too_much": result.too_much,
        "ended": result.ended,
        "limit": limit.to_dict(),
        **outside_values(result.found[0].config if result.found else config, limit),
        "config": config.to_dict(),
    }
    with written((figures, as_json(lambda: values))):
        if not args.quiet:
            from zerosim.report.fit_fastest import fastest_report

            show(args, fastest_report(config, batch, result, limit, cluster))
    if not result.ended:
        raise KeyboardInterrupt  # what was found has been shown
    return 0 if result.found else 3
