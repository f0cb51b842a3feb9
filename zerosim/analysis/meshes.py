"""The ways to arrange ranks for a model: tensor and pipeline parallelism, ZeRO stage, microbatches, recompute.

A vocabulary that tp does not divide is padded. ZeRO-2 and 3 stand beside a pipeline where the recipe's framework has
them there: they reduce and gather once per microbatch (DeepSpeed refuses them).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from zerosim.analysis.search import ever_more_recompute
from zerosim.config import RunConfig
from zerosim.config.presets.recipes import find_recipe
from zerosim.errors import InputError
from zerosim.placement.mesh import Mesh

MOST_ROWS = 16
"""Of a microbatch, but for all of a rank's rows at once."""


def mesh_values(config: RunConfig) -> dict[str, Any]:
    """The JSON form of what a search chooses."""
    mesh, parallel = config.mesh.axes, config.parallel
    return {
        "ranks": mesh.world_size,
        "pp": mesh.pp,
        "dp": mesh.shards,
        "tp": mesh.tp,
        "stage": parallel.zero_stage,
        "sequence_parallel": parallel.sequence_parallel,
        "recompute": config.memory.recompute,
        "pipeline": parallel.pipeline_schedule if mesh.pp > 1 else None,
        "dp_replicate": mesh.dp_replicate,
        "micro_batch": config.data.micro_batch,
        "accumulate": config.data.accumulate,
    }


def ladders(
    config: RunConfig, global_batch: int, node: int, schedule: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Sequence[RunConfig]]:
    """For every mesh of `config`'s ranks, ZeRO stage and microbatch that the model and the batch can be cut for: ever
    more recompute. Tensor parallelism stays within a `node` and is sequence parallel where the rows allow it, which
    sends as much and holds less; so stage 1 stands for 0. A pipeline has that `schedule`, where one is asked for."""
    ranks = config.mesh.ranks
    for tp, pp, stage in cuts(ranks, node, pipelined(config)):
        own, uneven = divmod(global_batch * Mesh(tp=tp, pp=pp).world_size, ranks)
        micro_batches = [] if uneven else [rows for rows in divisors(own) if rows <= MOST_ROWS or rows == own]
        for rows in micro_batches:
            sizes = {"micro_batch": rows, "accumulate": own // rows, **schedule}
            ways = (arranged(config, ranks, tp, pp, stage, **sizes, sequence_parallel=cut) for cut in (tp > 1, False))
            if (asked := next(filter(None, ways), None)) is not None:
                yield [asked.replace(recompute=recompute) for recompute in ever_more_recompute(config)]


def pipelined(config: RunConfig) -> tuple[int, ...]:
    """ZeRO stages that its framework has in a pipeline."""
    return find_recipe(config.parallel.recipe).pipelined


def cuts(ranks: int, node: int, beside_pp: Collection[int]) -> Iterator[tuple[int, int, int]]:
    """Every tp, pp and ZeRO stage that so many ranks are arranged in."""
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp) if tp <= node else ():
            dp = ranks // Mesh(tp=tp, pp=pp).world_size
            for stage in range(1, 4) if dp > 1 else (0,):
                if pp == 1 or dp == 1 or stage in beside_pp:
                    yield tp, pp, stage


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [value for value in range(1, number + 1) if number % value == 0]


def arranged(config: RunConfig, ranks: int, tp: int, pp: int, stage: int, **more: Any) -> RunConfig | None:
    """The configuration on such a mesh, with `more` changes; None where the model cannot be cut so."""
    rows = tp > 1 and more.get("sequence_parallel", config.parallel.sequence_parallel)
    inside: dict[str, Any] = {
        **more,
        "sequence_parallel": rows,
        "keep_gathered": rows and config.parallel.keep_gathered,
    }
    uneven = config.model.has_blocks and config.model.vocab % tp > 0
    inside["pad_vocab"] = tp > 1 and (config.parallel.pad_vocab or uneven)
    if pp == 1:
        inside |= {"pipeline": None, "virtual_stages": None, "balance_ends": False}
    try:
        return config.at_stage(stage, ranks=ranks, dp_replicate=1, tp=tp, pp=pp, stage_layers=None, **inside)
    except InputError:
        return None
