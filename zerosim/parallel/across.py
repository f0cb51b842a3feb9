"""The other mesh axes' work on each rank's shard of gradients after backward.

dp_replicate   hybrid sharding (HSDP, MiCS): the ranks that hold the same part average it
tp             ranks that compute shares of one gradient add them up
pp             a table that is tied to the head of another stage is held by both: its gradients are added
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.comm.groups import Groups
from zerosim.device.device import Buffer
from zerosim.parallel.shards import Shards
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import MODEL
from zerosim.tensor.flat import Flat, in_turn


def reduce(groups: Groups, layout: Layout, flats: Sequence[Flat], shards: Shards, *, averaged: bool) -> None:
    """Reduce each local shard over the other axes. `averaged`: backward has already averaged it over dp_replicate."""
    if not averaged:
        average_replicas(groups, flats)
    add_shares(groups, layout, flats)
    shards.gradients.end_backward(flats)


def average_replicas(groups: Groups, flats: Sequence[Flat]) -> None:
    """Average local shards over the ranks that hold the same one. Source: FSDP2, set_requires_all_reduce."""
    for flat in in_turn(reversed(flats)):  # the order in which backward produced them
        replicas = groups.replicas(*flat.held.axes, *flat.spec.cut_axes)
        if replicas is not None and flat.grad_shard is not None:
            with flat.device.scope(unit=flat.spec.module):
                replicas.all_reduce(flat.grad_shard)


def add_shares(groups: Groups, layout: Layout, flats: Sequence[Flat]) -> None:
    """Add up gradients of which several ranks hold shares: a table that two pipeline stages use; heads of keys and
    values that tensor-parallel ranks hold in copies; under sequence parallelism norms, positions and biases of
    row-parallel maps."""
    mesh = groups.mesh
    for flat in in_turn(reversed(flats)) if mesh.size(*MODEL) > 1 else ():
        ends = groups.ends("pp") if layout.is_tied(flat.name) else None
        if ends is not None and ends.size > 1 and flat.grad_shard is not None:
            with flat.device.scope(unit=flat.spec.module):
                ends.all_reduce(flat.grad_shard, op="sum")
        if mesh.size(*flat.spec.cut_axes) == 1:
            continue
        shared: dict[tuple[str, int], list[Buffer]] = {}
        for mine in flat.spec.within(flat.own):
            for sharers in mine.weight.shared_over(mesh):
                if flat.grad_shard is not None:
                    shared.setdefault(sharers, []).append(flat.grad_shard[mine.at : mine.at + mine.numel])
        with flat.device.scope(unit=flat.spec.module):
            for sharers, windows in shared.items():
                groups.neighbours(*sharers).all_reduce(windows, op="sum")
