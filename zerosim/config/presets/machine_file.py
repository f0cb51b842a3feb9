"""A measured machine (`zerosim calibrate`), as the table [machine] of a device's TOML file.

The clock uses it in place of a GPU's published figures: the seconds of kernels and collectives by their work, and the
host's seconds for each kernel. Every curve is a list of measured (work, seconds), ascending in both, so that more work
never ends sooner.

    product, memory   seconds by floating-point operations of a matrix product, and by bytes of a copy: for kernels
                      that have no curve of their own
    kernels           by name: by operations if the kernel is a product, else by bytes read and written
    collectives       by verb (`verbs.MEASURED`), by bytes of payload, between `ranks` ranks that run over `transport`
    kernel_s          seconds of the host for each kernel: the program's work between two kernels
    version           of this format
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from zerosim.errors import InputError, did_you_mean
from zerosim.verbs import MEASURED

VERSION = 1
"""Of the format: a file of a newer one is refused."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds by work. Between two points they follow a power law, below the first they are constant, and above the
    last they grow with the work."""

    points: tuple[tuple[float, float], ...]

    def seconds(self, work: float) -> float:
        (first, least), (last, most) = self.points[0], self.points[-1]
        if work <= first:
            return least
        if work >= last:
            return most * work / last
        for (low, below), (high, above) in pairwise(self.points):
            if work <= high:
                return below * math.exp(math.log(above / below) * math.log(work / low) / math.log(high / low))
        raise AssertionError(work)

    @property
    def best(self) -> float:
        """The highest work per second."""
        return max(work / seconds for work, seconds in self.points)


@dataclass(frozen=True, slots=True)
class Machine:
    """A measured machine, with its precision and its ranks. `known_error`: the clock's error then on measured steps,
    none of which it was fitted to."""

    precision: str
    transport: str
    ranks: int
    cores: int
    kernel_s: float
    known_error: str
    product: Measured
    memory: Measured
    kernels: Mapping[str, Measured]
    collectives: Mapping[str, Measured]

    def kernel_seconds(self, name: str, product_flops: int, nbytes: int) -> float:
        """Return the seconds of one kernel, without the host's; `product_flops` are 0 unless it is a product. Beyond
        the end of its own curve it grows as a product or a copy does."""
        any_kernel, work = (self.product, product_flops) if product_flops else (self.memory, nbytes)
        if not work:
            return 0.0
        own = self.kernels.get(name)
        if own is None:
            return any_kernel.seconds(work)
        last, seconds = own.points[-1]
        if work <= last:
            return own.seconds(work)
        return seconds * any_kernel.seconds(work) / any_kernel.seconds(last)

    @property
    def source(self) -> str:
        how = "threads of one process" if self.transport == "threads" else "processes over MPI"
        return f"measured in {self.precision} on {self.ranks} ranks, {how}"


def machine_text(machine: Machine, device: Mapping[str, Any]) -> str:
    """Return the TOML file of a machine; `device` has the keys that every device has."""
    words = [f"{key} = {_toml(value)}" for key, value in device.items()]
    words += ["", "[machine]", f"version = {VERSION}"]
    for key in ("precision", "transport", "ranks", "cores", "kernel_s", "known_error"):
        words.append(f"{key} = {_toml(getattr(machine, key))}")
    words += [_curve("product", machine.product), _curve("memory", machine.memory)]
    for title, curves in (("kernels", machine.kernels), ("collectives", machine.collectives)):
        words += ["", f"[machine.{title}]", *(_curve(name, curve) for name, curve in curves.items())]
    return "\n".join(words) + "\n"


def _curve(name: str, curve: Measured) -> str:
    return f"{name} = [{', '.join(f'[{work:.6g}, {seconds:.4g}]' for work, seconds in curve.points)}]"


def _toml(value: str | float) -> str:
    return json.dumps(value) if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else str(value)


# -- reading ----------------------------------------------------------------------------------------------------------
_KEYS = (
    "version", "precision", "transport", "ranks", "cores", "kernel_s", "known_error", "product", "memory", "kernels",
    "collectives",
)  # fmt: skip
_AGAIN = "measure again with zerosim calibrate"
_POINTS = "[work, seconds], such as [[1e6, 2e-5], [1e9, 0.01]]"


def read_machine(where: str, values: Any) -> Machine:
    """Read the table [machine] of the file that `where` names. Raises: InputError in one line, with the key."""
    _check_table(where, "machine", values)
    if "version" in values:
        _check_version(where, values["version"])
    for key in values:
        if key not in _KEYS:
            raise InputError(f"{where}: unknown key machine.{key}: {did_you_mean(key, _KEYS, ', '.join(_KEYS))}")
    if missing := [key for key in _KEYS if key not in values]:
        raise InputError(f"{where}: missing machine.{', machine.'.join(missing)}: {_AGAIN}")
    for key in ("precision", "transport", "known_error"):
        if not isinstance(values[key], str) or not values[key].isprintable():
            raise InputError(f"{where}: machine.{key} {values[key]!r}: expected text")
    for key, least in (("ranks", 2), ("cores", 1)):
        if isinstance(values[key], bool) or not isinstance(values[key], int) or values[key] < least:
            raise InputError(f"{where}: machine.{key} {values[key]!r}: expected a whole number, at least {least}")
    if not is_number(values["kernel_s"]) or values["kernel_s"] < 0:
        raise InputError(f"{where}: machine.kernel_s {values['kernel_s']!r}: expected seconds, at least 0")
    tables: dict[str, dict[str, Measured]] = {}
    for title in ("kernels", "collectives"):
        _check_table(where, f"machine.{title}", values[title])
        curves = values[title].items()
        tables[title] = {name: read_curve(where, f"machine.{title}.{name}", curve, _POINTS) for name, curve in curves}
    if missing := [verb for verb in MEASURED if verb not in tables["collectives"]]:
        raise InputError(f"{where}: missing machine.collectives.{missing[0]}: {_AGAIN}")
    alone = {key: read_curve(where, f"machine.{key}", values[key], _POINTS) for key in ("product", "memory")}
    given = {key: value for key, value in values.items() if key != "version"}
    return Machine(**{**given, **tables, **alone})


def _check_version(where: str, version: Any) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InputError(f"{where}: machine.version {version!r}: expected {VERSION}: {_AGAIN}")
    if version > VERSION:
        newer = f"machine.version {version}: written by a newer zerosim; this one reads version {VERSION}"
        raise InputError(f"{where}: {newer}: {_AGAIN}")


def _check_table(where: str, key: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise InputError(f"{where}: {key}: expected a table")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))


def read_curve(where: str, key: str, value: Any, what: str) -> Measured:
    """Read a list of such points. Raises: InputError in one line, with the key."""
    if not isinstance(value, list) or not value or not all(map(_is_pair, value)):
        raise InputError(f"{where}: {key}: expected a list of {what}")
    points = tuple((float(work), float(seconds)) for work, seconds in value)
    for work, seconds in points:
        if work <= 0 or seconds <= 0:
            raise InputError(f"{where}: {key}: [{work:g}, {seconds:g}]: expected two numbers more than 0")
    for (low, below), (high, above) in pairwise(points):
        if high <= low or above < below:
            raise InputError(
                f"{where}: {key}: [{high:g}, {above:g}] after [{low:g}, {below:g}]: work must ascend, and more work "
                "never ends sooner"
            )
    return Measured(points)
