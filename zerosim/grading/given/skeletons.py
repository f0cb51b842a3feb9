"""Skeletons: the parts to write raise NotImplementedError. The solutions are in notebooks/solutions.

The runs that a solution must pass are in `catalogue.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from zerosim.backends.kernels import Array
from zerosim.comm.collectives import Comm
from zerosim.device.copies import launch_copy
from zerosim.device.device import Buffer, Kind
from zerosim.nn import Unit
from zerosim.optim.elementwise import Elementwise, Now
from zerosim.optim.precision import norm_partials, total_norm
from zerosim.parallel.base import Strategy
from zerosim.parallel.schedule import Action, Forward, InputGrad
from zerosim.parallel.tensor import Borders
from zerosim.parallel.zero2 import Zero2
from zerosim.parallel.zero3 import Zero3
from zerosim.tensor.flat import Flat, Slice


def slice_of(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return (start, stop) of a rank's slice. All slices have one length; the last may reach past numel."""
    raise NotImplementedError("slice_of: return where the rank's slice starts and stops")


def all_reduce(comm: Comm, grad: Buffer) -> None:
    """Replace every rank's grad by the mean over ranks, in place. N divides grad.numel."""
    raise NotImplementedError("all_reduce: call comm.reduce_scatter, then comm.all_gather")


class MyDDP(Strategy):
    sees_all_grads = True  # every rank sees all of every gradient: the norm needs no exchange

    def owned(self, flat: Flat) -> Slice:
        raise NotImplementedError("owned: return the Slice(start, stop, flat.numel) that a rank updates")

    def padded(self, flat: Flat) -> int:
        return flat.numel

    def post_backward(self, unit: Unit) -> None:
        raise NotImplementedError("post_backward: keep the gradient, reduce it, and name it grad_shard")


class MyZero1(Strategy):
    def post_backward(self, unit: Unit) -> None:
        raise NotImplementedError("post_backward: keep the gradient whole, reduce its local slice")

    def publish_params(self, flat: Flat) -> None:
        raise NotImplementedError("publish_params: every rank gets the others' new parameters")


class MyZero2(Strategy):
    keeps_grads = False  # no rank holds a whole gradient until the step

    def post_backward(self, unit: Unit) -> None:
        raise NotImplementedError("post_backward: reduce the unit's gradient, keep your slice")

    def publish_params(self, flat: Flat) -> None:
        raise NotImplementedError("publish_params: every rank gets the others' new parameters")


class MyZero3(Strategy):
    keeps_params = False
    keeps_grads = False

    def pre_forward(self, unit: Unit) -> None:
        raise NotImplementedError("pre_forward: gather the unit's parameters")

    def post_forward(self, unit: Unit) -> None:
        raise NotImplementedError("post_forward: free them")

    def pre_backward(self, unit: Unit) -> None:
        raise NotImplementedError("pre_backward: gather them again")

    def post_backward(self, unit: Unit) -> None:
        raise NotImplementedError("post_backward: free them, then reduce the gradient")


class MyTied(Zero3):
    """ZeRO-3 is written, except what follows a unit's backward. lm_head and wte share one flat."""

    def post_backward(self, unit: Unit) -> None:
        raise NotImplementedError("post_backward: free; reduce the table's gradient once, when it is complete")


class MyAccumulation(Zero2):
    """ZeRO-2 is written, except what follows a unit's backward, which runs once per microbatch."""

    def add(self, total: Buffer, more: Buffer) -> None:
        self.device.kernel(more.numel, self.device.backend.add, total.array, more.array, total.array)

    def post_backward(self, unit: Unit) -> None:
        raise NotImplementedError("post_backward: reduce this microbatch's gradient, add it onto flat.grad_shard")


class MyClipping(Zero2):
    """ZeRO-2 is written, except the norm: a rank has the squares of its own slices only."""

    def reduce_grad_norm(self) -> float | None:
        squares = norm_partials(self.device, self.flats, self.comm.size)  # (flats, N), 0 where others count
        raise NotImplementedError("reduce_grad_norm: sum squares over all ranks; clip by their norm")
        return self.updater.decide(total_norm(self.device, squares))


class MyPrefetch(Zero3):
    """ZeRO-3 is written, except the gathers: begin the next unit's before this one computes."""

    def pre_forward(self, unit: Unit) -> None:
        raise NotImplementedError("pre_forward: wait for this unit's gather, launch the next one's")

    def pre_backward(self, unit: Unit) -> None:
        raise NotImplementedError("pre_backward: the same in the opposite order")


class MyBorders(Borders):
    """f and g. `comm` is the group of ranks that a layer is cut over."""

    def f_forward(self, comm: Comm, x: Buffer) -> Buffer:
        raise NotImplementedError("f_forward: return the columns' input")

    def f_backward(self, comm: Comm, dx: Buffer) -> Buffer:
        raise NotImplementedError("f_backward: return the whole of dx")

    def g_forward(self, comm: Comm, y: Buffer) -> Buffer:
        raise NotImplementedError("g_forward: return the whole of y")

    def g_backward(self, comm: Comm, dy: Buffer) -> Buffer:
        raise NotImplementedError("g_backward: return the rows' gradient")


def my_1f1b(
    num_stages: int,
    stage: int,
    micro_batches: int,
    chunks: int = 1,
) -> list[Action]:
    """Return the actions of a stage, from 0, in a step. chunks is 1."""
    raise NotImplementedError("my_1f1b: return the list of actions")


def my_zb_h1(
    num_stages: int,
    stage: int,
    micro_batches: int,
    chunks: int = 1,
) -> list[Action]:
    """Return 1F1B with its backwards in two parts. chunks is 1."""
    ahead = num_stages - stage - 1
    actions: list[Action] = [Forward(slot) for slot in range(ahead)]
    for slot in range(ahead, micro_batches):
        actions += [Forward(slot), InputGrad(slot - ahead)]
    for slot in range(micro_batches - ahead, micro_batches):
        actions += [InputGrad(slot)]
    raise NotImplementedError("my_zb_h1: add the weight gradients")


class MyArena:
    """A region of `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self.holes = {0: capacity}  # size by address
        self.live: dict[int, int] = {}  # the same, of reserved parts

    def reserve(self, nbytes: int) -> int | None:
        """Return the address of nbytes (1 at least); None: no hole."""
        raise NotImplementedError("reserve: choose a hole, and split it")

    def release(self, address: int) -> None:
        """Free the bytes reserved there."""
        raise NotImplementedError("release: open a hole, and merge it")


def my_compaction(live: dict[int, int]) -> list[tuple[int, int, int]]:
    """Return moves (source, target, size). `live` has sizes by address."""
    raise NotImplementedError("my_compaction: return the moves")


def my_depth(compute: list[int], gather: list[int]) -> int:
    """Return how many units to gather ahead. Seconds of each, in order."""
    raise NotImplementedError("my_depth: return a number of units")


def my_micro_batches(
    num_stages: int,
    chunks: int,
    share: Fraction,
) -> int:
    """Return how many keep the bubble at `share` of the work at most."""
    raise NotImplementedError("my_micro_batches: return a number")


class MyAdaGrad(Elementwise):
    """Every weight has the sum of its squared gradients."""

    states = ("sum",)
    flops = 7
    eps = 1e-8

    def rule(
        self,
        xp: Any,
        w: Array,
        g: Array,
        now: Now,
        *states: Array,
    ) -> None:
        """Update w. xp: numpy. now: lr, step (from 1), weight_decay."""
        raise NotImplementedError("rule: move w and states[0], in place")


class MyRAdam(Elementwise):
    """Adam that knows how far exp_avg_sq can be trusted."""

    states = ("exp_avg", "exp_avg_sq")
    flops = 14
    beta1, beta2, eps = 0.9, 0.999, 1e-8

    def rule(
        self,
        xp: Any,
        w: Array,
        g: Array,
        now: Now,
        *states: Array,
    ) -> None:
        """Update w. m, v = states."""
        raise NotImplementedError("rule: move m, v and w, in place")


def my_quantiser(values: Array, table: Array) -> tuple[Array, float]:
    """Return codes (uint8) and the scale of a block. table is sorted."""
    raise NotImplementedError("my_quantiser: return codes, scale")


def my_rounding(values: Array, drawn: Array) -> Array:
    """Round to bf16, stored as float32. drawn: uint32 below 2**16."""
    raise NotImplementedError("my_rounding: return the rounded values")


def my_adapter(
    x: Array,
    w: Array,
    a: Array,
    b: Array,
    scale: float,
    dy: Array,
) -> tuple[Array, Array, Array, Array]:
    """y, dx, da, db of y = x Wᵀ + scale (x Aᵀ) Bᵀ. W (O, I) is frozen."""
    raise NotImplementedError("my_adapter: return y, dx, da, db")


def my_nf4(values: Array, table: Array) -> tuple[Array, float]:
    """Codes, two a byte, first one high; and absmax. 16 entries."""
    raise NotImplementedError("my_nf4: return codes, absmax")


def my_top_k(
    grad: Array,
    residual: Array,
    k: int,
) -> tuple[Array, Array, Array]:
    """Return the places and values to send, and the new residual."""
    raise NotImplementedError("my_top_k: return places, values, residual")


def my_powersgd(m: list[Array], q: Array) -> tuple[Array, Array]:
    """Return the mean's approximation, and Q. m: ranks' matrices."""
    raise NotImplementedError("my_powersgd: return approximation, q")


class MySecondShard(Zero3):
    """ZeRO-3 is written, except the gathers. self.node are the ranks of this node; self.second has a buffer for each
    flat, by its name, and self.old the names of those that hold old parameters."""

    def place(self, flats: Sequence[Flat], write: Callable[[Flat], None]) -> None:
        super().place(flats, write)
        self.node = self.groups("node")
        sizes = {flat.name: flat.padded_numel // self.node.size for flat in flats}
        self.second = {flat.name: self.device.alloc((sizes[flat.name],), flat.dtype, Kind.PARAM) for flat in flats}
        self.old = set(self.second)

    def copy(self, source: Buffer, target: Buffer) -> None:
        self.device.kernel(0, self.device.backend.copy, source.array, target.array)

    def pre_forward(self, unit: Unit) -> None:
        raise NotImplementedError("pre_forward: gather over all ranks; copy the secondary shard if it is outdated")

    def pre_backward(self, unit: Unit) -> None:
        raise NotImplementedError("pre_backward: gather within the node")

    def publish_params(self, flat: Flat) -> None:
        raise NotImplementedError("publish_params: remember that the flat was updated")


class MyCpuAdam(Zero2):
    """ZeRO-2 is written, except the copies over PCIe. flat.master and the moments lie on the host, flat.shard() is a
    window of the device's parameters."""

    tile = 512  # elements that go back at once

    def carry(self, source: Buffer, target: Buffer) -> None:
        """Copy from one memory to the other, and wait on both sides. dtypes may differ; source's bytes are sent."""
        copy = launch_copy(source, target, after="cpu" if source.memory == "host" else "compute")
        copy.wait("cpu")
        copy.wait()

    def cast(self, source: Buffer, target: Buffer) -> None:
        """Cast within one memory."""
        self.device.kernel(0, self.device.backend.copy, source.array, target.array)

    def post_backward(self, unit: Unit) -> None:
        raise NotImplementedError("post_backward: reduce the unit's gradient, copy your slice to the host")

    def update(self, flat: Flat, scale: float) -> None:
        raise NotImplementedError("update: update the flat on the host, copy its new parameters back tile by tile")

    def step(self) -> None:
        scale = self.reduce_grad_norm()
        for flat in self.flats:
            if scale is not None:
                self.update(flat, scale)
                self.publish_params(flat)
            flat.drop_grads()


def my_offload(
    psi: int,
    room: dict[str, int],
    links: dict[str, int],
    compute: int,
    update: dict[str, int],
) -> tuple[str, str, str]:
    """Return where optimizer, gradients and parameters lie. psi: billions of parameters. room: GB. links: GB/s, each
    way. compute, update: seconds."""
    raise NotImplementedError("my_offload: return three of 'device', 'host', 'nvme'")


def my_merge(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
) -> tuple[Array, Array]:
    """Merge two blocks: out (queries, d) and lse (queries,) of each."""
    raise NotImplementedError("my_merge: return out, lse")


def my_pieces(ranks: int) -> list[list[int]]:
    """Return the pieces of each rank, of 2 * ranks, numbered from 0."""
    raise NotImplementedError("my_pieces: return a list for each rank")


def my_exchange(parts: list[Array], back: bool) -> list[Array]:
    """Return what each rank has then. Axes: tokens, heads, columns."""
    raise NotImplementedError("my_exchange: cut along an axis, and join")


def my_router(
    logits: Array,
    ids: Array,
    grad: Array,
    normed: bool,
) -> Array:
    """Return dlogits (tokens, experts). ids and grad: (tokens, k)."""
    raise NotImplementedError("my_router: return dlogits")


def my_bias(
    scores: Array,
    bias: Array,
    top_k: int,
    rate: float,
) -> tuple[Array, Array]:
    """Return weights (ranks, tokens, k), and the next bias (experts).
    scores: (ranks, tokens, experts)."""
    raise NotImplementedError("my_bias: return weights, bias")


def my_dispatch(
    counts: Array,
    rank: int,
) -> tuple[Array, Array, Array]:
    """Return sends, receives and order. counts: (ranks, experts)."""
    raise NotImplementedError("my_dispatch: return sends, receives, order")


def my_average(
    grads: list[tuple[Array, Array]],
    ep: int,
) -> list[tuple[Array, Array]]:
    """Return (dense, experts) for each rank, as `grads` has them."""
    raise NotImplementedError("my_average: return a pair for each rank")


def my_auto(
    config: dict[str, Any],
    hidden: int,
    micro: int,
    accumulate: int,
    ranks: int,
) -> tuple[dict[str, Any], list[str]]:
    """Return the filled file, and the keys that contradict the Trainer."""
    raise NotImplementedError("my_auto: return the file and a list of keys")


def my_hole(
    files: dict[int, list[tuple[str, int, int]]],
    sizes: dict[str, int],
    ranks: int,
) -> tuple[int, str, int, int] | None:
    """Return (rank, tensor, start, stop) of what no file has, or None."""
    raise NotImplementedError("my_hole: return four values, or None")


def my_recut(
    pieces: list[tuple[int, int, Array]],
    numel: int,
    ranks: int,
) -> list[tuple[int, int, Array]]:
    """Return (start, stop, values) for each rank, rank 0 first."""
    raise NotImplementedError("my_recut: return a piece for each rank")


def my_scale(values: Array, block: tuple[int, int]) -> Array:
    """Return each block's scale. values: float32 (rows, columns)."""
    raise NotImplementedError("my_scale: return a scale for each block")
