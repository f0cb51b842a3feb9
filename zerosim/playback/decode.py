"""Read a page's data back into every rank's record, for the ledgers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerosim.device.events import (
    Alloc,
    Copy,
    Event,
    Free,
    Kernel,
    Launch,
    Mark,
    Message,
    Retag,
    Scope,
    Wait,
)
from zerosim.errors import InputError, printable
from zerosim.placement.memories import DEVICE
from zerosim.playback.encode import EVENTS, SCHEMA, VERSION


def decode(data: object) -> list[dict[int, list[Event]]]:
    """Return each run's events by rank, in their order.

    Decoded kernels have no bytes and no engine, and a decoded alloc has taken exactly the bytes it asked for.

    Raises: InputError for data of another schema.
    """
    check_schema(data)
    assert isinstance(data, Mapping)
    return [_records(run) for run in data["runs"]]


def check_schema(data: object) -> None:
    """Check that data are a page's, of this version. Raises: InputError."""
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or schema != SCHEMA:
        what = (
            f"schema {printable(repr(schema))}" if schema is not None else f"a {type(data).__name__} without a schema"
        )
        raise InputError(f"{what}: expected {SCHEMA!r}, the data of a page that `zerosim step --html` wrote")
    if (version := data.get("version")) != VERSION:
        given = printable(repr(version))
        raise InputError(f"version {given} of {SCHEMA}: expected version {VERSION}; write the page anew")


def _records(run: Mapping[str, Any]) -> dict[int, list[Event]]:
    scopes = [Scope(*scope) for scope in run["scopes"]]
    records: dict[int, list[Event]] = {rank["rank"]: [] for rank in run["ranks"]}
    for kind, rank, scope, *values in run["events"]:
        records[rank].append(_READERS[EVENTS[kind]](run, rank, scopes[scope], values))
    return records


Reader = Callable[[Mapping[str, Any], int, Scope, Sequence[Any]], Event]


def _alloc(run: Mapping[str, Any], rank: int, scope: Scope, values: Sequence[Any]) -> Event:
    id, nbytes, kind, padding, name, *memory = values
    text = run["words"][name]
    where = run["words"][memory[0]] if memory else DEVICE
    return Alloc(scope, id, nbytes, nbytes, run["words"][kind], padding, "" if ": " in text else text, where)


def _launch(run: Mapping[str, Any], rank: int, scope: Scope, values: Sequence[Any]) -> Event:
    work, call, dtype, payload, sent, received, modelled = values
    op, axis, purpose, group, sequence, algorithm = run["calls"][call]
    op = "recv" if op == "send" and rank == group[1] else op
    words = run["words"]
    sizes = payload, sent, received, modelled
    return Launch(scope, work, op, words[dtype], purpose, axis, tuple(group), sequence, *sizes, algorithm)


def _copy(run: Mapping[str, Any], rank: int, scope: Scope, values: Sequence[Any]) -> Event:
    source, target, nbytes, purpose, work = values
    words = run["words"]
    return Copy(scope, words[source], words[target], nbytes, words[purpose], work)


_READERS: Mapping[str, Reader] = {
    "alloc": _alloc,
    "free": lambda run, rank, scope, values: Free(scope, values[0]),
    "retag": lambda run, rank, scope, values: Retag(scope, values[0], run["words"][values[1]]),
    "kernel": lambda run, rank, scope, values: Kernel(scope, run["words"][values[0]], "", values[1], 0, 0),
    "launch": _launch,
    "wait": lambda run, rank, scope, values: Wait(scope, values[0]),
    "message": lambda run, rank, scope, values: Message(scope, *values),
    "mark": lambda run, rank, scope, values: Mark(scope, run["words"][values[0]]),
    "copy": _copy,
    "alloc_elsewhere": _alloc,
    "free_elsewhere": lambda run, rank, scope, values: Free(scope, values[0], run["words"][values[1]]),
}
