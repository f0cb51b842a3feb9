"""Read pickles as plain values: a list of allowed names, and nothing of a file is ever executed.

A pickle is a program for a small stack machine. The machine here pushes, builds and stores like Python's own, but a
name in it stays a `Named` and a call of it an `Object`: no module is imported and no function runs. Names outside the
list in `names.py` are refused. The machine counts the containers it makes and shares what a pickle shares, so a short
file cannot fill memory.

Source: CPython's Lib/pickletools.py, which decodes the opcodes of protocols 0 to 5.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from zerosim.errors import InputError, printable
from zerosim.state.formats.names import is_allowed
from zerosim.state.formats.plain import PLAIN, BadPickle, Named, Object, Persistent, key_of

LARGEST_PICKLE = 2**28
"""The most bytes of a pickle: PyTorch's index of 500,000 pieces has less."""
MOST_CONTAINERS = 10**7
"""The most lists, tuples, mappings and objects of a pickle."""

Rebuild = Callable[[str, tuple[Any, ...]], Any]
"""What makes a value of a call, by the function's name and arguments; NotImplemented keeps it an `Object`."""


def read_pickle(raw: bytes, where: str, rebuild: Rebuild | None = None) -> Any:
    """Return the value of a pickle: dict, list, tuple, set, numbers, str, bytes, `Named`, `Object`, `Persistent`.

    `where` names the file in errors. `rebuild` makes values of calls, such as tensors of storages.

    Raises: InputError, in one line, for a name that is not allowed, a damaged or truncated pickle, and one that is too
    large.
    """
    if len(raw) > LARGEST_PICKLE:
        raise InputError(f"{where}: its pickle has {len(raw):,} bytes, expected at most {LARGEST_PICKLE:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of an escape in a name, which no name has
            return _Machine(rebuild).run(raw)
    except BadPickle as error:
        raise InputError(f"{where}: {error}") from None
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, Warning) as error:
        why = printable(str(error).split("\n")[0][:100])
        raise InputError(f"{where}: its pickle is damaged or cut short ({why})") from None


class _Machine:
    """The stack machine. `stack` ends with the values since the last mark, `below` holds the stacks before it."""

    def __init__(self, rebuild: Rebuild | None) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.rebuild = rebuild
        self.count = 0

    def run(self, raw: bytes) -> Any:
        for op, arg, _ in pickletools.genops(raw):
            if op.name == "STOP":
                return self.stack.pop()
            if op.name in _PUSHES:
                self.stack.append(arg)
            elif (step := _STEPS.get(op.name)) is None:
                raise BadPickle(f"its pickle uses {op.name}, which no checkpoint needs")
            else:
                step(self, arg)
        raise BadPickle("its pickle is cut short")

    def made(self) -> None:
        """Count a container. Raises: BadPickle for too many."""
        self.count += 1
        if self.count > MOST_CONTAINERS:
            raise BadPickle(f"its pickle makes more than {MOST_CONTAINERS:,} lists, mappings and objects")

    def push(self, value: Any) -> None:
        """Put a new container on the stack."""
        self.made()
        self.stack.append(value)

    def mark(self) -> list[Any]:
        """Return the values since the last mark, and go back to those before it. Raises: IndexError without a mark."""
        values, self.stack = self.stack, self.below.pop()
        return values

    def call(self, function: Any, args: Any) -> Any:
        """Return what calling an allowed name would make: a plain value, or an `Object`."""
        if not isinstance(function, Named) or not isinstance(args, tuple):
            raise BadPickle("its pickle calls something that is no name")
        plain = PLAIN.get(function.name)
        if plain is not None:
            return plain(args)
        if self.rebuild is not None:
            made = self.rebuild(function.name, args)
            if made is not NotImplemented:
                return made
        return Object(function.name, args)


def _named(machine: _Machine, module: object, name: object) -> None:
    whole = f"{module}.{name}"
    if not is_allowed(whole):
        raise BadPickle(
            f"its pickle names {printable(whole[:100])}, which no checkpoint that zerosim reads needs: save tensors, "
            "numbers and text alone, or convert it to .safetensors where you trust it"
        )
    machine.push(Named(whole))


def _global(machine: _Machine, arg: Any) -> None:
    module, _, name = arg.partition(" ")  # pickletools joins the two lines by a space
    _named(machine, _OLD_MODULES.get(module, module), name)


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    _named(machine, module, name)


def _reduce(machine: _Machine, _: Any) -> None:
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.push(machine.call(function, args))


def _newobj_ex(machine: _Machine, _: Any) -> None:
    keywords, args, function = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    if keywords:
        raise BadPickle("its pickle makes an object with keywords, which no checkpoint needs")
    machine.push(machine.call(function, args))


def _build(machine: _Machine, _: Any) -> None:
    state, value = machine.stack.pop(), machine.stack[-1]
    if isinstance(value, Object):
        value.state = state
    # an OrderedDict, a tensor: attributes of a plain value are nothing that is read


def _append(machine: _Machine, _: Any) -> None:
    value = machine.stack.pop()
    _extend(machine.stack[-1], [value])


def _appends(machine: _Machine, _: Any) -> None:
    values = machine.mark()
    _extend(machine.stack[-1], values)


def _extend(target: Any, values: list[Any]) -> None:
    if isinstance(target, Object):
        target.items.extend(values)
    elif isinstance(target, list):
        target.extend(values)
    else:
        raise BadPickle("its pickle appends to something that is no list")


def _setitem(machine: _Machine, _: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set(machine.stack[-1], [key, value])


def _setitems(machine: _Machine, _: Any) -> None:
    values = machine.mark()
    _set(machine.stack[-1], values)


def _set(target: Any, values: list[Any]) -> None:
    target = target.items if isinstance(target, Object) else target
    for key, value in zip(values[::2], values[1::2], strict=True):
        if isinstance(target, dict):
            target[key_of(key)] = value
        elif isinstance(target, list):
            target.append((key, value))
        else:
            raise BadPickle("its pickle sets items of something that is no mapping")


def _add_items(machine: _Machine, _: Any) -> None:
    values = machine.mark()
    if not isinstance(machine.stack[-1], set):
        raise BadPickle("its pickle adds items to something that is no set")
    machine.stack[-1].update(map(key_of, values))


def _get(machine: _Machine, arg: Any) -> None:
    machine.stack.append(machine.memo[int(arg)])


def _put(machine: _Machine, arg: Any) -> None:
    machine.memo[int(arg)] = machine.stack[-1]


def _memoize(machine: _Machine, _: Any) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _mark(machine: _Machine, _: Any) -> None:
    machine.below.append(machine.stack)
    machine.stack = []
    machine.made()


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    def step(machine: _Machine, _: Any) -> None:
        values = tuple(machine.stack.pop() for _ in range(count))
        machine.push(values[::-1])

    return step


def _pop(machine: _Machine, _: Any) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.mark()


def _pop_mark(machine: _Machine, _: Any) -> None:
    machine.mark()


def _persistent(machine: _Machine, _: Any) -> None:
    machine.push(Persistent(machine.stack.pop()))


_ARGUMENTS = """BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT SHORT_BINSTRING BINSTRING BINUNICODE SHORT_BINUNICODE
BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"""
_PUSHES = frozenset(_ARGUMENTS.split())
"""Opcodes whose argument is the value."""
_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = MappingProxyType(
    {
        "PROTO": lambda _, __: None,
        "FRAME": lambda _, __: None,
        "NONE": lambda machine, _: machine.stack.append(None),
        "NEWTRUE": lambda machine, _: machine.stack.append(True),
        "NEWFALSE": lambda machine, _: machine.stack.append(False),
        "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
        "EMPTY_LIST": lambda machine, _: machine.push([]),
        "EMPTY_DICT": lambda machine, _: machine.push({}),
        "EMPTY_SET": lambda machine, _: machine.push(set()),
        "FROZENSET": lambda machine, _: machine.push(set(map(key_of, machine.mark()))),
        "TUPLE": lambda machine, _: machine.push(tuple(machine.mark())),
        "TUPLE1": _tuple_of(1),
        "TUPLE2": _tuple_of(2),
        "TUPLE3": _tuple_of(3),
        "MARK": _mark,
        "POP": _pop,
        "POP_MARK": _pop_mark,
        "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
        "APPEND": _append,
        "APPENDS": _appends,
        "SETITEM": _setitem,
        "SETITEMS": _setitems,
        "ADDITEMS": _add_items,
        "BINGET": _get,
        "LONG_BINGET": _get,
        "BINPUT": _put,
        "LONG_BINPUT": _put,
        "MEMOIZE": _memoize,
        "GLOBAL": _global,
        "STACK_GLOBAL": _stack_global,
        "REDUCE": _reduce,
        "NEWOBJ": _reduce,
        "NEWOBJ_EX": _newobj_ex,
        "BUILD": _build,
        "BINPERSID": _persistent,
    }
)
_OLD_MODULES: Mapping[str, str] = MappingProxyType({"__builtin__": "builtins", "copy_reg": "copyreg"})
"""Modules of Python 2, whose names protocol 2 keeps."""
