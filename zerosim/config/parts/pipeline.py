"""Pipeline parallelism: options of `mesh.py` and `parallel.py`, and the nearest sizes that divide a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from zerosim.config.option import Exclusion
from zerosim.config.parts.data import DataConfig
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import InputError, wrong
from zerosim.placement.stages import Chunks, cut_layers, fits_group, smallest_group


def chunks_of(mesh: MeshConfig, parallel: ParallelConfig) -> Chunks:
    """Return the place of a pipeline's chunks of layers."""
    return Chunks(mesh.pp, parallel.num_chunks, turns_back=parallel.pipeline == "zb-v")


def group_of(mesh: MeshConfig, parallel: ParallelConfig, data: DataConfig) -> int:
    """Return how many microbatches pass through a chunk before the next one's turn."""
    if parallel.pipeline != "interleaved":
        return 1
    return parallel.micro_batch_group or smallest_group(mesh.pp, data.accumulate)


def cut(layers: int, mesh: MeshConfig, parallel: ParallelConfig, model: ModelConfig) -> list[int]:
    """Return how many of so many layers are in each chunk, in the model's order. Raises: InputError."""
    given, ends, has_ends = parallel.layers_given, parallel.balance_ends, model.family != "flat"
    word = "layers" if has_ends else "units"
    return cut_layers(layers, chunks_of(mesh, parallel), given=given, balance_ends=ends, has_ends=has_ends, word=word)


EXCLUSIONS = (Exclusion("balance_ends", "stage_layers", "stage_layers already divides the layers"),)


def rules(
    mesh: MeshConfig, model: ModelConfig, parallel: ParallelConfig, data: DataConfig, optim: OptimConfig
) -> Iterator[InputError]:
    """Yield what a pipeline does not divide. Raises: InputError for a `stage_layers` that is no list of them."""
    pp = mesh.pp
    if pp == 1:
        for name in ("pipeline", "virtual_stages", "micro_batch_group", "stage_layers", "balance_ends"):
            if getattr(parallel, name):
                yield wrong(name, ": without pp there are no pipeline stages; pass --pp 2 or more, or leave it out")
        return
    if model.family == "mlp":
        yield wrong("pp", f" {pp}: model mlp does not support pipeline stages; choose gpt, llama or flat")
        return
    if model.is_masked or model.is_second:
        yield wrong("pp", f" {pp}: an encoder ({model.family}) is trained on one pipeline stage only; choose pp 1")
    if parallel.balance_ends and model.family == "flat":
        yield wrong("balance_ends", ": model flat has no table and no head; leave it out, or choose gpt or llama")
    layers, word = (model.units or 0, "units") if model.family == "flat" else (model.layers, "layers")
    chunks = chunks_of(mesh, parallel).last + 1
    if parallel.layers_given is None and chunks > layers + 2 * parallel.balance_ends:
        name = "virtual_stages" if parallel.pipeline == "interleaved" else "chunks"
        each = f" x {name} {parallel.num_chunks}" if parallel.num_chunks > 1 else ""
        balanced = ", or pass --balance-ends" if word == "layers" and layers + 2 == chunks else ""
        yield wrong(
            "pp",
            f" {pp}{each}: more than the model's {word}, {layers}; choose "
            f"{_fewer_stages(layers, word, mesh, parallel, data)}{balanced}",
        )
        return
    cut(layers, mesh, parallel, model)
    fewest = parallel.fewest_micro_batches(pp)
    if data.accumulate < fewest:
        times = "" if fewest == pp else f"{fewest // pp} x "
        yield wrong(
            "accumulate",
            f" {data.accumulate}: {parallel.pipeline} needs at least {times}pp {pp} microbatches; choose {fewest}, or "
            "--pipeline 1f1b",
        )
    if (group := parallel.micro_batch_group) is not None and not fits_group(group, pp, data.accumulate):
        fitting = [size for size in range(pp, data.accumulate + 1) if fits_group(size, pp, data.accumulate)]
        near = min(fitting, key=lambda size: abs(size - group))
        yield wrong(
            "micro_batch_group",
            f" {group}: of {data.accumulate} microbatches, every group (the last too) needs at least pp {pp}; "
            f"choose {near}",
        )
    if parallel.partition == "owner" and parallel.zero_stage and model.has_blocks and model.tie_embeddings:
        right = "pass --no-tie-embeddings" if OPTIMIZERS[optim.optimizer].cut == "matrices" else "choose slices"
        yield wrong("partition", f" 'owner': a table tied across pipeline stages has an owner on each of them; {right}")


def _fewer_stages(layers: int, word: str, mesh: MeshConfig, parallel: ParallelConfig, data: DataConfig) -> str:
    """Return 'pp 2': the most stages that are possible with the other options; if none are, a model of more layers."""
    ends = 2 * parallel.balance_ends
    for pp in range(min(mesh.pp, layers // parallel.num_chunks), 1, -1):
        uneven = mesh.ranks % replace(mesh.others, pp=pp).world_size, (layers + ends) % (pp * parallel.num_chunks)
        if uneven == (0, 0) and data.accumulate >= parallel.fewest_micro_batches(pp):
            return f"pp {pp}"
    chunks = mesh.pp * parallel.num_chunks
    return f"{word} {2 * chunks - ends if ends else chunks}"


def schedule_given(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the options that name a schedule; None for those that it needs not."""
    kind = parallel.pipeline_schedule
    chunks = parallel.num_chunks if kind == "interleaved" else None
    return {"pipeline": None if kind == "1f1b" else kind, "virtual_stages": chunks}


WORDS = (
    ("parallelism.pipeline_parallel_microbatch_size", "--micro-batch B, with the microbatches in --accumulate"),
    ("vpp virtual_pipeline* num_virtual_stages*", "--pipeline interleaved --virtual-stages V"),
    ("num_layers_per_virtual_pipeline_stage", "--pipeline interleaved --virtual-stages V, for layers / (pp V) each"),
    ("*pipeline_parallel_schedule", "--pipeline 1f1b, gpipe, interleaved, zb-h1 or zb-v"),
    ("account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split", "--balance-ends, for both"),
    (
        "decoder_*_pipeline_num_layers pipeline_model_parallel_layout parallelism.pipeline_parallel_*_layers "
        "parallelism.pipeline_parallel_layers_per_stage",
        "--stage-layers L,L,...",
    ),
)
