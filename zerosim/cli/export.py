"""`zerosim export`: files that other programs open. Which format takes which flags, what is run for it, what is said.

The files are made in `report/trace.py` and `report/memory_snapshot.py`.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from zerosim.cli.options import add_run_flags
from zerosim.cli.outputs import output, written
from zerosim.cli.parser import Parser, nearest, size, whole_number
from zerosim.cli.plan import add_reserve_flag, add_time_flags, device_cluster, device_limit, planned_config
from zerosim.config import RunConfig
from zerosim.config.option import known_word
from zerosim.config.presets.cluster import Cluster
from zerosim.errors import InputError, printable
from zerosim.units import format_bytes

if TYPE_CHECKING:
    from zerosim.report.memory_snapshot import DeviceSnapshot

FORMATS = {
    "trace": "one step in time on a GPU, as Chrome trace events (with --gpu): .json for ui.perfetto.dev or speedscope",
    "memory": "each buffer and its address, as a PyTorch memory snapshot: .pickle or .json for pytorch.org/memory_viz",
}
MOST_BYTES = 500_000_000  # of text, a browser holds no more
PICKLE_PROTOCOL = 4  # the viewer reads 2 to 4
MOST_NAMED = 8


def add_arguments(parser: Parser) -> None:
    known = "\n".join(f"  {name:8}{text}" for name, text in FORMATS.items())
    parser.epilog = f"formats:\n{known}\n\n  zerosim export FORMAT --help   its flags, those of a run among them"
    parser.add_argument("what", metavar="FORMAT", nargs="?", help=", ".join(FORMATS))
    parser.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help="its flags")


def _format_parser(name: str | None) -> Parser:
    """The grammar of one format."""
    if name is None:
        raise InputError(f"expected a format: one of {', '.join(FORMATS)}")
    if name not in FORMATS:
        raise InputError(f"unknown format {name!r}{nearest(name, FORMATS, 'zerosim export --help')}")
    parser = Parser(f"zerosim export {name}", FORMATS[name][0].upper() + FORMATS[name][1:] + ".")
    add = parser.add_argument_group("the file").add_argument
    ends = ".json" if name == "trace" else ".pickle or .json"
    add("--out", "-o", metavar="FILE", required=True, help=f"where it goes: a name that ends in {ends}")
    if name == "memory":
        add(
            "--rank", metavar="R", type=whole_number, help="this rank alone (default: one of each kind that can differ)"
        )
        add("--every-rank", action="store_true", help="every rank, also those that cannot differ")
    add = parser.add_argument_group("the device").add_argument
    if name == "trace":
        add("--gpu", metavar="NAME", required=True, help="whose times: a preset, or a TOML file")
        parser.set_defaults(limit=None, reserve=None)
    else:
        add("--gpu", metavar="NAME", help="whose memory and times (default: no limit; the order of events is the time)")
        add("--limit", "--capacity", metavar="SIZE", type=size, help="the allocator has so many bytes")
        add_reserve_flag(add)
    add_time_flags(add)
    add_run_flags(parser, planning=True)
    return parser


def main(args: argparse.Namespace) -> int:
    name, words = known_word(args.what or "", FORMATS) or args.what, args.words
    parser = _format_parser(name)
    with parser.naming_as_typed(words):
        return _export(name, parser.parse(words))


def _export(name: str, args: argparse.Namespace) -> int:
    form = args.out.rpartition(".")[2].lower()
    forms = ("json",) if name == "trace" else ("pickle", "json")
    if form not in forms:
        raise InputError(f"--out {args.out}: expected a name that ends in {' or '.join('.' + one for one in forms)}")
    config = planned_config(args)
    return _trace(args, config.replace(capacity=None)) if name == "trace" else _memory(args, config, form)


def _trace(args: argparse.Namespace, config: RunConfig) -> int:
    cluster = device_cluster(args, device_limit(args, None))
    assert cluster is not None  # --gpu is required
    file = output(args, "out", config)
    from zerosim.report.trace import chrome_trace
    from zerosim.train.plan import plan_first_step, timeline_of

    timeline = timeline_of(plan_first_step(config), cluster)
    data = _json(chrome_trace(timeline, cluster.name))
    with written((file, lambda out: _write(out, data))):
        pass
    ranks = f"{len(timeline.tracks):,} of {config.mesh.ranks:,} ranks, one of each kind that can differ"
    print(
        f"{printable(args.out)}, {format_bytes(len(data))}: a step of {timeline.seconds:.4g} s on {cluster.name}, "
        f"modelled; {ranks}. Known error: {cluster.known_error}. Open it in ui.perfetto.dev or speedscope.app."
    )
    return 0


def _memory(args: argparse.Namespace, config: RunConfig, form: str) -> int:
    limit, rank, total = device_limit(args, config.memory.capacity), args.rank, config.mesh.ranks
    if rank is not None and not 0 <= rank < total:
        raise InputError(f"--rank {rank}: expected 0 to {total - 1}")
    if rank is not None and args.every_rank:
        raise InputError("--rank and --every-rank are both given: choose one")
    if getattr(args, "allocator", None) == "exact":
        raise InputError("--allocator exact: it counts bytes and has no addresses; choose caching or arena")
    cluster, file, memory = device_cluster(args, limit), output(args, "out", config), config.memory
    name = "caching" if memory.allocator == "exact" else memory.allocator
    capacity = None if limit is None else max(1, limit.nbytes - limit.reserve(config))
    from zerosim.device.allocators.choose import make_allocator
    from zerosim.device.memory import Exact
    from zerosim.report.memory_snapshot import device_snapshot, file_bytes, memory_snapshot, moments_of
    from zerosim.train.plan import plan

    make_allocator(name, capacity, memory.allocator_conf)  # what it refuses, it refuses before anything is run
    result = plan(config.replace(allocator="exact", allocator_conf=None, capacity=None), keep_events=True)
    ranks = [rank] if rank is not None else list(range(total) if args.every_rank else result.ran)
    alike = Counter(result.stands_for[rank] for rank in ranks)
    expected = sum(count * file_bytes(result.events[one], form) for one, count in alike.items())
    if expected > MOST_BYTES:
        smaller = "--rank R" if len(ranks) > 1 else "a .pickle" if form == "json" else "fewer --steps or --accumulate"
        raise InputError(f"--out {args.out}: it would have about {format_bytes(expected)}, and a browser opens no file "
                         f"of more than {format_bytes(MOST_BYTES)}: choose {smaller}")  # fmt: skip
    moments = {} if cluster is None else moments_of(result, cluster)
    devices = {}
    for rank in ranks:
        allocator = make_allocator(name, capacity, memory.allocator_conf)
        assert not isinstance(allocator, Exact)  # it was refused
        devices[rank] = device_snapshot(rank, result.events[rank], allocator, moments.get(result.stands_for[rank]))
    snapshot = memory_snapshot(devices, total)
    data = _json(snapshot) if form == "json" else pickle.dumps(snapshot, protocol=PICKLE_PROTOCOL)
    with written((file, lambda out: _write(out, data))):
        pass
    print(_memory_words(args.out, len(data), config, name, devices, cluster))
    return 0


def _memory_words(
    path: str,
    nbytes: int,
    config: RunConfig,
    allocator: str,
    devices: Mapping[int, DeviceSnapshot],
    cluster: Cluster | None,
) -> str:
    """What is in the file, and what opens it."""
    from zerosim.report.names import ALLOCATORS, counted, listed

    ranks, total = sorted(devices), config.mesh.ranks
    if len(ranks) == total:
        which = f"all of {counted(total, 'rank')}"
    elif len(ranks) > MOST_NAMED:
        which = f"{len(ranks):,} of {total:,} ranks"
    else:
        which = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} of {total:,}"
    chosen = ", one of each kind that can differ" if 1 < len(ranks) < total else ""
    most = max(ranks, key=lambda rank: devices[rank].peaks.requested_bytes)
    peaks = devices[most].peaks
    words = [
        f"{printable(path)}, {format_bytes(nbytes)}: {which}{chosen}; a rank is the device of its number.",
        f"Peak of rank {most}: {format_bytes(peaks.requested_bytes)} live, {format_bytes(peaks.reserved_bytes)} "
        f"reserved by {ALLOCATORS[allocator]}, which chose the addresses.",
    ]
    for rank, refusal in [(rank, devices[rank].refusal) for rank in ranks]:
        if refusal is not None:
            words.append(f"Rank {rank} ends out of memory: {format_bytes(refusal.nbytes)} of {refusal.kind}.")
            break
    if cluster is not None:
        words.append(f"Times are modelled on {cluster.name}; known error: {cluster.known_error}.")
    words.append("Drop it on pytorch.org/memory_viz, or python -m torch.cuda._memory_viz trace_plot FILE.pickle.")
    return " ".join(words)


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, allow_nan=False, separators=(",", ":")).encode()


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
