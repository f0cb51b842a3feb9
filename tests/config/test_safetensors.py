"""Files of tensors from outside: whole ones are read to the bit, and of others one line names file and tensor."""

from __future__ import annotations

import io
import json
import math
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zerosim.config.released import INDEX, SINGLE, is_released, stored_tensors
from zerosim.config.safetensors import Planned, read_header, write_tensors
from zerosim.errors import InputError

Header = dict[str, Any]


def packed(header: Header | str, data: bytes) -> bytes:
    raw = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def two() -> Header:
    """Two tensors: a (2, 3) of fp32 at bytes 0 to 24, and b (4) of bf16 at 24 to 32."""
    return {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }


def changed(name: str, **values: Any) -> bytes:
    header = two()
    header[name] |= values
    return packed(header, bytes(32))


BAD: list[tuple[str, bytes, str]] = [
    ("cut", packed(two(), bytes(31)), r"tensor 'b' ends at byte \d+, but the file has \d+: it is cut short"),
    ("longer", packed(two(), bytes(33)), "has 1 bytes after its last tensor: it is damaged"),
    ("header", (10**12).to_bytes(8, "little") + b"{}", "its header should have 1,000,000,000,000 bytes, but the file"),
    ("short", b"\x01\x02", "the file has 2: it is cut short, or no .safetensors file"),
    ("json", packed("{not json", b""), "its header is not JSON"),
    ("list", packed("[1]", b""), "its header is a JSON list: expected an object of tensors"),
    ("utf", (2).to_bytes(8, "little") + b"\xff\xfe", "its header is not UTF-8"),
    ("twice", packed('{"a": {}, "a": {}}', b""), "its header: 'a' appears twice; keep one"),
    ("overlap", changed("b", data_offsets=[16, 24]), "tensor 'b' begins at byte .* and overlaps a, which ends at"),
    ("gap", changed("a", shape=[2], data_offsets=[0, 8]), "tensor 'b' begins at byte .* and leaves a gap after a"),
    ("beyond", changed("b", data_offsets=[10**15, 10**15 + 8]), "tensor 'b' ends at byte .*: it is cut short"),
    ("backward", changed("b", data_offsets=[32, 24]), r"tensor 'b' is BF16 of shape \(4,\) and needs 8 bytes, not"),
    ("size", changed("a", shape=[2, 2]), r"tensor 'a' is F32 of shape \(2, 2\) and needs 16 bytes, not data_offsets"),
    ("negative", changed("a", shape=[-2, -3]), "tensor 'a' lacks a dtype, a shape of whole numbers or data_offsets"),
    ("dims", changed("a", shape=[1] * 10**5), "tensor 'a' lacks a dtype, a shape of whole numbers or data_offsets"),
    ("true", changed("a", shape=[True, 6]), "tensor 'a' lacks a dtype"),
    ("huge", changed("a", shape=[10**300]), "its header: a is a whole number of more than 100 digits|tensor 'a' lacks"),
    ("text", packed({"a": "b"}, b""), "tensor 'a' lacks a dtype"),
    ("dtype", changed("a", dtype="Q4"), "tensor 'a' has dtype 'Q4': expected one of BOOL"),
    ("escape", packed({"\x1b[31m": {}}, b""), r"tensor '\\\\x1b\[31m' lacks a dtype"),
    ("deep", packed('{"a":' * 50 + "1" + "}" * 50, b""), "nested more than 32 deep"),
]


@pytest.mark.parametrize(("content", "said"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said) as refusal:
        read_header(str(path))
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_is_written_is_read_to_the_bit(tmp_path: Path) -> None:
    """Every dtype, scalars, empty tensors, infinities and NaN."""
    draw = np.random.default_rng(0)
    arrays = {
        "fp64": draw.normal(size=(2, 3)),
        "fp32": np.array([np.nan, np.inf, -0.0, 1e-45], np.float32),
        "fp16": draw.normal(size=(3, 1, 2)).astype(np.float16),
        "bf16": draw.normal(size=(5, 7)).astype(ml_dtypes.bfloat16),
        "scalar": np.array(3.0, np.float32),
        "none": np.zeros((0, 4), np.float32),
        "columns": draw.normal(size=(4, 6)).astype(np.float32).T,
    }
    dtypes = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    path = tmp_path / SINGLE
    with path.open("wb") as file:
        write_tensors(
            file,
            [Planned(name, dtypes[str(one.dtype)], one.shape, lambda one=one: one) for name, one in arrays.items()],
        )
    found = stored_tensors(str(tmp_path))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        values, wanted = found[name].read(), array.astype(np.float32) if name == "bf16" else array
        assert values.dtype == wanted.dtype
        assert values.shape == wanted.shape
        assert values.tobytes() == wanted.tobytes()


def test_a_part_is_read_alone(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(packed(two(), np.arange(8, dtype="<f4").tobytes()))
    assert list(read_header(str(tmp_path / "one"))["a"].read(2, 4)) == [2.0, 3.0]


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """Of 40 MB in ten tensors no more than one, and its copy as bytes, is held while they are written and read."""
    size, path = 10**6, tmp_path / SINGLE
    planned = [Planned(str(i), "F32", (size,), lambda i=i: np.full(size, i, np.float32)) for i in range(10)]
    tracemalloc.start()
    try:
        with path.open("wb") as file:
            write_tensors(file, planned)
        sums = [float(one.read().sum()) for one in read_header(str(path)).values()]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sums == [i * size for i in range(10)]
    assert most < 3 * 4 * size


def test_a_file_that_changes_under_a_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    path.write_bytes(packed(two(), bytes(32)))
    found = read_header(str(path))
    path.write_bytes(packed(two(), bytes(20)))
    with pytest.raises(InputError, match=r"one.safetensors: tensor 'a' has 20 of its 24 bytes: the file has changed"):
        found["a"].read()


# -- folders ---------------------------------------------------------------------------------------------
def index(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}), "utf-8")


def shard(path: Path, *names: str) -> None:
    each = [{"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(len(names))]
    path.write_bytes(packed(dict(zip(names, each, strict=True)), bytes(4 * len(names))))


def outside(folder: Path) -> None:
    shard(folder.parent / "outside.safetensors", "a")
    index(folder, {"a": "one.safetensors"})
    os.symlink(folder.parent / "outside.safetensors", folder / "one.safetensors")


def single_outside(folder: Path) -> None:
    shard(folder.parent / "outside.safetensors", "a")
    folder.mkdir()
    os.symlink(folder.parent / "outside.safetensors", folder / SINGLE)


def lacking(folder: Path) -> None:
    index(folder, {"a": "one.safetensors", "b": "one.safetensors"})
    shard(folder / "one.safetensors", "a")


def further(folder: Path) -> None:
    index(folder, {"a": "one.safetensors"})
    shard(folder / "one.safetensors", "a", "b")


def half(folder: Path) -> None:
    index(folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    shard(folder / "model-00001-of-00002.safetensors", "a")


def folder_inside(folder: Path) -> None:
    (folder / SINGLE).mkdir(parents=True)


def pipe(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / SINGLE)


def holding(name: str, content: str = "x") -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / name).write_text(content, "utf-8")

    return make


FOLDERS: list[tuple[Callable[[Path], None], str]] = [
    (Path.mkdir, "in has neither model.safetensors nor model.safetensors.index.json: expected a folder"),
    (
        holding("pytorch_model.bin"),
        "pytorch_model.bin holds pickles, which can run any program, and zerosim loads none",
    ),
    (holding("adapter_model.safetensors"), "holds adapters, not weights: pass it as --adapters"),
    (holding(INDEX, "{}"), f"{INDEX}: weight_map is missing"),
    (holding(INDEX, '{"weight_map": {"a": "b", "a": "c"}}'), f"{INDEX}: 'a' appears twice; keep one"),
    (
        lambda folder: index(folder, {"a": "../in/one.safetensors"}),
        "tensor 'a' is in '../in/one.safetensors': expected",
    ),
    (lambda folder: index(folder, {"a": "/one.safetensors"}), "tensor 'a' is in '/one.safetensors': expected a"),
    (lambda folder: index(folder, {"a": "sub\\one.safetensors"}), "tensor 'a' is in .*: expected a .safetensors file"),
    (lambda folder: index(folder, {"a": ".."}), "tensor 'a' is in '..': expected a .safetensors file in its folder"),
    (lambda folder: index(folder, {"a": "one.bin"}), "tensor 'a' is in 'one.bin': expected a .safetensors file"),
    (outside, "one.safetensors is a link that leaves the folder"),
    (single_outside, "model.safetensors is a link that leaves the folder"),
    (half, "in lacks model-00002-of-00002.safetensors: its index names 2 shards, get all of them"),
    (lacking, "one.safetensors lacks b, which .*index.json says it has"),
    (further, "one.safetensors has b, which .*index.json does not name there"),
    (folder_inside, "cannot read .*model.safetensors: it is a folder, expected a file"),
    (pipe, "cannot read .*model.safetensors: it is a pipe, expected a file"),
]


@pytest.mark.parametrize(("make", "said"), FOLDERS, ids=[str(number) for number in range(len(FOLDERS))])
def test_a_folder_that_lacks_or_leaves_something_is_refused(
    tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    make(tmp_path / "in")
    with pytest.raises(InputError, match=said) as refusal:
        stored_tensors(str(tmp_path / "in"))
    assert "\n" not in str(refusal.value)


def test_shards_and_a_hubs_cache_are_read(tmp_path: Path) -> None:
    """In a hub's cache a folder's files are links to the blobs of the same model."""
    blobs, folder = tmp_path / "models--one" / "blobs", tmp_path / "models--one" / "snapshots" / "a1b2"
    blobs.mkdir(parents=True)
    folder.parent.mkdir()
    index(folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    for number, name in enumerate("ab", 1):
        shard(blobs / name, name)
        os.symlink(f"../../blobs/{name}", folder / f"model-0000{number}-of-00002.safetensors")
    assert stored_tensors(str(folder)).keys() == stored_tensors(str(folder / INDEX)).keys() == {"a", "b"}


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "no_suffix"])
def test_pickles_are_named_and_never_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(InputError, match=f"{name} holds pickles, which can run any program, and zerosim loads none"):
        is_released(str(tmp_path / name))


def test_files_are_told_apart(tmp_path: Path) -> None:
    arrays, tensors = io.BytesIO(), packed(two(), bytes(math.prod((4, 8))))
    np.savez(arrays, a=np.zeros(2))
    (tmp_path / "weights").write_bytes(arrays.getvalue())
    (tmp_path / "tensors").write_bytes(tensors)
    assert not is_released(str(tmp_path / "weights"))
    assert is_released(str(tmp_path / "tensors"))
    assert is_released(str(tmp_path))
