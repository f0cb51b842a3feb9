"""One rank's step: update the local shards of its flats, and publish the new parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from zerosim.comm.groups import Groups
from zerosim.config.parts.grads import GradMemory
from zerosim.device.device import Buffer
from zerosim.optim.updater import Updater
from zerosim.parallel.published import regather
from zerosim.parallel.shards import Shards
from zerosim.parallel.upcast import upcast
from zerosim.placement.memories import DEVICE
from zerosim.placement.partition import EvenSlices, WholeUnits
from zerosim.tensor.flat import Flat, in_turn


def begin(updater: Updater, flat: Flat, memory: GradMemory) -> None:
    """Begin a step of one flat: free what outlived the last one, and begin a new sum of gradients."""
    updater.upcasts.pop(flat.name, None)
    if memory.keep_shards:
        flat.drop_grads()
    flat.begin_step()


def end(flat: Flat, memory: GradMemory) -> None:
    """End a flat's update: free its gradient, unless it outlives the step."""
    if not memory.keep_shards:
        flat.drop_grads()


def step(
    updater: Updater,
    flats: Sequence[Flat],
    scale: float,
    memory: GradMemory,
    groups: Groups,
    shards: Shards,
    publish: Callable[[Flat], None],
) -> None:
    """Update trained flats, one by one, with gradients that are multiplied by `scale`; `publish` each one.

    An owner of whole flats updates all of them before the first broadcast. Flat by flat, the owners would wait for each
    other's updates, one after the other.
    """
    trained = [flat for flat in flats if flat.spec.is_trained]
    on_device = shards.step.place == DEVICE
    if not on_device:
        updater.make_states(trained)
    for together in shards.step.tiles(updater.groups(trained)):
        device, waiting = together[0].device, []
        with device.at(shards.step.place):  # on the host, where the CPU steps
            if memory.upcast:
                is_first = together[0] is trained[0]
                upcast(together, updater.upcasts if memory.keep_upcast else {}, is_first, flatten=memory.flatten)
            if on_device:
                updater.make_states(together)
            with updater.temporaries.of_flats(together, updater.stored, is_one=memory.flatten):
                for flat in in_turn(together):
                    with updater.temporaries.of_tensor(flat, updater.stored, is_one=memory.flatten):
                        updater.update(flat, scale, partial(_add, groups, flat))
                    shards.step.store(flat)  # fp32 master -> own slice, no traffic between ranks
                    end(flat, memory)
                    if isinstance(flat.held.rows["optim"].partition, WholeUnits):
                        waiting.append(flat)
                    else:
                        with device.at(DEVICE):
                            publish(flat)
        for flat in in_turn(waiting):
            publish(flat)
    regather(flats, publish)


def _add(groups: Groups, flat: Flat, sums: Buffer) -> None:
    """Add an optimizer's sums over the weights of the local slice to those of the ranks with the other slices."""
    if isinstance(flat.held.rows["optim"].partition, EvenSlices):
        groups(*flat.held.axes).all_reduce(sums, op="sum")
