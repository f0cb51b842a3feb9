"""Saved steps for people: where a run goes on, who wrote what, and what differs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Column

from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.names import counted, listed
from zerosim.state.checkpoint import Checkpoint
from zerosim.state.compare import Difference
from zerosim.state.manifest import Manifest
from zerosim.state.runs import PARAM, Run
from zerosim.units import format_bytes

MOST_STATES, MOST_RANKS = 6, 64
_FORMATS = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16", "U8": "uint8", "I32": "int32", "I64": "int64"}


def folder_report(folder: Path, steps: Sequence[int], checkpoint: Checkpoint, said: str, *, is_damaged: bool) -> Stack:
    """Return one saved step: what it is, and a row for each rank with the bytes that it wrote."""
    manifest = checkpoint.manifest
    others = f"Steps in {folder}: {listed(steps)}." if len(steps) > 1 else ""
    return Stack(
        prose(_headline(checkpoint), "bold"),
        prose(others) if others else None,
        prose(said, "bold red" if is_damaged else "green") if said else None,
        _ranks_table(checkpoint),
        prose(_closing(manifest)),
    )


def _headline(checkpoint: Checkpoint) -> str:
    manifest, config = checkpoint.manifest, checkpoint.manifest.config
    total = sum(entry.nbytes for entry in manifest.files)
    mesh = [f"{axis} {config[axis]}" for axis in ("pp", "dp_replicate", "cp", "tp", "ep") if config.get(axis, 1) != 1]
    ranks = ", ".join([counted(manifest.ranks, "rank"), f"ZeRO stage {config.get('stage', 2)}", *mesh])
    files = counted(len(manifest.files) + 1, "file")
    return f"{checkpoint.folder}: step {manifest.step}, {ranks}; {files}, {format_bytes(total)}"


def _closing(manifest: Manifest) -> str:
    steps, updates = manifest.step, manifest.numbers["control"]["updates"]
    skipped = f", {counted(steps - updates, 'step')} skipped" if steps != updates else ""
    how = "To go on, on any number of ranks and any ZeRO stage: zerosim run --resume DIR"
    return f"{counted(updates, 'update')}{skipped}. {how}. To see the pieces of a tensor: --tensor NAME."


def _ranks_table(checkpoint: Checkpoint) -> RenderableType:
    by_rank = {rank: Counter[str]() for rank in sorted(checkpoint.by_rank)}
    formats = defaultdict[str, set[str]](set)
    for rank, held in checkpoint.by_rank.items():
        for run, stored in held:
            by_rank[rank][run.state] += stored.stop - stored.start
            formats[run.state].add(_FORMATS.get(stored.dtype, stored.dtype))
    states = sorted(formats, key=lambda state: (state != PARAM, state))
    shown, rest = states[:MOST_STATES], states[MOST_STATES:]
    heads = [f"{state} {'/'.join(sorted(formats[state]))}" for state in shown] + ["others"] * bool(rest)
    grid = Grid("rank", right("runs"), *map(right, heads), right("all"))

    def add(name: str, runs: int, own: Counter[str]) -> None:
        others = [sum(own[state] for state in rest)] * bool(rest)
        grid.add(name, runs, *(own[state] for state in shown), *others, own.total())

    for rank, own in [*by_rank.items()][:MOST_RANKS]:
        add(str(rank), len(checkpoint.by_rank[rank]), own)
    add("all", sum(map(len, checkpoint.by_rank.values())), sum(by_rank.values(), Counter[str]()))
    left = len(by_rank) - MOST_RANKS
    note = f"{left} more ranks wrote files; --rank R shows one." if left > 0 else ""
    return titled("Who wrote what, in bytes", Adaptive(grid), note)


def pieces_table(checkpoint: Checkpoint, found: Sequence[tuple[int, Run, str, int]]) -> Stack:
    """Return runs, each with the rank that wrote it, its dtype and its bytes."""
    grid = Grid(
        Column("tensor", overflow="fold"), "state", right("rank"), "piece", right("numbers"), right("of"), "dtype",
        right("bytes"),
    )  # fmt: skip
    for rank, run, dtype, nbytes in found:
        cuts = ", ".join(f"{split.axis or 'tile'} {piece} of {split.pieces}" for split, piece in run.cuts) or "whole"
        numbers = f"{run.start:,} to {run.stop:,}"
        of = _numel(run)
        grid.add(run.weight, run.state, str(rank), cuts, numbers, of, _FORMATS.get(dtype, dtype), nbytes)
    count = counted(len(found), "run")
    return titled(f"{checkpoint.folder}: {count}", Adaptive(grid, grid.without("of")))


def _numel(run: Run) -> int | None:
    if run.follows not in ("elements", "rank"):
        return None
    numel = 1
    for size in run.cuts[-1][0].local_shape if run.cuts else run.shape:
        numel *= size
    return numel


def differences_report(one: Checkpoint, other: Checkpoint, found: Sequence[Difference], compared: int) -> Stack:
    """Return what differs between two saved steps, or that nothing does."""
    names = f"{one.folder} and {other.folder}"
    if not found:
        text = f"{names}: equal. {counted(compared, 'state')} of {counted(len(one.shapes), 'tensor')}, every number."
        return Stack(prose(text, "bold green"))
    grid = Grid(Column("tensor", overflow="fold"), "state", Column("difference", overflow="fold"))
    for difference in found[:MOST_RANKS]:
        grid.add(difference.weight, difference.state, difference.why)
    note = f"{len(found) - MOST_RANKS} more differ." if len(found) > MOST_RANKS else ""
    head = f"{names}: {len(found):,} of {counted(compared, 'state')} differ"
    return Stack(prose(head, "bold red"), titled("Differences", Adaptive(grid), note))
