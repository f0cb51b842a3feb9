"""Arrays from outside: what a file says is judged before any of its numbers is read, and nothing is run or unpacked."""

from __future__ import annotations

import io
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerosim.config.npz import ArrayFile
from zerosim.errors import InputError
from zerosim.train.data import read_tokens, read_weights

SHAPES = {"w": (3, 4), "b": (4,)}
GOOD = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(4, np.float32)}
HUGE = 10**12
MEMORY = 16 * 10**6  # what reading a small file may take; every bomb below stands for more


def npy(array: Any, **header: str) -> bytes:
    """A member as NumPy writes it; `header` replaces fields of the header by their text."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    raw = file.getvalue()
    end = 10 + int.from_bytes(raw[8:10], "little")
    fields = {"descr": "'<f4'", "fortran_order": "False", "shape": str(array.shape), **header}
    text = "{" + "".join(f"'{key}': {value}, " for key, value in fields.items()) + "}\n"
    return raw[:8] + struct.pack("<H", len(text)) + text.encode() + raw[end:] if header else raw


def zipped(path: Path, members: list[tuple[str, bytes]] | dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(path, "w", method) as file:
        for name, raw in members.items() if isinstance(members, dict) else members:
            file.writestr(name, raw)
    return path


def members(**changed: bytes) -> dict[str, bytes]:
    return {
        f"{name}.npy": raw for name, raw in {**{name: npy(array) for name, array in GOOD.items()}, **changed}.items()
    }


def patched(path: Path, local: int, central: int, value: bytes) -> Path:
    """Bytes of every local and central record replaced: the flags, the method, the sizes."""
    raw = bytearray(path.read_bytes())
    for magic, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        at = raw.find(magic)
        while at >= 0:
            raw[at + offset : at + offset + len(value)] = value
            at = raw.find(magic, at + 4)
    path.write_bytes(raw)
    return path


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Fails a test that holds more than `MEMORY` at once."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY


HEADERS = {
    "huge": (dict(shape=f"({HUGE}, 4)"), "of shape (1000000000000, 4) needs 16000000000000 bytes, but the file has 48"),
    "beyond_int64": (dict(shape=f"({10**30},)"), "of shape (1000000000000000000000000000000,) needs 4"),
    "nothing of huge": (dict(descr="'|O'", shape=f"({HUGE}, 4)"), "w has shape (1000000000000, 4), expected (3, 4)"),
    "true": (dict(shape="(True, 12)"), "member 'w.npy' is not an array of numbers; its header is"),
    "negative": (dict(shape="(-3, 4)"), "not an array of numbers; its header is"),
    "fraction": (dict(shape="(3.0, 4)"), "not an array of numbers; its header is"),
    "text": (dict(shape="'34'"), "not an array of numbers; its header is"),
    "program": (dict(shape="__import__('os')"), "not an array of numbers; its header is"),
    "record": (dict(descr="[('a', '<f4')]"), "not an array of numbers; its header is"),
    "long": (dict(shape="(3, 4)" + " " * 2000), "not an array of numbers; its header is"),
    "order": (dict(fortran_order="1"), "not an array of numbers; its header is"),
    "objects": (dict(descr="'|O'"), "w is Python objects (never loaded), expected float32"),
    "words": (dict(descr="'<U1'"), "w is <U1, expected float32"),
    "unknown": (dict(descr="'<f7'"), "w is <f7, expected float32"),
    "more": (dict(descr="'<f8'"), "member 'w.npy' is damaged: <f8 of shape (3, 4) needs 96 bytes, but the file has 48"),
    "fewer": (
        dict(descr="'<f2'"),
        "member 'w.npy' is damaged: <f2 of shape (3, 4) needs 24 bytes, but the file has 48",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_are_judged_before_numbers_are_read(
    tmp_path: Path, name: str, little_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, message = HEADERS[name]
    path = zipped(tmp_path / "in.npz", members(w=npy(GOOD["w"], **header)), zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(ArrayFile, "read", lambda *_: pytest.fail("numbers were read"))
    with pytest.raises(InputError) as caught:
        read_weights(str(path), SHAPES)
    assert "in.npz" in str(caught.value)
    assert message in str(caught.value)


def test_what_numpy_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.npz"
    fortran = {**GOOD, "w": np.asfortranarray(GOOD["w"])}
    halves = {name: array.astype(np.float16) for name, array in GOOD.items()}
    for save, arrays in ((np.savez, GOOD), (np.savez_compressed, fortran), (np.savez, halves)):
        save(path, **arrays)
        found = read_weights(str(path), SHAPES)
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            assert np.array_equal(found[name], array)
    np.savez(path, s=np.float32(7), e=np.zeros((0, 3)))
    assert read_weights(str(path), {"s": (), "e": (0, 3)})["s"] == 7
    version_2 = io.BytesIO()
    np.lib.format.write_array(version_2, GOOD["w"], version=(2, 0))
    assert np.array_equal(read_weights(str(zipped(path, members(w=version_2.getvalue()))), SHAPES)["w"], GOOD["w"])


def file_of(kind: str, path: Path) -> str:
    """One hostile file, and what is said of it."""
    good = npy(GOOD["w"])
    nothing = np.zeros(16 * 10**6, np.float32)  # 64 MB, of which deflate makes 62 KB
    match kind:
        case "text member":
            zipped(path, {**members(), "notes.txt": b"x"})
            return "member 'notes.txt' is not an array"
        case "folder":
            zipped(path, {**members(), "inner/": b""})
            return "member 'inner/' is not an array"
        case "no header":
            zipped(path, members(w=b"no numbers"))
            return "member 'w.npy' is not an array of numbers"
        case "empty member":
            zipped(path, members(w=b""))
            return "member 'w.npy' is not an array of numbers"
        case "twice":
            zipped(path, [*members().items(), ("w.npy", good)])
            return "two members 'w.npy'"
        case "a plain zip":
            zipped(path, {"a.txt": b"x", "b/c.txt": b"y"})
            return "member 'a.txt' is not an array"
        case "an empty zip":
            zipped(path, {})
            return "missing w, b"
        case "an npy":
            path.write_bytes(good)
            return "is a single array, a .npy file: expected an .npz file"
        case "a pickle":
            path.write_bytes(b"cos\nabort\n(tR.")
            return "is not a readable .npz file"
        case "truncated":
            path.write_bytes(zipped(path, members()).read_bytes()[:-30])
            return "is not a readable .npz file"
        case "truncated member":
            zipped(path, members(w=good[:-8]))
            return "<f4 of shape (3, 4) needs 48 bytes, but the file has 40"
        case "corrupt":
            raw = zipped(path, members(), zipfile.ZIP_DEFLATED).read_bytes()
            path.write_bytes(raw[:35] + b"\xff\xff\xff\xff" + raw[39:])
            return "member 'w.npy' is damaged"
        case "changed":
            path.write_bytes(zipped(path, members()).read_bytes().replace(GOOD["w"].tobytes(), bytes(48)))
            return "member 'w.npy' is damaged: Bad CRC-32"
        case "encrypted":
            patched(zipped(path, members()), 6, 8, b"\x01\x00")
            return "member 'w.npy' is encrypted"
        case "packed by nobody":
            patched(zipped(path, members()), 8, 10, struct.pack("<H", 99))
            return "member 'w.npy' is compressed by method 99"
        case "lzma":
            zipped(path, members(), zipfile.ZIP_LZMA)
            return "member 'w.npy' is compressed by method 14"
        case "small header, large data":
            zipped(path, members(w=good[:128] + nothing.tobytes()), zipfile.ZIP_DEFLATED)
            return "needs 48 bytes, but the file has 64000000"
        case "large header, large data":
            zipped(path, members(w=npy(nothing)), zipfile.ZIP_DEFLATED)
            return "w has shape (16000000,), expected (3, 4)"
        case "endless header":
            zipped(path, members(w=b"\x93NUMPY\2\0" + b"\xff" * 4 + b" " * 64 * 10**6), zipfile.ZIP_DEFLATED)
            return "member 'w.npy' is not an array of numbers"
        case "large data, sizes that lie":
            patched(zipped(path, members(w=good[:128] + nothing.tobytes()), 8), 22, 24, struct.pack("<I", 176))
            return "member 'w.npy' is damaged"
        case "endless directory":
            with path.open("wb") as file:
                file.truncate(3 * 10**9)
                file.seek(0, io.SEEK_END)
                file.write(b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, 3 * 10**9, 0, 0))
            return "a directory of 3,000,000,000 bytes"
        case "a name that moves the cursor":
            zipped(path, {**members(), "\x1b[2J.npy": good})
            return r"unknown \x1b[2J"
        case "names":
            zipped(path, {f"{index}.npy": b"" for index in range(1000)})
            return "missing w, b; unknown 0, 1, 10 and 997 more"
    raise AssertionError(kind)


KINDS = [
    "text member", "folder", "no header", "empty member", "twice", "a plain zip", "an empty zip", "an npy", "a pickle",
    "truncated", "truncated member", "corrupt", "changed", "encrypted", "packed by nobody", "lzma",
    "small header, large data", "large header, large data", "endless header", "large data, sizes that lie",
    "endless directory", "a name that moves the cursor", "names",
]  # fmt: skip


@pytest.mark.quick(5)
@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_not_what_they_should_be(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "in.npz"
    message = file_of(kind, path)
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            read_weights(str(path), SHAPES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "in.npz" in str(caught.value)
    assert message in str(caught.value)
    assert peak < MEMORY


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    class Program:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return Path.touch, (tmp_path / "loaded",)  # type: ignore[return-value]

    path = tmp_path / "in.npz"
    np.savez(path, **{**GOOD, "w": np.array([[Program()] * 4] * 3)})
    with pytest.raises(InputError, match="never loaded"):
        read_weights(str(path), SHAPES)
    np.savez(path, tokens=np.array([[[Program()]]]))
    with pytest.raises(InputError, match="never loaded"):
        read_tokens(str(path), 1, 0, 256, None)
    assert not (tmp_path / "loaded").exists()


def test_of_tokens_only_the_steps_that_are_trained_are_read(tmp_path: Path, little_memory: None) -> None:
    path = tmp_path / "tokens.npz"
    tokens = np.arange(6 * 2 * 9, dtype=np.int64).reshape(6, 2, 9)
    for order in (tokens, np.asfortranarray(tokens)):
        np.savez(path, tokens=order, other=np.array([None, "objects"]))
        assert np.array_equal(read_tokens(str(path), 2, 8, 256, 2), tokens[:2])
        assert np.array_equal(read_tokens(str(path), 2, 8, 256, None), tokens)
    zipped(path, {"tokens.npy": npy(tokens, descr="'<i8'", shape=f"({HUGE}, 2, 9)")})
    for steps in (2, None):
        with pytest.raises(InputError, match=r"tokens\.npz: member 'tokens\.npy' is damaged"):
            read_tokens(str(path), 2, 8, 256, steps)


def test_more_tokens_than_are_meant_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, little_memory: None
) -> None:
    path = tmp_path / "tokens.npz"
    np.savez_compressed(path, tokens=np.zeros((40_000, 2, 9), np.int64))
    monkeypatch.setattr("zerosim.train.data.LARGEST_DATA", 10**6)
    with pytest.raises(InputError, match=r"40000 steps of tokens exceed the limit of 1\.00 MB: set fewer"):
        read_tokens(str(path), 2, 8, 256, None)
    assert read_tokens(str(path), 2, 8, 256, 3).shape == (3, 2, 9)
