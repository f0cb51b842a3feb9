"""The manifest of one saved step: what was saved, by which run, and every file with its size and checksum.

    DIR/lock
    DIR/step-00000020/rank-00003.safetensors    a rank's runs, one after the other
    DIR/step-00000020/rank-00003.json           which runs, of which weights (`runs.py`)
    DIR/step-00000020/manifest.json             written last

Every file can be read without zerosim. Nothing in them is executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerosim.config.inputs import parse_json, read_file
from zerosim.errors import InputError
from zerosim.version import __version__

MANIFEST, SCHEMA, FORMAT = "manifest.json", 1, "zerosim state"
LARGEST_INDEX = 4 * 10**8
_BLOCK = 1 << 20


class Entry(NamedTuple):
    """A file of a saved step."""

    name: str
    nbytes: int
    sha256: str


class Manifest(NamedTuple):
    """What is common to all ranks.

    step      steps that were done
    ranks     of the run that wrote it
    config    the run's given options by flat name
    numbers   what is not a tensor: updates, attempts, the loss scaler, a delayed update's factor, routers' biases
    """

    step: int
    ranks: int
    config: Mapping[str, Any]
    numbers: Mapping[str, Any]
    files: tuple[Entry, ...]
    version: str = __version__

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        files = [entry._asdict() for entry in self.files]
        values = {"format": FORMAT, "schema": SCHEMA, **self._asdict(), "files": files}
        return {**values, "sha256": own_checksum(values)}


def own_checksum(values: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest's other values, however they are laid out."""
    others = {name: value for name, value in values.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a saved step. Raises: InputError for a folder without one, another format and a newer
    schema."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(f"{folder}: {'is a file' if folder.exists() else 'does not exist'}: expected a saved step")
    if not path.is_file():
        raise InputError(f"{folder}: has no {MANIFEST}: no complete checkpoint of zerosim; choose another folder")
    values = _read_json(path)
    try:
        if values["format"] != FORMAT:
            raise InputError(f"{path}: is no manifest of zerosim")
        if not isinstance(values["schema"], int) or values["schema"] > SCHEMA:
            raise InputError(
                f"{path}: schema {values['schema']} is newer than this zerosim's, {SCHEMA}: it was written by zerosim "
                f"{values.get('version', '?')}; use that version"
            )
        if values["sha256"] != own_checksum(values):
            raise InputError(f"{path}: its checksum is not that of its text: it was changed or the drive has an error")
        files = tuple(Entry(_plain(one["name"]), count(one["nbytes"]), str(one["sha256"])) for one in values["files"])
        config, numbers = values["config"], values["numbers"]
        if not isinstance(config, dict) or not isinstance(values["files"], list) or not files:
            raise TypeError("config is no object, or files no list")
        _check_numbers(numbers)
        step, ranks = count(values["step"]), count(values["ranks"], least=1)
        return Manifest(step, ranks, config, numbers, files, str(values["version"]))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: is damaged, or no manifest of zerosim ({type(error).__name__}: {error})") from None


def count(value: object, least: int = 0) -> int:
    """Return a whole number that is not less than `least`, and no larger than any file's bytes. Raises: ValueError."""
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{str(value)[:40]!r} is no whole number from {least} on")
    return value


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    """Check what a run goes on with that is no tensor. Raises: KeyError, TypeError or ValueError."""
    control, scaler, late = numbers["control"], numbers["scaler"], numbers.get("delayed")
    for name in ("steps", "updates"):
        count(control[name])
    _number(control["lr"])
    if scaler is not None:
        _number(scaler["scale"])
        count(scaler["left"])
        count(scaler["attempts"])
        count(scaler["last_overflow"], least=-1)
    if late is not None:
        count(late["steps"])
        if late["scale"] is not None:
            _number(late["scale"])


def _number(value: object) -> None:
    if type(value) not in (int, float):
        raise ValueError(f"{str(value)[:40]!r} is no number")


def read_index(path: Path) -> list[dict[str, Any]]:
    """Read which runs a rank's file has. Raises: InputError."""
    values = _read_json(path)
    if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
        raise InputError(f"{path}: expected a list of runs; it is damaged")
    return values


def _read_json(path: Path) -> Any:
    try:
        text = read_file(str(path), "checkpoint's file", LARGEST_INDEX).decode()
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8; it is damaged") from None
    return parse_json(text, str(path))


def _plain(name: object) -> str:
    """Return a file's name that leads to no other folder. Raises: ValueError."""
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", "..") or "\0" in name:
        raise ValueError(f"{str(name)[:40]!r} is no file's name")
    return name


def checksum(path: Path) -> Entry:
    """Return a file's entry. Raises: OSError."""
    sha, nbytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            sha.update(block)
            nbytes += len(block)
    return Entry(path.name, nbytes, sha.hexdigest())


def damage(folder: Path, manifest: Manifest, *, whole: bool = True) -> str:
    """Return in one line what is wrong with a saved step's files; '' if nothing is. Without `whole`, only whether all
    are there with their sizes."""
    for entry in manifest.files:
        path = folder / entry.name
        try:
            size = path.stat().st_size
            if size != entry.nbytes:
                return f"{path}: has {size:,} bytes, expected {entry.nbytes:,}: it is cut short or was changed"
            if whole and checksum(path).sha256 != entry.sha256:
                return f"{path}: its checksum is not the manifest's: it was changed or the drive has an error"
        except OSError as error:
            return f"{path}: {error.strerror or error}"
    return ""
