"""The zip archives of torch.save: where each record is in a file. Records are stored, never compressed.

An archive may be part of a file: those of a distributed checkpoint stand one after the other. Its offsets count from
its own beginning. Sizes beyond 4 GB are in zip64 fields.

Source: PKWARE's APPNOTE 6.3; PyTorch 2.13, caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from io import BufferedReader
from typing import NamedTuple

from zerosim.config.inputs import open_file
from zerosim.errors import InputError, printable

LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""How a file of PyTorch before 1.6 begins: a pickled magic number."""

_LARGEST_LIST = 2**28  # bytes of an archive's list of records
_END, _END_64, _LOCATOR, _ENTRY, _RECORD = (
    b"PK\x05\x06",
    b"PK\x06\x06",
    b"PK\x06\x07",
    b"PK\x01\x02",
    b"PK\x03\x04",
)


class Record(NamedTuple):
    """A record of an archive: where its header begins in the file, and how many bytes follow it."""

    header: int
    nbytes: int


class Zip(NamedTuple):
    """An archive: bytes [start, stop) of a file, and its records by name, without the folder that all are in."""

    path: str
    start: int
    stop: int
    records: Mapping[str, Record]

    def begin(self, file: BufferedReader, record: Record) -> int:
        """Return where a record's bytes begin in the file. Raises: InputError if they go beyond the archive's end."""
        begin = self.start + record.header + 30
        if begin <= self.stop:
            file.seek(self.start + record.header)
            raw = file.read(30)
            if len(raw) == 30 and raw[:4] == _RECORD:
                begin += sum(int(n) for n in struct.unpack_from("<2H", raw, 26))
                if begin + record.nbytes <= self.stop:
                    return begin
        raise InputError(f"{self.path}: a record of its archive is beyond its end: the file is damaged or cut short")

    def read(self, name: str, largest: int = 2**29) -> bytes:
        """Return all bytes of a record, none if there is none of that name. Raises: InputError beyond `largest`."""
        record = self.records.get(name)
        if record is None:
            return b""
        if record.nbytes > largest:
            raise InputError(f"{self.path}: {name} in it has {record.nbytes:,} bytes, expected at most {largest:,}")
        with open_file(self.path) as file:
            file.seek(self.begin(file, record))
            return file.read(record.nbytes)


def read_zip(path: str, start: int = 0, stop: int | None = None) -> Zip:
    """Return the records of an archive, without their bytes. `stop` None is the file's end.

    Raises: InputError, in one line, for anything but an archive that torch.save wrote.
    """
    with open_file(path) as file:
        size = file.seek(0, 2)
        end = size if stop is None else stop
        if not 0 <= start <= end <= size:
            raise InputError(
                f"{path}: bytes {start:,} to {end:,} are named, but the file has {size:,}: it is cut short"
            )
        try:
            return Zip(path, start, end, _records(file, path, start, end))
        except InputError:
            raise
        except (struct.error, ValueError, OverflowError) as error:
            raise InputError(f"{path}: its archive is damaged ({printable(str(error))})") from None


def _records(file: BufferedReader, path: str, start: int, stop: int) -> dict[str, Record]:
    """Return an archive's records by name, without the folder that all of them are in."""
    count, nbytes, offset = _directory(file, path, start, stop)
    if nbytes > _LARGEST_LIST or not 0 <= offset <= offset + nbytes <= stop - start:
        raise InputError(f"{path}: the list of its archive has {nbytes:,} bytes from {offset:,} on: it is damaged")
    file.seek(start + offset)
    raw, at, records = file.read(nbytes), 0, dict[str, Record]()
    for _ in range(count):
        magic, _, _, flags, method, _, _, _, packed, plain, *rest = struct.unpack_from("<4s6H3L5H2L", raw, at)
        lengths, header = rest[:3], rest[-1]
        name = raw[at + 46 : at + 46 + lengths[0]].decode("utf-8", "replace")
        extra = raw[at + 46 + lengths[0] : at + 46 + lengths[0] + lengths[1]]
        at += 46 + sum(lengths)
        if magic != _ENTRY:
            raise InputError(f"{path}: the list of its archive is damaged")
        plain, packed, header = _wide(extra, plain, packed, header)
        if method or flags & 1 or plain != packed:
            raise InputError(f"{path}: {printable(name[:80])} in it is compressed: torch.save never does that")
        short = name.partition("/")[2] or name
        if short in records:
            raise InputError(f"{path}: its archive has {printable(name[:80])} twice: it is damaged")
        records[short] = Record(header, plain)
    if "data.pkl" not in records or "constants.pkl" in records:
        what = "a TorchScript program" if "constants.pkl" in records else "an archive without data.pkl"
        raise InputError(f"{path} is {what}: expected a file of torch.save(state_dict, ...)")
    return records


def _directory(file: BufferedReader, path: str, start: int, stop: int) -> tuple[int, int, int]:
    """Return how many records an archive lists, and the list's bytes and offset."""
    file.seek(start)
    head = file.read(min(16, stop - start))
    if head.startswith(LEGACY):
        raise InputError(
            f"{path} has the format of PyTorch before 1.6: load it with torch where you trust it, and save it again"
        )
    if head[:2] != b"PK":
        what = "a plain pickle" if head[:1] == b"\x80" else "no file of torch.save, or cut short"
        raise InputError(f"{path} is {what}: expected a zip archive as torch.save writes it")
    back = min(stop - start, 65_557)  # the end's own 22 bytes and the longest comment
    file.seek(stop - back)
    tail = file.read(back)
    at = tail.rfind(_END)
    if at < 0:
        raise InputError(f"{path}: its archive has no end: the file is cut short")
    _, _, _, _, count, nbytes, offset, _ = struct.unpack_from("<4s4H2LH", tail, at)
    if at >= 20 and tail[at - 20 : at - 16] == _LOCATOR:
        (where,) = struct.unpack_from("<Q", tail, at - 12)
        if where > stop - start - 56:
            raise InputError(f"{path}: its archive is damaged")
        file.seek(start + where)
        magic, _, _, _, _, _, _, count, nbytes, offset = struct.unpack("<4sQ2H2L4Q", file.read(56))
        if magic != _END_64:
            raise InputError(f"{path}: its archive is damaged")
    return count, nbytes, offset


def _wide(extra: bytes, *sizes: int) -> list[int]:
    """Return sizes and offset of a record; those beyond 4 GB are in the extra field 1."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        wide = extra[at + 4 : at + 4 + length] if kind == 1 else wide
        at += 4 + length
    found = []
    for one in sizes:
        if one == 0xFFFFFFFF:
            (one,) = struct.unpack_from("<Q", wide)
            wide = wide[8:]
        found.append(one)
    return found
