"""Bytes and counts, as people write them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.errors import InputError
from zerosim.units import format_bytes, format_count, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("4096", 4096), ("1B", 1), ("32GB", 32 * 10**9), ("32 GB", 32 * 10**9), (" 32  gb ", 32 * 10**9),
        ("1.5GiB", 3 * 2**29), ("1kb", 1000), ("1KiB", 1024), ("7MB", 7 * 10**6), ("7MiB", 7 * 2**20),
        ("1TB", 10**12), ("1TiB", 2**40), ("2PB", 2 * 10**15), ("2PiB", 2**51), ("0.1KB", 100), (".5KB", 500),
        ("5.KB", 5000), ("1e9", 10**9), ("1.5e9B", 15 * 10**8), ("2E+3", 2000), ("1e-3KB", 1),
        ("123456789.123456789GB", 123456789123456789), (7, 7),
    ],
)  # fmt: skip
def test_bytes(text: str | int, value: int) -> None:
    assert parse_bytes(text) == value
    assert isinstance(parse_bytes(text), int)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7.5B", 7_500_000_000), ("1T", 10**12), ("350M", 350 * 10**6), ("124k", 124_000), ("1e12", 10**12),
        ("12", 12), ("0.000001M", 1), (3, 3),
    ],
)  # fmt: skip
def test_counts(text: str | int, value: int) -> None:
    assert parse_count(text) == value


NO_SIZE = ["", "GB", "-1", "-1GB", "1.5", "1.0001KB", "1 2", "1GBs", "one", "1,5GB", "0x10", "1e", "nan", "inf", "١"]


@pytest.mark.parametrize("text", NO_SIZE)
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(repr(text))):
        parse_bytes(text)
    with pytest.raises(InputError, match=r"write it like 7\.5B or 350M"):
        parse_count(text)


def test_units_of_bytes_are_no_counts() -> None:
    with pytest.raises(InputError, match="not a whole number"):
        parse_bytes("0.3B")
    with pytest.raises(InputError, match="'1GB' is not a count"):
        parse_count("1GB")
    assert parse_count("1B") == 10**9 * parse_bytes("1B")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"), (1, "1 B"), (999, "999 B"), (1000, "1.00 KB"), (1024, "1.02 KB"), (9_994, "9.99 KB"),
        (9_996, "10.0 KB"), (99_940, "99.9 KB"), (99_960, "100 KB"), (999_499, "999 KB"), (999_500, "1.00 MB"),
        (1_880_000_000, "1.88 GB"), (16 * 10**12, "16.0 TB"), (5 * 10**15, "5.00 PB"), (1234 * 10**15, "1234 PB"),
    ],
)  # fmt: skip
def test_three_figures(value: int, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (64, "64"), (7_500_000_000, "7.50B"), (124_439_808, "124M"), (9_999_999, "10.0M"), (10**12, "1.00T")],
)
def test_counts_in_three_figures(value: int, text: str) -> None:
    assert format_count(value) == text


@given(st.integers(0, 10**18 - 1))
def test_what_is_printed_can_be_read_back(value: int) -> None:
    for parse, text in ((parse_bytes, format_bytes(value)), (parse_count, format_count(value % 10**15))):
        exact = value if parse is parse_bytes else value % 10**15
        assert abs(parse(text) - exact) <= exact / 199  # half of the last of three figures
        digits = sum(c.isdigit() for c in text)
        assert digits == 3 or exact < 1000 or (digits == 4 and exact >= 999.5 * 10**12)


@given(st.integers(0, 10**30))
def test_exact_sizes_are_read_exactly(value: int) -> None:
    assert parse_bytes(str(value)) == value
    assert parse_bytes(f"{value}.5KB") == 1000 * value + 500
    assert parse_count(f"{value}K") == 1000 * value
