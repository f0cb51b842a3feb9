"""Measured times of collectives between GPUs of one node, as tables (`collectives/*.toml`).

    gpu, source   whose times they are, and where they come from
    VERB          by number of ranks: bytes of payload and microseconds, both ascending
    strided       for a box in which groups share their links: GB/s that each rank sends, by verb and by how far apart
                  neighbours of a group are (2: every second GPU)

A table has at least one of all_reduce, all_gather and reduce_scatter: `ledger/collectives.py` derives the times of
other verbs and numbers of ranks. A user's own GPU may have such a table in its TOML file, as [collectives]
(`hardware.py`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from zerosim.config.presets.machine_file import Measured, is_number, read_curve
from zerosim.errors import InputError, did_you_mean
from zerosim.verbs import VERBS

US, GB = 1e-6, 10**9
RING_VERBS = ("all_reduce", "all_gather", "reduce_scatter")
KNOWN = tuple(verb.name for verb in VERBS.values() if verb.curve and verb.name != "recv")
_KEYS = ("gpu", "source", *KNOWN, "strided")


@dataclass(frozen=True, slots=True)
class CollectiveTables:
    """One GPU's tables: by verb and number of ranks, seconds by bytes of payload; by verb and stride, bytes per second.

    `link` is the bandwidth of the links on which they were measured, in bytes per second (`Cluster.link`).
    """

    gpu: str
    source: str
    link: float
    calls: Mapping[str, Mapping[int, Measured]]
    strided: Mapping[str, Mapping[int, float]]


@cache
def packaged_collectives(name: str, link: float) -> CollectiveTables:
    """Return the table of one of zerosim's own GPUs, by the name of its file."""
    text = files("zerosim.config.presets").joinpath("collectives", f"{name}.toml").read_text(encoding="utf-8")
    return read_collectives(f"collectives of {name}", tomllib.loads(text), link)


def read_collectives(where: str, values: Any, link: float) -> CollectiveTables:
    """Read a table of the file that `where` names. Raises: InputError in one line, with the key."""
    values = _table(where, "", values)
    for key in values:
        if key not in _KEYS:
            raise InputError(f"{where}: unknown key {key}: {did_you_mean(key, _KEYS, 'known: ' + ', '.join(_KEYS))}")
    for key in ("gpu", "source"):
        if key not in values:
            raise InputError(f"{where}: missing {key}: name the machine and the source of these times")
        if not isinstance(values[key], str) or not values[key].strip():
            raise InputError(f"{where}: {key} {values[key]!r}: expected text")
    calls = {verb: _by_ranks(where, verb, values[verb]) for verb in KNOWN if verb in values}
    if not any(verb in calls for verb in RING_VERBS):
        raise InputError(f"{where}: missing {RING_VERBS[0]}: at least one of {', '.join(RING_VERBS)} is needed")
    strided = _strided(where, values["strided"]) if "strided" in values else {}
    return CollectiveTables(values["gpu"], values["source"], link, calls, strided)


def _by_ranks(where: str, verb: str, value: Any) -> Mapping[int, Measured]:
    example = "[bytes, microseconds], such as [[65536, 15.2], [1048576, 21.0]]"
    found = dict[int, Measured]()
    for ranks, points in _table(where, verb, value).items():
        n = _number(where, verb, ranks, "a number of ranks")
        us = read_curve(where, f"{verb}.{ranks}", points, example).points
        found[n] = Measured(tuple((size, time * US) for size, time in us))
    return found


def _strided(where: str, value: Any) -> Mapping[str, Mapping[int, float]]:
    found = dict[str, dict[int, float]]()
    for verb, speeds in _table(where, "strided", value).items():
        if verb not in RING_VERBS:
            hint = did_you_mean(verb, RING_VERBS, f"known: {', '.join(RING_VERBS)}")
            raise InputError(f"{where}: unknown key strided.{verb}: {hint}")
        for stride, speed in _table(where, f"strided.{verb}", speeds).items():
            if not is_number(speed) or speed <= 0:
                raise InputError(f"{where}: strided.{verb}.{stride} {speed!r}: expected GB/s, more than 0")
            of = _number(where, f"strided.{verb}", stride, "how far apart neighbours are")
            found.setdefault(verb, {})[of] = speed * GB
    return found


def _table(where: str, key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not value:
        raise InputError(f"{where}{': ' if key else ''}{key}: expected a table that is not empty")
    return value


def _number(where: str, key: str, text: str, what: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 2:
        raise InputError(f"{where}: {key}.{text}: expected {what}, at least 2")
    return int(text)
