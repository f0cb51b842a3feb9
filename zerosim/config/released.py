"""Weights as they are released: a .safetensors file, or a folder with one, or with shards and their index.

Only headers are read here (`safetensors.py`); no pickle is ever loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from zerosim.config.inputs import open_file, read_json
from zerosim.config.safetensors import Stored, read_header
from zerosim.errors import InputError, printable
from zerosim.units import few

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PEFT, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The names of the files that transformers and PEFT write."""

LARGEST_INDEX = 10**8
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def is_released(path: str) -> bool:
    """Return whether a path names released weights rather than an .npz file: by its name, a folder, or how it begins.

    Raises: InputError for a file with pickles, and for a config.json.
    """
    if os.path.isdir(path) or path.endswith((".safetensors", INDEX)):
        return True
    if path.endswith(PICKLES):
        raise _pickled(path)
    with open_file(path) as file:
        start = file.read(9)
    if start[:1] == b"\x80":
        raise _pickled(path)
    if path.endswith(".json"):
        folder = os.path.dirname(path) or "."
        raise InputError(f"{path} describes a model and has no weights: pass it as --model, and {folder} as --weights")
    return start[8:] == b"{"


def stored_tensors(path: str) -> dict[str, Stored]:
    """Return the tensors of a file, a folder, or an index by their names in it.

    Raises: InputError, in one line, for a folder without weights, an index that leaves its folder, a missing shard, and
    shards that have other tensors than the index says; else as `read_header`.
    """
    if os.path.isdir(path):
        return _of_folder(Path(path))
    return _of_index(Path(path)) if path.endswith(INDEX) else read_header(path)


def _of_folder(folder: Path) -> dict[str, Stored]:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror or error}") from None
    if SINGLE in names:
        return read_header(str(_inside(folder, SINGLE, f"{folder}")))
    if INDEX in names:
        return _of_index(_inside(folder, INDEX, f"{folder}"))
    if PEFT in names:
        raise InputError(
            f"{folder} holds adapters, not weights: pass it as --adapters, and its base model's as --weights"
        )
    if pickled := [name for name in names if name.endswith(PICKLES)]:
        raise _pickled(str(folder / pickled[0]))
    raise InputError(f"{folder} has neither {SINGLE} nor {INDEX}: expected a folder from save_pretrained")


def _of_index(index: Path) -> dict[str, Stored]:
    values = read_json(index, largest=LARGEST_INDEX)
    wanted = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(wanted, dict) or not wanted:
        raise InputError(f"{index}: weight_map is missing: expected the file of each tensor, {{name: file}}")
    folder, by_file = index.parent, dict[str, list[str]]()
    for name, file in wanted.items():
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or os.path.basename(file) != file
            or "\\" in file
        ):
            given = printable(str(file)[:100])
            raise InputError(
                f"{index}: tensor {printable(name[:200])!r} is in {given!r}: expected a .safetensors file in its folder"
            )
        by_file.setdefault(file, []).append(name)
    missing = [file for file in sorted(by_file) if not (folder / file).exists()]
    if missing:
        raise InputError(f"{folder} lacks {few(missing)}: its index names {len(by_file)} shards, get all of them")
    tensors = dict[str, Stored]()
    for file, names in sorted(by_file.items()):
        shard = read_header(str(_inside(folder, file, str(index))))
        lacking = [name for name in names if name not in shard]
        if lacking:
            raise InputError(f"{folder / file} lacks {_few(lacking)}, which {index} says it has")
        if others := shard.keys() - set(names):
            raise InputError(f"{folder / file} has {_few(others)}, which {index} does not name there")
        tensors |= shard
    return tensors


def _inside(folder: Path, name: str, where: str) -> Path:
    """Return a file of the folder. Raises: InputError if it is a link out of it, save into the blobs of the same model
    in a hub's cache."""
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    if not any((folder / name).resolve().is_relative_to(root) for root in roots):
        raise InputError(f"{where}: {name} is a link that leaves the folder; copy the file there")
    return folder / name


def _few(names: Iterable[str]) -> str:
    return few([printable(name[:200]) for name in sorted(names)])


def _pickled(path: str) -> InputError:
    return InputError(
        f"{path} holds pickles, which can run any program, and zerosim loads none: convert it with transformers, "
        "from_pretrained(...).save_pretrained(DIR), or get its .safetensors"
    )
