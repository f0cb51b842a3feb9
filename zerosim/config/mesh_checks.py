"""Checks of a model against a mesh: sizes that tensor parallelism and pipelines divide, and the nearest valid
choice."""

from __future__ import annotations

from dataclasses import replace

from zerosim.config.model import ModelConfig
from zerosim.config.optim import OptimConfig
from zerosim.config.parallel import MeshConfig, ParallelConfig
from zerosim.config.parts import DataConfig, MemoryConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import wrong
from zerosim.placement.stages import Chunks, cut_layers, fits_group


def check_tensor_parallel(model: ModelConfig, mesh: MeshConfig, parallel: ParallelConfig) -> None:
    """Check that a tensor-parallel group divides the model. Raises: InputError."""
    tp = mesh.tp
    if tp == 1:
        for name in ("sequence_parallel", "keep_gathered", "pad_vocab"):
            if getattr(parallel, name):
                raise wrong(name, ": has no effect without tp; pass --tp 2 or more, or leave it out")
        return
    if parallel.keep_gathered and not parallel.sequence_parallel:
        raise wrong("keep_gathered", ": has no effect without sequence_parallel; pass --sequence-parallel too")
    if model.family == "mlp":
        raise wrong("tp", f" {tp}: model mlp does not support tensor parallelism; choose gpt, llama or flat")
    if model.family == "flat":
        if parallel.sequence_parallel:
            raise wrong(
                "sequence_parallel", ": model flat has no token rows to divide; leave it out, or choose gpt or llama"
            )
        return
    for name, size in (("heads", model.heads), ("ffn", model.ffn)):
        if size % tp:
            raise wrong("tp", f" {tp} does not divide {name} {size}: choose {_right_tp(model, mesh, parallel)}")
    if model.kv_heads % tp and tp % model.kv_heads:
        raise wrong(
            "tp",
            f" {tp} neither divides kv_heads {model.kv_heads} nor is a multiple of it: choose "
            f"{_right_tp(model, mesh, parallel)}",
        )
    if model.vocab % tp and not parallel.pad_vocab:
        raise wrong(
            "tp",
            f" {tp} does not divide vocab {model.vocab}: pass --pad-vocab, which adds rows that the softmax ignores, "
            f"or choose {_right_tp(model, mesh, parallel)}",
        )
    if parallel.sequence_parallel and model.seq % tp:
        near = max(1, round(model.seq / tp)) * tp
        raise wrong("sequence_parallel", f": tp {tp} does not divide seq {model.seq}: choose seq {near}, for one")


def check_kept_inputs(mesh: MeshConfig, memory: MemoryConfig) -> None:
    """Check the options for inputs that full recompute stores. Raises: InputError.

    Partitioned inputs need no more than `check_tensor_parallel` asks: tp divides the heads, and so the width of every
    input.
    """
    for name in ("partition_activations", "cpu_checkpointing"):
        if getattr(memory, name) and not memory.again.every:
            raise wrong(
                name,
                f": recompute {memory.recompute!r} does not recompute whole blocks; pass --recompute full too, or "
                "leave it out",
            )
    if memory.offload_activations and memory.again.every:
        raise wrong(
            "offload_activations",
            f": recompute {memory.recompute!r} saves only the inputs of blocks; pass --cpu-checkpointing instead",
        )
    if memory.stash_window and not (memory.cpu_checkpointing or memory.offload_activations):
        choose = "pass --cpu-checkpointing or --offload-activations too"
        raise wrong("stash_window", f" {memory.stash_window}: no buffers are copied to the host; {choose}")
    if memory.partition_activations and mesh.tp == 1:
        raise wrong(
            "partition_activations",
            ": without tp no other rank has the same inputs; pass --tp 2 or more, or leave it out",
        )


def check_pipeline(
    model: ModelConfig, mesh: MeshConfig, parallel: ParallelConfig, data: DataConfig, optim: OptimConfig
) -> None:
    """Check that a pipeline divides the model. Raises: InputError."""
    pp = mesh.pp
    if pp == 1:
        for name in ("pipeline", "virtual_stages", "micro_batch_group", "stage_layers", "balance_ends"):
            if getattr(parallel, name):
                raise wrong(name, ": without pp there are no pipeline stages; pass --pp 2 or more, or leave it out")
        return
    if model.family == "mlp":
        raise wrong("pp", f" {pp}: model mlp does not support pipeline stages; choose gpt, llama or flat")
    if model.is_masked or model.is_second:
        raise wrong("pp", f" {pp}: an encoder ({model.family}) is trained on one pipeline stage only; choose pp 1")
    if parallel.balance_ends and model.family == "flat":
        raise wrong("balance_ends", ": model flat has no table and no head; leave it out, or choose gpt or llama")
    layers, word = (model.units or 0, "units") if model.family == "flat" else (model.layers, "layers")
    ends, lie = word == "layers", Chunks(pp, parallel.num_chunks, turns_back=parallel.pipeline == "zb-v")
    chunks = lie.last + 1
    if parallel.layers_given is None and chunks > layers + 2 * parallel.balance_ends:
        name = "virtual_stages" if parallel.pipeline == "interleaved" else "chunks"
        each = f" x {name} {parallel.num_chunks}" if parallel.num_chunks > 1 else ""
        balanced = ", or pass --balance-ends" if ends and layers + 2 == chunks else ""
        raise wrong(
            "pp",
            f" {pp}{each}: more than the model's {word}, {layers}; choose "
            f"{_fewer_stages(layers, word, mesh, parallel, data)}{balanced}",
        )
    cut_layers(layers, lie, given=parallel.layers_given, balance_ends=parallel.balance_ends, has_ends=ends, word=word)
    fewest = parallel.fewest_micro_batches(pp)
    if data.accumulate < fewest:
        times = "" if fewest == pp else f"{fewest // pp} x "
        raise wrong(
            "accumulate",
            f" {data.accumulate}: {parallel.pipeline} needs at least {times}pp {pp} microbatches; choose {fewest}, or "
            "--pipeline 1f1b",
        )
    if (group := parallel.micro_batch_group) is not None and not fits_group(group, pp, data.accumulate):
        fitting = [size for size in range(pp, data.accumulate + 1) if fits_group(size, pp, data.accumulate)]
        near = min(fitting, key=lambda size: abs(size - group))
        raise wrong(
            "micro_batch_group",
            f" {group}: of {data.accumulate} microbatches, every group (the last too) needs at least pp {pp}; "
            f"choose {near}",
        )
    if parallel.partition == "owner" and parallel.zero_stage and model.has_blocks and model.tie_embeddings:
        right = "pass --no-tie-embeddings" if OPTIMIZERS[optim.optimizer].cut == "matrices" else "choose slices"
        raise wrong("partition", f" 'owner': a table tied across pipeline stages has an owner on each of them; {right}")


def _fewer_stages(layers: int, word: str, mesh: MeshConfig, parallel: ParallelConfig, data: DataConfig) -> str:
    """Return 'pp 2': the most stages that are possible with the other options; if none are, a model of more layers."""
    ends = 2 * parallel.balance_ends
    for pp in range(min(mesh.pp, layers // parallel.num_chunks), 1, -1):
        uneven = mesh.ranks % replace(mesh.others, pp=pp).world_size, (layers + ends) % (pp * parallel.num_chunks)
        if uneven == (0, 0) and data.accumulate >= parallel.fewest_micro_batches(pp):
            return f"pp {pp}"
    chunks = mesh.pp * parallel.num_chunks
    return f"{word} {2 * chunks - ends if ends else chunks}"


def _right_tp(model: ModelConfig, mesh: MeshConfig, parallel: ParallelConfig) -> str:
    """Return 'tp 2 or 4': the sizes that this model and its ranks allow, nearest to the given one."""

    def fits(tp: int) -> bool:
        cut = [model.heads, model.ffn, mesh.ranks // replace(mesh.others, tp=1).world_size, max(tp, model.kv_heads)]
        cut += [] if parallel.pad_vocab else [model.vocab]
        cut += [model.seq] if parallel.sequence_parallel else []
        return not any(size % tp for size in cut) and not max(tp, model.kv_heads) % min(tp, model.kv_heads)

    below = max(tp for tp in range(1, mesh.tp) if fits(tp))
    above = next((tp for tp in range(mesh.tp + 1, model.heads + 1) if fits(tp)), None)
    return f"tp {below}" + (f" or {above}" if above else "")
