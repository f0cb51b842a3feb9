"""The step of one rank: the optimizer on the own parts of its flats, and the new parameters published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from zerosim.comm.groups import Groups
from zerosim.config.zero import GradMemory
from zerosim.device.device import Buffer
from zerosim.optim.updater import Updater
from zerosim.placement.partition import EvenSlices, WholeUnits
from zerosim.tensor.flat import Flat


def step(
    updater: Updater,
    flats: Sequence[Flat],
    scale: float,
    memory: GradMemory,
    groups: Groups,
    publish: Callable[[Flat], None],
) -> None:
    """Update what is trained, flat by flat, with gradients that are multiplied by `scale`; `publish` each one.

    An owner of whole flats updates all that it has before the first broadcast: flat by flat the owners would wait for
    each other's updates, one after the other.
    """
    trained = [flat for flat in flats if flat.is_trained]
    updater.make_states(trained)
    for together in updater.groups(trained):
        if memory.upcast:
            _upcast(together, memory, is_first=together[0] is trained[0])
        waiting = []
        with updater.temporaries(together):
            for flat in together:
                updater.update(flat, scale, partial(_add, groups, flat))
                flat.store_param_shard()  # fp32 master -> own slice, no traffic
                flat.drop_grads()
                if isinstance(flat.rows["optim"].partition, WholeUnits):
                    waiting.append(flat)
                else:
                    publish(flat)
        for flat in waiting:
            publish(flat)


def estimate(updater: Updater, flats: Sequence[Flat], scale: float | None) -> None:
    """In place of a step where gradients are those on drawn labels: update what the optimizer estimates of the own
    parts. No weight moves, so nothing is published; None: nothing is updated either."""
    for flat in flats:
        if scale is not None and flat.is_trained:
            updater.make_states([flat])
            with flat.device.scope(unit=flat.module):
                updater.estimate(flat, scale)
        flat.drop_grads()


def _add(groups: Groups, flat: Flat, sums: Buffer) -> None:
    """An optimizer's sums over the weights of a flat's own slice, added over the ranks that have the others."""
    if isinstance(flat.rows["optim"].partition, EvenSlices):
        groups(*flat.axes).all_reduce(sums, op="sum")


def _upcast(flats: Sequence[Flat], memory: GradMemory, *, is_first: bool) -> None:
    """These flats' own slices in fp32, beside the half-type ones; then those go (DeepSpeed's order)."""
    copies = [flat.upcast_grad_shard() for flat in flats]
    if is_first:  # of several groups
        flats[0].device.mark("gradients_upcast")
    for flat, shard in zip(flats, copies, strict=True):
        if shard is not None:
            flat.drop_grads()
            flat.grad_shard = shard
            if memory.keep_upcast:
                flat.grad_upcast = shard
