"""ZeRO-3, P_os+g+p: parameters are partitioned too. Gather a unit, use it, free it.

    bytes per rank     (2 + 2 + K) Psi/N          half types; K = 12 for Adam
    volume per step    3 Psi (N-1)/N elements     all_gather forward, all_gather backward, reduce_scatter

ZeRO paper, sections 5.3 and 7.2.2. A tied buffer of V D elements is gathered at each of its uses and
reduced once: 3 Psi + 2 V D. With A micro-batches: 3 A Psi. Choices beyond the paper's:

    kept           units that stay gathered from forward to backward (all of them: FSDP's
                   reshard_after_forward=False, 2 Psi, and ZeRO-2's peak)
    keep_next      a unit that is used next once more stays gathered: the last one, whose backward
                   follows its forward (3 Psi less that unit)
    root           units that stay gathered until a micro-batch's backward ends,
                   and whose gradients are reduced then (FSDP2's root: tables, last norm, head)
    persistent     buffers that stay gathered for good, and are gathered once after each step
    cast_shards    the half-type shard is not stored, but cast from the fp32 master at each gather
    by module      units are leaf modules, such as one linear map (`nn/leaf.py`), with a buffer for each tensor:
                   DeepSpeed's granularity. A block that runs again in backward is then gathered for that, too
    prefetch       before a unit computes, the gathers of so many units after it are launched, and each is
                   waited for when its unit's turn comes. The volume stays, the peak grows by those units
    ahead          the same by elements, as DeepSpeed does: see `Ahead`
    overlap        a reduction is waited for when the next unit's begins, and its input is held until then
                   (`Strategy.overlaps`; FSDP2's reduce_scatter_state)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.device.device import Buffer, Device, Kind
from zerosim.nn import Unit
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.schedule import Use
from zerosim.tensor.flat import Flat


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far buffers are gathered ahead by elements (DeepSpeed's stage3_prefetch_bucket_size and max_live_parameters).

    numel      at each turn the next buffers of this forward or backward are launched until they are so many elements;
               the last one may go beyond. So what is ahead grows from turn to turn
    max_live   at a turn no more than what is missing to so many gathered elements, those under way included; 0: no
               limit. It holds back nothing but this: a unit's own parameters come at its turn, whatever is there

    What is there, or on its way, when a use of it is looked at is not launched for that use: if it is freed before, it
    is gathered when the turn comes. DeepSpeed keeps it then, and goes on from forward into backward: left out, as its
    max_reuse_distance is. Source: DeepSpeed edaa722, runtime/zero/partitioned_param_coordinator.py, fetch_sub_module.
    """

    numel: int = 0
    max_live: int = 0


class Zero3(Strategy):
    """Every rank holds its slice of everything. The keywords are the header's choices: units and buffers by name."""

    keeps_params = False
    keeps_grads = False

    def __init__(
        self,
        comm: Comm,
        device: Device,
        updater: Updater,
        *,
        kept: Collection[str] = (),
        keep_next: bool = False,
        root: Collection[str] = (),
        persistent: Collection[str] = (),
        cast_shards: bool = False,
        prefetch: int = 0,
        ahead: Ahead = Ahead(),
    ) -> None:
        super().__init__(comm, device, updater)
        self.kept = frozenset([*kept, *root])
        self.keep_next = keep_next
        self.root = frozenset(root)
        self.ended: list[Unit] = []  # root units whose backward is over
        self.persistent = frozenset(persistent)
        self.cast_shards = cast_shards
        self.num_prefetched = prefetch
        self._ahead = ahead
        self._gathers: dict[str, Work[Buffer]] = {}  # under way, by flat
        self._queue: deque[tuple[int, Use, Flat]] = deque()  # of the step's uses, those not looked at yet
        self._live = 0  # elements that are gathered, or under way, and will be freed

    def place(self, flats: Sequence[Flat], write: Callable[[Flat], None]) -> None:
        super().place(flats, write)
        self.open_buffers()
        for flat in flats:
            if flat.name in self.persistent:
                flat.unshard(self.gather(flat))

    def begin(self, uses: Sequence[Use]) -> None:
        super().begin(uses)
        if self._ahead.numel:
            self._queue = deque((at, use, flat) for at, use in enumerate(uses) for flat in use.unit.flats)

    def pre_forward(self, unit: Unit) -> None:
        self._come(unit)

    def post_forward(self, unit: Unit) -> None:
        if unit.name not in self.kept and not (self.keep_next and self.is_used_next(unit)):
            for flat in unit.flats:
                self.reshard(flat)

    def is_used_next(self, unit: Unit) -> bool:
        """Whether the next use is this unit's again, in another forward or backward."""
        return self.ends_action and any(use.unit is unit for use in Strategy.coming(self))

    def pre_backward(self, unit: Unit) -> None:
        self._come(unit)

    def post_backward(self, unit: Unit) -> None:
        if unit.name in self.root:
            self.ended.append(unit)
        else:
            self.finish(unit)
        if self.ends_action:  # backward is over, the root's turn has come
            for ended in self.ended:
                self.finish(ended)
            self.ended.clear()

    def finish(self, unit: Unit) -> None:
        """A unit's backward is over: its parameters go, its gradient is reduced."""
        for flat in unit.flats:
            if unit.reduces or flat.module not in self.kept:  # a shared buffer's other unit may still keep it
                self.reshard(flat)  # free before the reduction: lower peak
        for flat in unit.flats if unit.reduces else ():  # a tied buffer: after its last use only
            if self.buffers is not None:
                self.buffers.add(flat, [flat.take_grad()], self.launch_reduce)
            elif self.overlaps:
                self.reduce_beside(flat)
            else:
                self.keep_shard(flat, self.reduce(flat, flat.take_grad()))

    def _come(self, unit: Unit) -> None:
        """A unit's turn has come: its parameters are there, those of units to come on their way."""
        for flat in unit.flats:
            self._unshard(flat)
        self._prefetch()
        if self._queue:
            self._prefetch_elements()

    def _unshard(self, flat: Flat) -> None:
        """The whole parameters are there: as they are, or as they arrive, or gathered now."""
        work = self._gathers.pop(flat.name, None)
        if work is not None:
            full = work.wait()
            if full is not flat.param_shard:  # under an owner's partition it is the owner's own
                self.device.retag(full, Kind.UNSHARDED_PARAM)
            flat.unshard(full)
        elif flat.param is None:
            flat.unshard(self.gather(flat))
            self._live += flat.numel

    def _prefetch(self) -> None:
        """Of this forward's or backward's next units, those that are not there are under way, as many as are asked."""
        absent = (use.unit for use in self.rest_of_action() if any(flat.param is None for flat in use.unit.flats))
        for unit in islice(absent, self.num_prefetched):
            for flat in unit.flats:
                self._launch_ahead(unit, flat)

    def _launch_ahead(self, unit: Unit, flat: Flat) -> bool:
        """Gather a buffer for a unit to come, unless it is there or on its way."""
        if flat.param is not None or flat.name in self._gathers:
            return False
        with self.device.scope(unit=unit.name):
            self._gathers[flat.name] = self.launch_gather(flat)
        self._live += flat.numel
        return True

    def _prefetch_elements(self) -> None:
        """Of this forward's or backward's next buffers those that are not there are launched, by `ahead`."""
        most = self._ahead.numel
        if self._ahead.max_live:
            most = min(most, self._ahead.max_live - self._live)
        action, launched = self._uses[self._at - 1].action, 0
        while self._queue:
            at, use, flat = self._queue[0]
            if at >= self._at and (launched >= most or use.action != action):
                return
            self._queue.popleft()
            if at >= self._at and self._launch_ahead(use.unit, flat):
                launched += flat.numel

    def publish_params(self, flat: Flat) -> None:
        if flat.name in self.persistent:
            flat.reshard()  # the old parameters go before the new ones come
            flat.unshard(self.gather(flat))

    def reshard(self, flat: Flat) -> None:
        """The whole parameters go, unless they stay for good."""
        if flat.name not in self.persistent:
            self._live -= flat.numel if flat.param is not None else 0
            flat.reshard()

    def shard(self, flat: Flat, kind: Kind = Kind.COMM) -> Buffer:
        """The own slice of the parameters, to be sent; a buffer of `kind` where it is cast for that."""
        return flat.cast_shard(kind) if self.casts(flat) else flat.shard()

    def casts(self, flat: Flat) -> bool:
        return self.cast_shards and flat.master is not None

    def gather(self, flat: Flat) -> Buffer:
        """The whole parameters, padding included, in a new buffer."""
        return self.comm.all_gather(self.shard(flat))

    def launch_gather(self, flat: Flat) -> Work[Buffer]:
        """The same, under way. A slice that is cast is cast where it will lie, so that nothing else waits with it."""
        if not self.casts(flat):
            return self.comm.launch_all_gather(flat.shard(), kind=Kind.PREFETCHED_PARAM)
        full = self.device.alloc((flat.padded_numel,), flat.dtype, Kind.PREFETCHED_PARAM)
        own = full[flat.own.start : flat.own.stop]
        flat.cast_into(own)
        return self.comm.launch_all_gather(own, out=full)

    def reduce(self, flat: Flat, grad: Buffer) -> Buffer | None:
        """The own slice of a whole gradient, averaged; None on a rank that has no part of it."""
        return self.comm.reduce_scatter(grad, out=flat.new_grad_shard())
