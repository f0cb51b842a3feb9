"""`zerosim export`: what other programs open. `trace`: a step by the clock, for Perfetto and chrome://tracing."""

from __future__ import annotations

import argparse
import json
from typing import BinaryIO

from zerosim.cli.options import add_run_flags
from zerosim.cli.outputs import output, written
from zerosim.cli.parser import Parser
from zerosim.cli.plan import add_time_flags, device_cluster, device_limit, planned_config
from zerosim.errors import printable

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
    assert cluster is not None  # --gpu is required
    from zerosim.report.trace import chrome_trace
    from zerosim.train.plan import plan, timeline_of

    def fill(file: BinaryIO) -> None:
        file.write(json.dumps(chrome_trace(timeline, cluster.name), allow_nan=False).encode())

    file = output(args, "out", config)
    timeline = timeline_of(plan(config, keep_events=True), cluster)
    with written((file, fill)):
        pass
    ranks = f"{len(timeline.tracks):,} of {config.mesh.ranks:,} ranks, one of each kind that can differ"
    print(f"{printable(args.out)}: a step of {timeline.seconds:.4g} s on {cluster.name}, modelled; {ranks}. "
          f"Known error: {cluster.known_error}. Open it in ui.perfetto.dev.")  # fmt: skip
    return 0
