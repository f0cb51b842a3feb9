"""`zerosim export`: what other programs open. `trace`: a step by the clock, for Perfetto and chrome://tracing."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, BinaryIO

from zerosim.cli.options import add_run_flags
from zerosim.cli.outputs import output, written
from zerosim.cli.parser import Parser
from zerosim.cli.plan import add_time_flags, device_cluster, device_limit, planned_config
from zerosim.errors import InputError

if TYPE_CHECKING:
    from zerosim.config import RunConfig
    from zerosim.config.presets.cluster import Cluster
    from zerosim.ledger.clock import Timeline
    from zerosim.train.result import RunResult

FORMATS = ("trace",)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("what", choices=FORMATS, help="trace: Chrome trace events of one step, for ui.perfetto.dev")
    parser.add_argument("--out", "-o", metavar="FILE", required=True, help="where it goes, such as trace.json")
    group = parser.add_argument_group("the device")
    group.add_argument("--gpu", metavar="NAME", required=True, help="whose times: a preset, or a TOML file")
    add_time_flags(group.add_argument)
    add_run_flags(parser, planning=True)
    parser.set_defaults(limit=None, reserve=None)


def main(args: argparse.Namespace) -> int:
    config = planned_config(args).replace(capacity=None)
    cluster = device_cluster(args, device_limit(args, None))
    if cluster is None:
        raise InputError("--gpu: name a device whose times these are")
    from zerosim.report.trace import chrome_trace

    def fill(file: BinaryIO) -> None:
        file.write(json.dumps(chrome_trace(timeline, cluster.name), allow_nan=False).encode())

    file = output(args, "out", config)
    timeline, _ = timeline_of(config, cluster)
    with written((file, fill)):
        pass
    ranks = f"{len(timeline.tracks):,} of {config.mesh.ranks:,} ranks, one of each kind that can differ"
    print(f"{args.out}: a step of {timeline.seconds:.4g} s on {cluster.name}, modelled; {ranks}. Known error: "
          f"{cluster.known_error}. Open it in ui.perfetto.dev.")  # fmt: skip
    return 0


def timeline_of(config: RunConfig, cluster: Cluster) -> tuple[Timeline, RunResult]:
    """A step's every kernel in time, and the plan that it is of."""
    from zerosim.ledger.clock import simulate
    from zerosim.ledger.pace import PaceLedger
    from zerosim.train.plan import plan

    result = plan(config, keep_events=True)
    paces = {rank: PaceLedger(cluster, detail=True) for rank in result.ran}
    for rank, pace in paces.items():
        pace.read(result.events[rank])
    entries = {rank: pace.entries for rank, pace in paces.items()}
    return simulate(entries, result.stands_for, config.mesh.axes, cluster, keep_spans=True), result
