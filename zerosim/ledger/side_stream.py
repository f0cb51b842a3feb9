"""ZeRO-3's reductions in a side stream, as DeepSpeed runs them (overlap_comm, its default at stage 3).

DeepSpeed copies a gradient into the bucket, reduces it and adds the result in one stream beside compute. Compute
waits for that stream at the end of a microbatch's backward. The next copy queues in the stream after the
reduction, so one bucket is enough. Here the rank waits for a reduction when the next one begins, or when backward ends,
and uses its result then.

In DeepSpeed gathers and reductions have two communicators. In the clock they share one stream: both use the same links,
which carry one after the other as fast as both at once.

Source: deepspeedai/DeepSpeed 007cca6, runtime/zero/stage3.py (reduce_and_partition_stream; __add_grad_to_ipg_bucket,
__reduce_and_partition_ipg_grads, independent_gradient_partition_epilogue); utils/groups.py (_clone_world_group, the
reductions' group), zero/partition_parameters.py (Init: the gathers' group is the world).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zerosim.device.device import Phase
from zerosim.device.events import COMPUTE, Copy, Launch, Wait
from zerosim.ledger.entries import Busy, Entry
from zerosim.placement.axes import what_for
from zerosim.placement.memories import DEVICE

_REDUCTIONS = ("reduce_scatter", "all_reduce", "reduce")
_KEEPS = ("copy", "accumulate")


def beside(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Return entries of single kernels, with each wait for a reduction deferred, and the use of its result with it."""
    reductions, copies = set[int](), set[int | None]()  # copies of results to another memory
    put_off, pending, slot = list[Entry](), set[int | None](), -1  # what is deferred, its copies, its backward
    follows = False  # the last deferred entry belongs to the same use
    for entry in entries:
        now = entry.scope.slot if entry.scope.phase == Phase.BACKWARD else -1
        is_reduction = isinstance(entry, Launch) and entry.op in _REDUCTIONS and _is_of_states(entry)
        if now != slot or is_reduction:
            yield from put_off
            put_off, pending, follows, slot = [], set(), False, now
        if isinstance(entry, Launch) and is_reduction and now >= 0:
            reductions.add(entry.work)
        waits = isinstance(entry, Wait) and (entry.work in pending or (follows and entry.work in copies))
        if isinstance(entry, Wait) and entry.work in reductions:
            follows = True
            put_off.append(entry)
        elif waits or (follows and _uses(entry)):
            put_off.append(entry)
            if isinstance(entry, Copy):
                copies.add(entry.work)
                pending.add(entry.work)
        else:
            follows = follows and not isinstance(entry, Busy | Launch) and not _is_by_compute(entry)
            yield entry
    yield from put_off


def _is_of_states(entry: Launch) -> bool:
    return entry.purpose == "states" and what_for(entry.axis) == "states"


def _uses(entry: Entry) -> bool:
    """Return whether an entry behind a reduction stores its result: a kernel, or a copy away from the device."""
    if isinstance(entry, Busy):
        return entry.name in _KEEPS or entry.place != DEVICE
    return isinstance(entry, Copy) and entry.target != DEVICE


def _is_by_compute(entry: Entry) -> bool:
    return isinstance(entry, Wait) and entry.by == COMPUTE
