"""Formats: which arrays hold n numbers, where they are in a weight's bytes, and how many bytes that is."""

from __future__ import annotations

import pytest

from zerosim.dtypes import fp16, fp32, int32, uint8
from zerosim.placement.formats import DYNAMIC8, FP32, GPTQ, NF4, WEIGHTS, Format, blocks

SIZES = (1, 2, 63, 64, 65, 16_384, 16_385, 300_001)
EVERY = (*WEIGHTS.values(), GPTQ.of_map(5), DYNAMIC8, FP32, blocks(8, 256), blocks(4, 64), blocks(1, 0))


def test_nf4_has_the_bytes_of_its_paper() -> None:
    """Half a byte an element, a byte for 64, 4 bytes for 256 of these, and the mean of the largest magnitudes."""
    for numel in SIZES:
        shared = -(-numel // 64)
        scales, mean, absmax, codes = 4 * -(-shared // 256), 4, shared, -(-numel // 2)
        assert NF4.arrays(numel) == [(codes, uint8), (absmax, uint8), (1, fp32), (scales // 4, fp32)]
        starts = [place.start for place in NF4.places(numel)]
        assert starts == [scales + mean + absmax, scales + mean, scales, 0]
        assert NF4.nbytes(numel) == -(-(scales + mean + absmax + codes) // 4) * 4
    assert round(8 * NF4.nbytes(2**30) / 2**30, 3) == 4.127


def test_gptq_has_zeros_scales_and_the_group_of_each_input() -> None:
    """As fms-acceleration's Mistral 7B in GPTQ holds them: of a map, half a byte, 1/256 and 2/128 a weight, and 4 bytes
    an input."""
    form, numel = GPTQ.of_map(14_336), 4096 * 14_336
    assert form.arrays(numel) == [
        (numel // 2, uint8), (numel // 256, uint8), (numel // 128, fp16), (14_336, int32)
    ]  # fmt: skip
    assert form.nbytes(numel) == numel // 2 + numel // 256 + numel // 64 + 4 * 14_336
    assert NF4.of_map(14_336) == NF4


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("one", EVERY, ids=str)
def test_arrays_fill_a_run_of_bytes_and_each_is_aligned(one: Format, numel: int) -> None:
    arrays, places = one.arrays(numel), one.places(numel)
    assert len(arrays) == len(places)
    end = 0
    for (count, dtype), place in sorted(zip(arrays, places, strict=True), key=lambda pair: pair[1].start):
        assert place.start == end
        assert place.start % dtype.itemsize == 0
        assert place.stop - place.start == count * dtype.itemsize
        end = place.stop
    widest = max(dtype.itemsize for _, dtype in arrays)
    assert end <= one.nbytes(numel) < end + widest
    assert one.nbytes(numel) % widest == 0


def test_numbers_as_they_are_have_no_scales() -> None:
    assert FP32.arrays(7) == [(7, fp32)]
    assert FP32.nbytes(7) == 28


def test_blocks_share_a_scale_the_last_one_too() -> None:
    assert blocks(8, 256).arrays(257) == [(257, uint8), (2, fp32)]
    assert blocks(4, 64).arrays(65) == [(33, uint8), (2, fp32)]
    assert blocks(1, 0).arrays(9) == [(2, uint8), (1, fp32)]
    assert DYNAMIC8.nbytes(4096) == 4096 + 4 * 16
