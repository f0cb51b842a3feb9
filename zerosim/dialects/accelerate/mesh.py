"""The sizes of a mesh in accelerate's file: its section `parallelism_config`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from zerosim.dialects.fsdp import REPLICAS
from zerosim.dialects.reading import Notes
from zerosim.errors import did_you_mean

BY = "accelerate 1.15"


def _sizes(notes: Notes) -> Iterator[tuple[str, Any]]:
    """Yield the sizes of `parallelism_config` with their names, such as ('tp', 2)."""
    for name in ("dp_replicate", "dp_shard", "cp", "sp", "tp"):
        key = f"parallelism_config.parallelism_config_{name}_size"
        found = notes.checked(key, BY) if notes.document.keys.get(key) is not None else 1
        yield name, 1 if found is None else found


def parallelism(notes: Notes, kind: str) -> None:
    """Read `parallelism_config`."""
    given = [key for key in notes.document.keys if key.startswith("parallelism_config.")]
    if kind == "NO":
        for key in given:
            notes.tell(key, "ignored", "NO starts one process")
    elif given:
        _checked(notes, kind, given)
        for key in given:
            if key not in notes.said:
                notes.tell(key, "understood", "the mesh")


def _checked(notes: Notes, kind: str, given: list[str]) -> None:
    """Check the sizes as ParallelismConfig and the Accelerator do, and set them."""
    prefix = "parallelism_config.parallelism_config_"
    for key in given:
        if key not in notes.rows:
            known = [one for one in notes.rows if one.startswith(prefix)]
            short = f"parallelism_config.parallelism_config_{key.partition('.')[2]}"
            hint = f"write {short.partition('.')[2]}" if short in known else did_you_mean(key, known, "leave it out")
            notes.refuse(key, BY, "the launcher drops it without a word, and this size stays 1", hint)
    size = dict(_sizes(notes))

    def refuse(name: str, why: str, advice: str) -> None:
        notes.refuse(f"{prefix}{name}_size", BY, f"ValueError: {why}", advice)

    for name, number in size.items():
        if number < 1:
            return refuse(name, f"{name}_size must be at least 1, but got {number}", "write 1")
    backend = notes.document.keys.get(f"{prefix}cp_backend", "torch")
    if backend != "torch":
        why = f"ValueError: cp_backend must be one of ['torch'], but got {backend}"
        notes.refuse(f"{prefix}cp_backend", BY, why, "write torch")
    replicas, shards, total = size["dp_replicate"], size["dp_shard"], math.prod(size.values())
    if size["cp"] > 1 and size["sp"] > 1:
        return refuse("sp", "context and sequence parallelism are mutually exclusive", "write 1 for one of them")
    if replicas > 1 and shards == 1 and max(size["tp"], size["cp"]) > 1:
        return refuse("dp_replicate", "tp and cp exclude replicas of one rank", "write dp_shard_size 2 or more")
    version = 2 if notes.values.get("recipe", notes.context.given.get("recipe")) == "fsdp2" else 1
    if kind == "FSDP" and version == 2 and shards == size["cp"] == 1:
        return refuse("dp_shard", "the parallelism config has no dimension for FSDP to shard across",
                      "write the ranks of a replica (absent is 1)")  # fmt: skip
    if kind == "FSDP" and version == 1 and total > 1:
        return refuse("dp_shard", "ParallelismConfig is not compatible with FSDP version 1", "write fsdp_version: 2")
    if size["cp"] > 1 and kind != "FSDP":
        return refuse("cp", "cp_size > 1, but no fsdp_plugin was provided", "write FSDP, and fsdp_version: 2")
    if kind == "MEGATRON_LM" and total > 1:
        return refuse("dp_shard", "ParallelismConfig is not compatible with MEGATRON_LM", "leave the section out")
    ranks = notes.context.given.get("ranks", notes.values.get("ranks"))
    if size["sp"] == 1 and total > 1 and ranks is not None and total != ranks:
        why = f"total_size ({total}) does not match num_processes ({ranks})"
        return refuse("dp_shard", why, f"write sizes whose product is {ranks}")
    _mesh(notes, prefix, size)


def _mesh(notes: Notes, prefix: str, size: dict[str, int]) -> None:
    if notes.values.get("stage", notes.context.given.get("stage")) != 0:
        notes.sets(f"{prefix}dp_replicate_size", dp_replicate=size["dp_replicate"])
        if size["dp_replicate"] > 1:
            notes.note(REPLICAS)
    else:
        notes.tell(f"{prefix}dp_replicate_size", "understood", "all ranks that tp leaves hold the whole model")
    notes.tell(f"{prefix}dp_shard_size", "understood", f"{size['dp_shard']}: what the other sizes leave of the ranks")
    notes.sets(f"{prefix}tp_size", tp=size["tp"])
    if size["tp"] > 1:
        notes.note("tp: the Trainer wants the model loaded with tp_plan, and norms run on every rank")
    strategy = notes.document.keys.get(f"{prefix}cp_comm_strategy", "allgather")
    notes.sets(f"{prefix}cp_size", cp=size["cp"] * size["sp"])
    notes.tell(f"{prefix}cp_backend", "understood", "PyTorch's")
    if size["cp"] > 1:
        if strategy not in ("allgather", "alltoall"):
            why = f"ValueError: Invalid cp_comm_strategy: {strategy}"
            notes.refuse(f"{prefix}cp_comm_strategy", BY, why, "write allgather or alltoall")
            return
        notes.sets(f"{prefix}cp_comm_strategy", context="ring" if strategy == "alltoall" else "allgather")
        notes.note(f"FSDP shards states over dp_shard x cp: {size['dp_shard'] * size['cp']} ranks")
    else:
        notes.tell(f"{prefix}cp_comm_strategy", "ignored", "cp is 1")
    notes.tell(f"{prefix}sp_size", "understood", "Ulysses" if size["sp"] > 1 else "off")
    if size["sp"] > 1:
        notes.sets(f"{prefix}sp_size", context="ulysses")
