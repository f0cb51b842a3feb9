"""How many kernels a framework launches for one of zerosim's kernel events, and by how much they multiply its bytes.

A framework without a fused kernel runs an operator as several kernels: each reads and writes memory, and each costs the
host a launch. The table (`operators.toml`) is counted from the frameworks' formulas; a test counts it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from zerosim.config.parts.clock import KERNELS
from zerosim.config.presets.hardware import packaged
from zerosim.errors import InputError, did_you_mean, wrong


class Operator(NamedTuple):
    """A framework's kernels for one kernel event: the number of launches, and `traffic` times the event's bytes.

    No launch, but traffic: a neighbour's kernel includes the work. Neither: no framework runs it.
    """

    launches: int
    traffic: float


ALONE = Operator(1, 1.0)
"""For every name that is not in a table: the event is one kernel, and moves its own bytes."""
FOREACH = "foreach"
ROWS = {kernels: f"{kernels}-rows" for kernels in ("eager", "compiled")}
"""The operator table of casts to 8 bits with a scale for each row or column."""
CASTS = "fp8_"
"""How the names of casts to 8 bits begin."""
_OF_TORCH = ("torch", "torch-half", "hf-4.45", "hf-4.48", "hf-5")
LOSSES: Mapping[str, str] = MappingProxyType(
    {f"{name}{kept}": "torch" for name in _OF_TORCH for kept in ("", "-kept")}
    | dict.fromkeys(("torch-fp32-kept", "hf-half", "hf-half-autocast", "torchtune", "litgpt"), "torch")
    | {"megatron": "megatron"}
)
"""The operator table of each `--loss`, where its kernels are not those that the program records."""
TABLES = (*KERNELS, FOREACH, *ROWS.values(), *(f"loss-{name}" for name in dict.fromkeys(LOSSES.values())))


class Operators(dict[str, Operator]):
    """Operators by the name of a kernel event; `ALONE` if there is none."""

    def __missing__(self, name: str) -> Operator:
        return ALONE


def operators(
    kernels: str, *, loss: str = "", foreach: bool = False, by_rows: bool = False, own_casts: bool = False
) -> Mapping[str, Operator]:
    """Return a choice of `--kernels`: its operators for each kernel event. Names that are not listed are `ALONE`.

    `loss` is `--loss`, whose kernels are the same in all choices; `foreach`: the optimizer uses PyTorch's foreach
    kernels, which torch.compile leaves alone; `by_rows`: casts to 8 bits scale rows and columns.
    `own_casts`: a library casts with hand-written kernels, [fused]'s, in all choices.

    Raises: InputError for an unknown choice, with the nearest one.
    """
    if kernels not in KERNELS:
        near = did_you_mean(kernels, KERNELS, f"expected one of {', '.join(KERNELS)}")
        raise wrong("kernels", f" {kernels!r} is not known; {near}")
    tables = _packaged()
    rows = [ROWS[kernels]] if by_rows and kernels in ROWS else []
    chosen = [kernels, *rows, *([FOREACH] if foreach else []), *([f"loss-{LOSSES[loss]}"] if loss in LOSSES else [])]
    found = {name: row for table in chosen for name, row in tables[table].items()}
    if own_casts:
        others = {name: row for name, row in found.items() if not name.startswith(CASTS)}
        found = others | {name: row for name, row in tables["fused"].items() if name.startswith(CASTS)}
    return Operators(found)


@cache
def _packaged() -> Mapping[str, Mapping[str, Operator]]:
    return checked(packaged("operators.toml"), "operators.toml")


def checked(values: Mapping[str, Any], where: str) -> dict[str, dict[str, Operator]]:
    """Check tables as they stand in a TOML file. Raises: InputError for a missing or unknown table or key, and for
    impossible numbers."""
    for table in values:
        if table not in TABLES:
            near = did_you_mean(table, TABLES, f"expected {', '.join(TABLES)}", quote=lambda name: f"[{name}]")
            raise InputError(f"{where}: unknown table [{table}]; {near}")
    if missing := [f"[{table}]" for table in TABLES if table not in values]:
        raise InputError(f"{where}: missing {', '.join(missing)}")
    for table, rows in values.items():
        if not isinstance(rows, dict):
            raise InputError(f"{where}: [{table}] = {rows}: expected a table of operators")
    return {
        table: {name: _operator(row, f"{where}: [{table}] {name}") for name, row in rows.items()}
        for table, rows in values.items()
    }


def _operator(row: Any, where: str) -> Operator:
    keys = Operator._fields
    if not isinstance(row, dict) or row.keys() != set(keys):
        raise InputError(f"{where} = {row}: expected {{{' = ..., '.join(keys)} = ...}}")
    launches, traffic = row["launches"], row["traffic"]
    if type(launches) is not int or launches < 0:
        raise InputError(f"{where}: launches {launches}: expected a whole number of at least 0")
    if type(traffic) not in (int, float) or not math.isfinite(traffic) or traffic < 0:
        raise InputError(f"{where}: traffic {traffic}: expected a number of at least 0")
    if launches and not traffic:
        raise InputError(f"{where}: {launches} launches move 0 bytes: expected traffic more than 0, or launches 0")
    return Operator(launches, float(traffic))
