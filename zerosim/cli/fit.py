"""`zerosim fit`: find the largest size that fits on a device, the fewest ranks, or the best meshes.

All answers come from runs on tensor shapes only.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import Any

from zerosim.analysis.candidate import accepted, candidate
from zerosim.analysis.cheapest import MOST_RANKS
from zerosim.analysis.search import (
    SEARCHES,
    SIZES,
    Tried,
    check_search,
    in_whole_nodes,
    largest_models,
    most_that_fits,
)
from zerosim.cli.fit_search import at_any_stage, clock_of, leave_found, mesh_told_on, refuse, search_of, told_on
from zerosim.cli.options import add_run_flags
from zerosim.cli.parser import Parser, flag_of, whole_number
from zerosim.cli.plan import add_device_flags, add_time_flags, planned_config
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.option import known_word
from zerosim.errors import InputError
from zerosim.units import format_bytes

SEARCHED = (
    *("tp", "cp", "context", "context_order", "ep", "etp", "pp", "dp_replicate", "stage", "stage_layers"),
    "recompute",
)
"""The options that a search of meshes finds. They may not be given."""


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("what to search for")
    add, known = group.add_argument, "; ".join(f"{name}: {what}" for name, what in SEARCHES.items())
    add("--find", metavar="|".join(SEARCHES), default="micro-batch", help=f"{known} (default: micro-batch)")
    most = f"with --find mesh and no --ranks: the most ranks that are tried (default: {MOST_RANKS})"
    add("--most-ranks", metavar="N", type=whole_number, default=MOST_RANKS, help=most)
    rows = "with --find mesh: rows of a step on all ranks (default: --micro-batch x --accumulate on each rank)"
    add("--global-batch", metavar="ROWS", type=whole_number, help=rows)
    limit = "with --find mesh: show the best that has been found after so long"
    add("--time-limit", metavar="SECONDS", type=float, help=limit)
    add_device_flags(group)
    add_run_flags(parser, planning=True)
    add_time_flags(parser.add_argument_group("time, modelled where --gpu is given").add_argument)
    group = parser.add_argument_group("output")
    group.add_argument("--all", action="store_true", help="everything that was run, after the first page")
    group.add_argument("--json", metavar="OUT.json", help="what was tried and found; - for stdout")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress and no summary")


def main(args: argparse.Namespace) -> int:
    """Search. Return 0 if something fits, 3 if nothing does."""
    args.find = known_word(args.find, SEARCHES) or args.find
    if args.global_batch is not None and args.find != "mesh":
        raise InputError("--global-batch: works only with --find mesh; pass --micro-batch and --accumulate instead")
    if args.time_limit is not None and args.find != "mesh":
        raise InputError("--time-limit: works only with --find mesh; the other searches take seconds")
    searches = {"mesh": find_meshes, "model": find_model, "offload": find_offload}
    return searches.get(args.find, find_size)(args)


def find_size(args: argparse.Namespace) -> int:
    """Find the largest value of one size that fits, or the fewest ranks."""
    is_rank = args.find == "lora-rank"
    if is_rank:
        refuse(args, "lora_rank")
        args.lora_rank = 1  # so that the other adapter options can be checked
    is_seq = args.find == "seq" and hasattr(args, "cp")
    if is_seq:
        refuse(args, "seq")
        args.seq = 128 * args.cp * getattr(args, "tp", 1)  # which the ranks that share a row divide
    config = planned_config(args, any_ranks=args.find == "ranks")
    field = check_search(config, args.find)
    refuse(args, *([] if is_rank or is_seq else [field]))
    search, figures = search_of(args, config)
    from zerosim.report.fit import fit_report
    from zerosim.report.time import time_values
    from zerosim.train.plan import judged, plan

    told, devices, config = told_on(args), search.devices, search.config

    def say(tried: Tried) -> None:
        told(f"{args.find} {tried.value:,}: {', '.join(tried.too_small) or 'fits'}, {format_bytes(tried.peak_bytes)}")

    found = most_that_fits(config, field, devices.tried, say)
    if field == "ranks" and search.cluster is not None:
        found = in_whole_nodes(config, found, search.cluster.node_gpus, devices.tried, say)
    best, timed = found.best, None
    if best is not None and search.cluster is not None:
        with suppress(InputError):  # its time may take too many events, where its memory follows from fewer
            timed = plan(judged(best.config, devices.room(best.config)), cluster=search.cluster)
    values = {
        "best": best and best.to_dict(),
        "beyond": found.beyond and found.beyond.to_dict(),
        "whole_nodes": found.whole_nodes and found.whole_nodes.to_dict(),
        "tried": [tried.to_dict() for tried in found.tried],
        "time": timed and time_values(timed, search.cluster),
    }
    return leave_found(args, search, figures, best, values, lambda: fit_report(search, found, timed))


def find_model(args: argparse.Namespace) -> int:
    """Find the largest named models that fit, from the largest down."""
    from zerosim.report.fit import models_report

    refuse(args, "model", *SIZES)
    search, figures = search_of(args, planned_config(args))
    told = told_on(args)
    found = largest_models(
        search.config,
        search.devices.tried,
        lambda tried: told(f"{tried.config.model.name}: {format_bytes(tried.peak_bytes)}"),
    )
    rows = [{"name": one.config.model.name, "num_parameters": one.value, **one.to_dict()} for one in found.tried]
    values = {"best": next((row for row in rows if row["fits"]), None), "tried": rows}
    return leave_found(args, search, figures, found.best, values, lambda: models_report(search, found))


def find_offload(args: argparse.Namespace) -> int:
    """Plan every way to offload at one stage: which fit, what each takes of every memory, and how long its step is."""
    from zerosim.analysis.capabilities.offload import where
    from zerosim.analysis.offload_ways import other_memories, ranked, ways
    from zerosim.report.fit import offload_report
    from zerosim.report.time import step_values
    from zerosim.train.offload import node_has

    refuse(args, "offload")
    args.stage, late = getattr(args, "stage", 3), vars(args).pop("delayed_update", 0)
    if args.stage == 0:
        raise InputError("--stage 0: offload works only with stages 1 to 3; choose stage 1, 2 or 3")
    search, figures = search_of(args, planned_config(args))
    config, cluster, told = search.config, search.cluster, told_on(args)
    if not (memories := other_memories(config, cluster)):
        raise InputError("--find offload: the size of host memory is missing; pass --node NAME or --host-memory SIZE")
    tried = []
    for way in ways(config, memories, late):
        tried.append(search.devices.tried(way, clock=True))
        told(f"{where(way) or 'nothing offloaded'}: {format_bytes(tried[-1].peak_bytes)}")
    found = ranked(tried, cluster)
    rows = [
        {
            "offload": where(one.config),
            "stage": one.config.parallel.zero_stage,
            **one.to_dict(),
            "time": one.time and step_values(one.config, one.time, cluster),
        }
        for one in found
    ]
    best, has = found[0] if found[0].fits else None, node_has(config, cluster)
    values = {"best": None if best is None else rows[0], "ways": rows}
    return leave_found(args, search, figures, best, values, lambda: offload_report(search, found, has))


def _asked_schedule(args: argparse.Namespace) -> dict[str, Any]:
    """Take the options of all pipelines in a mesh search out of `args`: one rank has no pipeline to check them with."""
    names = ("pipeline", "virtual_stages", "micro_batch_group")
    asked = {name: vars(args).pop(name) for name in names if hasattr(args, name)}
    group, most = max(1, asked.get("micro_batch_group", 1)), int(OPTIONS["accumulate"].high or 4)
    whole_groups = max(4, min(4 * group, most // group * group))
    checked = RunConfig(pp=2, layers=4096, accumulate=whole_groups, **asked)
    return {name: getattr(checked.parallel, name) for name in asked}


def find_meshes(args: argparse.Namespace) -> int:
    """Find meshes, ZeRO stages, microbatches, recompute and schedules, ranked by tokens/s or, without a GPU, by memory.
    Search --ranks ranks, or the fewest that fit.

    Ctrl-C and --time-limit show the best so far.
    """
    refuse(args, *SEARCHED, "sequence_parallel")
    check_time = clock_of(args)
    for name in ("micro_batch", "accumulate"):
        if args.global_batch is not None and hasattr(args, name):
            raise InputError(f"--global-batch and {flag_of(name)} are both given: choose one")
    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    schedule = _asked_schedule(args)
    config, any_ranks = at_any_stage(args, any_ranks=True), not hasattr(args, "ranks")
    if not config.model.has_blocks:
        raise InputError(f"--find mesh: {config.model.name} has no blocks to time; choose another --model")
    if not 1 <= args.most_ranks <= 65536:
        raise InputError(f"--most-ranks {args.most_ranks}: expected at least 1 and at most 65,536")
    if args.global_batch is not None and args.global_batch < 1:
        raise InputError(f"--global-batch {args.global_batch}: expected at least 1 row")
    search, figures = search_of(args, config)
    from zerosim.analysis.mesh_search import NODE, Meshes, best_meshes
    from zerosim.analysis.meshes import ladders, mesh_values
    from zerosim.analysis.offload_ways import offloaded, other_memories
    from zerosim.report.fit import mesh_report
    from zerosim.report.time import step_values

    cluster, say = search.cluster, mesh_told_on(args)
    result, own, node = Meshes(()), config.mesh.ranks, NODE if cluster is None else cluster.node_gpus
    most = max(args.most_ranks, own)
    doubled = sorted({first * 2**power for first in (1, own) for power in range((most // first).bit_length())})
    for asked in accepted(candidate(search.config, ranks=ranks) for ranks in (doubled if any_ranks else [own])):
        batch = args.global_batch or asked.global_batch
        families = ladders(asked, batch, node, schedule)
        result = best_meshes(asked, families, search.devices, node=node, check_time=check_time, say=say)
        if not result.found and result.ended:
            families = offloaded(ladders(asked, batch, node, schedule), other_memories(asked, cluster))
            lean = best_meshes(asked, families, search.devices, node=node, check_time=check_time, say=say)
            result = lean if lean.found else result
        if result.found or not result.ended or not any_ranks:
            break
    search = search._replace(config=asked)
    if not any_ranks and not result.candidates:
        raise InputError(
            f"no mesh of {own} ranks divides a global batch of {batch:,} rows: choose another --global-batch"
        )
    found = result.found
    values = {
        "global_batch": batch,
        "meshes": [
            {
                **mesh_values(one.config),
                "peak_bytes": one.peak_bytes,
                "time": one.time and step_values(one.config, one.time, cluster),
            }
            for one in found
        ],
        **{name: getattr(result, name) for name in ("candidates", "estimated", "planned", "too_much", "ended")},
    }
    best = found[0] if found else None
    code = leave_found(args, search, figures, best, values, lambda: mesh_report(search, batch, result, given))
    if not result.ended and args.time_limit is None:
        raise KeyboardInterrupt  # the answers so far were shown
    return code
