"""What a pickle's names and calls become: plain values where one has the same meaning, otherwise symbols."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from zerosim.errors import printable
from zerosim.state.formats.names import is_enum

_MOST_KEY = 64  # elements of a tuple that is a key
_SCALARS = (str, bytes, int, float, bool, type(None))


class Named(NamedTuple):
    """A class or a function, by its name alone: 'torch.Size'."""

    name: str


class Persistent(NamedTuple):
    """A reference to something outside the pickle: a tensor's storage."""

    id: Any


class Object:
    """An instance of an allowed class: the call that would make it, and what it would be given afterwards."""

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None
        self.items: list[Any] = []

    def field(self, name: str, otherwise: Any = None) -> Any:
        """Return an attribute that the pickle sets, `otherwise` if it sets none of that name."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        found = [one[name] for one in states if isinstance(one, dict) and name in one]
        return found[0] if found else otherwise


class BadPickle(Exception):
    """Why a pickle is refused: the rest of a sentence that begins with the file."""


def key_of(value: Any) -> Hashable:
    """Return a key. A tuple's must be flat: the hash of nested ones can take a time that doubles with each level."""
    if isinstance(value, (Object, Named, *_SCALARS)):
        return value
    if isinstance(value, tuple) and len(value) <= _MOST_KEY and all(isinstance(one, _SCALARS) for one in value):
        return value
    raise BadPickle(f"its pickle has a key of type {type(value).__name__}, which no checkpoint needs")


def _set_of(args: tuple[Any, ...]) -> set[Hashable]:
    return {key_of(one) for one in _one_list(args)}


def _one_list(args: tuple[Any, ...]) -> list[Any]:
    given = args[0] if args else []
    if len(args) > 1 or not isinstance(given, list | tuple | set):
        raise BadPickle("its pickle makes a list of something that is none")
    return list(given)


def _ordered(args: tuple[Any, ...]) -> dict[Any, Any]:
    return {key_of(key): value for key, value in _one_list(args)}


def _size(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(int(one) for one in _one_list(args))


def _encoded(args: tuple[Any, ...]) -> bytes:
    """Return the bytes that protocol 2 writes as latin-1 text."""
    text, encoding = args if len(args) == 2 else (*args, "latin1")
    if encoding not in ("latin1", "latin-1"):
        raise BadPickle(f"its pickle encodes text as {printable(str(encoding)[:40])}")
    return str(text).encode("latin1")


def _bytes_of(args: tuple[Any, ...]) -> bytes:
    given = args[0] if args else b""
    if not isinstance(given, bytes | str):  # bytes(10**12) would make that many
        raise BadPickle("its pickle makes bytes of something that is no text")
    return given if isinstance(given, bytes) else given.encode("latin1")


def _member(args: tuple[Any, ...]) -> Object:
    """Return a member of an enumeration, which old Pythons pickle as getattr(Class, 'NAME')."""
    owner, name = args
    if not isinstance(owner, Named) or not is_enum(owner.name):
        raise BadPickle("its pickle names builtins.getattr, which no checkpoint needs")
    return Object(owner.name, (name,))


PLAIN: Mapping[str, Callable[[tuple[Any, ...]], Any]] = MappingProxyType(
    {
        "builtins.set": _set_of,
        "builtins.frozenset": _set_of,
        "builtins.list": _one_list,
        "builtins.tuple": lambda args: tuple(_one_list(args)),
        "builtins.dict": _ordered,
        "builtins.bytes": _bytes_of,
        "builtins.bytearray": _bytes_of,
        "builtins.slice": lambda args: slice(*args),
        "builtins.complex": lambda args: complex(*map(float, args)),
        "builtins.getattr": _member,
        "collections.OrderedDict": _ordered,
        "torch.Size": _size,
        "torch._utils._rebuild_parameter": lambda args: args[0],
        "torch._utils._rebuild_parameter_with_state": lambda args: args[0],
        "_codecs.encode": _encoded,
    }
)
"""The value that a call makes, by the function's name."""
