"""`zerosim convert FROM TO`: a checkpoint of one framework as another's; weights, optimizer states and the step."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerosim.cli.folders import Folder
from zerosim.cli.options import add_flag
from zerosim.cli.parser import Parser, whole_number
from zerosim.config import OPTIONS, RunConfig
from zerosim.errors import InputError

if TYPE_CHECKING:
    from zerosim.state.checkpoint import Checkpoint
    from zerosim.state.formats.whole import WholeState

OWN, SAFETENSORS, DCP, UNIVERSAL = "zerosim", "safetensors", "dcp", "universal"
OF_MODEL = (
    *("model", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "seq", "vocab", "positions"),
    *("tie_embeddings", "optimizer", "precision"),
)
"""The flags of a run that say what another framework's files do not."""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    known = "zerosim's, PyTorch's distributed, DeepSpeed's, Megatron's, accelerate's, the Trainer's, .safetensors, .pt"
    add("source", metavar="FROM", help=f"a checkpoint: {known}. Nothing in it is executed")
    add("to", metavar="TO", help="a new folder")
    formats = "|".join((OWN, SAFETENSORS, DCP, UNIVERSAL))
    what = "zerosim's, to go on with --resume; transformers' weights; PyTorch's distributed; DeepSpeed's universal"
    add("--as", dest="form", metavar=formats, help=f"{what} (default: zerosim; of zerosim's safetensors)")
    add("--step", type=whole_number, metavar="N", help="optimizer steps done, where the files do not say it")
    add("--masters", action="store_true", help="with --as safetensors: the fp32 masters, not the model's own halves")
    add("--pieces", type=whole_number, default=1, metavar="N", help="with --as dcp: as if N ranks wrote (default: 1)")
    add("--quiet", "-q", action="store_true", help="print nothing")
    group = parser.add_argument_group("with --as zerosim: what is trained (default: the config.json in FROM)")
    for name in OF_MODEL:
        add_flag(group.add_argument, OPTIONS[name])


def main(args: argparse.Namespace) -> int:
    from zerosim.state.manifest import MANIFEST

    source, folder = Path(args.source), Folder("TO", args.to)
    is_own = (source / MANIFEST).is_file() or any(source.glob(f"step-*/{MANIFEST}"))
    form = args.form or (SAFETENSORS if is_own else OWN)
    if form not in (OWN, SAFETENSORS, DCP, UNIVERSAL):
        raise InputError(f"--as {form}: expected {OWN}, {SAFETENSORS}, {DCP} or {UNIVERSAL}")
    if is_own and form == OWN:
        raise InputError(f"{source}: is zerosim's already; go on with zerosim run --resume {source}")
    for flag, value, needed in (("--masters", args.masters, SAFETENSORS), ("--pieces", args.pieces > 1, DCP)):
        if value and form != needed:
            raise InputError(f"{flag}: works only with --as {needed}")
    if args.pieces < 1:
        raise InputError(f"--pieces {args.pieces}: expected at least 1")
    folder.check([args.source])
    if is_own and form == SAFETENSORS and (found := _adapters(args.source)) is not None:
        return _write_adapters(*found, folder, quiet=args.quiet)
    state, config = _own(args.source) if is_own else (_whole(args.source), None)
    said = [f"{args.source}: {_about(state)}"]
    if form == OWN:
        said += _to_own(args, state, folder)
    else:
        folder.write(lambda place: _write(place, form, state, args, config))
        said.append(f"Wrote {folder.path}, {form}.")
        said += [f"Left out: {name}: {what}." for name, what in state.others.items()]
    if not args.quiet:
        print("\n".join(said))
    return 0


def _own(path: str) -> tuple[WholeState, RunConfig]:
    """Return zerosim's own checkpoint under transformers' names, and its run's configuration."""
    from zerosim.state.checkpoint import Checkpoint
    from zerosim.state.convert import to_whole
    from zerosim.state.folder import damaged_after, newest

    folder = newest(path)
    for damaged in damaged_after(folder):
        print(f"{damaged}; {folder} is converted", file=sys.stderr)
    checkpoint = Checkpoint(folder)
    config = RunConfig.from_dict(dict(checkpoint.manifest.config), f"the checkpoint {folder}")
    return to_whole(checkpoint, config), config


def _adapters(path: str) -> tuple[Checkpoint, list[str]] | None:
    """Return zerosim's own checkpoint and the names of its adapters; None if it trained none."""
    from zerosim.config.parts.tuning import is_adapter
    from zerosim.state.checkpoint import Checkpoint
    from zerosim.state.folder import newest
    from zerosim.state.runs import PARAM

    checkpoint = Checkpoint(newest(path))
    names = [name for name, state in checkpoint.names if state == PARAM and is_adapter(name)]
    return (checkpoint, names) if names else None


def _write_adapters(checkpoint: Checkpoint, names: list[str], folder: Folder, *, quiet: bool) -> int:
    """Write the adapters as PEFT reads them."""
    from zerosim.models.peft import check_peft, save_adapters
    from zerosim.state.runs import PARAM

    config = RunConfig.from_dict(dict(checkpoint.manifest.config), f"the checkpoint {checkpoint.folder}")
    check_peft(config.model, dict.fromkeys(names), "FROM")
    folder.write(lambda place: save_adapters(place, config, {name: checkpoint.whole(name, PARAM) for name in names}))
    if not quiet:
        print(f"{checkpoint.folder}: {len(names)} tensors of adapters\nWrote {folder.path}, as PEFT reads them.")
    return 0


def _whole(path: str) -> WholeState:
    from zerosim.state.formats import read_whole

    return read_whole(path)


def _about(state: WholeState) -> str:
    """Return what a checkpoint holds, in one line."""
    names = dict.fromkeys(name for own in state.states.values() for name in own)
    step = "" if state.step is None else f", step {state.step}"
    states = f", {', '.join(names)}" if names else ", no optimizer states"
    version = f" {state.version}" if state.version else ""
    return f"{state.kind}{version}{step}: {len(state.weights):,} weights{states}"


def _write(place: Path, form: str, state: WholeState, args: argparse.Namespace, config: RunConfig | None) -> None:
    from zerosim.config.config_json import config_json
    from zerosim.models.save import write_json
    from zerosim.state.formats import write_dcp, write_safetensors, write_universal

    if form == DCP:
        write_dcp(place, state, args.pieces)
    elif form == UNIVERSAL:
        write_universal(place, state)
    else:
        write_safetensors(place, state, masters=args.masters)
        given = Path(args.source) / "config.json"
        if config is not None and config.model.has_blocks:
            dtype = next(iter((state.weights if args.masters or not state.stored else state.stored).values())).dtype
            write_json(place / "config.json", config_json(config.model, dtype))
        elif given.is_file():
            shutil.copyfile(given, place / "config.json")


def _to_own(args: argparse.Namespace, state: WholeState, folder: Folder) -> list[str]:
    """Write a saved step of zerosim. Return what to say of it."""
    from zerosim.state.convert import from_whole
    from zerosim.train.build import declare

    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name in OF_MODEL}
    if "model" not in given:
        if not (Path(args.source) / "config.json").is_file():
            raise InputError(f"{args.source}: has no config.json; pass --model NAME, or a config.json's folder")
        given["model"] = args.source
    config = RunConfig(**{"optimizer": "adamw", **given})
    left = list[str]()

    def fill(place: Path) -> None:
        found, others = from_whole(state, args.source, config, declare(config)[0].shapes(), place, args.step)
        left.extend([found.name, *others])

    folder.write(fill)
    step, *others = left
    said = [f"Wrote {folder.path}/{step}. Go on with: zerosim run --resume {folder.path} --ranks N --steps S"]
    if state.step is None and args.step is None:
        said.append("The files do not say how many steps were done: 0 is written. Pass --step N.")
    return said + [f"Left out: {other}." for other in others]
