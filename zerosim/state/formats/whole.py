"""A checkpoint of any framework, as zerosim sees it: named tensors that are read one at a time.

`WholeState` is what each reader of this package returns and each writer takes. Nothing in it says how a checkpoint was
sharded: a tensor is whole, and `Tensor.read` joins its pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zerosim.backends.numpy.cast import BFLOAT16
from zerosim.errors import InputError, printable
from zerosim.units import few

_MOST_DEEP = 32  # mappings in one another
_MOST_ITEMS = 10**6  # of a file's mappings

assert BFLOAT16.name == "bfloat16"  # ml_dtypes is loaded: NumPy knows its names


class Tensor(NamedTuple):
    """A tensor of a checkpoint, before it is read.

    dtype   NumPy's or ml_dtypes' name: 'float32', 'bfloat16', 'float8_e4m3fn', 'int64'
    read    returns the whole array, its bits kept; raises InputError for a damaged file
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Any]


class WholeState(NamedTuple):
    """A checkpoint, without its values.

    kind      the format: 'dcp', 'deepspeed zero 3', 'safetensors'
    version   the framework's version, as the files say it, '' if they say none
    weights   by the framework's name, as the optimizer has them: fp32 masters where there are some
    stored    the model's own copies, where masters stand beside them
    states    of each weight, by the optimizer's name: exp_avg, exp_avg_sq
    step      optimizer steps done, None if the files do not say it
    frozen    weights without states, where the format says which
    aliases   tied names, and the name that is stored
    others    what else the files hold, in words
    """

    kind: str
    version: str
    weights: Mapping[str, Tensor]
    stored: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]]
    step: int | None
    frozen: frozenset[str]
    aliases: Mapping[str, str]
    others: Mapping[str, str]


def host_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of that name, ml_dtypes' narrow floats among them. Raises: InputError for another name."""
    try:
        return np.dtype(name)
    except TypeError:
        raise InputError(
            f"no array has dtype {printable(name[:40])!r}: expected one like float32 or bfloat16"
        ) from None


def leaves(value: Any, where: str, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the items of nested mappings with the keys that lead there, as text.

    Raises: InputError for mappings nested more than 32 deep, such as one that contains itself, and for more than a
    million items, such as those of mappings that repeat one another.
    """
    count, left = 0, [(path, value)]
    while left:
        at, one = left.pop()
        count += 1
        if len(at) > _MOST_DEEP or count > _MOST_ITEMS:
            what = (
                f"nested more than {_MOST_DEEP} deep" if len(at) > _MOST_DEEP else f"of more than {_MOST_ITEMS:,} items"
            )
            raise InputError(f"{where}: its mappings are {what}; no checkpoint needs that")
        if isinstance(one, dict):
            if len(left) + len(one) > _MOST_ITEMS:
                raise InputError(f"{where}: its mappings are of more than {_MOST_ITEMS:,} items")
            left += [((*at, str(key)), inner) for key, inner in reversed(one.items())]
        else:
            yield at, one


def described(value: Any) -> str:
    """Return in a few words what an item that is no tensor is."""
    if isinstance(value, bool | int | float | str) or value is None:
        return printable(repr(value)[:60])
    if isinstance(value, list | dict | set) or type(value) is tuple:
        return f"{type(value).__name__} of {len(value):,} items"
    if hasattr(value, "read"):
        return "an object"
    return f"an object ({printable(str(getattr(value, 'name', type(value).__name__))[:100])})"


def joined(parts: list[Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor whose elements, row by row, are those of the parts in turn. The parts' dtypes are the same.

    Raises: InputError if the parts have another dtype or too few elements in all.
    """
    dtypes = {part.dtype for part in parts}
    count, needed = sum(int(np.prod(part.shape, dtype=object)) for part in parts), int(np.prod(shape, dtype=object))
    if len(dtypes) != 1 or count != needed:
        raise InputError(
            f"{printable(name[:200])} needs {needed:,} elements of one dtype: its pieces have {count:,} of "
            f"{few(sorted(dtypes)) if dtypes else 'none'}; get all files of the checkpoint"
        )
    return Tensor(name, dtypes.pop(), shape, partial(_read_joined, parts, shape))


def _read_joined(parts: list[Tensor], shape: tuple[int, ...]) -> Any:
    if len(parts) == 1:
        return parts[0].read().reshape(shape)
    return np.concatenate([part.read().reshape(-1) for part in parts]).reshape(shape)
