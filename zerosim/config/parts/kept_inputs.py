"""What blocks keep for backward: divided among ranks, or on the host. Options of `memory.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zerosim.config.option import Draft
from zerosim.config.parts.memory import MemoryConfig
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.tuning import TuningConfig
from zerosim.config.recompute import read_recompute
from zerosim.errors import InputError, wrong


def partitions_inputs(memory: MemoryConfig, parallel: ParallelConfig) -> bool:
    """Return whether tp's ranks store parts of blocks' inputs."""
    return memory.partition_activations and not parallel.sequence_parallel


def holds_rows(memory: MemoryConfig, mesh: MeshConfig, tuning: TuningConfig) -> bool:
    """Return whether a frozen table's rows require a gradient, as PEFT and transformers make the input of recomputed
    blocks. litgpt does not. Pipelines are left out."""
    return tuning.adapter_dtype is not None and memory.again.is_whole and memory.saves != "litgpt" and mesh.pp == 1


def rules(memory: MemoryConfig, mesh: MeshConfig, parallel: ParallelConfig) -> Iterator[InputError]:
    """Yield options for kept inputs that this recompute or mesh does not have.

    Partitioned inputs need no more than `tensor.rules` asks: tp divides the heads, and so the width of every input.
    """
    for name in ("partition_activations", "cpu_checkpointing"):
        if getattr(memory, name) and not memory.again.is_whole:
            yield wrong(
                name,
                f": recompute {memory.recompute!r} does not recompute whole blocks; pass --recompute full too, or "
                "leave it out",
            )
    if memory.offload_activations and memory.again.is_whole:
        yield wrong(
            "offload_activations",
            f": recompute {memory.recompute!r} saves only the inputs of blocks; pass --cpu-checkpointing instead",
        )
    if memory.stash_window and not (memory.cpu_checkpointing or memory.offload_activations):
        choose = "pass --cpu-checkpointing or --offload-activations too"
        yield wrong("stash_window", f" {memory.stash_window}: no buffers are copied to the host; {choose}")
    if memory.partition_activations and mesh.tp == 1:
        yield wrong(
            "partition_activations",
            ": without tp no other rank has the same inputs; pass --tp 2 or more, or leave it out",
        )
    if memory.returns_outputs:
        if not (memory.loss.startswith("hf-") and memory.loss.endswith("-kept")):
            yield wrong("use_cache", f": with loss {memory.loss!r} nobody keeps them; choose loss hf-5-kept")
        if memory.repeat_kv or mesh.tp * mesh.pp > 1:
            yield wrong("use_cache", ": leave out repeat_kv, tp and pp, or leave it out")
    if memory.use_reentrant:
        if memory.cpu_checkpointing:
            yield wrong("use_reentrant", ": inputs that wait on the host are no leaves; leave one of them out")
        if parallel.recipe == "fsdp2":
            yield wrong("use_reentrant", ": FSDP2 frees what FSDP1 keeps; choose recipe fsdp1, or leave it out")


def settles(draft: Draft) -> Mapping[str, str]:
    """Take out a recipe's reentrant checkpoints where nothing is recomputed, or frozen or prefetched. Raises:
    InputError."""
    if not draft.values.get("use_reentrant"):
        return {}
    why = ""
    if not (draft.values.get("lora_rank") or draft.values.get("prefetch")) and draft.values.get("freeze") is None:
        why = "trained blocks keep no more than their inputs; choose a lora_rank, or leave it out"
    elif not read_recompute(draft.values.get("recompute", "none")).is_whole:
        why = "no blocks are recomputed; pass --recompute full too, or leave it out"
    if why and not draft.source["use_reentrant"]:
        raise wrong("use_reentrant", f": {why}")
    if why or draft.values.get("cpu_checkpointing"):
        draft.without("use_reentrant", why)
    return {}


WORDS = (
    (
        "activation_offloading *activation_checkpointing_offload cpu_offloading* fine_grained_activation_offloading",
        "--cpu-checkpointing with --recompute full, or --offload-activations",
    ),
)
