"""The ways to arrange ranks for a model: tensor, context and pipeline parallelism, ZeRO stage, microbatches, recompute.

Rows are cut over as few ranks as the batch allows (`wider` cuts them further). A vocabulary that tp does not divide is
padded. ZeRO-2 and 3 appear beside a pipeline only if the recipe's framework
allows that: they reduce and gather once per microbatch (DeepSpeed refuses them).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from math import gcd
from types import MappingProxyType
from typing import Any

from zerosim.analysis.candidate import accepted, candidate, candidate_at
from zerosim.analysis.capabilities import context, experts, offload, pipeline, tensor
from zerosim.analysis.recompute import ever_more_recompute, recompute_of
from zerosim.config import RunConfig
from zerosim.config.presets.recipes import find_recipe
from zerosim.placement.mesh import Mesh

MOST_ROWS = 16
"""Rows of a microbatch to try, besides all of a rank's rows at once."""


def mesh_values(config: RunConfig) -> dict[str, Any]:
    """Return the JSON form of the options that a search chooses."""
    mesh = config.mesh.axes
    return {
        "ranks": mesh.world_size,
        "pp": mesh.pp,
        "dp": mesh.dp_shard,
        "cp": mesh.cp,
        "context": context.way(config) or None,
        "tp": mesh.tp,
        **experts.sizes(config),
        "stage": config.parallel.zero_stage,
        "sequence_parallel": tensor.divides_rows(config),
        "recompute": recompute_of(config),
        "pipeline": pipeline.schedule_name(config),
        "dp_replicate": mesh.dp_replicate,
        "micro_batch": config.data.micro_batch,
        "accumulate": config.data.accumulate,
    }


def ladders(
    config: RunConfig, global_batch: int, node: int, schedule: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Sequence[RunConfig]]:
    """Yield for every possible mesh of `config`'s ranks, ZeRO stage and microbatch a list of configurations with ever
    more recompute. Tensor parallelism stays within a `node` and is sequence parallel if the rows allow it, which
    sends as much and holds less. For the same reason ZeRO stage 1 stands for 0. A pipeline has the `schedule`, if one
    is given. A layer's experts are shared by nobody or by the most ranks. Offloaded states are always divided, also on
    one rank."""
    ranks = config.mesh.ranks
    for tp, pp, divides in cuts(ranks, node, pipelined(config)):
        stage = divides or offload.stage_alone(config, pp)
        data = ranks // Mesh(tp=tp, pp=pp).world_size
        cp = data // gcd(data, global_batch)
        own = global_batch * cp // data
        for rows in [rows for rows in divisors(own) if rows <= MOST_ROWS or rows == own] if cp == 1 else [1]:
            sizes = {"micro_batch": rows, "accumulate": own // rows, **({"cp": cp} if cp > 1 else {}), **schedule}
            for among in experts.ways_to_cut(config, ranks // pp, tp, node):
                cut = {**sizes, **among}
                ways = (arranged(config, ranks, tp, pp, stage, **cut, sequence_parallel=sp) for sp in (tp > 1, False))
                if (asked := next(filter(None, ways), None)) is not None:
                    yield ladder(asked)


def ladder(config: RunConfig) -> list[RunConfig]:
    """Return the configuration with ever more recompute."""
    return list(accepted(candidate(config, recompute=recompute) for recompute in ever_more_recompute(config)))


def wider(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the same batch with its rows cut over more of the data ranks, the fewest first, in the first way that the
    model allows."""
    mesh = config.mesh
    for times in divisors(mesh.axes.dp_shard)[1:]:
        more = {"cp": mesh.cp * times, "accumulate": config.data.accumulate * times}
        yield from islice(accepted(candidate(config, **more, **way) for way in ({}, {"context": "ulysses"})), 1)


def pipelined(config: RunConfig) -> tuple[int, ...]:
    """Return the ZeRO stages that the recipe's framework allows in a pipeline."""
    return find_recipe(config.parallel.recipe).pipelined


def cuts(ranks: int, node: int, beside_pp: Collection[int]) -> Iterator[tuple[int, int, int]]:
    """Yield every tp, pp and ZeRO stage for that many ranks."""
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp) if tp <= node else ():
            dp = ranks // Mesh(tp=tp, pp=pp).world_size
            for stage in range(1, 4) if dp > 1 else (0,):
                if pp == 1 or dp == 1 or stage in beside_pp:
                    yield tp, pp, stage


def divisors(number: int) -> list[int]:
    """Return the divisors, ascending."""
    return [value for value in range(1, number + 1) if number % value == 0]


def arranged(config: RunConfig, ranks: int, tp: int, pp: int, stage: int, **more: Any) -> RunConfig | None:
    """Return the configuration on such a mesh, with `more` changes; None if the model cannot be cut this way."""
    inside = more | tensor.on_ranks(config, tp, more.get("sequence_parallel"))
    if pp == 1:
        inside |= {"pipeline": None, "virtual_stages": None, "micro_batch_group": None, "balance_ends": False}
    return candidate_at(config, stage, ranks=ranks, dp_replicate=1, tp=tp, pp=pp, stage_layers=None, **inside).config
