"""ZeRO++ and MiCS: options of `mesh.py`, `gathering.py` and `reduction.py`."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.config.option import Exclusion
from zerosim.config.parts.gathering import Gathering
from zerosim.config.parts.mesh import MeshConfig, between
from zerosim.config.parts.precision import PrecisionConfig
from zerosim.config.parts.reduction import Reduction
from zerosim.config.parts.tuning import TuningConfig
from zerosim.dtypes import dtype
from zerosim.errors import InputError, wrong

EXCLUSIONS = (
    Exclusion("secondary_shard", "partition", "owners hold whole units and have no secondary shard"),
    Exclusion("secondary_shard", "reshard_after_forward", "without resharding, backward gathers nothing"),
    Exclusion("quantized_weights", "partition", "the owner sends parameters in place"),
    Exclusion("quantized_gradients", "partition", "the owner reduces gradients in place"),
    Exclusion("quantized_gradients", "compress", "both choose how gradients are encoded"),
    Exclusion("hierarchical_gather", "partition", "the owner sends parameters in place"),
    Exclusion("hierarchical_gather", "quantized_weights", "int8 codes are gathered in one hop"),
)


def has_second_shard(mesh: MeshConfig) -> bool:
    """Return whether backward gathers hpZ's secondary shard."""
    return mesh.secondary_shard > 0


def rules(
    given: MeshConfig, gathering: Gathering, reduction: Reduction, precision: PrecisionConfig, tuning: TuningConfig
) -> Iterator[InputError]:
    """Yield what ZeRO++ and MiCS refuse of formats, mesh and model."""
    mesh, kept = given.axes, dtype(precision.stored)
    codes = {
        "quantized_weights": gathering.quantized_weights,
        "quantized_gradients": reduction.quantized_gradients,
    }
    for name in (name for name, is_on in codes.items() if is_on):
        if kept.itemsize > 4:
            yield wrong(
                name,
                f": codes replace values of 16 or 32 bits, and the parameters are {kept}; choose fp32, bf16 or fp16",
            )
        if mesh.tp > 1:
            why = "the copies of a weight would be rounded differently on each rank"
            yield wrong(name, f": not with tp {mesh.tp}, {why}; leave one of them out", beside="tp")
        if mesh.shards == 1:
            yield wrong(name, ": dp_shard 1 sends nothing; choose more ranks, or leave it out")
    hops = {
        "quantized_gradients": codes["quantized_gradients"],
        "hierarchical_gather": gathering.hierarchical_gather,
    }
    if mesh.cp > 1:
        for name, is_on in {**hops, "secondary_shard": bool(given.secondary_shard)}.items():
            if is_on:
                why = f"is not modelled with cp {mesh.cp}, which cuts model states too"
                yield wrong(name, f": {why}; leave one of them out", beside="cp")
    for name in (name for name, is_on in hops.items() if is_on):
        if 1 in (mesh.node, mesh.nodes):
            node = f", and ranks_per_node is {given.ranks_per_node}" if given.ranks_per_node else ""
            sizes = [str(mesh.tp * size) for size in between(mesh.dp_shard)]
            right = f"pass --ranks-per-node {' or '.join(sizes)}" if sizes else "choose 4 ranks of dp_shard or more"
            yield wrong(name, f": communicates both within a node and across nodes{node}; {right}")
    if tuning.is_on:
        for name, is_on in {**codes, **hops, "secondary_shard": bool(given.secondary_shard)}.items():
            if is_on:
                yield wrong(name, ": works only where all parameters are trained; leave it out, or freeze nothing")


WORDS = (
    ("mics_hierarchical*", "--hierarchical-gather, with --ranks-per-node R"),
    ("zero_hpz* hpz", "--secondary-shard G, for G ranks of a node"),
    ("zeropp zero_plus_plus", "--secondary-shard G --quantized-weights --quantized-gradients"),
)
