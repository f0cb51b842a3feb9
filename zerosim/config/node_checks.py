"""Checks of a mesh against nodes, and of ZeRO++ against the rest: possible second shards and nodes, and the nearest
valid choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerosim.dtypes import dtype
from zerosim.errors import wrong

if TYPE_CHECKING:
    from zerosim.config.run import RunConfig


def node_of(ranks_per_node: int, tp: int) -> int:
    """Return the members of dp_shard that share a node with so many ranks, tp's among them."""
    return max(1, ranks_per_node // tp)


def between(shards: int) -> list[int]:
    """Return the sizes of groups that divide `shards` ranks, without 1 and all of them."""
    return [size for size in range(2, shards) if shards % size == 0]


def choices(shards: int, otherwise: str, *, times: int = 1) -> str:
    """Return 'choose 2 or 4': the sizes that divide so many ranks; `otherwise` if there are none."""
    sizes = [str(times * size) for size in between(shards)]
    return f"choose {' or '.join(sizes)}" if sizes else otherwise


def check_node(shards: int, tp: int, secondary: int, ranks_per_node: int) -> None:
    """Check how many of dp_shard's ranks share a node. Raises: InputError."""
    right = choices(shards, f"dp_shard {shards} has no divisor between 1 and {shards}; choose more ranks")
    if secondary == 1:
        raise wrong(
            "secondary_shard", f" 1: every rank would keep whole parameters, as in stage 2; {right}, or stage 2"
        )
    if secondary and secondary == shards:
        raise wrong(
            "secondary_shard",
            f" {secondary}: the secondary shard would equal the first one, cut over dp_shard; {right}",
        )
    if secondary and shards % secondary:
        raise wrong("secondary_shard", f" {secondary} does not divide dp_shard {shards}; {right}")
    if not ranks_per_node:
        return
    if ranks_per_node >= tp and ranks_per_node % tp:
        raise wrong("ranks_per_node", f" {ranks_per_node}: tp {tp} does not divide it; choose a multiple of {tp}")
    node = node_of(ranks_per_node, tp)
    if shards % node:
        fitting = choices(shards, f"choose {shards * tp}", times=tp)
        raise wrong("ranks_per_node", f" {ranks_per_node}: {node} does not divide dp_shard {shards}; {fitting}")
    if secondary not in (0, node):
        raise wrong(
            "secondary_shard",
            f" {secondary}: must be the ranks of dp_shard on a node, {node} with ranks_per_node {ranks_per_node}; "
            f"choose {node}, or leave one of them out",
            beside="ranks_per_node",
        )


def check_zeropp(config: RunConfig) -> None:
    """Check ZeRO++ and MiCS against formats, mesh and model. Raises: InputError."""
    mesh, kept = config.mesh.axes, dtype(config.precision.stored)
    codes = {
        "quantized_weights": config.gathering.quantized_weights,
        "quantized_gradients": config.reduction.quantized_gradients,
    }
    for name in (name for name, is_on in codes.items() if is_on):
        if kept.itemsize > 4:
            raise wrong(
                name,
                f": codes replace values of 16 or 32 bits, and the parameters are {kept}; choose fp32, bf16 or fp16",
            )
        if mesh.tp > 1:
            why = "the copies of a weight would be rounded differently on each rank"
            raise wrong(name, f": not with tp {mesh.tp}, {why}; leave one of them out", beside="tp")
        if mesh.dp_shard == 1:
            raise wrong(name, ": dp_shard 1 sends nothing; choose more ranks, or leave it out")
    hops = {
        "quantized_gradients": codes["quantized_gradients"],
        "hierarchical_gather": config.gathering.hierarchical_gather,
    }
    for name in (name for name, is_on in hops.items() if is_on):
        if 1 in (mesh.node, mesh.nodes):
            given = f", and ranks_per_node is {config.mesh.ranks_per_node}" if config.mesh.ranks_per_node else ""
            sizes = [str(mesh.tp * size) for size in between(mesh.dp_shard)]
            right = f"pass --ranks-per-node {' or '.join(sizes)}" if sizes else "choose 4 ranks of dp_shard or more"
            raise wrong(name, f": communicates both within a node and across nodes{given}; {right}")
    if config.tuning.is_on:
        for name, is_on in {**codes, **hops, "secondary_shard": bool(config.mesh.secondary_shard)}.items():
            if is_on:
                raise wrong(name, ": works only where all parameters are trained; leave it out, or freeze nothing")
