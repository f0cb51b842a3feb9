"""The caching allocator's rules, one by one against cases worked by hand, and all of them on seeded streams."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from zerosim.config.allocator import caching_knobs
from zerosim.device.allocators.blocks import MIB, Block, BlockPool, DeviceMemory
from zerosim.device.allocators.caching import CachingAllocator
from zerosim.device.allocators.expandable import ExpandableSegments
from zerosim.errors import InputError


def made(conf: str | None = None, capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(capacity, caching_knobs(conf))


def power2_div(size: int, divisions: int) -> int:
    """What PyTorch's own test of roundup_power2_divisions expects (test/test_cuda.py)."""
    power = 1
    while power < size:
        power *= 2
    if power == size:
        return power
    step, rounded = power // 2 // divisions, power // 2
    while rounded < size:
        rounded += step
    return rounded


# -- one rule each ------------------------------------------------------------------------------
@pytest.mark.parametrize(("nbytes", "rounded"), [(1, 512), (512, 512), (513, 1024), (1200, 1536), (MIB - 1, MIB)])
def test_sizes_are_rounded_to_512_bytes(nbytes: int, rounded: int) -> None:
    assert made().reserve(1, nbytes) == rounded


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB), (33 * MIB + 5, 34 * MIB),
    ],
)  # fmt: skip
def test_segments_of_each_size(nbytes: int, segment: int) -> None:
    allocator = made()
    allocator.reserve(1, nbytes)
    assert allocator.reserved_bytes == segment


def test_small_rests_are_split_off_and_large_ones_only_above_1_mib() -> None:
    small = made()
    assert small.reserve(1, 2 * MIB - 512 - MIB) == MIB - 512  # leaves MiB + 512 in the segment
    assert small.reserve(2, MIB) == MIB  # leaves 512, which is a block
    assert (small.reserve(3, 1), small.reserved_bytes) == (512, 2 * MIB)
    large = made()
    assert large.reserve(1, 19 * MIB) == 20 * MIB  # a segment of its own, 20 MiB: a rest of 1 MiB is not split off
    assert (large.allocated_bytes, large.reserved_bytes) == (20 * MIB, 20 * MIB)
    assert large.reserve(2, 9 * MIB) == 9 * MIB  # a shared one: 11 MiB are left of 20
    assert large.reserve(3, 9 * MIB) == 9 * MIB
    assert (large.reserve(4, 2 * MIB), large.reserved_bytes) == (2 * MIB, 40 * MIB)


def test_best_fit_takes_the_smallest_then_the_lowest_block() -> None:
    allocator = made()
    for id, size in enumerate((40, 30, 30, 50)):
        allocator.reserve(id, size * MIB)
    for id in range(4):
        allocator.release(id)
    allocator.reserve(9, 29 * MIB)
    assert allocator.address_of(9) == 40 * MIB
    assert allocator.reserved_bytes == 150 * MIB


def test_neighbours_merge_on_free_from_either_side_and_between() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1)):
        allocator = made()
        for id in range(3):
            allocator.reserve(id, 5 * MIB)
        for id in order:
            allocator.release(id)
        assert [block.size for block in allocator.large.free()] == [20 * MIB]


def test_pools_and_streams_share_nothing() -> None:
    allocator = made()
    allocator.reserve(1, 30 * MIB)
    allocator.release(1)
    allocator.reserve(2, 30 * MIB, "side")
    allocator.reserve(3, 512)
    assert allocator.reserved_bytes == (30 + 30 + 2) * MIB


def test_a_block_on_another_stream_comes_back_when_its_work_has_ended() -> None:
    allocator = made()
    allocator.reserve(1, 30 * MIB)
    allocator.lend(1, work=7)
    allocator.lend(1, work=8)
    allocator.release(1)
    assert allocator.allocated_bytes == 0
    allocator.passed(7)
    allocator.reserve(2, 30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB  # work 8 still reads the first one
    allocator.passed(8)
    allocator.reserve(3, 30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_a_full_device_waits_for_works_and_gives_cached_segments_back() -> None:
    allocator = made(capacity=64 * MIB)
    allocator.reserve(1, 30 * MIB)
    allocator.reserve(2, 30 * MIB)
    allocator.lend(2, work=1)
    allocator.release(1)
    allocator.release(2)
    assert allocator.reserve(3, 60 * MIB) == 60 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_a_segment_with_a_live_byte_is_not_given_back() -> None:
    allocator = made(capacity=40 * MIB)
    allocator.reserve(1, 2 * MIB)
    allocator.reserve(2, 9 * MIB)
    allocator.release(2)
    assert allocator.reserve(3, 21 * MIB) is None
    room = allocator.room(21 * MIB)
    assert room is not None
    assert (room.free_bytes, room.largest_hole, room.reserved_bytes) == (38 * MIB, 20 * MIB, 20 * MIB)
    assert room.needed_bytes == (20 + 22) * MIB
    assert "expandable_segments:True" in room.remedy
    assert made("expandable_segments:True", 42 * MIB).reserve(1, 21 * MIB) == 21 * MIB


@pytest.mark.parametrize(("live", "asked", "needed"), [(15, 12, 40), (21, 30, 60), (0, 512 / MIB, 2), (19, 41, 60)])
def test_a_refused_request_needs_whole_pages(live: float, asked: float, needed: int) -> None:
    """Large pages have 20 MiB, small ones 2. What is free behind live bytes is part of the request."""

    def second(capacity: int) -> CachingAllocator:
        allocator = made("expandable_segments:True", capacity)
        assert allocator.reserve(1, int(live * MIB)) is not None
        allocator.reserve(2, int(asked * MIB))
        return allocator

    short = second(needed * MIB - 1)
    room = short.room(int(asked * MIB))
    assert room is not None
    assert room.needed_bytes == needed * MIB
    assert second(needed * MIB).reserved_bytes == needed * MIB


@pytest.mark.parametrize("conf", ["max_split_size_mb:40", "expandable_segments:True,max_split_size_mb:40"])
def test_three_fill_a_device_and_are_given_back_as_pytorch_tests_it(conf: str) -> None:
    """Its test_max_split_expandable, with one setting at a time: 120 MiB hold three times 40, then once 120."""
    allocator = made(conf, 120 * MIB)
    assert [allocator.reserve(id, 40 * MIB) for id in range(4)] == [40 * MIB] * 3 + [None]
    for id in range(3):
        allocator.release(id)
    assert allocator.reserve(5, 120 * MIB) == 120 * MIB


def test_max_split_size_keeps_large_blocks_whole() -> None:
    allocator = made("max_split_size_mb:50")
    allocator.reserve(1, 60 * MIB)
    allocator.release(1)
    allocator.reserve(2, 30 * MIB)  # a smaller request does not get it
    assert allocator.reserved_bytes == 90 * MIB
    allocator.reserve(3, 55 * MIB)  # one within max_non_split_rounding_mb does, whole
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (90 * MIB, 90 * MIB)
    far = made("max_split_size_mb:50")
    far.reserve(1, 80 * MIB)
    far.release(1)
    assert far.reserve(2, 60 * MIB) == 60 * MIB  # 20 MiB more than it asks for: too far
    assert far.reserved_bytes == 140 * MIB
    near = made("max_split_size_mb:50,max_non_split_rounding_mb:21")
    near.reserve(1, 80 * MIB)
    near.release(1)
    assert near.reserve(2, 60 * MIB) == 80 * MIB


def test_max_split_size_gives_back_no_more_than_it_takes() -> None:
    allocator = made("max_split_size_mb:20", capacity=100 * MIB)
    for id, size in enumerate((24, 30, 40)):
        allocator.reserve(id, size * MIB)
    for id in range(3):
        allocator.release(id)
    allocator.reserve(4, 70 * MIB)  # no block is so large: 40 and 30 go, 24 stays
    assert [block.size for block in allocator.large.free()] == [24 * MIB]
    assert allocator.reserved_bytes == 94 * MIB


def test_max_split_size_gives_back_no_smaller_block_first() -> None:
    """The block of 45 MiB is too small for 70, and the one of 30 is below the limit. PyTorch then frees all three."""
    allocator = made("max_split_size_mb:40", capacity=100 * MIB)
    for id, size in enumerate((45, 30, 20)):
        allocator.reserve(id, size * MIB)
    for id in range(3):
        allocator.release(id)
    allocator.reserve(4, 70 * MIB)
    assert allocator.large.free() == []
    assert allocator.reserved_bytes == 70 * MIB


def test_roundup_power2_divisions_as_pytorch_tests_it() -> None:
    elements, more = 4 * 21 * MIB, 4 * 100 * MIB
    assert made("roundup_power2_divisions:4").reserve(1, elements) == power2_div(elements, 4) == 96 * MIB
    table = made("garbage_collection_threshold:0.5,roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]")
    assert table.reserve(1, elements) == power2_div(elements, 8)
    assert table.reserve(2, more) == power2_div(more, 2)
    assert made("roundup_power2_divisions:4").rounded(1200) == 1536  # up to 512 x 4 bytes as ever
    assert made("roundup_power2_divisions:4").rounded(4097) == 5 * 1024


def test_tables_of_divisions_as_pytorch_tests_them() -> None:
    """Its AllocatorConfigTest: c10/test/core/AllocatorConfig_test.cpp."""

    def divisions(table: str) -> dict[int, int]:
        return dict(zip((2**power for power in range(16)), caching_knobs(table).roundup_power2_divisions, strict=True))

    one = divisions("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]")
    assert [one[mib] for mib in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)] == [8, 8, 2, 4, 2, 4, 1, 1, 1]
    two = divisions("roundup_power2_divisions:[128:8,256:16,512:1,2048:8,>:2]")
    assert [two[mib] for mib in (64, 128, 256, 512, 1024, 2048, 4096)] == [8, 8, 16, 1, 0, 8, 2]
    assert set(divisions("roundup_power2_divisions:4").values()) == {4}


def test_garbage_collection_gives_back_what_was_not_used_for_long() -> None:
    allocator = made("garbage_collection_threshold:0.5", capacity=100 * MIB)
    allocator.reserve(1, 34 * MIB)
    allocator.reserve(2, 14 * MIB)
    allocator.release(1)  # a search earlier than the others
    allocator.reserve(3, 36 * MIB)
    allocator.release(3)
    allocator.release(2)
    allocator.reserve(4, 38 * MIB)  # 84 MiB are reserved, the threshold is 50: the oldest goes, which is enough
    assert [block.size for block in allocator.large.free()] == [14 * MIB, 36 * MIB]
    assert allocator.reserved_bytes == (14 + 36 + 38) * MIB
    plain = made(capacity=1000 * MIB)
    for id in (1, 2):
        plain.reserve(id, 20 * id * MIB)
        plain.release(id)
    plain.reserve(3, 700 * MIB)
    assert plain.reserved_bytes == 760 * MIB


def test_garbage_collection_goes_on_with_the_mean_of_what_is_left() -> None:
    """18 MiB are too many. Of free blocks aged 4, 2 and 1 the first goes (mean 7/3), then the second (mean 3/2)."""
    allocator = made("garbage_collection_threshold:0.5", capacity=100 * MIB)
    for id, size in ((1, 12), (2, 14), (3, 16), (4, 26)):
        allocator.reserve(id, size * MIB)
    for id, searches in ((1, 2), (2, 1), (3, 0)):
        allocator.release(id)
        for _ in range(searches):  # each finds the same block again
            allocator.release(4)
            allocator.reserve(4, 26 * MIB)
    allocator.reserve(5, 18 * MIB)
    assert [block.size for block in allocator.large.free()] == [16 * MIB]
    assert allocator.reserved_bytes == (16 + 26 + 18) * MIB


def test_expandable_segments_grow_by_pages_and_give_back_pages() -> None:
    allocator = made("expandable_segments:True", capacity=110 * MIB)
    allocator.reserve(1, 30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB  # two pages of 20 MiB
    allocator.reserve(2, 30 * MIB)  # 10 MiB are left: one page more
    assert (allocator.reserved_bytes, allocator.address_of(2)) == (60 * MIB, 30 * MIB)
    allocator.reserve(3, 512)
    assert allocator.reserved_bytes == 62 * MIB  # a small page has 2 MiB
    allocator.release(1)
    assert allocator.reserve(4, 50 * MIB) == 50 * MIB  # 3 pages more have no room: the whole free page goes
    assert (allocator.reserved_bytes, allocator.address_of(4)) == ((62 - 20 + 60) * MIB, 60 * MIB)
    allocator.reserve(5, 10 * MIB)
    assert allocator.address_of(5) == 20 * MIB  # what had been left of the page that was half live
    allocator.release(2)
    allocator.release(5)
    assert [block.size for block in allocator.large.free()] == [40 * MIB, 10 * MIB][::-1]


def test_a_block_that_can_grow_is_not_taken_where_one_that_cannot_is_enough() -> None:
    allocator = made("expandable_segments:True", capacity=110 * MIB)
    for id, size in enumerate((30, 10, 15)):
        allocator.reserve(id, size * MIB)
    allocator.release(0)
    allocator.reserve(3, 4 * MIB)  # 5 MiB are free at the end, and 30 at the start
    assert allocator.address_of(3) == 0


@pytest.mark.parametrize(
    ("blocks", "taken"),  # size and room of each, in the order of their sizes
    [
        ([(5, 100), (10, 0), (20, 0)], 1),  # 105, 10, 20
        ([(30, 0), (30, 0)], 0),  # of equal blocks the first
        ([(4, 100), (5, 40), (10, 0)], 2),  # 104, 45, 10
        ([(4, 40), (5, 100), (10, 0)], 0),  # 44, 105: the search ends before it sees the 10
    ],
)
def test_the_search_goes_on_while_the_next_block_can_become_less(blocks: list[tuple[int, int]], taken: int) -> None:
    """The rule of PyTorch's get_free_block. A block has a size, and room to grow into behind it."""
    pool, found = BlockPool(is_small=False), []
    for size, behind in blocks:
        found.append(Block(pool, "compute", 0, size + behind, base=0))
        if behind:
            found[-1].split(size).mapped = False
    chosen = ExpandableSegments(DeviceMemory(None)).least_room(found[0], found[1:])
    assert found.index(chosen) == taken


def test_addresses_that_were_given_back_are_used_again() -> None:
    allocator = made(capacity=70 * MIB)
    for id, size in enumerate((30, 40)):
        allocator.reserve(id, size * MIB)
    allocator.release(0)
    allocator.reserve(2, 30 * MIB, "side")  # for which the other stream's goes
    assert allocator.address_of(2) == 0


@pytest.mark.parametrize(
    "conf",
    [
        "foo:1,bar:2", "garbage_collection_threshold:1.2", "max_split_size_mb:2", "max_split_size_mb",
        "max_split_size_mb:", "garbage_collection_threshold:", "expandable:True",
        "expandable_segments:yes", "max_non_split_rounding_mb:-1", "roundup_power2_divisions:3", "defragment:True",
        "roundup_power2_divisions:[64:8", "roundup_power2_divisions:[65:8]", "max_split_size_mb:40,max_split_size_mb:4",
        "garbage_collection_threshold:nan", "max_split_size_mb:9999999999999999", ",",
    ],
)  # fmt: skip
def test_bad_knobs_are_one_line(conf: str) -> None:
    with pytest.raises(InputError, match=r"^allocator_conf") as caught:
        caching_knobs(conf)
    assert "\n" not in str(caught.value)


# -- all of them on a stream of requests --------------------------------------------------------
def blocks_of(allocator: CachingAllocator) -> list[Block]:
    """All blocks, by address: live, waiting for a work, free, and addresses without memory."""
    seen = [block for block in allocator._live.values() if block is not None] + allocator._pending
    for pool in (allocator.small, allocator.large):
        seen += pool.free() + [entry[-1] for entry in pool._unmapped]
    return sorted(seen, key=lambda block: block.address)


def check(allocator: CachingAllocator, asked: dict[int, int]) -> None:
    blocks = blocks_of(allocator)
    for left, right in pairwise(blocks):
        assert left.address + left.size <= right.address
        assert (left.after is right) == (right.before is left)
        if left.after is right:
            assert left.address + left.size == right.address
            assert not (left.is_free and right.is_free and left.mapped == right.mapped), "two free neighbours"
    assert allocator.reserved_bytes == sum(block.size for block in blocks if block.mapped)
    assert allocator.allocated_bytes == sum(block.size for block in blocks if block.allocated)
    assert allocator.reserved_bytes >= allocator.allocated_bytes >= sum(asked.values())
    assert allocator.capacity is None or allocator.reserved_bytes <= allocator.capacity


@pytest.mark.parametrize(
    "conf", [None, "expandable_segments:True", "max_split_size_mb:20", "garbage_collection_threshold:0.6",
             "roundup_power2_divisions:4,expandable_segments:True", "max_split_size_mb:32,expandable_segments:True"],
)  # fmt: skip
@pytest.mark.parametrize("capacity", [None, 120 * MIB])
def test_random_requests_never_overlap_and_all_come_back(conf: str | None, capacity: int | None) -> None:
    draw = random.Random(f"{conf} {capacity}")
    allocator, asked, refused = made(conf, capacity), dict[int, int](), 0
    reserved: list[Any] = [0]
    for id in range(600):
        if asked and draw.random() < 0.48:
            gone = draw.choice(list(asked))
            if draw.random() < 0.1:
                allocator.lend(gone, work=id)
            allocator.release(gone)
            del asked[gone]
        else:
            nbytes = int(2 ** draw.uniform(0, 26))
            stream = draw.choice(("compute", "compute", "side"))
            got = allocator.reserve(id, nbytes, stream)
            if got is None:
                refused += 1
                room = allocator.room(nbytes, stream)
                assert room is not None
                assert room.needed_bytes > (capacity or 0)
            else:
                assert got >= nbytes
                asked[id] = nbytes
        if draw.random() < 0.2:
            allocator.passed(draw.randrange(id + 1))
        if id % 5 == 0:
            check(allocator, asked)
    assert (refused > 0) == (capacity is not None)
    reserved += [numbers[1] for _, numbers in allocator.changes]
    assert sum(reserved) == allocator.reserved_bytes
    for id in asked:
        allocator.release(id)
    allocator._give_back_all()
    check(allocator, {})
    assert allocator.reserved_bytes == 0
    assert blocks_of(allocator) == []
    assert allocator.memory.addresses(1) == 0  # no range is left
