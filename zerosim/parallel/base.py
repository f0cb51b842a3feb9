"""What every strategy is: a few points that the engine calls, and how a flat is placed at the start.

A strategy file (`ddp.py`, `zero1.py`, ...) holds what happens at those points: the collectives. What
is common to all stands here: placing parameters and optimizer states, the gradients' norm, the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.comm.groups import Groups
from zerosim.device.device import Buffer, Device, Kind
from zerosim.errors import NonFiniteGradient
from zerosim.nn import Unit
from zerosim.optim.precision import norm_partials, total_norm
from zerosim.optim.updater import Updater
from zerosim.parallel.bucket import ReduceBuffers
from zerosim.parallel.norm import blame, norm_rows
from zerosim.parallel.schedule import Use
from zerosim.placement.layout import Layout, Row, Rows
from zerosim.placement.mesh import COPIES, DATA, Mesh
from zerosim.placement.partition import EvenSlices, Partition, Slice, Whole
from zerosim.tensor.accumulation import GradProbe
from zerosim.tensor.flat import Flat

T = TypeVar("T")


class Strategy:
    """The points, all empty. `last`: this is the step's last micro-batch.

    `comm` is the group that divides the model states, of N ranks; all its members call the same collectives in the
    same order.
    """

    partition: Partition = EvenSlices()  # how what is not kept whole is cut
    keeps_params = True  # every rank holds all parameters between uses
    keeps_grads = True  # every rank holds all gradients until the step
    sees_all_grads = False  # every rank sees every reduced gradient, so nothing need be exchanged
    cast_shards = False  # the half-type shard is cast from the master at each use, not stored
    overlaps = False  # backward goes on while gradients are reduced
    updates_first = False  # all own parts are updated before new parameters are published, not flat by flat

    def __init__(self, comm: Comm, device: Device, updater: Updater) -> None:
        self.comm = comm
        self.device = device
        self.updater = updater
        self.flats: list[Flat] = []
        self.layout = Layout(Mesh(dp_shard=comm.size), [], self.rows())
        self.mesh_rank = comm.rank
        self.groups: Groups | None = None  # of a mesh of several axes
        self.everyone = comm  # all ranks of the mesh
        self.replicas: Comm | None = None  # the ranks that hold the same parts as this one
        self.buffers: ReduceBuffers | None = None  # of constant size, through which gradients are reduced
        self.allgather_bucket = 0  # elements of one through which new parameters arrive; 0: where they belong
        self.reduces_each_micro_batch = False
        self.last = True
        self._uses: Sequence[Use] = ()
        self._at = 0  # uses that have begun
        self._under_way: deque[tuple[Work[Any], Callable[[Any], None]]] = deque()

    def join(self, groups: Groups, layout: Layout, *, at_each_micro_batch: bool = False) -> None:
        """Take a place in a mesh of several axes; `comm` is the group along `dp_shard`, `layout` that of all ranks.

        dp_replicate   hybrid sharding (HSDP, MiCS): gradients are reduced within `comm` as ever, then the own parts are
                       averaged over the replicas, once a step or, where stages 2 and 3 reduce each micro-batch, in each
                       of them. Source: FSDP2, set_requires_all_reduce
        tp             the ranks hold parts of weights: their norms add up, and where they work out shares of one
                       gradient, the shares do
        pp             a table that is tied to the head of another stage is held by both: its gradients are added
        """
        self.groups = groups
        self.layout = layout
        self.mesh_rank = self.device.rank
        self.everyone = groups("pp", *DATA, "tp")
        if groups.mesh.size(*COPIES) > 1:
            self.replicas = groups(*COPIES)
        self.reduces_each_micro_batch = at_each_micro_batch and not self.keeps_grads

    # -- what comes, and what is under way ----------------------------------------------------------
    def begin(self, uses: Sequence[Use]) -> None:
        """A step begins, in which units are used in this order, those of `schedule.uses_of`."""
        self._uses, self._at = uses, 0
        for flat in self.flats:
            flat.begin_step()

    def enter(self) -> None:
        """The next use begins: its points follow. Outside of a step nothing is known of what comes."""
        if self._at < len(self._uses):
            self.last = self._uses[self._at].action.slot == self._uses[-1].action.slot
            self._at += 1

    def coming(self, count: int = 1) -> Sequence[Use]:
        """The next uses, `count` of them or as many as there are, after the one that is on."""
        return self._uses[self._at : self._at + count]

    @property
    def ends_action(self) -> bool:
        """Whether the use that is on is the last one of its forward or backward."""
        following = Strategy.coming(self)  # an answer of a student may call something of its own `coming`
        return not following or following[0].action != self._uses[self._at - 1].action

    def rest_of_action(self) -> Iterator[Use]:
        """The uses that follow in the forward or backward that is on. Outside of a step there are none."""
        for at in range(self._at, len(self._uses)):
            if not self._at or self._uses[at].action != self._uses[self._at - 1].action:
                return
            yield self._uses[at]

    def later(self, work: Work[T], then: Callable[[T], None]) -> None:
        """When `work` has arrived, which is asked for in `land`, do `then` with its result."""
        self._under_way.append((work, then))

    def land(self) -> None:
        """Wait for all that is under way, in the order in which it was launched."""
        while self._under_way:
            work, then = self._under_way.popleft()
            then(work.wait())

    # -- the points -------------------------------------------------------------------------------
    def pre_forward(self, unit: Unit) -> None:
        """Before a unit's forward: its whole parameters must be there."""

    def post_forward(self, unit: Unit) -> None:
        """After it: they may go."""

    def pre_backward(self, unit: Unit) -> None:
        """Before its backward: they must be there again."""

    def post_backward(self, unit: Unit) -> None:
        """After it: where `unit.reduces`, the flat's gradient of this micro-batch is complete (`Flat.take_grad`)."""

    def end_backward(self) -> None:
        """After the last micro-batch's backward: what still waits to be reduced."""

    def publish_params(self, flat: Flat) -> None:
        """After the update of a flat's own slice: bring it to the ranks that hold the whole."""

    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> tuple[Work[Any], Callable[[Any], None]]:
        """Reduce whole gradients in one call, and keep the own parts when it has arrived."""
        shards = []
        for flat in flats:
            with self.device.scope(unit=flat.module):
                shards.append(flat.new_grad_shard())

        def keep(_: Any) -> None:
            for flat, shard in zip(flats, shards, strict=True):
                with self.device.scope(unit=flat.module):
                    self.keep_shard(flat, shard)

        return self.comm.launch_reduce_scatter(grads, out=shards), keep

    def reduce_beside(self, flat: Flat) -> None:
        """Reduce a flat's finished gradient while backward goes on. The reduction before lands first: no more than one
        input is held beside the gradient that backward makes."""
        self.land()
        self.later(*self.launch_reduce([flat], [flat.take_grad()]))

    def open_buffers(self) -> None:
        """A backward begins: what gradients are reduced out of must be there."""
        if self.buffers is not None:
            self.buffers.open(self.flats[0].grad_dtype)

    def close_buffers(self) -> None:
        """It is over: what is left there is reduced. What is under way lands, unless its input is kept anyway."""
        if self.buffers is not None:
            self.buffers.flush(self.launch_reduce)
        if self.overlaps and not self.keeps_grads:
            self.land()

    def keep_shard(self, flat: Flat, grad: Buffer | None) -> None:
        """Keep the own part of a micro-batch's reduced gradient (None: there is none)."""
        if self.replicas is not None and self.reduces_each_micro_batch and grad is not None:
            self.replicas.all_reduce(grad)
        flat.add_grad_shard(grad)

    def reduce_replicas(self) -> None:
        """Average the own parts over the ranks that hold the same ones: once a step, when backward ends."""
        if self.replicas is None or self.reduces_each_micro_batch:
            return
        for flat in reversed(self.flats):  # the order in which backward left them
            if flat.grad_shard is not None:
                with self.device.scope(unit=flat.module):
                    self.replicas.all_reduce(flat.grad_shard)

    def reduce_shares(self) -> None:
        """Add up gradients of which several ranks hold shares: a table that two pipeline stages use; heads of keys and
        values that tensor-parallel ranks hold in copies; under sequence parallelism norms, positions, row biases."""
        if self.groups is None:
            return
        stages = self.layout.stages
        for flat in reversed(self.flats):
            ends = self.groups.ends("pp") if sum(flat.name in names for names in stages) > 1 else None
            if ends is not None and ends.size > 1 and flat.grad_shard is not None:
                with self.device.scope(unit=flat.module):
                    ends.all_reduce(flat.grad_shard, op="sum")
            if self.groups.mesh.tp == 1:
                continue
            shared: dict[int, list[Buffer]] = {}
            for mine in flat.spec.within(flat.own):
                sharers = mine.weight.sharers(self.groups.mesh.tp)
                if sharers > 1 and flat.grad_shard is not None:
                    shared.setdefault(sharers, []).append(flat.grad_shard[mine.at : mine.at + mine.numel])
            with self.device.scope(unit=flat.module):
                for sharers, windows in shared.items():
                    self.groups.neighbours("tp", sharers).all_reduce(windows, op="sum")

    def step(self) -> None:
        """Decide by the norm; then flat by flat update the own slice and publish the new parameters (owners update all
        that is theirs first). Or skip.

        Raises: NonFiniteGradient, LossScaleExhausted.
        """
        scale = self.reduce_grad_norm()
        if scale is not None:
            for group in self.updater.groups(self.flats):
                self._step_together(group, scale)
        for flat in self.flats:
            flat.drop_grads()

    def estimate(self) -> None:
        """In place of `step` where gradients are those on drawn labels: flat by flat update what the optimizer
        estimates of the own slice. No weight moves, so nothing is published, and nothing is clipped.

        Raises: NonFiniteGradient.
        """
        norm = self._reduced_norm()
        try:
            scale = self.updater.control.unscale(norm)
        except NonFiniteGradient:
            raise self._blame() from None
        for flat in self.flats:
            if scale is not None:
                with self.device.scope(unit=flat.module):
                    self.updater.estimate(flat, scale)
            flat.drop_grads()

    def _step_together(self, flats: Sequence[Flat], scale: float) -> None:
        if self.updater.grad_memory.upcast:
            self._upcast_grads(flats)
        with self.updater.temporaries(flats):
            for flat in flats:
                self.updater.update(flat, scale, self.add_sums)
                flat.store_param_shard()  # fp32 master -> own slice, no traffic
                flat.drop_grads()
                if not self.updates_first:
                    self.publish_params(flat)
        for flat in flats if self.updates_first else ():
            self.publish_params(flat)

    def add_sums(self, sums: Buffer) -> None:
        """An optimizer's sums over the weights of a flat's own slice, added over the ranks that have the others."""
        if isinstance(self.partition, EvenSlices):
            self.comm.all_reduce(sums, op="sum")

    def _upcast_grads(self, flats: Sequence[Flat]) -> None:
        """These flats' own slices in fp32, beside the half-type ones; then those go (DeepSpeed's order)."""
        copies = [flat.upcast_grad_shard() for flat in flats]
        if flats[0] is self.flats[0]:  # of several groups the first
            self.device.mark("gradients_upcast")
        for flat, shard in zip(flats, copies, strict=True):
            if shard is not None:
                flat.drop_grads()
                flat.grad_shard = shard
                if self.updater.grad_memory.keep_upcast:
                    flat.grad_upcast = shard

    # -- placing ----------------------------------------------------------------------------------
    @classmethod
    def rows(cls) -> Rows:
        """How each model state is held: whole where it is kept, else in the partition's parts."""
        kept, cut = Row(Whole()), Row(cls.partition)
        return {
            "param": kept if cls.keeps_params else cut,
            "grad": kept if cls.keeps_grads else cut,
            "optim": cut,
        }

    def owned(self, flat: Flat) -> Slice:
        """The part of a flat that this rank updates."""
        return self.layout.part(self.mesh_rank, flat.name, "optim")

    def padded(self, flat: Flat) -> int:
        """Elements of a whole buffer, padding included."""
        return self.layout.padded(flat.name, "optim")

    def place(self, flats: Sequence[Flat], write: Callable[[Flat], None]) -> None:
        """Take memory for one flat after the other and `write` its weights, each before the next."""
        self.flats = list(flats)
        if self.groups is None:
            self.layout = Layout(self.layout.mesh, [flat.spec for flat in flats], self.rows())
        for flat in flats:
            with self.device.scope(unit=flat.module):
                self._place(flat)
                write(flat)

    def _place(self, flat: Flat) -> None:
        own = flat.own = self.owned(flat)
        flat.padded_numel = self.padded(flat)
        flat.place_grads(self.updater.grad_memory, flat.dtype, keeps_whole=self.keeps_grads)
        flat.probe = GradProbe(self.device) if self.updater.control.stops_at_nonfinite else None
        if self.keeps_params:
            flat.param = self._alloc_param(flat, Slice(0, flat.padded_numel, flat.numel))
            flat.param_shard = flat.param[own.start : own.stop]
        elif not (self.cast_shards and flat.dtype.is_half):
            flat.param_shard = self._alloc_param(flat, own)
        self.updater.allocate(flat)

    def _alloc_param(self, flat: Flat, part: Slice) -> Buffer:
        param = self.device.alloc((part.size,), flat.dtype, Kind.PARAM, padding=flat.spec.padding(part))
        for start, stop in flat.spec.gaps(part):
            self.device.kernel(0, self.device.backend.fill, param[start:stop].array, 0.0)
        return param

    # -- the norm ---------------------------------------------------------------------------------
    def reduce_grad_norm(self) -> float | None:
        """What gradients are to be multiplied by (unscaled, clipped), or None: all ranks skip this step.

        One exchange of one fp64 number per slice carries the norm and, being inf or nan then, any
        overflow.

        Raises: NonFiniteGradient naming rank and unit, where nothing says that such steps are skipped;
        LossScaleExhausted.
        """
        norm = self._reduced_norm()
        try:
            return self.updater.decide(norm)
        except NonFiniteGradient:
            raise self._blame() from None

    def _reduced_norm(self) -> float:
        """That of all ranks' gradients as they are."""
        partials = norm_partials(
            self.device, self.flats, self.comm.size, *norm_rows(self.layout, self.mesh_rank, self.flats)
        )
        if not self.sees_all_grads:
            self.comm.all_reduce(partials, op="sum", purpose="control")
        if self.groups is not None:
            for axis in ("tp", "pp"):
                if self.layout.mesh.size(axis) > 1:
                    self.groups(axis).all_reduce(partials, op="sum", purpose="control")
        return total_norm(self.device, partials)

    def _blame(self) -> NonFiniteGradient:
        names = [flat.name for flat in self.flats] if self.groups is None else list(self.layout.flats)
        return blame(self.everyone, self.flats, names)
