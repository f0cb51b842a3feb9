"""`zerosim state`: look into a checkpoint: who wrote what, whether it is whole, how two of them differ."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerosim.cli.outputs import as_json, human_stream, output, show, written
from zerosim.cli.parser import Parser, whole_number
from zerosim.errors import DIFFERENCE, InputError, did_you_mean

if TYPE_CHECKING:
    from zerosim.config.safetensors import Stored
    from zerosim.state.checkpoint import Checkpoint
    from zerosim.state.runs import Run


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("folder", metavar="DIR", help="a folder that --save-state wrote, or one of its steps; by default the newest")
    add("--step", type=whole_number, metavar="N", help="the saved step (default: the newest)")
    add("--tensor", metavar="PATTERN", help="list every piece of these tensors: h.0.attn.*, or a part of a name")
    add("--rank", type=whole_number, metavar="R", help="list every piece that this rank wrote")
    add("--verify", action="store_true", help="read every file and compare its checksum; 1 if one is damaged")
    add("--against", metavar="DIR", help="compare every number with another checkpoint, of any mesh; 1 if one differs")
    add("--json", metavar="OUT.json", help="what was found; - for stdout")
    add("--quiet", "-q", action="store_true", help="print nothing: the exit code says it")


def main(args: argparse.Namespace) -> int:
    from zerosim.report import state as report
    from zerosim.state.compare import differences
    from zerosim.state.folder import saved_steps
    from zerosim.state.manifest import damage

    figures = output(args, "json")
    checkpoint = _opened(args.folder, args.step)
    values: dict[str, Any] = {"schema": 1, "folder": str(checkpoint.folder), **_about(checkpoint)}
    code, shown = 0, list[Any]()
    damaged = damage(checkpoint.folder, checkpoint.manifest, whole=args.verify)
    values["damage"] = damaged
    if args.against is not None:
        other = _opened(args.against, None)
        found = list(differences(checkpoint, other))
        compared = len({*checkpoint.names, *other.names})
        shown.append(report.differences_report(checkpoint, other, found, compared))
        values["differences"] = [one._asdict() for one in found]
        code = DIFFERENCE if found else 0
    elif args.tensor is not None or args.rank is not None:
        found_runs = _wanted(checkpoint, args.tensor, args.rank)
        pieces = [(rank, run, stored.dtype, stored.stop - stored.start) for rank, run, stored in found_runs]
        shown.append(report.pieces_table(checkpoint, pieces))
    else:
        steps = saved_steps(checkpoint.folder.parent)
        verified = "Every file has its checksum." if args.verify and not damaged else damaged
        shown.append(
            report.folder_report(checkpoint.folder.parent, steps, checkpoint, verified, is_damaged=bool(damaged))
        )
    with written((figures, as_json(lambda: values))):
        if not args.quiet:
            for one in shown:
                show(args, one)
            if damaged and (args.against or args.tensor or args.rank is not None):
                print(damaged, file=human_stream(args))
    return DIFFERENCE if damaged else code


def _opened(path: str, step: int | None) -> Checkpoint:
    """Open a saved step: the one that is named, or the newest. Raises: InputError."""
    from zerosim.state.checkpoint import Checkpoint
    from zerosim.state.folder import saved_steps, step_folder
    from zerosim.state.manifest import MANIFEST

    folder = Path(path)
    if (folder / MANIFEST).is_file():
        if step is not None:
            raise InputError(f"--step {step}: {path} is one step; pass the folder around it")
        return Checkpoint(folder)
    steps = saved_steps(folder)
    if not steps:
        what = "has no saved step" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        raise InputError(f"{path}: {what}; expected a folder that --save-state wrote")
    if step is not None and step not in steps:
        raise InputError(f"--step {step}: {path} has steps {', '.join(map(str, steps))}")
    return Checkpoint(step_folder(folder, steps[-1] if step is None else step))


def _wanted(checkpoint: Checkpoint, pattern: str | None, rank: int | None) -> list[tuple[int, Run, Stored]]:
    """Return the runs of these tensors that a rank wrote. Raises: InputError if there are none."""
    if rank is not None and rank not in checkpoint.by_rank:
        wrote, ranks = len(checkpoint.by_rank), checkpoint.manifest.ranks
        raise InputError(f"--rank {rank}: wrote nothing; {wrote} of {ranks} ranks did")
    found = [
        (number, run, stored)
        for number, runs in sorted(checkpoint.by_rank.items())
        if rank is None or number == rank
        for run, stored in runs
        if pattern is None or pattern in run.weight or fnmatchcase(run.weight, pattern)
    ]
    if not found:
        names = sorted(checkpoint.shapes)
        hint = did_you_mean(pattern, names, f"there are {', '.join(names[:3])} ...")
        raise InputError(f"--tensor {pattern}: no tensor has this name; {hint}")
    return sorted(found, key=lambda one: (one[1].weight, one[1].state, [p for _, p in one[1].cuts], one[1].start))


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the JSON form of a checkpoint, without its numbers."""
    manifest = checkpoint.manifest.to_dict()
    return {
        "manifest": manifest,
        "runs": [
            {
                "rank": rank, "tensor": run.weight, "state": run.state, "shape": run.shape, "start": run.start,
                "stop": run.stop, "dtype": stored.dtype, "bytes": stored.stop - stored.start,
                "cuts": {split.axis or "tile": [piece, split.pieces] for split, piece in run.cuts},
            }
            for rank, runs in sorted(checkpoint.by_rank.items())
            for run, stored in runs
        ],
    }  # fmt: skip
