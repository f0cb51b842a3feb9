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
from zerosim.device.events import Copy, Launch, Wait
from zerosim.ledger.entries import Busy, Entry
from zerosim.placement.mesh import what_for

_REDUCTIONS = ("reduce_scatter", "all_reduce", "reduce")
_KEEPS = ("copy", "accumulate")


def beside(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Return entries of single kernels, with each wait for a reduction deferred."""
    reductions, put_off, slot = set[int](), list[Entry](), -1  # the deferred wait, and its microbatch's backward
    copies = set[int | None]()  # of the result, to another memory
    follows = False  # the last deferred entry is a wait, or a kernel that stores the result
    for entry in entries:
        now = entry.scope.slot if entry.scope.phase == Phase.BACKWARD else -1
        is_reduction = isinstance(entry, Launch) and entry.op in _REDUCTIONS and what_for(entry.axis) == "states"
        if now != slot or is_reduction:
            yield from put_off
            put_off, follows, slot = [], False, now
        if isinstance(entry, Launch) and is_reduction and now >= 0:
            reductions.add(entry.work)
        if isinstance(entry, Wait) and entry.work in reductions:
            put_off.append(entry)
            follows = True
        elif follows and isinstance(entry, Busy) and entry.name in _KEEPS:
            put_off.append(entry)
        elif follows and (isinstance(entry, Copy) or (isinstance(entry, Wait) and entry.work in copies)):
            put_off.append(entry)
            copies.add(entry.work)
        else:
            follows = follows and not isinstance(entry, Busy | Launch | Wait)
            yield entry
    yield from put_off
