"""Tensor parallelism: options of `mesh.py` and `parallel.py`, and the nearest sizes that divide a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.errors import InputError, wrong


def rules(mesh: MeshConfig, model: ModelConfig, parallel: ParallelConfig) -> Iterator[InputError]:
    """Yield sizes of the model that a tensor-parallel group does not divide."""
    tp = mesh.tp
    if tp == 1:
        for name in ("sequence_parallel", "keep_gathered", "pad_vocab"):
            if getattr(parallel, name):
                yield wrong(name, ": has no effect without tp; pass --tp 2 or more, or leave it out")
        return
    if parallel.keep_gathered and not parallel.sequence_parallel:
        yield wrong("keep_gathered", ": has no effect without sequence_parallel; pass --sequence-parallel too")
    if model.family == "mlp":
        yield wrong("tp", f" {tp}: model mlp does not support tensor parallelism; choose gpt, llama or flat")
        return
    if model.family == "flat":
        if parallel.sequence_parallel:
            yield wrong(
                "sequence_parallel", ": model flat has no token rows to divide; leave it out, or choose gpt or llama"
            )
        return
    for name, size in (("heads", model.heads), ("ffn", model.ffn)):
        if size % tp:
            yield wrong("tp", f" {tp} does not divide {name} {size}: choose {_right_tp(model, mesh, parallel)}")
    if model.kv_heads % tp and tp % model.kv_heads:
        yield wrong(
            "tp",
            f" {tp} neither divides kv_heads {model.kv_heads} nor is a multiple of it: choose "
            f"{_right_tp(model, mesh, parallel)}",
        )
    if model.vocab % tp and not parallel.pad_vocab:
        yield wrong(
            "tp",
            f" {tp} does not divide vocab {model.vocab}: pass --pad-vocab, which adds rows that the softmax ignores, "
            f"or choose {_right_tp(model, mesh, parallel)}",
        )
    if parallel.sequence_parallel and model.seq % tp:
        near = max(1, round(model.seq / tp)) * tp
        yield wrong("sequence_parallel", f": tp {tp} does not divide seq {model.seq}: choose seq {near}, for one")


def _right_tp(model: ModelConfig, mesh: MeshConfig, parallel: ParallelConfig) -> str:
    """Return 'tp 2 or 4': the sizes that this model and its ranks allow, nearest to the given one."""

    def fits(tp: int) -> bool:
        rest = replace(mesh.others, tp=1, etp=1).world_size
        cut = [model.heads, model.ffn, mesh.ranks // rest, max(tp, model.kv_heads)]
        cut += [] if parallel.pad_vocab else [model.vocab]
        cut += [model.seq] if parallel.sequence_parallel else []
        return not any(size % tp for size in cut) and not max(tp, model.kv_heads) % min(tp, model.kv_heads)

    below = max(tp for tp in range(1, mesh.tp) if fits(tp))
    above = next((tp for tp in range(mesh.tp + 1, model.heads + 1) if fits(tp)), None)
    return f"tp {below}" + (f" or {above}" if above else "")


WORDS = (
    ("parallelism.tensor_parallel_degree", "--tp T --sequence-parallel"),
    ("make_vocab_size_divisible_by", "--pad-vocab, with --tp: to a multiple of 128 T"),
)


LACKING = (("*disable_loss_parallel", "a whole loss beside --tp", "With --tp the vocabulary of the loss is divided"),)
