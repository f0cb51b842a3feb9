"""Values as plain data: results cross from an answer's process to the judging one, and no code comes along.

Numbers, texts, arrays, and zerosim's records that are listed here go through. Anything else, such as a tuple's subclass
that equals everything, arrives as its own text. Neither side calls a method of such an object except its `repr`, on the
answer's side. Control characters in texts arrive spelled out: a report shows them on a terminal.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import numpy as np

from zerosim.device.events import Event, Scope
from zerosim.errors import InputError, printable
from zerosim.grading.limits import Failure
from zerosim.grading.own_code import text_of
from zerosim.nn.balance import Routed
from zerosim.optim.control import StepReport
from zerosim.placement.assemble import Piece
from zerosim.tensor.flat import Slice
from zerosim.train.run import RankOutcome


class Odd(NamedTuple):
    """An object that is no plain data: its own text, and the name of its type."""

    text: str
    kind: str


_RECORDS = (Odd, Failure, Scope, *get_args(Event), StepReport, Piece, Slice, Routed, RankOutcome)
_SAME = frozenset({type(None), bool, int, float, bytes})
_BARE = _SAME | {str}
_NUMBERS = "biuf"  # an array of objects would bring them along


def packed(value: Any, records: Sequence[type] = ()) -> bytes:
    """Return a value as bytes; `records` are named tuples and dataclasses beside those listed here."""
    numbers = {kind: number for number, kind in enumerate((*_RECORDS, *records))}
    return marshal.dumps(_bare(value, numbers))


def unpacked(data: bytes, records: Sequence[type] = ()) -> Any:
    """Return the packed value. Raises: InputError for bytes that were not packed here."""
    try:
        return _whole(marshal.loads(data), (*_RECORDS, *records))
    except Exception as error:
        raise InputError(f"what came from the answer's process is not plain data: {error}") from None


def plain(value: Any) -> Any:
    """Return the value as it would arrive on the other side."""
    return unpacked(packed(value))


def shown(value: Any) -> str:
    """Return a value in words; for an odd one, its own."""
    return value.text if isinstance(value, Odd) else text_of(value, repr)


def _bare(value: Any, numbers: dict[type, int]) -> Any:
    kind = type(value)
    if kind in _BARE:
        return value
    if kind in numbers:
        parts = value if isinstance(value, tuple) else [getattr(value, one.name) for one in fields(value)]
        return "record", numbers[kind], _bare_parts(parts, numbers)
    if kind is list or kind is tuple:
        return kind.__name__, _bare_parts(value, numbers)
    if kind in (dict, MappingProxyType):
        return "dict", [(_bare(name, numbers), _bare(one, numbers)) for name, one in value.items()]
    if kind is np.ndarray and value.dtype.kind in _NUMBERS:
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic) and kind.__module__ == "numpy" and value.dtype.kind in _NUMBERS:
        return value.item()
    return _bare(Odd(text_of(value, repr), text_of(kind, lambda one: one.__name__)), numbers)


def _bare_parts(parts: Iterable[Any], numbers: dict[type, int]) -> list[Any]:
    # A run leaves a hundred thousand numbers: most parts need no call.
    return [one if type(one) in _BARE else _bare(one, numbers) for one in parts]


def _whole(value: Any, records: Sequence[type]) -> Any:
    if type(value) is str:
        return printable(value)
    if type(value) in _BARE:
        return value
    match value:
        case ("record", int(number), list(parts)):
            return records[number](*_whole_parts(parts, records))
        case ("list", list(parts)):
            return _whole_parts(parts, records)
        case ("tuple", list(parts)):
            return tuple(_whole_parts(parts, records))
        case ("dict", list(pairs)):
            return {_whole(name, records): _whole(one, records) for name, one in pairs}
        case ("array", str(dtype), tuple(shape), bytes(data)) if np.dtype(dtype).kind in _NUMBERS:
            return np.frombuffer(data, dtype).reshape(shape).copy()
        case _:
            raise ValueError(f"a {type(value).__name__}")


def _whole_parts(parts: list[Any], records: Sequence[type]) -> list[Any]:
    return [one if type(one) in _SAME else _whole(one, records) for one in parts]
