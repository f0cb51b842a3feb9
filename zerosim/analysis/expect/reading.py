"""Read the table [expect] of a scenario: a source's printed figures about the run above it.

This module and `keys.py` find every error in a file before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from zerosim.analysis.expect.asked import SHAPES, Quantity
from zerosim.analysis.expect.closed_forms import FORMULAS
from zerosim.analysis.expect.counts import COUNTS, TIMES
from zerosim.analysis.expect.errors import Ranking
from zerosim.analysis.expect.expectation import BoldRule, Cell, Expectation
from zerosim.analysis.expect.figures import Figure, naming, parse_figure
from zerosim.analysis.expect.keys import (
    COMPUTED,
    MEASURED,
    PRINTED,
    QUANTITIES,
    check_keys,
    check_options,
)
from zerosim.analysis.expect.rows import read_rows
from zerosim.analysis.expect.sweeps import (
    BANDWIDTH,
    GPU,
    MP,
    NO_FIELDS,
    PIPELINE_STAGE,
    Axis,
    Point,
    describe,
    grid,
    read_axes,
)
from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.config.files import ScenarioFile
from zerosim.config.presets.hardware import Hardware, find_hardware
from zerosim.errors import InputError, did_you_mean
from zerosim.train.delayed import planned_steps
from zerosim.units import LONGEST_NUMBER, parse_bytes, shown


def read_expectations(file: ScenarioFile) -> tuple[Expectation, ...]:
    """Read every [expect] of a file. Raises: InputError, in one line, with the file and the key."""
    titles = [table.get("title") for table in file.expect]
    if len(titles) > 1 and (None in titles or len(set(map(str, titles))) < len(titles)):
        raise InputError(f"scenario {file.path}: expect.title: each of several [[expect]] needs its own title")
    found = []
    for table, title in zip(file.expect, titles, strict=True):
        where = f"scenario {file.path}: expect" + (f" {title!r}" if len(titles) > 1 else "")
        with naming(f"{where}: "):
            found.append(_expectation(file, table))
    return tuple(found)


def _expectation(file: ScenarioFile, table: Mapping[str, Any]) -> Expectation:
    check_keys(table)
    asked = {key: known[table[key]] for key, known in QUANTITIES.items() if key in table}
    check_options(table, asked)
    given = table.get("with", {}) if "sweep" in table else {**file.run, **table.get("with", {})}
    is_list = "rows" in table
    if is_list:
        axes, points, lines = read_rows(table, {**file.run, **table.get("with", {})})
    else:
        axes = read_axes(table.get("sweep", file.sweep), given)
        points = grid(axes)
    rounding = table.get("rounding", "")
    if rounding == "multiples-of-first-row" and [axis.name for axis in axes][:1] != [MP]:
        raise InputError(f"rounding {rounding!r}: the first axis of [sweep] must be mp")
    over = _over(table, axes, points)
    dimension = "share" if over else next(iter(asked.values())).dimension
    for name in NO_FIELDS:
        for key, quantity in asked.items():
            if key != "beside" and name not in quantity.takes and any(name in point.changes for point in points):
                raise InputError(f"sweep: {name} does not use {key} {table[key]!r}; leave it out")
    key = COMPUTED if COMPUTED in table else PRINTED
    instead = _figures(table, "instead", axes, points, dimension)
    if is_list:
        printed = _of_rows(table, lines, dimension)
    else:
        printed = _figures(table, key, axes, points, dimension)
    for point, figure, right in zip(points, printed, instead, strict=True):
        if figure is None and right is not None:
            raise InputError(
                f"instead at {describe(axes, point.labels)}: {right.text!r}: this place has no {key} figure"
            )
        if over and (figure is None) == (point.labels in over):
            missing = "no figure" if figure is None else "not there"
            raise InputError(f"over: {describe(axes, point.labels)}: {missing}; name only places that have a figure")
    counted_on = table.get("counted_on", SHAPES)

    def cell(point: Point, printed: Figure, instead: Figure | None = None, over: Cell | None = None) -> Cell:
        changes, config = point.changes, _config(file, table, point, axes, counted_on)
        fields = table.get("spared_from")
        whole = None if fields is None else _config(file, table, point, axes, counted_on, fields)
        bandwidth = _size(changes, BANDWIDTH) if BANDWIDTH in changes else None
        stage = changes.get(PIPELINE_STAGE)
        gpu = changes.get(GPU, table.get("gpu", ""))
        if not isinstance(gpu, str):
            raise InputError(f"at {describe(axes, point.labels)}: gpu {gpu!r}: expected a device's name")
        if not gpu and any("gpu" in quantity.needs for quantity in asked.values()):
            raise InputError(f"gpu is missing at {describe(axes, point.labels)}: {table.get('quantity')} needs it")
        return Cell(point.labels, config, changes.get(MP, 1), stage, printed, instead, bandwidth, gpu, over, whole)

    texts = ("source", "title", "note", "why", "calculator", "formula_only")
    said: dict[str, Any] = {key: table.get(key) for key in QUANTITIES} | {key: table.get(key, "") for key in texts}
    expectation = Expectation(
        path=file.path,
        **said,
        is_modelled=table.get("quantity") in TIMES,
        figures=MEASURED if "within" in table else key,
        rounding=rounding,
        within=_within(table, "within") if "within" in table else Fraction(0),
        mean_within=Fraction(_within(table, "mean_within")) if "mean_within" in table else Fraction(0),
        ranking=_ranking(table["ranking"], axes) if "ranking" in table else None,
        outside=_outside(table, dimension),
        spared_from=table.get("spared_from", {}),
        bold=_bold(table, axes, dimension, printed),
        counted_on=counted_on,
        at=table.get("at", "end_of_backward"),
        memory=_memory(table) if "memory" in table else 0,
        is_list=is_list,
        axes=axes,
        cells=tuple(
            cell(point, figure, right, cell(over[point.labels], figure) if over else None)
            for point, figure, right in zip(points, printed, instead, strict=True)
            if figure is not None
        ),
    )
    if not expectation.cells:
        raise InputError(f"{key} contains no figure, so nothing could fail")
    return expectation


def _over(
    table: Mapping[str, Any], axes: Sequence[Axis], points: Sequence[Point]
) -> dict[tuple[str, ...], Point] | None:
    """Return for a place's labels the place that its figure is divided by. Raises: InputError for an unknown place."""
    if "over" not in table:
        return None
    labels = axes[-1].labels if axes else ()
    if not table["over"]:
        raise InputError('over {}: expected places, such as { "400" = "64" }')
    for label in (*table["over"], *table["over"].values()):
        if label not in labels:
            hint = did_you_mean(str(label), labels, f"expected one of {', '.join(labels)}" if labels else "no [sweep]")
            raise InputError(f"over {label!r} is not a place of the sweep; {hint}")
    places = {point.labels: point for point in points}
    return {at: places[*at[:-1], table["over"][at[-1]]] for at in places if at[-1] in table["over"]}


def _figures(
    table: Mapping[str, Any], key: str, axes: Sequence[Axis], points: Sequence[Point], dimension: str
) -> list[Figure | None]:
    """Return the figures of all cells in the grid's order. Raises: InputError for missing or extra cells."""
    if key not in table:
        return [None] * len(points)
    value = table[key]
    cells = value if isinstance(value, list) else [value]
    if axes and len(cells) != len(axes[0].labels):
        raise InputError(f"{key} has {len(cells)} rows, expected {len(axes[0].labels)}: one for each {axes[0].name}")
    if len(axes) > 1:
        width, across = len(points) // len(cells), " x ".join(axis.name for axis in axes[1:])
        for label, row in zip(axes[0].labels, cells, strict=True):
            if not isinstance(row, list) or len(row) != width:
                got = f"{len(row)} cells" if isinstance(row, list) else repr(row)
                raise InputError(f"{key}: row {axes[0].name}={label} is {got}, expected {width}: {across}")
        cells = [cell for row in cells for cell in row]
    if len(cells) != len(points):
        raise InputError(f"{key} has {len(cells)} figures, expected {len(points)}, for there is no [sweep]")
    figures = []
    for point, cell in zip(points, cells, strict=True):
        with naming(f"{key}{f' at {describe(axes, point.labels)}' if axes else ''}: "):
            figures.append(parse_figure(cell, dimension, table.get("unit", "")))
    return figures


def _of_rows(table: Mapping[str, Any], lines: Sequence[Any], dimension: str) -> list[Figure | None]:
    """Return the printed figure of each row."""
    figures = []
    for number, text in enumerate(lines, 1):
        with naming(f"row {number}: "):
            figures.append(parse_figure(text, dimension, table.get("unit", "")))
    return figures


def _ranking(given: Mapping[str, Any], axes: Sequence[Axis]) -> Ranking:
    """Read the demand on rankings. Raises: InputError for other keys, and for unknown columns."""
    names, same, above = [axis.name for axis in axes], given.get("same"), given.get("above")
    if not isinstance(same, list) or set(given) != {"same", "above", "groups"} or any(one not in names for one in same):
        raise InputError(
            f"ranking {dict(given)!r}: expected {{ same = some of {', '.join(names)}, above = 0.8, groups = 9 }}"
        )
    if type(above) is not float or not -1 <= above <= 1 or type(given["groups"]) is not int or given["groups"] < 0:
        raise InputError(f"ranking: above {above!r}, groups {given['groups']!r}: expected a correlation and a number")
    return Ranking(tuple(same), above, given["groups"])


def _bold(
    table: Mapping[str, Any], axes: Sequence[Axis], dimension: str, printed: Sequence[Figure | None]
) -> BoldRule | None:
    rule, is_any_bold = table.get("bold"), any(figure is not None and figure.is_bold for figure in printed)
    if rule is None and is_any_bold:
        raise InputError('bold is missing: **figures** need a rule, such as { smallest = "ranks", at_most = "32GB" }')
    if rule is None:
        return None
    names = [axis.name for axis in axes]
    if set(rule) != {"smallest", "at_most"} or rule["smallest"] not in names:
        raise InputError(f'bold {rule!r}: expected {{ smallest = one of {", ".join(names)}, at_most = "32GB" }}')
    labels = [label for axis in axes if axis.name == rule["smallest"] for label in axis.labels]
    if not all(label.isdecimal() and len(label) <= LONGEST_NUMBER for label in labels):
        raise InputError(f"bold: {rule['smallest']} has no smallest value: expected an axis of whole numbers")
    if dimension != "bytes":
        raise InputError(f"bold: the rule compares bytes, but these figures are a {dimension}")
    return BoldRule(rule["smallest"], _size(rule, "at_most"))


def _within(table: Mapping[str, Any], key: str) -> Fraction | int:
    """Parse '5%' or '0.5%' of the printed figure, or a size such as '64KiB' if figures are in bytes.

    Raises: InputError for anything else, and for 0 %.
    """
    text = table[key]
    if table.get("unit") == "B" and "%" not in text:
        return _size(table, key)
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%", text)
    if match is None or not Fraction(match[1]):
        raise InputError(
            f'{key} {shown(text)}: expected a share of what is printed above 0 and below 1,000 %, such as "5%"'
        )
    return Fraction(match[1]) / 100


def _outside(table: Mapping[str, Any], dimension: str) -> dict[str, int | Quantity]:
    """Return each cause's bytes, or its quantity. Raises: InputError for anything else."""
    known = {name: each for name, each in {**FORMULAS, **COUNTS}.items() if each.dimension == "bytes"}
    found: dict[str, int | Quantity] = {}
    for cause, value in table.get("outside", {}).items():
        if dimension != "bytes":
            raise InputError(f"outside: causes are in bytes, but these figures are a {dimension}")
        if isinstance(value, str) and value.isidentifier() and value not in known:
            hint = did_you_mean(value, known, f"expected one of {', '.join(known)}, or a size")
            raise InputError(f"outside {cause!r}: {value!r} is not known; {hint}")
        found[cause] = known[value] if isinstance(value, str) and value in known else _size(table["outside"], cause)
    return found


def _memory(table: Mapping[str, Any]) -> int | Hardware:
    """Parse a size, or a device's name. Raises: InputError for neither."""
    value = table["memory"]
    if isinstance(value, str) and not value[:1].isdigit():
        return find_hardware(value)
    return _size(table, "memory")


def _size(table: Mapping[str, Any], key: str) -> int:
    value = table[key]
    with naming(f"{key} "):
        return parse_bytes(value if isinstance(value, str) else repr(value))


def _config(
    file: ScenarioFile,
    table: Mapping[str, Any],
    point: Point,
    axes: Sequence[Axis],
    counted_on: str,
    instead: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Build the run of one cell: a plan's steps by default, then the file's values, the table's, the cell's own, and
    those `instead`."""
    assumed = PLAN_DEFAULTS if counted_on == SHAPES else {}
    own = {name: value for name, value in point.changes.items() if name not in NO_FIELDS}
    with naming(f"at {describe(axes, point.labels)}: " if axes else ""):
        given = {**assumed, **file.run, **table.get("with", {}), **own, **(instead or {})}
        config = RunConfig.from_dict(given, source="the run")
        config = config.replace(steps=planned_steps(config))
        stage, pp = point.changes.get(PIPELINE_STAGE, 0), config.mesh.pp
        if type(stage) is not int or not 0 <= stage < pp:
            raise InputError(f"pipeline_stage {stage!r}: expected 0 to {pp - 1}, for pp is {pp}")
        return config
