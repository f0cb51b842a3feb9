"""`zerosim plan`: one step on shapes alone: bytes per rank, the contents of the peak, and whether it fits."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from zerosim.cli.auto import resolved
from zerosim.cli.device import device_limit as device_limit
from zerosim.cli.device import device_of as device_of
from zerosim.cli.device import node_of as node_of
from zerosim.cli.files import Files, add_write_flag, files_of, reading_of
from zerosim.cli.options import add_flag, add_run_flags, run_config, scenario_values
from zerosim.cli.outputs import Output, leave, output, written
from zerosim.cli.parser import Parser, flag_of, size, whole_number
from zerosim.cli.saving import SHARDS, add_save_flags, settle_saves
from zerosim.config import OPTIONS, PLAN_DEFAULTS, RunConfig
from zerosim.config.parts.allocators import feels_limit
from zerosim.config.parts.clock import CLOCK
from zerosim.config.presets.cluster import Cluster, cluster_of
from zerosim.config.presets.hardware import check_formats
from zerosim.config.presets.kernel_tables import EFFICIENT
from zerosim.config.presets.recipes import USUAL
from zerosim.config.recompute import AUTO
from zerosim.errors import InputError, OutOfMemory
from zerosim.placement.memories import DEVICE

if TYPE_CHECKING:
    from zerosim.report.memory import Certainty
    from zerosim.report.verdict import Limit, Planned
    from zerosim.train.result import RunResult

MICRO_BATCHES_A_STAGE = 4
"""Microbatches per pipeline stage if none are given: the bubble is then less than a quarter."""


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("the device")
    add_device_flags(group)
    add_run_flags(parser, planning=True)
    add_time_flags(parser.add_argument_group("time").add_argument)
    add_save_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--all", action="store_true", help="every table after the first page")
    group.add_argument(
        "--every-rank", action="store_true", help="run every rank instead of one for each group of identical ranks"
    )
    group.add_argument("--html", metavar="OUT.html", help="the first step as a page that plays in any browser")
    group.add_argument("--json", metavar="OUT.json", help="every figure of the plan; - for stdout")
    add_write_flag(group.add_argument)
    group.add_argument("--quiet", "-q", action="store_true", help="no tables")


def add_time_flags(add: Any) -> None:
    """Add --node, --node-gpus, --nic and the fields of the clock, with this `add_argument`."""
    add(
        "--node", metavar="NAME", help="a node by name, which has its GPUs: dgx-h100, 4xrtx4090 ... (zerosim zoo nodes)"
    )
    add("--node-gpus", metavar="N", type=whole_number, help="GPUs of a node (default: --node's or the GPU's)")
    add(
        "--nic",
        metavar="SIZE",
        type=size,
        help="bytes per second of all NICs of a node, such as 200GB (default: --node's or the GPU's)",
    )
    for name in CLOCK:
        add_flag(add, OPTIONS[name])


def add_device_flags(group: Any) -> None:
    """Add --gpu, --limit and --reserve."""
    group.add_argument(
        "--gpu", metavar="NAME", help="v100-32, a100-80, h100-80, b200, rtx4090 ... (zerosim zoo gpus), or a TOML file"
    )
    group.add_argument(
        "--limit", "--capacity", metavar="SIZE", type=size, help="bytes per device, such as 24GB, in place of --gpu's"
    )
    add_reserve_flag(group.add_argument)


def add_reserve_flag(add: Callable[..., Any]) -> None:
    add(
        "--reserve", metavar="SIZE", type=size,
        help="bytes reserved for the CUDA context, NCCL and other libraries (default: --gpu's, else 0; 0 "
        "for a flat model)",
    )  # fmt: skip


def planned_config(
    args: argparse.Namespace,
    *,
    any_ranks: bool = False,
    scenario: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Build the configuration of a plan, with the recompute that --recompute auto chooses.

    Raises: InputError as `run_config` does, for an unknown device or one without --fp8's units, and for auto without a
    device memory.
    """
    config = _unresolved(args, any_ranks, scenario)
    if (device := device_of(args)) is not None:
        check_formats(device, config.fp8)
    return resolved(args, config)


def _unresolved(args: argparse.Namespace, any_ranks: bool, scenario: Mapping[str, Any] | None) -> RunConfig:
    """Build `run_config` with a plan's defaults and, without a scenario, with what people usually run.

    That is four microbatches per pipeline stage, attention without saved scores if a GPU or a limit is given, and
    with --gpu the usual recipe of this ZeRO stage, unless given values exclude these.
    """
    reading = reading_of(args)
    if args.scenario is not None and reading is None:
        return run_config(args, PLAN_DEFAULTS, any_ranks=any_ranks, scenario=scenario)
    read = {} if reading is None else reading.values
    usual, pp = dict[str, Any](), getattr(args, "pp", read.get("pp", 1))
    if pp > 1 and getattr(args, "global_batch", None) is None:
        group, most = getattr(args, "micro_batch_group", None) or 1, int(OPTIONS["pp"].high or pp)
        usual["accumulate"] = -(-MICRO_BATCHES_A_STAGE * min(pp, most) // group) * group
    config = _usually(args, usual, any_ranks)
    device = device_of(args)
    is_machine = device is not None and device.machine is not None  # this one trains with zerosim itself
    if not config.model.has_blocks or is_machine or (device is None and getattr(args, "limit", None) is None):
        return config
    usual["attention"] = "flash"
    if device is not None and device.flash is False:
        usual["flash_kernel"] = EFFICIENT
    if device is not None:
        usual["recipe"] = USUAL
    return _usually(args, usual, any_ranks)


def _usually(args: argparse.Namespace, usual: Mapping[str, Any], any_ranks: bool) -> RunConfig:
    """Build `run_config` with a plan's defaults and these. If given values exclude one of them, leave it out; if they
    exclude several, leave out all."""
    kept: list[Mapping[str, Any]] = [usual]
    kept += [{name: value for name, value in usual.items() if name != out} for out in usual]
    refusal = None
    for some in (*kept, {}) if len(usual) > 1 else kept:
        try:
            return run_config(args, {**PLAN_DEFAULTS, **some}, any_ranks=any_ranks)
        except InputError as error:
            refusal = error if refusal is None or refusal.field in usual else refusal
    assert refusal is not None
    raise refusal


def unlike_run(args: argparse.Namespace, scenario: Mapping[str, Any], config: RunConfig) -> str:
    """Name the values in which `zerosim run` with the same flags differs from this plan; nothing if a GPU was named,
    or if a run refuses the flags."""
    if device_of(args) is not None:
        return ""
    try:
        run = run_config(args, scenario=scenario).to_dict()
    except InputError:
        return ""
    planned, flags = config.to_dict(), []
    for name in run.keys() - {"capacity", "steps", *(["recompute"] if run["recompute"] == AUTO else [])}:
        if run[name] != planned[name]:
            shown = OPTIONS[name].shown if run[name] == OPTIONS[name].default else None
            flags.append(f"{flag_of(name)} {shown or run[name]}")
    return (
        f"zerosim run with the same flags also uses {' '.join(sorted(flags))}: pass them to plan that run."
        if flags
        else ""
    )


def main(args: argparse.Namespace) -> int:
    """Plan. Return 0 if the run fits or no device is named, 3 if it does not fit."""
    scenario = scenario_values(args)
    settle_saves(args, scenario)
    config = planned_config(args, scenario=scenario)
    limit, figures = device_limit(args, config.memory.capacity), output(args, "json", config)
    config = config.replace(capacity=None)
    html, files = output(args, "html", config, apart=[figures]), files_of(args, config)
    from zerosim.report.plan import plan_report
    from zerosim.report.verdict import is_saves_fault

    if html is not None:
        from zerosim.cli.pages import plan_page

        plan_page(args, html, config, limit and limit.nbytes)

    cluster = device_cluster(args, limit)
    planned = plan_on(config, limit, cluster=cluster, every_rank=args.every_rank)
    result, refusal = planned
    fitting, advice = planned.fits(limit), None
    sure = sure_of(planned, limit, cluster, asks=args.all) if fitting else None
    from zerosim.analysis.experts_imbalance import fullest_that_fits, words_of

    imbalance = fullest_that_fits(config, partial(_fits, limit=limit)) if fitting and limit is not None else None
    found: list[str] = []
    if limit is not None and is_saves_fault(result, limit):
        found, advice = [SHARDS], f"{SHARDS}."
    elif limit is not None and not fitting:
        from zerosim.analysis.cheapest import cheapest_fits
        from zerosim.analysis.offload_ways import other_memories
        from zerosim.train.plan import peak_within

        trial, memories = partial(peak_within, cluster=cluster), other_memories(config, cluster)
        given = scenario.keys() | vars(args).keys()
        found = cheapest_fits(config, limit.nbytes, trial, reserve=limit.reserve, memories=memories, given=given)
        advice = f"{'; '.join(found)}." if found else "No change that was tried fits: see zerosim fit --find mesh."
    unlike = unlike_run(args, scenario, config)
    page = partial(plan_report, result, limit, found, refusal, cluster, sure=sure, unlike_run=unlike, all=args.all)
    page = partial(page, imbalance=words_of(imbalance))
    values = partial(plan_values, result, limit, fitting, advice, cluster, sure, imbalance)
    _leave(args, figures, values, page, files)
    return 0 if fitting else 3


def _leave(
    args: argparse.Namespace,
    figures: Output | None,
    values: Callable[[], dict[str, Any]],
    page: Callable[[], Any],
    files: Files | None,
) -> None:
    """Write the plan's files, and show its page: what a file of another framework says, the plan, what was written."""
    from zerosim.report.files import file_page
    from zerosim.report.look import Stack, prose

    if (reading := reading_of(args)) is not None:
        flags = {name: value for name, value in vars(args).items() if name in OPTIONS}
        plan_page, plan_values = page, values
        page = lambda: file_page(reading, flags, plan_page(), all=args.all)  # noqa: E731
        values = lambda: {**plan_values(), "file": reading.to_dict()}  # noqa: E731
    if files is None:
        leave(args, figures, values, page)
        return
    with written(*files.fills()):
        leave(args, figures, values, lambda: Stack(page(), prose(files.text())))


def _fits(config: RunConfig, limit: Limit | None) -> bool:
    return plan_on(config, limit, cluster=None, clock=False).fits(limit)


def device_cluster(args: argparse.Namespace, limit: Limit | None) -> Cluster | None:
    """Return the devices of --gpu in nodes, as --node-gpus and --nic say; None without --gpu.

    Raises: InputError for nodes without GPUs, and for a flag of the clock without a device.
    """
    if limit is not None and limit.device is not None:
        given = {"node_gpus": args.node_gpus, "nic_bytes_per_s": args.nic}
        return cluster_of(limit.device, node=node_of(args), nvme_bytes_per_s=getattr(args, "drive_rate", None), **given)
    for name in ("node_gpus", "nic", "drive_rate", *CLOCK):
        if (value := getattr(args, name, None)) is not None:
            shown = "" if isinstance(value, bool) else f" {value}"
            raise InputError(f"{flag_of(name)}{shown}: needs a device; pass --gpu NAME too")
    return None


def plan_on(
    config: RunConfig, limit: Limit | None, *, cluster: Cluster | None, every_rank: bool = False, clock: bool = True
) -> Planned:
    """Plan the configuration on devices without a limit. With an allocator or paged states the limit applies, and the
    device may refuse."""
    from zerosim.report.verdict import Planned
    from zerosim.train.plan import plan

    if not feels_limit(config.memory):
        return Planned(plan(config, every_rank=every_rank, cluster=cluster))
    room = None if limit is None else max(1, limit.nbytes - limit.reserve(config))
    try:
        return Planned(plan(config.replace(capacity=room), every_rank=every_rank, cluster=cluster, clock=clock))
    except OutOfMemory as error:
        if error.memory != DEVICE:
            raise
        exact = plan(config.replace(allocator="exact", allocator_conf=None), every_rank=every_rank, cluster=cluster)
        return Planned(replace(exact, config=config), error)


def sure_of(planned: Planned, limit: Limit | None, cluster: Cluster | None, *, asks: bool = False) -> Certainty | None:
    """Return how sure a plan is that fits. Close to the limit, or if asked to, the caching allocator is asked too, with
    a plan."""
    from zerosim.report.memory import certainty
    from zerosim.report.verdict import peak_bytes

    config = planned.result.config
    sure = certainty(config, limit, peak_bytes(planned.result))
    if sure is None or not (asks or sure.is_close):
        return sure
    return sure._replace(cached=plan_on(config.replace(allocator="caching"), limit, cluster=cluster, clock=False))


def plan_values(
    result: RunResult,
    limit: Limit | None,
    fitting: bool,
    advice: str | None,
    cluster: Cluster | None = None,
    sure: Certainty | None = None,
    imbalance: tuple[float, bool] | None = None,
) -> dict[str, Any]:
    """Return the JSON form: that of a run without values, with each class of ranks once, and the verdict."""
    values, alike = result.to_dict(), Counter(result.stands_for)
    with_values = ("losses", "losses_by_data_rank", "grad_norm", "loss_scale")
    from zerosim.report.saving import save_values
    from zerosim.report.time import time_values
    from zerosim.report.verdict import peak_bytes
    from zerosim.report.warnings import warnings_of

    config, taken = result.config, max(memory.reserved_bytes for memory in result.memory)
    return {
        **{key: value for key, value in values.items() if key not in with_values},
        "ranks": [{**rank, "stands_for": alike[rank["rank"]]} for rank in values["ranks"]],
        "peak_bytes": peak_bytes(result),
        "limit": limit and limit.to_dict(),
        **outside_values(config, limit),
        "fits": None if limit is None else fitting,
        "advice": advice,
        **({} if imbalance is None else {"fullest_expert_fits": imbalance[0]}),
        "certainty": None if sure is None else sure.to_dict(),
        "warnings": warnings_of(config, limit, cluster, taken if fitting else None) + (sure.doubts if sure else []),
        "time": time_values(result, cluster),
        **save_values(result, cluster),
    }


def outside_values(config: RunConfig, limit: Limit | None) -> dict[str, Any]:
    """Return the JSON form of memory outside the program: each line's bytes, and the reserve for it."""
    return {
        "outside": {} if limit is None else {one.name: one.nbytes for one in limit.outside(config)},
        "reserve_bytes": 0 if limit is None else limit.reserve(config),
    }
