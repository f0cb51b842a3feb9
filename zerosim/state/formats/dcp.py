"""Read PyTorch's distributed checkpoints (torch.distributed.checkpoint): a folder with `.metadata` and `.distcp` files.

`.metadata` is a pickle: for each name a tensor's dtype, size and chunks, and for each chunk the file, the offset and
the length of a small archive of torch.save. `planner_data` has the keys that lead to each name. A file of
SerializationFormat.SAFETENSORS holds one .safetensors with all chunks of its rank instead.

Source: PyTorch 2.13, torch/distributed/checkpoint/metadata.py, filesystem.py and default_planner.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from zerosim.config.inputs import open_file, read_file
from zerosim.config.safetensors import read_header
from zerosim.errors import InputError, printable
from zerosim.state.formats.archive import Stored, read_archive
from zerosim.state.formats.boxes import Box, from_boxes
from zerosim.state.formats.names import DTYPES
from zerosim.state.formats.pickles import LARGEST_PICKLE, read_pickle
from zerosim.state.formats.plain import Named, Object
from zerosim.state.formats.shards import tensor_of
from zerosim.state.formats.sorting import sort_items, state_of, tied
from zerosim.state.formats.whole import Tensor, WholeState, host_dtype

METADATA = ".metadata"
_CLASSES = "torch.distributed.checkpoint.metadata"


class Place(NamedTuple):
    """Where a chunk or an object is: bytes of a file."""

    path: str
    offset: int
    length: int


class Item(NamedTuple):
    """A value that is no tensor, in an archive of its own; `read` gives it as `read_archive` does."""

    place: Place

    def read(self) -> Any:
        return read_archive(self.place.path, self.place.offset, self.place.offset + self.place.length)


RowsOf = Callable[[str], tuple[str, str] | None]


def _no_rows(_: str) -> None:
    return None


def read_dcp(folder: str, kind: str = "dcp") -> WholeState:
    """Return a distributed checkpoint, its chunks joined.

    Raises: InputError, in one line, for a damaged `.metadata`, a missing or short file, and a tensor whose chunks leave
    a hole or overlap, with its name.
    """
    items, version = read_items(folder)
    found = sort_items(items)
    return state_of(kind, version, found, tied(found))


def read_items(folder: str, rows_of: RowsOf = _no_rows) -> tuple[dict[tuple[str, ...], Tensor | Item], str]:
    """Return the items of a distributed checkpoint by the keys that lead to them, and its version.

    `rows_of`: of a name whose first dimension stacks several tensors, their names before and after the number.

    Raises: InputError as `read_dcp`.
    """
    path = os.path.join(folder, METADATA)
    top = read_pickle(read_file(path, "", LARGEST_PICKLE), path)
    described, stored = _field(top, "state_dict_metadata"), _field(top, "storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise InputError(f"{path} has no state_dict_metadata and storage_data: expected the index of a DCP folder")
    places = dict(_places(stored, folder, path))
    _check_files(places.values())
    paths = _field(top, "planner_data")
    items = dict[tuple[str, ...], Tensor | Item]()
    for name, entry in described.items():
        keys = paths.get(name) if isinstance(paths, dict) else None
        keys = tuple(map(str, keys)) if isinstance(keys, tuple) and keys else (str(name),)
        rows = rows_of(str(name))
        if rows is not None and not _is_bytes(entry):
            items |= {(one.name,): one for one in _rows(str(name), rows, entry, places, folder, path)}
        else:
            items[keys] = _item(str(name), entry, places, folder, path)
    version = _field(top, "version")
    return items, version if isinstance(version, str) else ""


def _field(value: Any, name: str) -> Any:
    return value.field(name) if isinstance(value, Object) else None


def _places(stored: Mapping[Any, Any], folder: str, path: str) -> Iterator[tuple[tuple[str, Any], Place]]:
    """Yield the place of each chunk, by name and offsets (None for an object)."""
    for index, info in stored.items():
        name, file = _field(index, "fqn"), _field(info, "relative_path")
        if not isinstance(name, str) or not isinstance(file, str):
            raise InputError(f"{path}: its storage_data is not what PyTorch's FileSystemWriter writes")
        if _field(info, "transform_descriptors"):
            raise InputError(f"{path}: {printable(name[:100])!r} is compressed by an extension: save it without")
        if os.path.basename(file) != file or "\\" in file or file in ("", ".", ".."):
            raise InputError(f"{path}: {printable(file[:100])!r} is no file in its folder")
        offset, length = _field(info, "offset"), _field(info, "length")
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
            raise InputError(f"{path}: {printable(name[:100])!r} has no offset and length")
        yield (name, _field(index, "offset")), Place(os.path.join(folder, file), offset, length)


def _check_files(places: Iterable[Place]) -> None:
    """Check that each file is there, and has the bytes that are named. Raises: InputError."""
    sizes = dict[str, int]()
    for place in places:
        if place.path not in sizes:
            if not os.path.isfile(place.path):
                raise InputError(f"{place.path} is missing: its .metadata names it; get the files of all ranks")
            sizes[place.path] = os.path.getsize(place.path)
        if place.offset + place.length > sizes[place.path]:
            raise InputError(
                f"{place.path} has {sizes[place.path]:,} bytes, and .metadata names byte "
                f"{place.offset + place.length:,}: it is cut short"
            )


def _is_bytes(entry: Any) -> bool:
    return isinstance(entry, Object) and entry.name == f"{_CLASSES}.BytesStorageMetadata"


def _item(name: str, entry: Any, places: Mapping[tuple[str, Any], Place], folder: str, path: str) -> Tensor | Item:
    """Return a tensor, its chunks found, or an object."""
    if _is_bytes(entry):
        place = places.get((name, None))
        if place is None:
            raise InputError(f"{path}: {printable(name[:200])!r} is in no file: get the files of all ranks")
        return Item(place)
    return from_boxes(name, *_boxes(name, entry, places, path), folder)


def _rows(
    name: str, rows: tuple[str, str], entry: Any, places: Mapping[tuple[str, Any], Place], folder: str, path: str
) -> Iterator[Tensor]:
    """Yield the tensors that one stacks along its first dimension."""
    dtype, size, boxes = _boxes(name, entry, places, path)
    for row in range(size[0] if size else 0):
        own = [
            Box(box.offsets[1:], box.sizes[1:], partial(_row, box, row - box.offsets[0]))
            for box in boxes
            if box.sizes and box.offsets[0] <= row < box.offsets[0] + box.sizes[0]
        ]
        yield from_boxes(f"{rows[0]}{row}{rows[1]}", dtype, size[1:], own, folder)


def _row(box: Box, row: int) -> Any:
    return box.read()[row]


def _boxes(
    name: str, entry: Any, places: Mapping[tuple[str, Any], Place], path: str
) -> tuple[str, tuple[int, ...], list[Box]]:
    """Return a tensor's dtype, size and chunks. Raises: InputError for a chunk that is in no file."""
    said = f"{path}: {printable(name[:200])!r}"
    if not isinstance(entry, Object) or entry.name != f"{_CLASSES}.TensorStorageMetadata":
        raise InputError(f"{said} is neither a tensor nor an object of a DCP folder")
    size, boxes, dtype = entry.field("size"), list[Box](), dtype_of(entry.field("properties"), said)
    for chunk in entry.field("chunks") or ():
        offsets, sizes = _field(chunk, "offsets"), _field(chunk, "sizes")
        place = places.get((name, offsets)) if _is_shape(offsets) else None
        if not _is_shape(sizes) or place is None:
            raise InputError(
                f"{said} has a piece at {printable(str(offsets)[:80])} in no file: get the files of all ranks"
            )
        box = Box(offsets, sizes, partial(_read_chunk, name, place))
        if box.numel * host_dtype(dtype).itemsize > place.length:
            raise InputError(f"{said} has a piece of {sizes} in {place.length:,} bytes: the folder is damaged")
        boxes.append(box)
    if not _is_shape(size):
        raise InputError(f"{said} has no size")
    return dtype, size, boxes


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= 32 and all(type(n) is int and 0 <= n < 2**62 for n in value)


def dtype_of(properties: Any, where: str) -> str:
    """Return the dtype of a tensor's properties, which a tuple or a mapping sets. Raises: InputError without one."""
    state = properties.state if isinstance(properties, Object) else None
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict | None.__class__):
        state = state[1] or state[0]
    named = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else None
    dtype = DTYPES.get(named.name) if isinstance(named, Named) else None
    if dtype is None:
        raise InputError(f"{where} has no dtype that is read: expected one like torch.float32")
    return dtype


def _read_chunk(name: str, place: Place) -> Any:
    with open_file(place.path) as file:
        file.seek(place.offset)
        head = file.read(9)
    if head[8:] == b"{" and place.offset == 0:
        stored = read_header(place.path).get(name)
        if stored is None:
            raise InputError(f"{place.path} lacks {printable(name[:200])!r}, which .metadata says it has")
        return tensor_of(stored).read()
    value = read_archive(place.path, place.offset, place.offset + place.length)
    if not isinstance(value, Stored):
        raise InputError(f"{place.path}: {printable(name[:200])!r} is no dense tensor: save its .to_dense()")
    return value.read()
