"""What an answer took from zerosim: functions that solve the exercise, and changes to the package.

Either would let an answer pass every check without being the student's work. Both are detected while it runs: whichever
way an answer reaches zerosim's own solution (it inherits it, calls it, returns it), that function is called. An answer
that is a function is traced as well: the executed code does not depend on the name under which it was found.

This does not detect copied and edited text, another process or a `_thread` thread that does the work, or C code that
stops the tracer. The first is a student's effort, the others a cheat that a reader sees.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from zerosim.analysis import slots
from zerosim.backends.numpy import blocks, experts, nf4, quantize, rounding
from zerosim.device.allocators import arena
from zerosim.dialects.deepspeed import auto as deepspeed_auto
from zerosim.functional import lora
from zerosim.grading import optimizers
from zerosim.grading.best_fit import Book
from zerosim.grading.given import bugs, other_bugs
from zerosim.grading.own_code import is_own
from zerosim.ledger import clock
from zerosim.nn.balance import Balance
from zerosim.optim.elementwise import Elementwise
from zerosim.parallel import norm, pipeline
from zerosim.parallel.base import Strategy
from zerosim.parallel.compression import powersgd
from zerosim.parallel.compression.codecs import TopK
from zerosim.parallel.exchange import Slices
from zerosim.parallel.gathered import Gathered
from zerosim.parallel.offload import OffloadedGradients, OffloadedStep
from zerosim.parallel.prefetch import Elements, Units
from zerosim.parallel.reducer import Reducer
from zerosim.parallel.secondary import Secondary
from zerosim.parallel.tensor import Borders
from zerosim.parallel.ulysses import Ulysses
from zerosim.placement import partition
from zerosim.placement.context import ContextCut
from zerosim.tensor import flat, float8

_MODULES = (pipeline, arena, quantize, rounding, nf4, lora, powersgd, blocks, experts, deepspeed_auto)
"""Their functions are never called by an exercise's run itself."""
_BUGS = (bugs.__name__, other_bugs.__name__)
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep

DEAF = "sys.setprofile"
"""Noted for an answer that replaces the profile function set here."""

Note = Callable[[str], None]
Audit = Callable[[Callable[[str, tuple[Any, ...]], None]], None]
Code = Hashable
"""Identifies a function's code."""


@contextmanager
def noted(
    names: Sequence[str], note: Note, audit: Audit = lambda hook: None, given: Any = None
) -> Iterator[Callable[[Any], Any]]:
    """Run a block in which `note` is told which of zerosim's own answers under these names are called, as
    'Zero2.publish_params'. Yields a function that traces an answer.

    A name is a function's or a method's, in whatever class, or 'Class.method'. A strategy with a bug, `given` in the
    exercise, may keep its methods. `audit` installs an audit hook, which Python cannot remove: use it in a process that
    ends with the answer."""
    own = [(owner, name, vars(owner)[name]) for asked in names for owner, name in _owners(asked)]
    if isinstance(given, type) and given.__module__ in _BUGS:
        own = [one for one in own if getattr(given, one[1], None) is not one[2]]
    heard: dict[Code, str] = {}
    bound: list[tuple[type | ModuleType, str, Any]] = []
    names_of: dict[int, str] = {}  # one for each function, whatever its names
    places = _other_names()
    for owner, name, function in own:
        called = names_of.setdefault(id(function), f"{owner.__name__.removeprefix('zerosim.')}.{name}")
        from_anywhere = owner in _MODULES or (isinstance(owner, type) and owner not in _collaborators())
        noting = _noting(function, called, note, from_anywhere=from_anywhere)
        for place, key in [(owner, name), *places.pop(id(function), ())]:
            bound.append((place, key, vars(place)[key]))
            setattr(place, key, noting)
        if hasattr(function, "__code__"):
            heard |= dict.fromkeys(_signs(function.__code__), called)
    audit(copies(heard, note))
    try:
        yield functools.partial(listening, heard=heard, note=note)
    finally:
        for place, key, function in reversed(bound):
            setattr(place, key, function)


def _other_names() -> dict[int, list[tuple[ModuleType, str]]]:
    """Return the places where zerosim's modules have functions under a name, by the function: an import leaves one
    behind. The grader's own stay: it calls them itself."""
    found: dict[int, list[tuple[ModuleType, str]]] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("zerosim.") and not name.startswith("zerosim.grading."):
            for key, value in list(vars(module).items()):
                found.setdefault(id(value), []).append((module, key))
    return found


def _owners(name: str) -> list[tuple[type | ModuleType, str]]:
    """Return where a name is zerosim's own: the strategies, those with a bug too, and their helpers (the base only
    where no other has the name: its own hooks are empty), the classes of f and g, the arena, a codec, the optimizers'
    rules, a context's cut and exchange, a router's balance, and modules."""
    within, _, name = name.rpartition(".")
    strategies: list[type] = [each for each in (*_shipped(Strategy), *_collaborators()) if name in vars(each)]
    classes = (
        *_shipped(Borders),
        Borders,
        arena.Arena,
        *_shipped(Elementwise),
        Units,
        Elements,
        Secondary,
        TopK,
        ContextCut,
    )
    modules = *_MODULES, partition, flat, float8, clock, slots, norm, optimizers
    owners: list[type | ModuleType] = [*(strategies or [Strategy]), *classes, Ulysses, Balance, *modules]
    return [(each, name) for each in owners if _has(each, name) and within in ("", each.__name__)]


def _has(owner: type | ModuleType, name: str) -> bool:
    """Whether the name is the owner's own: what a module imports is another's."""
    if name not in vars(owner):
        return False
    return isinstance(owner, type) or getattr(vars(owner)[name], "__module__", owner.__name__) == owner.__name__


def _collaborators() -> list[type[Any]]:
    """Return the helpers of zerosim's strategies, and of its grader."""
    return [Gathered, Reducer, *_shipped(Reducer), Slices, *_shipped(Slices), OffloadedGradients, OffloadedStep, Book]


def _shipped(base: type[Any]) -> Iterator[type[Any]]:
    """Return the package's own subclasses, and theirs."""
    for one in base.__subclasses__():
        if one.__module__.startswith(("zerosim.parallel.", "zerosim.optim.", *_BUGS)):
            yield one
        yield from _shipped(one)


def _noting(function: Callable[..., Any], name: str, note: Note, *, from_anywhere: bool) -> Callable[..., Any]:
    """Return a function that notes each call on behalf of the student. The engine may call a strategy's method, a
    pipeline its own schedule, and an arena its own compaction. Other functions, and the strategies' helpers, are used
    by zerosim itself too: for those the student's code must have led to the call."""

    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if from_anywhere or _is_led_to(sys._getframe(1)):
            note(name)
        return function(*args, **kwargs)

    del noting.__wrapped__  # a way around this function
    return noting


def _is_led_to(frame: FrameType | None) -> bool:
    """Return whether the student's code has led here, above the grader's own that called it."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_own(file):
            return True
        if file.startswith(_HERE):
            return False
        frame = frame.f_back
    return False


# -- whatever it is called by -------------------------------------------------------------------------
def listening(answer: Any, *, heard: Mapping[Code, str], note: Note) -> Any:
    """Return a function that notes the zerosim code that runs inside it, however it was reached: a function out of a
    closure or of the garbage collector, a copy of a module. A class stays unchanged: hooks take part in too much."""
    if isinstance(answer, type) or not callable(answer) or not heard:
        return answer

    def listen(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and (name := _known(frame.f_code, heard)):
            note(name)

    @functools.wraps(answer)
    def listened(*args: Any, **kwargs: Any) -> Any:
        before, is_deep = sys.getprofile(), False
        sys.setprofile(listen)
        threading.setprofile(listen)
        try:
            return answer(*args, **kwargs)
        except RecursionError:  # Python removes a profile function when there is no stack left to call it
            is_deep = True
            raise
        finally:
            if sys.getprofile() is not listen and not is_deep:
                note(DEAF)
            sys.setprofile(before)
            threading.setprofile(None)

    return listened


def copies(heard: Mapping[Code, str], note: Note) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that notes zerosim's own answers among code that is executed or made into a function
    again."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("exec", "function.__new__") and args and isinstance(args[0], CodeType):
            for code in _with_inner(args[0]):
                if name := _known(code, heard):
                    note(name)

    return hook


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _with_inner(one)


def _known(code: CodeType, heard: Mapping[Code, str]) -> str:
    """Return the name of zerosim's own answer with that code, or ''."""
    return next((heard[sign] for sign in _signs(code) if sign in heard), "")


def _signs(code: CodeType) -> list[Code]:
    """Return what identifies a function's code: its file and name and, if it has a docstring, its instructions. A
    function without a docstring might be written twice by chance."""
    texts = [one for one in code.co_consts if not isinstance(one, CodeType)]
    signs: list[Code] = [(code.co_filename, code.co_qualname)]
    if texts and isinstance(texts[0], str) and len(texts[0]) > 20:
        signs.append((code.co_code, repr(texts), code.co_names, code.co_varnames))
    return signs


# -- changes ----------------------------------------------------------------------------------------
State = dict[str, dict[str, Any]]


def state_of_zerosim() -> State:
    """Return the named values of zerosim's modules and classes and, under names with (), the code of their functions,
    to be compared by identity."""
    modules = {name: module for name, module in list(sys.modules.items()) if f"{name}.".startswith("zerosim.")}
    held: State = {name: dict(vars(module)) for name, module in modules.items()}
    for name, space in list(held.items()):
        classes = {key: value for key, value in space.items() if isinstance(value, type) and value.__module__ == name}
        held |= {f"{name}.{key}": dict(vars(value)) for key, value in classes.items()}
    codes = {
        f"{name}()": {key: value.__code__ for key, value in space.items() if isinstance(value, FunctionType)}
        for name, space in held.items()
    }
    return held | codes


def changed(before: State) -> list[str]:
    """Return the names of changed values, and of new ones in zerosim's classes."""
    now, found = state_of_zerosim(), set[str]()
    for name, space in before.items():
        here = now.get(name, {})
        is_same = (
            len(space) == len(here) and all(map(is_, space, here)) and all(map(is_, space.values(), here.values()))
        )
        if not is_same:
            keys = [key for key, value in space.items() if here.get(key, _GONE) is not value]
            if name.removesuffix("()") not in sys.modules:  # a class, in which Python caches names with __
                keys += [key for key in here if key not in space and not key.startswith("__")]
            found |= {f"{name.removesuffix('()')}.{key}" for key in keys}
    return sorted(found)


_GONE = object()
