"""Expert parallelism: what its options of `mesh.py` go together with."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.config.parts.gathering import Gathering
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.reduction import Reduction
from zerosim.errors import InputError, wrong


def rules(
    mesh: MeshConfig, model: ModelConfig, parallel: ParallelConfig, gathering: Gathering, reduction: Reduction
) -> Iterator[InputError]:
    """Yield what does not go with experts that are cut otherwise than other weights."""
    if not mesh.axes.is_folded and mesh.etp is None:
        return
    name = "ep" if mesh.ep > 1 else "etp"
    sizes = f" {getattr(mesh, name)}"
    if not model.experts:
        yield wrong(name, f"{sizes}: model {model.name} has no experts; pass --experts 8 --top-k 2, or leave it out")
        return
    for size, what, field in ((model.experts, "experts", "ep"), (model.expert_ffn, "expert_ffn", "etp")):
        if size % mesh.axes.size(field):
            right = next(at for at in range(mesh.axes.size(field), 0, -1) if size % at == 0)
            yield wrong(field, f" {mesh.axes.size(field)} does not divide {what} {size}: choose {field} {right}")
    if mesh.tp > 1 and not parallel.sequence_parallel:
        why = "with tp, tokens are dealt to experts by rank; pass --sequence-parallel too"
        yield wrong(name, f"{sizes}: {why}")
    for is_on, field in (
        (bool(mesh.secondary_shard), "secondary_shard"),
        (gathering.hierarchical_gather, "hierarchical_gather"),
        (reduction.quantized_gradients, "quantized_gradients"),
        (gathering.quantized_weights, "quantized_weights"),
        (reduction.is_encoded, "compress"),
    ):
        if is_on:
            yield wrong(name, f"{sizes}: experts' states are cut over other ranks; leave {field} out")
