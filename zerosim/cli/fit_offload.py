"""`zerosim fit --find offload`: should I offload, what, and what does it cost?"""

from __future__ import annotations

import argparse

from zerosim.cli.fit_search import leave_found, refuse, search_of, told_on
from zerosim.cli.plan import planned_config
from zerosim.errors import InputError
from zerosim.units import format_bytes


def find_offload(args: argparse.Namespace) -> int:
    """Plan every way to offload at one stage: which fit, what each takes of every memory, and how long its step is."""
    from zerosim.analysis.offload_ways import other_memories, planned_way, ranked, ways
    from zerosim.report.fit_offload import offload_report
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
    has, found = node_has(config, cluster), []
    for way in ways(config, memories, late):
        found.append(planned_way(way, search.limit.nbytes, search.limit.reserve(way), has, cluster))
        told(f"{way.offload.where or 'nothing offloaded'}: {format_bytes(found[-1].peak_bytes)}")
    found = ranked(found, cluster)
    rows = [{**one.to_dict(), "time": one.time and step_values(one.config, one.time, cluster)} for one in found]
    best = None if found[0].too_small else found[0]
    config_of, taken = (None, None) if best is None else (best.config, best.peak_bytes)
    values = {"best": None if best is None else rows[0], "ways": rows}
    return leave_found(args, search, figures, config_of, taken, values, lambda: offload_report(search, found, has))
