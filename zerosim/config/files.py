"""Scenario files: a run's values as TOML and, beside them, the expected results.

A file has the keys of a run on top, a table [sweep] and one or several tables [expect]. `zerosim/analysis/expect` reads
the tables; a run ignores them. The JSON of `run --json` and `plan --json` also holds a run's values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerosim.config.inputs import read_json, read_toml
from zerosim.errors import InputError, did_you_mean

TABLES = ("sweep", "expect")
SCHEMA = 2
"""Of the JSON of a run and a plan."""


@dataclass(frozen=True, slots=True)
class ScenarioFile:
    """One file, not yet checked: `run` as flat fields of a RunConfig, `sweep`, and each of its [expect] tables.

    `is_run_alone`: the file says that it expects nothing (`expect = []`). A file without any [expect] may have lost it.
    """

    path: str
    run: dict[str, Any]
    sweep: dict[str, Any]
    expect: tuple[dict[str, Any], ...]
    is_run_alone: bool = False


def read_scenario(path: str) -> dict[str, Any]:
    """Read the run of a TOML scenario, without its expectations; dashes in keys are read as underscores. From a run's
    or a plan's JSON, read its configuration.

    Raises: InputError for a file that cannot be read, is neither, or has an unknown table.
    """
    if path.endswith(".json"):
        written = read_json(path, "scenario")
        config = written.get("config") if isinstance(written, dict) and written.get("schema") == SCHEMA else None
        if not isinstance(config, dict):
            raise InputError(f"scenario {path}: expected what zerosim run or plan wrote with --json (schema {SCHEMA})")
        return config
    return read_scenario_file(path).run


def read_scenario_file(path: str) -> ScenarioFile:
    """Read all of a scenario. Raises: InputError as `read_scenario`."""
    values: dict[str, Any] = {}
    for key, value in read_toml(path, "scenario").items():
        name = key.replace("-", "_")
        if name in values:
            raise InputError(f"scenario {path}: {name} appears twice, with - and with _: keep one")
        is_table = any(isinstance(item, dict) for item in (value if isinstance(value, list) else [value]))
        if is_table and name not in TABLES:
            hint = did_you_mean(name, TABLES, "the tables are [sweep] and [expect]", quote=lambda table: f"[{table}]")
            raise InputError(f"scenario {path}: unknown table [{name}]; {hint}")
        values[name] = value
    sweep, expect = values.pop("sweep", {}), values.pop("expect", None)
    if not isinstance(sweep, dict):
        raise InputError(f"scenario {path}: sweep {sweep!r}: expected a table, [sweep]")
    tables = [] if expect is None else [expect] if isinstance(expect, dict) else expect
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"scenario {path}: expect {expect!r}: expected a table, [expect], or several, [[expect]]")
    return ScenarioFile(path, values, sweep, tuple({**table} for table in tables), is_run_alone=expect == [])
