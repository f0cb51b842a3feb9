"""An answer as bytes, for another interpreter: the student's own code goes by value, everything else by name.

Definitions of a notebook's cell, a script or an exec'd text cannot be imported elsewhere. So their functions and
classes go as code, with closures and the globals that they name. Definitions of Python, zerosim and installed packages
go as a name and are imported again, without any patches made here.

Both sides are the same Python, so code objects keep their form (`marshal`). Annotations stay here. Objects that belong
to this process, such as an open file, a generator or a thread, cannot go: that is an InputError.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import importlib
import io
import linecache
import marshal
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from zerosim.errors import InputError
from zerosim.grading.own_code import error_words, is_own

_DERIVED = {"__dict__", "__weakref__", "__annotations__", "__annotate_func__", "__annotations_cache__", "_abc_impl"}


def pack(answer: Any) -> tuple[bytes, dict[str, list[str]]]:
    """Return the answer as bytes, and the lines of the source files that its code names.

    Raises: InputError for an object that cannot go, with the name under which the answer uses it.
    """
    file = io.BytesIO()
    carrier = _Carrier(file)
    try:
        carrier.dump(answer)
    except Exception as error:  # a student's own __reduce__ may raise anything
        raise InputError(
            f"{carrier.culprit()} cannot be sent to the process that runs it: {error_words(error)}"
        ) from None
    return file.getvalue(), {name: linecache.getlines(name) for name in carrier.files}


def unpack(parcel: bytes) -> Any:
    """Return the packed answer. This makes the student's own objects, and may do anything.

    Raises: InputError for an object that cannot be rebuilt.
    """
    try:
        return pickle.loads(parcel)
    except Exception as error:
        raise InputError(f"it cannot be recreated in the process that runs it: {error_words(error)}") from None


class _Carrier(pickle.Pickler):
    """Pickles by value what cannot be imported by the reader."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.files: dict[str, None] = {}
        self._spaces: dict[int, dict[str, Any]] = {}  # functions of one module share their globals there too
        self._uses: list[tuple[str, Any]] = []

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, types.FunctionType):
            return NotImplemented if _is_importable(value) else self._function(value)
        if isinstance(value, type):
            if _is_importable(value) or not _is_made_by_python(value):
                return NotImplemented
            self._uses += vars(value).items()
            return _class(value)
        if kind is types.BuiltinFunctionType:
            return NotImplemented
        if kind is types.CodeType:
            self.files[value.co_filename] = None
            return marshal.loads, (marshal.dumps(value),)
        if kind is types.CellType:
            return _empty, ("CellType",), _contents(value), None, None, _fill_cell
        return _PARTS[kind](value) if kind in _PARTS else _by_its_name(value)

    def _function(self, function: types.FunctionType) -> Any:
        code, space = function.__code__, function.__globals__
        used = {name: space[name] for name in _global_names(code) if name in space}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._uses += [(name, value) for value in _contents(cell)]
        self._uses += used.items()
        there = self._spaces.setdefault(id(space), {"__name__": space.get("__name__", "")})
        state = {
            "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "__qualname__": function.__qualname__,
        }
        args = (code, there, function.__name__, None, function.__closure__)
        return _empty, ("FunctionType", *args), (used, state, dict(vars(function))), None, None, _fill_function

    def culprit(self) -> str:
        """Return the name under which the student's code uses the object that could not go."""
        for name, value in reversed(self._uses):
            try:
                _Carrier(io.BytesIO()).dump(value)
            except Exception:
                if not isinstance(value, types.FunctionType | type):  # these use it themselves
                    return f"`{name}`, a {type(value).__name__},"
        return "what it uses"


# -- by name ----------------------------------------------------------------------------------------
def _is_importable(value: Any) -> bool:
    """Return whether its module, imported elsewhere, has this very function or class."""
    found: Any = sys.modules.get(value.__module__ or "")
    if not _is_library(found):
        return False
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _is_made_by_python(cls: type) -> bool:
    return bool(cls.__flags__ & 1 << 9)  # Py_TPFLAGS_HEAPTYPE: C's own classes have no parts to carry


def _is_library(module: Any) -> bool:
    if module is None or module.__name__ == "__main__":
        return False
    file = getattr(module, "__file__", None)
    return module.__name__.partition(".")[0] in sys.stdlib_module_names if file is None else not is_own(file)


def _module_name(module: types.ModuleType) -> str:
    if sys.modules.get(module.__name__) is not module or module.__name__ == "__main__":
        raise InputError(f"module {module.__name__} cannot be imported by its name")
    return module.__name__


def _by_its_name(value: Any) -> Any:
    """Return whether a value is a named constant of its type's own library module, such as a dtype or a sentinel."""
    module = sys.modules.get(type(value).__module__)
    if _is_library(module):
        for name, found in list(vars(module).items()):
            if found is value:
                return getattr, (module, name)
    return NotImplemented


# -- by value ---------------------------------------------------------------------------------------
def _global_names(code: types.CodeType) -> set[str]:
    """Return the globals that a function, and the definitions in it, names."""
    names = {
        step.argval
        for step in dis.get_instructions(code)
        if "GLOBAL" in step.opname or step.opname == "LOAD_NAME"  # the latter in the body of a class
    }
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names |= _global_names(inner)
    return names


def _empty(kind: str, *args: Any) -> Any:
    """Return a built-in type that has no importable name."""
    return getattr(types, kind)(*args)


def _fill_function(function: types.FunctionType, state: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    used, attributes, own = state
    function.__globals__.setdefault("__builtins__", builtins)  # C code's imports, NumPy's too, look there
    function.__globals__.update(used)
    for name, value in attributes.items():
        setattr(function, name, value)
    vars(function).update(own)


def _class(cls: type) -> Any:
    """Make an empty class first, then its attributes: its methods refer to it."""
    slots = vars(cls).get("__slots__", ())
    hidden = _DERIVED | {slots} if isinstance(slots, str) else _DERIVED.union(slots)
    held = {name: value for name, value in vars(cls).items() if name not in hidden}
    first = {"__module__": held.pop("__module__"), "__qualname__": cls.__qualname__}
    if "__slots__" in held:
        first["__slots__"] = held.pop("__slots__")
    if isinstance(cls, enum.EnumType):  # it makes its members itself, and much else
        first |= {name: cls[name].value for name in cls.__members__}
        held = {name: value for name, value in held.items() if hasattr(value, "__code__") and name != "__new__"}
    return _empty_class, (type(cls), cls.__name__, cls.__bases__, first), held, None, None, _fill_class


def _empty_class(kind: type, name: str, bases: tuple[type, ...], first: dict[str, Any]) -> type:
    def fill(space: dict[str, Any]) -> None:
        for key, value in first.items():
            space[key] = value

    return types.new_class(name, bases, {"metaclass": kind}, fill)


def _fill_class(cls: type, held: dict[str, Any]) -> None:
    for name, value in held.items():
        type.__setattr__(cls, name, value)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing has been put into it yet
        return ()


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    for value in contents:
        cell.cell_contents = value


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


_PARTS: dict[type, Callable[[Any], tuple[Any, tuple[Any, ...]]]] = {
    types.ModuleType: lambda module: (importlib.import_module, (_module_name(module),)),
    types.MappingProxyType: lambda proxy: (_empty, ("MappingProxyType", dict(proxy))),
    property: lambda value: (property, (value.fget, value.fset, value.fdel, value.__doc__)),
    staticmethod: lambda method: (staticmethod, (method.__func__,)),
    classmethod: lambda method: (classmethod, (method.__func__,)),
    functools._lru_cache_wrapper: lambda cached: (_cached, (cached.__wrapped__, cached.cache_parameters())),
    type(threading.Lock()): lambda lock: (threading.Lock, ()),  # locks are replaced: they have no state to keep
    type(threading.RLock()): lambda lock: (threading.RLock, ()),
}
"""The constructor and parts of a value of these types."""
