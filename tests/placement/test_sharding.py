"""Slices, owners and flat buffers: every element belongs somewhere exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.device.device import Device, Kind
from zerosim.dtypes import DType, bf16, fp16, fp32, fp64
from zerosim.ledger.memory import MemoryLedger
from zerosim.parallel.exchange import Slices
from zerosim.parallel.reducer import InBuckets
from zerosim.parallel.upcast import upcast_grad_shard
from zerosim.placement.partition import assign_owners
from zerosim.placement.rows import Held
from zerosim.tensor.flat import Flat, Slice, nothing, slice_of, slice_size, whole
from zerosim.tensor.sums import GradProbe
from zerosim.tensor.tensor import cpu

NUMELS = st.integers(1, 10**13)
RANKS = st.integers(1, 2048)


# -- slices ------------------------------------------------------------------------------------------------
@given(NUMELS, RANKS)
def test_slices_cover_every_element_once(numel: int, ranks: int) -> None:
    slices = [slice_of(numel, rank, ranks) for rank in range(ranks)]
    assert slices[0].start == 0
    assert all(one.stop == next.start for one, next in itertools.pairwise(slices))
    assert slices[-1].stop >= numel
    assert {part.size for part in slices} == {slice_size(numel, ranks)}


@given(NUMELS, RANKS)
def test_padding_is_what_is_too_much_and_no_more_than_it_must_be(numel: int, ranks: int) -> None:
    slices = [slice_of(numel, rank, ranks) for rank in range(ranks)]
    assert sum(part.padding for part in slices) == slices[-1].stop - numel < ranks
    assert all(0 <= part.padding <= part.size for part in slices)
    held = [part.size - part.padding for part in slices]
    assert held == sorted(held, reverse=True)  # what is padding lies at the end
    assert sum(held) == numel


@given(NUMELS)
def test_one_rank_pads_nothing(numel: int) -> None:
    assert slice_of(numel, 0, 1) == whole(numel)
    assert (whole(numel).size, whole(numel).padding) == (numel, 0)
    assert (nothing(numel).size, nothing(numel).padding) == (0, 0)


def test_padding_of_a_real_bug_hunt() -> None:
    """266,240 elements on 768 ranks (DeepSpeed #1422, #6974): all padding was taken to lie on the last rank."""
    ours = [slice_of(266_240, rank, 768) for rank in range(768)]
    assert (ours[0].size, [part.padding for part in ours]) == (347, [0] * 767 + [256])
    # Aligned to 2 x 768 as there: 267,264 elements, of which 1,024 are padding, over three ranks.
    aligned = [Slice(348 * rank, 348 * (rank + 1), 266_240) for rank in range(768)]
    assert [part.padding for part in aligned] == [0] * 765 + [328, 348, 348]


# -- owners ------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=60), st.integers(1, 40))
def test_owners_are_balanced(sizes: list[int], ranks: int) -> None:
    owners = assign_owners(tuple(sizes), ranks)
    load = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert len(owners) == len(sizes)
    assert sum(load) == sum(sizes)
    # The last buffer of the fullest rank went there when that rank was the emptiest.
    fullest = load.index(max(load))
    assert max(load) - min(size for size, owner in zip(sizes, owners, strict=True) if owner == fullest) <= min(load)
    if len(sizes) <= ranks:
        assert max(load) == max(sizes)


def test_owners_by_hand() -> None:
    assert assign_owners((5, 3, 3, 2, 1), 2) == (0, 1, 1, 0, 1)  # loads 5 0; 5 3; 5 6; 7 6; 7 7
    assert assign_owners((4, 4, 4), 2) == (0, 1, 0)
    assert assign_owners((1, 9), 4) == (1, 0)
    assert assign_owners((4, 4), 2) == (0, 1)  # of equal ones the first goes first


# -- flats -------------------------------------------------------------------------------------------------
SHAPES = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


def declared(shapes: list[tuple[int, ...]], dtype: DType = fp64, device: Device | None = None) -> Flat:
    flat = Flat("flat", device or cpu(), dtype, dtype)
    for i, shape in enumerate(shapes):
        flat.declare(f"p{i}", shape)
    return flat


def values_of(flat: Flat) -> list[Any]:
    """1, 2, 3, ... over the layout, cut into the parameters."""
    placed = zip(flat.spec.weights, flat.spec.offsets, strict=True)
    return [1.0 + offset + np.arange(spec.numel).reshape(spec.shape) for spec, offset in placed]


@given(SHAPES, st.integers(1, 9))
def test_what_ranks_write_is_the_whole(shapes: list[tuple[int, ...]], ranks: int) -> None:
    pieces = []
    for rank in range(ranks):
        flat = declared(shapes)
        flat.held = Held(slice_of(flat.numel, rank, ranks), flat.numel)
        flat.param_shard = flat.device.alloc((flat.own.size,), fp64, Kind.PARAM)
        flat.param_shard.array[...] = -1
        for index, values in enumerate(values_of(flat)):
            flat.write(index, values, exact_master=False)
        pieces.append(flat.shard().array)
    written = np.concatenate(pieces)
    assert written.tolist() == [*range(1, flat.numel + 1), *[-1] * (written.size - flat.numel)]
    # Gathered, every parameter is there in its own shape.
    flat.unshard(flat.device.alloc((written.size,), fp64, Kind.UNSHARDED_PARAM))
    flat.whole_param().array[...] = written
    for index, values in enumerate(values_of(flat)):
        assert (flat.param_window(index).array == values).all()


@given(SHAPES)
def test_what_one_rank_holds_whole_is_written_whole(shapes: list[tuple[int, ...]]) -> None:
    """Stages 1 and 2: all parameters, of which the own slice is a window."""
    flat = declared(shapes)
    own = slice_of(flat.numel, 1, 3)
    flat.held = Held(own, 3 * own.size)
    flat.param = flat.device.alloc((flat.padded_numel,), fp64, Kind.PARAM)
    flat.param_shard = flat.param[flat.own.start : flat.own.stop]
    for index, values in enumerate(values_of(flat)):
        flat.write(index, values, exact_master=False)
    assert flat.param.array[: flat.numel].tolist() == list(range(1, flat.numel + 1))


@pytest.mark.parametrize("dtype", [fp16, bf16])
def test_masters_are_copies_of_the_rounded_weight_or_exact(dtype: DType) -> None:
    flat = declared([(3,), (5,)], dtype)
    flat.held = Held(Slice(2, 6, 8), 8)
    flat.param_shard = flat.device.alloc((4,), dtype, Kind.PARAM)
    flat.master = flat.device.alloc((4,), fp32, Kind.OPTIM)
    values = (np.arange(8) + 1 / 3).astype(np.float32)
    for exact in (False, True):
        flat.write(0, values[:3], exact_master=exact)
        flat.write(1, values[3:], exact_master=exact)
        rounded = flat.device.backend.to_host(flat.shard().array)
        assert (rounded == values[2:6].astype(flat.shard().array.dtype).astype(np.float32)).all()
        assert (flat.master.array == (values[2:6] if exact else rounded)).all()
    flat.store_param_shard()
    assert (flat.device.backend.to_host(flat.shard().array) == rounded).all()


def test_declaring_takes_no_memory(device: Device, live: Callable[[], int]) -> None:
    flat = declared([(10**6, 10**6), (7,)], fp16, device)
    assert flat.numel == 10**12 + 7
    assert live() == 0


def test_a_local_slice_in_another_memory_is_not_sent_from_there(device: Device) -> None:
    flat = Flat("h.0", device, fp64, fp64)
    flat.param_shard = device.alloc((4,), fp64, Kind.PARAM, memory="host")
    with pytest.raises(RuntimeError, match=r"h\.0: its local slice is in host memory; copy it to the device"):
        flat.own_param(Kind.COMM)


def test_a_flat_has_few_attributes() -> None:
    """Those that exist once its weights are declared, without its copies on their way between memories."""
    flat, moving = declared([(2,)]), {"incoming", "leaving", "outgoing"}
    assert flat.numel == 2
    slots = {name for one in type(flat).mro() for name in vars(one).get("__slots__", ())}
    assert len((vars(flat).keys() | slots) - moving) <= 18


# -- gradients ---------------------------------------------------------------------------------------------
def test_a_gradient_is_padded_with_zeros_and_named(device: Device, live: Callable[[], int]) -> None:
    flat = declared([(2, 2), (3,)], fp16, device)
    flat.held = Held(slice_of(7, 2, 3), 9)
    flat.collect_grad(1, _full(device, 5.0, (3,)))
    grad = flat.take_grad()
    assert grad.array.tolist() == [0, 0, 0, 0, 5, 5, 5, 0, 0]
    assert live() == 18


def test_micro_batches_add_onto_what_is_kept(device: Device) -> None:
    flat = declared([(2,)], fp64, device)
    flat.held = Held(whole(2), 2)
    for keep, kept in ((flat.add_grad_whole, lambda: flat.grad_whole), (flat.add_grad_shard, lambda: flat.grad_shard)):
        for value in (1.0, 10.0, 100.0):
            flat.collect_grad(0, _full(device, value, (2,)))
            keep(flat.take_grad())
        result = kept()
        assert result is not None
        assert result.array.tolist() == [111, 111]
    flat.add_grad_shard(None)  # a rank that owns nothing of this flat
    flat.drop_grads()
    assert flat.grad_whole is None
    assert flat.grad_shard is None


def test_the_first_kept_gradient_is_not_copied(device: Device, ledger: MemoryLedger) -> None:
    """DDP and ZeRO-1 add into, reduce in and update from one buffer, that of the first microbatch; later ones pass."""
    flat = declared([(4,)], fp32, device)
    flat.held, flat.collector.stays_whole = Held(whole(4), 4), True
    for later in (False, True, True):
        flat.collect_grad(0, _full(device, 1.0, (4,)))
        device.recorder.drain()
        assert ledger.now().by_kind == {"grad": 16, **({"unsharded_grad": 16} if later else {})}
        flat.add_grad_whole(flat.take_grad())
        device.recorder.drain()
        assert ledger.now().by_kind == {"grad": 16}


def test_a_parameter_that_is_used_twice_gets_one_window_and_the_sum(device: Device) -> None:
    """Whoever comes second must not be given the window that holds the first one's gradient."""
    flat = declared([(2,)], fp64, device)
    flat.held = Held(whole(2), 2)
    first, second = flat.grad_window(0), flat.grad_window(0)
    assert second.storage is not first.storage
    first.array[...], second.array[...] = 1, 10
    for grad in (first, second):
        flat.collect_grad(0, grad)
    assert flat.take_grad().array.tolist() == [11, 11]
    flat.collect_grad(0, _full(device, 5.0, (2,)))  # one that was made elsewhere
    third = flat.grad_window(0)
    third.array[...] = 100
    flat.collect_grad(0, third)
    assert flat.take_grad().array.tolist() == [105, 105]


def test_a_bad_gradient_is_remembered_over_later_micro_batches(device: Device) -> None:
    flat = declared([(2,)], fp32, device)
    flat.held, probe = Held(whole(2), 2), GradProbe(device)
    flat.collector.probe = probe
    seen = []
    for value in (1.0, np.inf, 1.0):
        flat.collect_grad(0, _full(device, value, (2,)))
        flat.take_grad()
        assert probe.flag is not None
        seen.append(float(probe.flag.array[0]))
    assert seen[0] == 0.0
    assert np.isnan(seen[1:]).all()
    flat.drop_grads()
    assert probe.flag is None


def test_an_fp32_copy_of_the_own_slice_names_its_padding(device: Device, ledger: MemoryLedger) -> None:
    flat = declared([(7,)], bf16, device)
    flat.held = Held(slice_of(7, 2, 3), 9)  # elements 6 to 8, of which two are padding
    flat.grad_shard = flat.new_grad_shard()
    copy = upcast_grad_shard(flat)
    assert copy is not None
    device.recorder.drain()
    assert ledger.now().by_kind == {"grad": 3 * 2 + 3 * 4}
    assert ledger.now().padding == {"grad": 2 * 2 + 2 * 4}


@pytest.mark.parametrize(
    ("capacity", "left"),
    [
        (None, [[1], [1], [1]]),
        (15, [[], [1], [1]]),
        (16, [[], [2], []]),
        (24, [[], [], [3]]),
        (25, [[], [], []]),
        (8, [[1], [1], [1]]),
    ],
)
def test_a_bucket_holds_as_many_bytes_as_it_may(capacity: int | None, left: list[list[int]], device: Device) -> None:
    """Padding is sent, so it counts: three flats of three elements, padded to four, of 2 bytes each. What is full
    leaves at once; what would be too much finds the bucket empty."""
    seen: list[int] = []

    class Counted(Slices):
        def calls(self, flats: Sequence[Flat]) -> list[list[Flat]]:
            seen.extend([len(flats)] if flats else [])
            return []

    reducer, found = InBuckets(Counted(), capacity), []
    for _ in range(3):
        flat = declared([(3,)], fp16, device)
        flat.held = Held(whole(4), 4)
        reducer.reduce(flat)
        found.append(seen[:])
        seen.clear()
    assert found == left
    reducer.finish()
    assert sum(seen) == 3 - sum(map(sum, left))


def _full(device: Device, value: float, shape: tuple[int, ...]) -> Any:
    buffer = device.alloc(shape, fp64, Kind.TEMP)
    buffer.array[...] = value
    return buffer
