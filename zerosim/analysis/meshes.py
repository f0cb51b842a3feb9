"""The space of configurations that a search of meshes looks through: recipes, cuts, rows, recompute and schedules.

All have the same global batch. With recipe `usual` they are those that a framework runs: each recipe's ZeRO stages,
what it can recompute, and the schedules that it has. Rows are cut over as few ranks as the batch allows (`wider` cuts
them further). A vocabulary that tp does not divide is padded. ZeRO-2 and 3 appear beside a pipeline only if the
recipe's framework allows that: they reduce and gather once per microbatch (DeepSpeed refuses them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from math import gcd
from types import MappingProxyType
from typing import Any

from zerosim.analysis.candidate import accepted, candidate, candidate_at
from zerosim.analysis.capabilities import context, experts, offload, pipeline, tensor, tuning
from zerosim.analysis.recompute import ever_more_recompute, recompute_of
from zerosim.config import RunConfig
from zerosim.config.presets.recipes import FUSED_LOSS, USUAL, find_recipe, recipes_run
from zerosim.placement.mesh import Mesh

MOST_ROWS = 16
"""Rows of a microbatch to try, besides all of a rank's rows at once."""
LEAST_TOKENS = 1024
"""Tokens of a row that a rank keeps where rows are cut for memory alone."""
NOTHING: Mapping[str, Any] = MappingProxyType({})
NO_PIPELINE: Mapping[str, Any] = MappingProxyType(
    {"pipeline": None, "virtual_stages": None, "micro_batch_group": None, "balance_ends": False}
)


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
        "recipe": config.parallel.recipe,
        "sequence_parallel": tensor.divides_rows(config),
        "recompute": recompute_of(config),
        "pipeline": pipeline.schedule_name(config),
        "layers_by_stage": pipeline.layers_by_stage(config) if mesh.pp > 1 else None,
        "dp_replicate": mesh.dp_replicate,
        "micro_batch": config.data.micro_batch,
        "accumulate": config.data.accumulate,
        "offload": offload.where(config) or None,
    }


def ladders(
    config: RunConfig, global_batch: int, node: int, schedule: Mapping[str, Any] = NOTHING
) -> Iterator[list[RunConfig]]:
    """Yield for every possible mesh of `config`'s ranks, recipe, ZeRO stage and microbatch a list of configurations
    with ever more recompute. Tensor parallelism stays within a `node` and is sequence parallel if the rows allow it,
    which sends as much and holds less. A pipeline has the `schedule`, if one is given. A layer's experts are shared by
    nobody or by the most ranks. Offloaded states are always divided, also on one rank."""
    ranks, layers = config.mesh.ranks, config.model.layers
    for tp in [size for size in divisors(ranks) if node % size == 0]:
        for pp in [size for size in divisors(ranks // tp) if size <= max(layers // 2, min(layers, 16))]:
            data = ranks // Mesh(tp=tp, pp=pp).world_size
            cp = data // gcd(data, global_batch)
            own = global_batch * cp // data
            rows = [rows for rows in divisors(own) if rows <= MOST_ROWS or rows == own] if cp == 1 else [1]
            for recipe, stage in ways(config, tp, pp, data):
                fast = {"overlap": "all", "loss": FUSED_LOSS[recipe]} if recipe == "megatron" else {}
                usual = {name: value for name, value in fast.items() if name not in config.given}
                is_ds3 = recipe.endswith("deepspeed") and stage == 3  # its own layers of experts refuse that stage
                for among in [{}] if is_ds3 else experts.ways_to_cut(config, ranks // pp, tp, node):
                    shared = {"cp": cp} if cp > 1 else {}
                    cut = {"recipe": recipe, **usual, **among, **shared, **layers_cut(layers, pp)}
                    sizes = {"micro_batch": rows[0], "accumulate": own // rows[0], **cut, **schedule}
                    in_parts = (tp > 1, False)
                    tried = (arranged(config, ranks, tp, pp, stage, **sizes, sequence_parallel=sp) for sp in in_parts)
                    for asked in islice(filter(None, tried), 1):
                        of_rows = (candidate(asked, micro_batch=each, accumulate=own // each) for each in rows)
                        yield from map(ladder, accepted(of_rows))


def ways(config: RunConfig, tp: int, pp: int, data: int) -> Iterator[tuple[str, int]]:
    """Yield the recipes and ZeRO stages of such a mesh. A given recipe has its own stages. ZeRO stage 1 stands for 0
    except where another framework has 0, which `beside` tries."""
    given = config.given.get("recipe") if not config.precision.is_pure else "paper"
    alone = offload.stage_alone(config, pp)
    for stage in range(4) if data > 1 else (alone,):
        if given == USUAL:
            names = recipes_run(stage, is_cut=tp * pp > 1, has_adapters=tuning.has_adapters(config))
        else:
            names = (config.parallel.recipe,) if stage or data == 1 else ()
        for name in names:
            recipe = find_recipe(name)
            gathers_often = given == USUAL and pp > 1 and stage == 3  # once per microbatch: torchtitan avoids it
            if data == 1 or (stage in (recipe.pipelined if pp > 1 else recipe.stages) and not gathers_often):
                yield name, stage


def layers_cut(layers: int, pp: int) -> dict[str, Any]:
    """Return how a pipeline divides that many layers: evenly, the ends with one fewer, or as nearly so as possible, as
    the token table and the head take about a layer's time."""
    if layers % pp == 0:
        return {}
    if (layers + 2) % pp == 0:
        return {"balance_ends": True}
    counts = [-(-(layers + 2) // pp)] * pp
    order = [pp - 1, 0, *range(pp - 2, 0, -1)]  # those with fewer: the last, the first, then from the end
    for at in range(sum(counts) - layers):
        counts[order[at % pp]] -= 1
    return {"stage_layers": ",".join(map(str, counts))}


def fused_loss(config: RunConfig) -> dict[str, Any]:
    """Return the change to the fused loss of the recipe's users; none if a loss was given. Liger's needs the whole
    head."""
    loss = FUSED_LOSS.get(config.parallel.recipe)
    return {} if loss is None or "loss" in config.given or (loss == "liger" and config.mesh.tp > 1) else {"loss": loss}


def ladder(config: RunConfig) -> list[RunConfig]:
    """Return the configuration with ever more recompute. A fused loss comes before that."""
    (first, *others), lean = ever_more_recompute(config), fused_loss(config)
    more = [{"recompute": recompute, **lean} for recompute in ([first] if lean else []) + others]
    return list(accepted(candidate(config, **values) for values in ({"recompute": first}, *more)))


def wider(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the same batch with its rows cut over more of the data ranks, the fewest first, in the first way that the
    model allows."""
    mesh, seq = config.mesh, config.model.seq
    fewest = min(LEAST_TOKENS, seq // 8)
    for times in [times for times in divisors(mesh.axes.dp_shard)[1:] if seq // (mesh.cp * times) >= fewest]:
        more = {"cp": mesh.cp * times, "accumulate": config.data.accumulate * times}
        yield from islice(accepted(candidate(config, **more, **way) for way in ({}, {"context": "ulysses"})), 1)


def beside(config: RunConfig, node: int) -> Iterator[RunConfig]:
    """Yield the same mesh with another schedule, with overlap, with replicas that each fill a node, and with other ways
    to share rows, except for given options and what the recipe's framework lacks."""
    mesh, given, recipe, tried = config.mesh, config.given, config.parallel.recipe, list[Mapping[str, Any]]()
    if recipe == "paper":
        tried = [{"stage": 0}] if config.parallel.zero_stage == 1 else []
        tried += tensor.whole_rows(config)
    if "overlap" not in given and recipe in ("paper", "deepspeed"):
        tried.append({"overlap": "reduce" if recipe == "deepspeed" else "all"})
    if mesh.pp > 1 and "pipeline" not in given:
        tried += _schedules(config)
    tried += [*context.other_ways(config), *experts.other_cuts(config)]
    if config.data.micro_batch == 1 and recompute_of(config) != "none":
        yield from accepted(candidate(cut, recompute="none") for cut in wider(config))
    shards = max(1, node // (mesh.cp * mesh.tp))
    if config.parallel.zero_stage == 3 and mesh.dp_replicate == 1 and shards > 1 and mesh.axes.dp_shard % shards == 0:
        tried.append({"dp_replicate": mesh.axes.dp_shard // shards})
    yield from (changed for changed in accepted(candidate(config, **values) for values in tried) if changed != config)


def _schedules(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    """Yield other schedules: Megatron-LM interleaves, PyTorch has zero bubble too. All chunks have equal numbers of
    layers, but for the ends."""
    pp, layers = config.mesh.pp, config.model.layers
    for chunks in (2, 4, 8):
        for ends in (False, True):
            if (layers + 2 * ends) % (pp * chunks) == 0:
                cut = {"balance_ends": ends, "stage_layers": None}
                yield {"pipeline": "interleaved", "virtual_stages": chunks, **cut}
    if config.parallel.recipe != "megatron":
        yield {"pipeline": "zb-h1"}
        if (layers + pipeline.layer_steps(config)[1]) % (2 * pp) == 0:
            yield {"pipeline": "zb-v", "stage_layers": None}


def divisors(number: int) -> list[int]:
    """Return the divisors, ascending."""
    return [value for value in range(1, number + 1) if number % value == 0]


def arranged(config: RunConfig, ranks: int, tp: int, pp: int, stage: int, **more: Any) -> RunConfig | None:
    """Return the configuration on such a mesh, with `more` changes; None if the model cannot be cut this way."""
    inside = {"stage_layers": None} | more | tensor.on_ranks(config, tp, more.get("sequence_parallel"))
    inside |= NO_PIPELINE if pp == 1 else {}
    return candidate_at(config, stage, ranks=ranks, dp_replicate=1, tp=tp, pp=pp, **inside).config
