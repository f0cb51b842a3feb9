"""Read single files of torch.save: a state dict, or {"model": ..., "optimizer": ...}.

Tied weights are found exactly: they share their storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerosim.errors import InputError, printable
from zerosim.state.formats.archive import Stored, read_archive
from zerosim.state.formats.numbered import numbered
from zerosim.state.formats.plain import Object
from zerosim.state.formats.sorting import OPTIMIZER, sort_items, state_of, tied
from zerosim.state.formats.whole import Tensor, WholeState, leaves


def read_torch(path: str) -> WholeState:
    """Return the weights of a file of torch.save, and the optimizer's states whose weights are known by name.

    Raises: InputError, in one line, for another file, a pickle with a name that no checkpoint needs, and a weight that
    is no dense tensor.
    """
    value = read_archive(path)
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {_kind(value)}: expected a state dict, or a mapping with model and optimizer")
    return from_values(value, path, "torch")


def from_values(value: Mapping[Any, Any], path: str, kind: str, order: Sequence[str] | None = None) -> WholeState:
    """Return a loaded mapping as a checkpoint. `order`: the trained weights in the model's order, None for the file's.

    Raises: InputError as `read_torch`.
    """
    items, by_number = dict[tuple[str, ...], Any](), dict[str, Any]()
    for key, inner in value.items():
        if OPTIMIZER.fullmatch(str(key)) and isinstance(inner, dict) and _is_numbered(inner):
            by_number[str(key)] = inner
        else:
            items |= {at: _tensor(one, at, path) for at, one in leaves(inner, path, (str(key),))}
    found = sort_items(items)
    aliases = _shared(value, path, found.weights)
    for key, optimizer in by_number.items():
        names = [name for name in order if name in found.weights] if order else list(found.weights)
        shapes = {name: found.weights[name].shape for name in names if name not in aliases}
        states, steps, why = numbered(optimizer, shapes)
        found.states.update(states)
        found.steps.extend(steps)
        found.others[f"{key}.param_groups"] = "settings of the optimizer"
        if why:
            found.others[key] = why
    return state_of(kind, "", found, {**tied(found), **aliases})


def _is_numbered(optimizer: Mapping[Any, Any]) -> bool:
    state = optimizer.get("state")
    return isinstance(state, dict) and any(isinstance(key, int) for key in state)


def _tensor(value: Any, at: tuple[str, ...], path: str) -> Any:
    name = ".".join(at)
    if isinstance(value, Object) and value.name.startswith("torch._utils._rebuild"):
        kind = value.name.removeprefix("torch._utils._rebuild_").removesuffix("_tensor")
        raise InputError(f"{path}: tensor {printable(name[:200])!r} is of kind {kind}: expected a dense one")
    return value.named(name) if isinstance(value, Stored) else value


def _shared(value: Mapping[Any, Any], path: str, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return names of weights whose storage and place is another's, and this one's name."""
    first, aliases = dict[Any, str](), dict[str, str]()
    for at, one in leaves(dict(value), path):
        name = next((name for name in (".".join(at), ".".join(at[1:]), ".".join(at[2:])) if name in weights), None)
        if name is None or not isinstance(one, Stored) or not one.numel:
            continue
        place = (one.record.header, one.dtype, one.offset, one.shape, one.strides)
        if first.setdefault(place, name) != name:
            aliases[name] = first[place]
    return aliases


def _kind(value: Any) -> str:
    return "one tensor" if isinstance(value, Stored) else f"a {type(value).__name__}"
