"""What several parts of a configuration have to agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerosim.config.mesh_checks import check_kept_inputs, check_pipeline, check_tensor_parallel
from zerosim.config.parts import PURE
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.dtypes import dtype
from zerosim.errors import wrong

if TYPE_CHECKING:
    from zerosim.config.run import RunConfig


def check_together(config: RunConfig) -> None:
    """What several parts have to agree on. Raises: InputError."""
    model, mesh, world = config.model, config.mesh, config.world
    for name, plain in (("recompute", "none"), ("attention", "eager")):
        value = getattr(config.memory, name)
        if not model.has_blocks and value != plain:
            raise wrong(name, f" {value!r}: model {model.family} has no blocks; leave it out")
    again = config.memory.again
    if again.every > model.layers and model.has_blocks:
        raise wrong(
            "recompute",
            f" {config.memory.recompute!r}: of {model.layers} layers every K-th runs again; choose at most "
            f"full:{model.layers}",
        )
    if config.parallel.keep_gathered and again.parts & {"layernorm", "fc1"}:
        raise wrong(
            "keep_gathered",
            f": recompute {config.memory.recompute!r} runs norms or linear maps again and drops what was "
            "gathered; leave one out",
        )
    if config.memory.loss == "chunked" and not model.has_blocks:
        raise wrong(
            "loss", f" 'chunked': model {model.family} has no head of its own; choose in-place, or leave it out"
        )
    check_tensor_parallel(model, mesh, config.parallel)
    check_kept_inputs(mesh, config.memory)
    check_pipeline(model, mesh, config.parallel, config.data, config.optim)
    _check_optimizer(config)
    sent, kept = config.reduction.compress, config.precision.grad_dtype
    if sent != "none" and dtype(kept).itemsize <= dtype(sent).itemsize:
        raise wrong("compress", f" {sent!r}: gradients are {kept}, which is no wider; choose grad_dtype fp32")
    if world.transport == "mpi" and mesh.ranks % world.ranks_per_process:
        raise wrong(
            "ranks",
            f" {mesh.ranks}: {world.ranks_per_process} in each process do not make as many; choose a multiple "
            f"of {world.ranks_per_process}, or leave ranks out",
        )
    if (text := config.data.sample) is not None and max(text.encode()) >= model.vocab:
        raise wrong("sample", f" {text!r} holds byte {max(text.encode())}: vocab {model.vocab} is too small, use 256")


def _check_optimizer(config: RunConfig) -> None:
    """What an optimizer asks of the partition, the mesh and the precision. Raises: InputError."""
    tp, name = config.mesh.tp, config.optim.optimizer
    cut = OPTIMIZERS[name].cut
    if cut == "matrices" and config.parallel.partition == "slices":
        raise wrong("partition", f" 'slices': {name} wants whole matrices; choose owner, or leave it out")
    if cut in ("sums", "matrices") and tp > 1:
        raise wrong("tp", f" {tp}: {name} wants whole matrices, which tensor parallelism cuts; choose tp 1")
    if OPTIMIZERS[name].estimates_every and tp > 1:
        raise wrong("tp", f" {tp}: {name} draws labels from logits, which tensor parallelism cuts; choose tp 1")
    if config.precision.is_pure and cut != "elements":
        raise wrong("precision", f" {PURE!r}: of element-wise optimizers; {name} wants fp32 masters")
