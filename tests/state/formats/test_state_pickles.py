"""Pickles from outside: what checkpoints need is read as plain values, nothing is run, the rest is refused by name."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pathlib
import pickle
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.errors import InputError
from zerosim.state.formats import pickles
from zerosim.state.formats.pickles import read_pickle
from zerosim.state.formats.plain import Object
from zerosim.state.formats.whole import leaves
from zerosim.state.formats.written import Call, Made, Name, pickled

PROTOCOLS = pytest.mark.parametrize("protocol", [2, 3, 4, 5])
PLAIN: dict[str, Any] = {
    "numbers": [0, 1, -1, 255, 65536, -(2**31), 2**40, -(2**70), 1.5, float("inf"), True, False, None],
    "text": ["", "a", "é" * 300, "x" * 70_000],
    "bytes": [b"", b"\x00\xff", b"x" * 300],
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "set": {1, 2, 3},
    "ordered": collections.OrderedDict(a=1, b=2),
    "mapping": {1: "a", "b": {"c": [1, {"d": 2}]}, (1, 2): 3},
    "slice": slice(1, 2, None),
    "array": bytearray(b"abc"),
}


class Hostile:
    """A pickle that would run something."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@PROTOCOLS
def test_plain_values_come_back(protocol: int) -> None:
    assert read_pickle(pickle.dumps(PLAIN, protocol), "x") == PLAIN


@PROTOCOLS
def test_shared_values_stay_shared(protocol: int) -> None:
    inner = [1]
    found = read_pickle(pickle.dumps([inner, inner], protocol), "x")
    assert found[0] is found[1]


@PROTOCOLS
def test_classes_of_checkpoints_stay_symbols(protocol: int) -> None:
    values = argparse.Namespace(lr=1.5), pathlib.PurePosixPath("a"), io.BytesIO(b"abc"), collections.Counter("aab")
    found = read_pickle(pickle.dumps(values, protocol), "x")
    assert [one.name.rpartition(".")[2] for one in found] == ["Namespace", "PurePosixPath", "BytesIO", "Counter"]
    assert found[0].field("lr") == 1.5


@PROTOCOLS
@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (os.system, ("echo",), rf"{os.name}\.system"),
        (eval, ("1",), r"builtins\.eval"),
        (exec, ("1",), r"builtins\.exec"),
        (getattr, (os, "system"), ""),
        (__import__, ("os",), r"builtins\.__import__"),
        (open, ("x",), r"io\.open"),
        (pickle.loads, (b"",), r"pickle\.loads"),
        (pathlib.Path.unlink, (pathlib.PurePosixPath("x"),), ""),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_nothing_is_run(function: Any, args: Any, name: str, protocol: int) -> None:
    try:
        raw = pickle.dumps({"a": Hostile(function, *args)}, protocol)
    except TypeError:
        pytest.skip("Python itself pickles no module")
    with pytest.raises(InputError, match=f"file: its pickle .*{name}"):
        read_pickle(raw, "file")


@pytest.mark.parametrize("name", ["torch.hub.load", "torch.load", "torch.storage._load_from_bytes", "os.path.join.x"])
def test_what_is_not_on_the_list_is_refused_by_its_name(name: str) -> None:
    for value in (Call(name, ("a",)), Made(name, {}), Name(name)):
        with pytest.raises(InputError, match=f"names {name}, which no checkpoint"):
            read_pickle(pickled([value])[0], "x")


def test_a_function_is_called_only_by_an_allowed_name() -> None:
    for raw in (b"\x80\x02X\x01\x00\x00\x00a)R.", b"\x80\x02]]R.", b"\x80\x02ctorch\nSize\nK\x01R."):
        with pytest.raises(InputError, match="its pickle"):
            read_pickle(raw, "x")
    bad = b"\x80\x02cbuiltins\ngetattr\nctorch\nSize\nX\x03\x00\x00\x00foo\x86R."
    with pytest.raises(InputError, match=r"builtins\.getattr"):
        read_pickle(bad, "x")
    enum = bad.replace(b"ctorch\nSize", b"cdeepspeed.runtime.zero.config\nZeroStageEnum")
    assert isinstance(read_pickle(enum, "x"), Object)


def test_what_would_fill_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MOST_CONTAINERS", 1000)
    with pytest.raises(InputError, match=r"more than 1,000 lists, mappings and objects"):
        read_pickle(b"\x80\x02" + b"]" * 2000 + b".", "x")
    monkeypatch.setattr(pickles, "LARGEST_PICKLE", 100)
    with pytest.raises(InputError, match="expected at most 100"):
        read_pickle(b"\x80\x02" + b"N" * 200 + b".", "x")
    with pytest.raises(InputError, match="is no text"):
        read_pickle(pickled(Call("builtins.bytes", (10**12,)))[0], "x")


def test_lists_that_repeat_themselves_take_no_memory() -> None:
    """A list of ten of a list of ten ..., forty times: 500 bytes that would be 10 ** 40 items."""
    raw = b"\x80\x02]"
    for at in range(40):
        raw += b"q" + bytes([at]) + b"](" + (b"h" + bytes([at])) * 10 + b"e"
    tracemalloc.start()
    assert len(read_pickle(raw + b".", "x")) == 10
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_a_mapping_in_itself_ends() -> None:
    found = read_pickle(b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.", "x")
    with pytest.raises(InputError, match="more than 32 deep"):
        list(leaves(found, "x"))


def test_mappings_that_repeat_one_another_end() -> None:
    """A mapping of ten of a mapping of ten ..., twenty times, and nothing in the last."""
    one: dict[str, Any] = {}
    for _ in range(20):
        one = {str(key): one for key in range(10)}
    with pytest.raises(InputError, match="more than 1,000,000 items"):
        list(leaves(one, "x"))


def test_nested_tuples_are_no_keys() -> None:
    """The hash of t = (t, t), fifty times, takes 2 ** 50 steps."""
    raw = b"\x80\x02})" + b"2\x86" * 50 + b"Ns."
    with pytest.raises(InputError, match="a key of type tuple"):
        read_pickle(raw, "x")


@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_one_line(raw: bytes) -> None:
    read_or_one_line(raw)


@given(st.integers(0, 10**6), st.integers(0, 255), st.sampled_from([2, 4]))
def test_any_changed_byte_gives_a_value_or_one_line(at: int, byte: int, protocol: int) -> None:
    raw = bytearray(pickle.dumps(PLAIN, protocol)[-600:])
    raw[at % len(raw)] = byte
    read_or_one_line(b"\x80\x02" + bytes(raw))


def read_or_one_line(raw: bytes) -> None:
    said = ""
    try:
        read_pickle(raw, "x")
    except InputError as error:
        said = str(error)
    assert "\n" not in said
