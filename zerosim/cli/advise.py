"""`zerosim advise`: what should I run? Three plans that differ in kind, their price, and the files that launch them."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerosim.cli.device import device_of
from zerosim.cli.fit_search import at_any_stage, clock_of, mesh_told_on
from zerosim.cli.options import add_flag
from zerosim.cli.outputs import leave, output
from zerosim.cli.parser import Parser, whole_number
from zerosim.cli.plan import device_cluster, device_limit, outside_values
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.presets.nodes import find_node
from zerosim.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from zerosim.analysis.search import Tried
    from zerosim.report.advise import Page
    from zerosim.report.memory import Certainty
    from zerosim.report.verdict import Limit

FINETUNES: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "lora": {"lora_rank": 16, "lora_target": "all-linear"},
    "qlora": {"lora_rank": 16, "lora_target": "all-linear", "base": "nf4"},
}
"""What is trained. Adapters are on all linear maps, as QLoRA's authors advise (2305.14314, section 4), of rank 16."""
ROWS = 4
"""Rows of a step on each GPU, if no global batch is given."""
KEPT = (
    *("model", "seq", "recipe", "precision", "fp8", "fp8_library", "optimizer", "loss", "lora_rank", "lora_target"),
    *("mtp_layers", "mtp_loss", "host_memory"),
)
"""A run's options that may be given; the search chooses all others."""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument_group("what is there").add_argument
    add("--gpus", metavar="NxNAME", help="so many GPUs, such as 8xh100-80 (zerosim zoo gpus)")
    add("--node", metavar="NAME", help="nodes by name, in place of --gpus: dgx-h100 ... (zerosim zoo nodes)")
    add("--nodes", metavar="N", type=whole_number, help="with --node: how many of them (default: 1)")
    add = parser.add_argument_group("what is trained").add_argument
    for name in KEPT:
        add_flag(add, OPTIONS[name])
    how = "train all parameters, or adapters (lora), or adapters on a 4-bit base (qlora)"
    add("--finetune", metavar="|".join(FINETUNES), default="full", help=f"{how} (default: full)")
    each = f"rows of a step on all GPUs (default: {ROWS} for each GPU)"
    add("--global-batch", metavar="ROWS", type=whole_number, help=each)
    add = parser.add_argument_group("what it costs").add_argument
    add("--tokens", metavar="COUNT", help="tokens to train on, such as 15B: hours, GPU-hours and their price")
    add("--price", metavar="PRICE", help='of one GPU for an hour, such as "2.5 EUR"')
    add = parser.add_argument_group("output").add_argument
    add("--time-limit", metavar="SECONDS", type=float, help="advise on the best that has been found after so long")
    add("--write", metavar="DIR", help="a new folder for each plan's launch files")
    add("--json", metavar="OUT.json", help="every figure of every plan; - for stdout")
    add("--all", action="store_true", help="everything that was tried, after the first page")
    add("--quiet", "-q", action="store_true", help="no progress and no page")


def main(args: argparse.Namespace) -> int:
    """Find plans and show them. Return 0 if something fits, 3 if nothing does."""
    from zerosim.report.advise import Page, Price, launch_of

    ranks = _devices(args)
    price, tokens, check_time = _price(args.price), _count(args.tokens), clock_of(args)
    config, batch = _config(args, ranks), ROWS * ranks if args.global_batch is None else args.global_batch
    _check(args, config, batch)
    folder = None if args.write is None else _new_folder(args.write)
    limit, figures = device_limit(args, None), output(args, "json", config)
    assert limit is not None
    if folder is not None and figures is not None and figures.path == Path(os.path.realpath(folder)):
        raise InputError(f"--write {folder}: --json names the same path; choose another")
    cluster = device_cluster(args, limit)
    from zerosim.analysis.advise import advise
    from zerosim.analysis.mesh_search import NODE
    from zerosim.analysis.search import Devices

    advice = advise(
        config,
        batch,
        Devices(limit.nbytes, limit.reserve, cluster, is_strict=True),
        node=NODE if cluster is None else cluster.node_gpus,
        length_given=hasattr(args, "seq"),
        check_time=check_time,
        say=mesh_told_on(args),
    )
    if not advice.plans and advice.least is None:
        raise InputError(f"--time-limit {args.time_limit:g}: no plan was found in so short a time; allow more seconds")
    sure = [_sure(plan.tried, limit) for plan in advice.plans]
    files = [launch_of(plan) for plan in advice.plans]
    page = Page(config, batch, advice, sure, limit, cluster, Price(tokens, *price), _same(args), files, args.all)
    try:
        leave(args, figures, lambda: _values(page), page.stack)
    finally:  # a file that cannot be written costs no other
        if folder is not None:
            _write(folder, page)
    if not advice.ended and args.time_limit is None:
        raise KeyboardInterrupt  # the plans so far were shown
    return 0 if advice.plans else 3


def _sure(tried: Tried, limit: Limit) -> Certainty | None:
    """Return how sure a plan is, with the caching allocator's plan where the search made one."""
    from zerosim.report.memory import certainty
    from zerosim.report.verdict import Planned

    found = certainty(tried.config, limit, tried.peak_bytes)
    return found and found._replace(cached=None if tried.cached is None else Planned(tried.cached))


def _devices(args: argparse.Namespace) -> int:
    """Set the device's flags as other verbs have them, and return the number of GPUs. Raises: InputError."""
    vars(args).update(scenario=None, beside=None, limit=None, reserve=None, node_gpus=None, nic=None, gpu=None)
    if (args.gpus is None) == (args.node is None):
        both = "--gpus and --node are both given: choose one" if args.gpus else "no GPUs: pass --gpus 8xh100-80"
        raise InputError(f"{both}, or --node dgx-h100 --nodes 4" if args.gpus is None else both)
    if args.gpus is not None:
        if args.nodes is not None:
            raise InputError(f"--nodes {args.nodes}: works only with --node; --gpus already says how many")
        if (found := re.fullmatch(r"\s*(\d{1,6})\s*[xX*]\s*(\S+)\s*", args.gpus)) is None:
            raise InputError(f"--gpus {args.gpus!r}: expected a number and a GPU, such as 8xa100-80")
        args.gpu, ranks = found[2], int(found[1])
        most, flag = int(OPTIONS["ranks"].high or 1), f"--gpus {args.gpus}"
    else:
        if (nodes := 1 if args.nodes is None else args.nodes) < 1:
            raise InputError(f"--nodes {nodes}: expected at least 1 node")
        each = find_node(args.node).gpus
        ranks, most, flag = nodes * each, int(OPTIONS["ranks"].high or 1), f"--nodes {nodes}"
    if not 1 <= ranks <= most:
        raise InputError(f"{flag}: expected at least 1 GPU and at most {most:,}")
    return ranks


def _config(args: argparse.Namespace, ranks: int) -> RunConfig:
    """Build the configuration that the search starts from. Raises: InputError."""
    if not hasattr(args, "model"):
        raise InputError("no model: pass --model llama3-8b, or --model FOLDER/config.json (zerosim zoo models)")
    if args.finetune not in FINETUNES:
        hint = did_you_mean(args.finetune, FINETUNES, f"expected one of {', '.join(FINETUNES)}")
        raise InputError(f"--finetune {args.finetune}: {hint}")
    if args.finetune == "full" and hasattr(args, "lora_rank"):
        raise InputError(f"--lora-rank {args.lora_rank}: works only with --finetune lora or qlora")
    if (device := device_of(args)) is not None and not device.has_bf16 and not hasattr(args, "precision"):
        args.precision = "fp16"
    values = {**FINETUNES[args.finetune], "ranks": ranks, **_given(args)}
    shared = {name: value for name, value in vars(args).items() if name not in KEPT}
    return at_any_stage(argparse.Namespace(**shared, **values))


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in KEPT if hasattr(args, name)}


def _same(args: argparse.Namespace) -> list[str]:
    """Return the words that every command of the page has: model, what is trained, and the device."""
    from zerosim.report.fit import flags_of

    names = {**FINETUNES[args.finetune], **{k: v for k, v in _given(args).items() if k != "recipe"}}
    device = f"--gpu {args.gpu}" if args.gpu else f"--node {args.node}"
    return [flags_of(names), device]


def _check(args: argparse.Namespace, config: RunConfig, batch: int) -> None:
    """Check what the model and the GPUs cannot do. Raises: InputError."""
    from math import gcd

    if not config.model.has_blocks:
        raise InputError(f"--model {config.model.name}: has no blocks to time; choose another model")
    if batch < 1:
        raise InputError(f"--global-batch {batch}: expected at least 1 row")
    ranks, seq, positions = config.mesh.ranks, config.model.seq, config.model.positions
    if ranks > 1 and gcd(batch, ranks) == 1:
        near = max(ranks, round(batch / ranks) * ranks)
        raise InputError(f"--global-batch {batch}: {ranks} GPUs do not divide so many rows; choose {near}")
    if hasattr(args, "seq") and seq > positions:
        raise InputError(f"--seq {seq}: {config.model.name} has {positions:,} positions; choose at most {positions}")


def _price(text: str | None) -> tuple[float | None, str]:
    """Parse '2.5 EUR'. Raises: InputError."""
    if text is None:
        return None, ""
    found = re.fullmatch(r"\s*([^\d\s.+-]{0,3})\s*(\d{1,9}(?:\.\d{1,9})?)\s*([^\d\s.+-]{0,4})\s*", text)
    if found is None or not float(found[2]) > 0 or (found[1] and found[3]):
        raise InputError(f"--price {text!r}: expected the price of one GPU for an hour, such as '2.5 EUR'")
    return float(found[2]), found[1] or found[3]


def _count(text: str | None) -> float | None:
    """Parse '15B'. Raises: InputError."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([kKmMbBgGtT]?)\s*", text)
    number = float(found[1]) * 1000.0 ** " kmbt".index(found[2].lower().replace("g", "b") or " ") if found else 0
    if number < 1:
        raise InputError(f"--tokens {text}: expected at least 1 token, such as 15B")
    return number


def _new_folder(path: str) -> Path:
    """Return the folder to make. Raises: InputError if something is there already, or if it cannot be made."""
    folder = Path(path)
    try:
        is_there, parent = os.path.lexists(folder), folder.absolute().parent
        has_parent = parent.is_dir()
    except (OSError, ValueError):
        raise InputError(f"--write {path}: this cannot be a folder name; choose another") from None
    if is_there:
        raise InputError(f"--write {path or repr(path)}: is already there; choose a new folder")
    if not has_parent:
        raise InputError(f"--write {path}: there is no folder {parent}; make it first")
    return folder


def _write(folder: Path, page: Page) -> None:
    """Write each plan's files into a folder of its own, all or none."""
    import shutil
    import tempfile

    from zerosim.device.interrupts import signals_postponed
    from zerosim.errors import OutputError

    made = None
    with signals_postponed():
        try:
            made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.absolute().parent))
            for launch in (one for one in page.launches if not isinstance(one, str)):
                (inner := made / launch.folder).mkdir()
                (inner / launch.name).write_text(launch.made.text, encoding="utf-8")
                (inner / f"{Path(launch.name).stem}.launch.sh").write_text(launch.made.launch, encoding="utf-8")
            made.chmod(0o755)
            if os.path.lexists(folder):  # made meanwhile
                raise FileExistsError(None, "it is there already")
            os.rename(made, folder)
        except OSError as error:
            why = error.strerror or str(error)
            raise OutputError(f"--write {folder}: cannot be written: {why}; choose another folder") from None
        finally:
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)


def _values(page: Page) -> dict[str, Any]:
    """Return the JSON form."""
    outside = {"limit": page.limit.to_dict(), **outside_values(page.config, page.limit)}
    return {"schema": 1, **page.to_dict(), **outside, "config": page.config.to_dict()}
