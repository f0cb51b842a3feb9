"""What blocks keep for backward: divided among ranks, or on the host. Options of `memory.py`."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.config.parts.memory import MemoryConfig
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.errors import InputError, wrong


def partitions_inputs(memory: MemoryConfig, parallel: ParallelConfig) -> bool:
    """Return whether tp's ranks store parts of blocks' inputs."""
    return memory.partition_activations and not parallel.sequence_parallel


def rules(memory: MemoryConfig, mesh: MeshConfig) -> Iterator[InputError]:
    """Yield options for kept inputs that this recompute or mesh does not have.

    Partitioned inputs need no more than `tensor.rules` asks: tp divides the heads, and so the width of every input.
    """
    for name in ("partition_activations", "cpu_checkpointing"):
        if getattr(memory, name) and not memory.again.every:
            yield wrong(
                name,
                f": recompute {memory.recompute!r} does not recompute whole blocks; pass --recompute full too, or "
                "leave it out",
            )
    if memory.offload_activations and memory.again.every:
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


WORDS = (
    (
        "activation_offloading *activation_checkpointing_offload cpu_offloading* fine_grained_activation_offloading",
        "--cpu-checkpointing with --recompute full, or --offload-activations",
    ),
)
