"""`zerosim export`: write files for other programs. This module says which flags a format takes, and what runs for it.

The files are made in `report/export/`.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from zerosim.cli.options import add_run_flags
from zerosim.cli.outputs import output, written
from zerosim.cli.parser import Parser, add_kinds, kind_parser, size, whole_number
from zerosim.cli.plan import add_reserve_flag, add_time_flags, device_cluster, device_limit, planned_config
from zerosim.config import RunConfig
from zerosim.config.parts.allocators import with_addresses
from zerosim.config.presets.cluster import Cluster
from zerosim.errors import InputError, printable
from zerosim.units import format_bytes

if TYPE_CHECKING:
    from zerosim.report.export.memory_snapshot import DeviceSnapshot

MOST_BYTES = 500_000_000  # of text: a browser opens no more
PICKLE_PROTOCOL = 4  # the viewer reads formats 2 to 4
MOST_NAMED = 8


class Format(NamedTuple):
    """A format: its description, its file name's endings, its flags, and its writer."""

    words: str
    forms: tuple[str, ...]
    add_flags: Callable[[Parser, Any], None]
    export: Callable[[argparse.Namespace, RunConfig, str], None]

    @property
    def ends(self) -> str:
        return " or ".join(f".{form}" for form in self.forms)


def add_arguments(parser: Parser) -> None:
    add_kinds(parser, "format", WORDS, width=8)


def main(args: argparse.Namespace) -> int:
    name, parser = kind_parser("export", "format", WORDS, args.kind)
    made = FORMATS[name]
    add = parser.add_argument_group("the file").add_argument
    add("--out", "-o", metavar="FILE", required=True, help=f"output file: a name that ends in {made.ends}")
    made.add_flags(parser, add)
    add_run_flags(parser, planning=True)
    with parser.naming_as_typed(args.words):
        asked = parser.parse(args.words)
        form = asked.out.rpartition(".")[2].lower()
        if form not in made.forms:
            raise InputError(f"--out {asked.out}: expected a name that ends in {made.ends}")
        made.export(asked, planned_config(asked), form)
    return 0


# -- a step in time ---------------------------------------------------------------------------------
def _trace_flags(parser: Parser, add: Any) -> None:
    add = parser.add_argument_group("the device").add_argument
    add("--gpu", metavar="NAME", help="GPU to time: a preset or a TOML file; or pass --node")
    add_time_flags(add)
    parser.set_defaults(limit=None, reserve=None)


def _trace(args: argparse.Namespace, config: RunConfig, form: str) -> None:
    cluster = device_cluster(args, device_limit(args, None))
    if cluster is None:
        raise InputError("no device to time: pass --gpu NAME or --node NAME")
    config, file = config.replace(capacity=None), output(args, "out", config)
    from zerosim.analysis.step_interval import step_interval
    from zerosim.ledger.clock import step_time
    from zerosim.report.export.trace import chrome_trace
    from zerosim.report.interval import trust
    from zerosim.train.plan import plan_first_step, timeline_of

    result = plan_first_step(config)
    timeline = timeline_of(result, cluster)
    found = step_interval(config, step_time(timeline, result.stands_for), cluster)
    data = _json(chrome_trace(timeline, cluster.name))
    with written((file, lambda out: out.write(data))):
        pass  # the text below is only true if nothing failed
    ranks = f"{len(timeline.tracks):,} of {config.mesh.ranks:,} ranks, one of each group of identical ranks"
    print(
        f"{printable(args.out)}, {format_bytes(len(data))}: a step of {timeline.seconds:.4g} s on {cluster.name}; "
        f"{ranks}. {trust(cluster, found)} Open it in ui.perfetto.dev or speedscope.app."
    )


# -- memory -----------------------------------------------------------------------------------------
def _memory_flags(parser: Parser, add: Any) -> None:
    alone = "this rank alone (default: one of each group of identical ranks)"
    add("--rank", metavar="R", type=whole_number, help=alone)
    add("--every-rank", action="store_true", help="every rank, including identical ones")
    add = parser.add_argument_group("the device").add_argument
    add(
        "--gpu",
        metavar="NAME",
        help="GPU for memory and times (default: no limit, and events are numbered instead of timed)",
    )
    add(
        "--limit",
        "--capacity",
        metavar="SIZE",
        type=size,
        help="size of the allocator's memory, such as 24GB",
    )
    add_reserve_flag(add)
    add_time_flags(add)


def _memory(args: argparse.Namespace, config: RunConfig, form: str) -> None:
    limit, rank, total = device_limit(args, config.memory.capacity), args.rank, config.mesh.ranks
    if rank is not None and not 0 <= rank < total:
        raise InputError(f"--rank {rank}: expected 0 to {total - 1}")
    if rank is not None and args.every_rank:
        raise InputError("--rank and --every-rank are both given: choose one")
    if getattr(args, "allocator", None) == "exact":
        raise InputError("--allocator exact: counts bytes and has no addresses; choose caching or arena")
    cluster, file = device_cluster(args, limit), output(args, "out", config)
    name, conf = with_addresses(config.memory)
    capacity = None if limit is None else max(1, limit.nbytes - limit.reserve(config))
    from zerosim.device.allocators.choose import make_allocator
    from zerosim.device.memory import Exact
    from zerosim.report.export.memory_snapshot import DeviceSnapshot, file_bytes, memory_snapshot, moments_of
    from zerosim.train.plan import plan

    make_allocator(name, capacity, conf)  # refuse before anything runs
    result = plan(config.replace(allocator="exact", allocator_conf=None, capacity=None), keep_events=True)
    ranks = [rank] if rank is not None else list(range(total) if args.every_rank else result.ran)
    alike = Counter(result.stands_for[rank] for rank in ranks)
    expected = sum(count * file_bytes(result.events[one], form) for one, count in alike.items())
    if expected > MOST_BYTES:
        smaller = "--rank R" if len(ranks) > 1 else "a .pickle" if form == "json" else "fewer --steps or --accumulate"
        most = f"a browser cannot open a file of more than {format_bytes(MOST_BYTES)}: choose {smaller}"
        raise InputError(f"--out {args.out}: the file would have about {format_bytes(expected)}, and {most}")
    moments = {} if cluster is None else moments_of(result, cluster)
    devices = {}
    for rank in ranks:
        allocator = make_allocator(name, capacity, conf)
        assert not isinstance(allocator, Exact)  # it was refused
        devices[rank] = DeviceSnapshot(rank, result.events[rank], allocator, moments.get(result.stands_for[rank]))
    snapshot = memory_snapshot(devices, total)
    data = _json(snapshot) if form == "json" else pickle.dumps(snapshot, protocol=PICKLE_PROTOCOL)
    with written((file, lambda out: out.write(data))):
        pass  # the text below is only true if nothing failed
    print(_memory_words(args.out, len(data), config, name, devices, cluster))


def _memory_words(
    path: str,
    nbytes: int,
    config: RunConfig,
    allocator: str,
    devices: Mapping[int, DeviceSnapshot],
    cluster: Cluster | None,
) -> str:
    """Say what is in the file, and which program opens it."""
    from zerosim.report.names import ALLOCATORS, counted, listed

    ranks, total = sorted(devices), config.mesh.ranks
    if len(ranks) == total:
        which = f"all of {counted(total, 'rank')}"
    elif len(ranks) > MOST_NAMED:
        which = f"{len(ranks):,} of {total:,} ranks"
    else:
        which = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} of {total:,}"
    chosen = ", one of each group of identical ranks" if 1 < len(ranks) < total else ""
    most = max(ranks, key=lambda rank: devices[rank].peaks.requested_bytes)
    peaks = devices[most].peaks
    words = [
        f"{printable(path)}, {format_bytes(nbytes)}: {which}{chosen}; device N is rank N.",
        f"Peak of rank {most}: {format_bytes(peaks.requested_bytes)} live, {format_bytes(peaks.reserved_bytes)} "
        f"reserved by {ALLOCATORS[allocator]}, which chose the addresses.",
    ]
    refusals = [(rank, refusal) for rank in ranks if (refusal := devices[rank].refusal) is not None]
    for rank, refusal in refusals[:1]:
        words.append(f"Rank {rank} ends out of memory: {format_bytes(refusal.nbytes)} of {refusal.kind}.")
    if cluster is not None:
        words.append(f"Times are modelled on {cluster.name}, not measured.")
    words.append("Drop it on pytorch.org/memory_viz, or python -m torch.cuda._memory_viz trace_plot FILE.pickle.")
    return " ".join(words)


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, allow_nan=False, separators=(",", ":")).encode()


FORMATS = {
    "trace": Format(
        "one step in time on a GPU, as Chrome trace events (with --gpu): .json for ui.perfetto.dev or speedscope",
        ("json",), _trace_flags, _trace),
    "memory": Format(
        "each buffer and its address, as a PyTorch memory snapshot: .pickle or .json for pytorch.org/memory_viz",
        ("pickle", "json"), _memory_flags, _memory),
}  # fmt: skip
WORDS = {name: row.words for name, row in FORMATS.items()}
