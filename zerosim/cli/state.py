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
    from zerosim.report.look import Stack
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
    from zerosim.state.checkpoint import Checkpoint
    from zerosim.state.manifest import damage, read_manifest

    figures, folder = output(args, "json"), _folder(args.folder, args.step)
    damaged = damage(folder, read_manifest(folder), whole=args.verify)
    values: dict[str, Any] = {"schema": 1, "folder": str(folder), "damage": damaged}
    try:
        checkpoint = Checkpoint(folder)
    except InputError:
        if not damaged:
            raise
        shown, code = None, DIFFERENCE  # what is damaged says it
    else:
        shown, code = _looked(args, checkpoint, damaged, values)
    with written((figures, as_json(lambda: values))):
        if not args.quiet:
            if shown is not None:
                show(args, shown)
            if damaged and (shown is None or args.against or args.tensor or args.rank is not None):
                print(damaged, file=human_stream(args))
    return DIFFERENCE if damaged else code


def _looked(
    args: argparse.Namespace, checkpoint: Checkpoint, damaged: str, values: dict[str, Any]
) -> tuple[Stack, int]:
    """Return what the flags ask to see of a saved step, and the exit code. Add its JSON form to `values`."""
    from zerosim.report import state as report
    from zerosim.state.checkpoint import Checkpoint
    from zerosim.state.compare import differences
    from zerosim.state.folder import saved_steps

    values.update(_about(checkpoint))
    if args.against is not None:
        other = Checkpoint(_folder(args.against, None))
        found = list(differences(checkpoint, other))
        values["differences"] = [one._asdict() for one in found]
        compared = len({*checkpoint.names, *other.names})
        return report.differences_report(checkpoint, other, found, compared), DIFFERENCE if found else 0
    if args.tensor is not None or args.rank is not None:
        found_runs = _wanted(checkpoint, args.tensor, args.rank)
        pieces = [(rank, run, stored.dtype, stored.stop - stored.start) for rank, run, stored in found_runs]
        return report.pieces_table(checkpoint, pieces), 0
    around = checkpoint.folder.parent
    said = "Every file has its checksum." if args.verify and not damaged else damaged
    return report.folder_report(around, saved_steps(around), checkpoint, said, is_damaged=bool(damaged)), 0


def _folder(path: str, step: int | None) -> Path:
    """Return the folder of a saved step: the one that is named, or the newest. Raises: InputError."""
    from zerosim.state.folder import nothing_in, saved_steps, step_folder
    from zerosim.state.manifest import MANIFEST

    folder = Path(path)
    if (folder / MANIFEST).is_file():
        if step is not None:
            raise InputError(f"--step {step}: {path} is one step; pass the folder around it")
        return folder
    steps = saved_steps(folder)
    if not steps:
        raise InputError(f"{path}: {nothing_in(folder)}")
    if step is not None and step not in steps:
        raise InputError(f"--step {step}: {path} has steps {', '.join(map(str, steps))}")
    return step_folder(folder, steps[-1] if step is None else step)


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
