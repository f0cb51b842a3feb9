"""The keys of a table [expect], and their valid combinations.

Each key and its meaning:

    source                where the figures are printed: paper, section or table (required)
    title                 the meaning of the figures (required if a file has several tables)
    quantity, formula     the judged value: a count (`counts.py`), a formula (`closed_forms.py`), or both
    formula_only          why nothing is counted, if there is no quantity
    printed               the figures as strings, one for each cell of the grid; **bold**, "-" for none
    computed              instead of printed, for figures that no source prints: the source's rule applied by the file
    unit                  the unit of figures without one, such as GB
    rounding              how the source rounded (`figures.py`); or, for measured figures:
    within                how far count and causes may be from it, such as "5%", or "64KiB" where the unit is B; from
                          "100%" on also in the other direction: "300%" is four times as much, or a fourth
    outside               causes that the count leaves out: each a size, or the name of a count or formula in bytes
    bold                  the rule for bold type, { smallest = "ranks", at_most = "32GB" }
    instead, note         figures that the source's own rule gives where it prints others, and the reason
    beside, why           a count that is shown but not judged, and why it differs
    over                  each place with a figure, and the place that it is divided by: { "400" = "64" }
    spared_from           fields of a second run: figures are how much less each run needs than the same with these
    with, sweep           fields of this table's runs; its own grid instead of the file's
    columns, rows, cases  instead of a grid and `printed`: a line for each run (`rows.py`)
    mean_within           beside within, for rows: the tolerance of their mean error, such as "15%"
    ranking               for rows: columns within which layouts are ranked, a Spearman correlation and how many groups
                          must be above it, { same = ["layers", "ranks"], above = 0.8, groups = 9 }
    counted_on            "shapes" (one step, Megatron's kernels) or "training" (real numbers)
    gpu                   the device of the times, by name
    at, memory, calculator   inputs of some quantities: a moment, devices' bytes or a device by name, the author of a
    rule
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from zerosim.analysis.expect.asked import SHAPES, TRAINING, Quantity
from zerosim.analysis.expect.closed_forms import FORMULAS
from zerosim.analysis.expect.counts import COUNTS, TIMES
from zerosim.analysis.expect.figures import ROUNDINGS
from zerosim.analysis.formulas import calculators
from zerosim.errors import InputError, did_you_mean
from zerosim.ledger.memory import MARKS

TEXTS = ("source", "title", "unit", "note", "why", "within", "mean_within", "formula_only", "gpu")
TABLES = ("with", "sweep", "bold", "outside", "over", "spared_from", "cases", "ranking")
QUANTITIES = MappingProxyType({"quantity": COUNTS, "formula": FORMULAS, "beside": COUNTS})
WORDS: Mapping[str, Collection[str]] = MappingProxyType(
    {
        **QUANTITIES,
        "rounding": ROUNDINGS,
        "at": MARKS,
        "counted_on": (SHAPES, TRAINING),
        "calculator": [calculator.name for calculator in calculators()],
    }
)
"""The keys with a fixed set of values."""
FIGURES = PRINTED, MEASURED, COMPUTED = "printed", "measured", "computed"
"""The origin of a table's figures."""
_FROM: Mapping[str, str] = MappingProxyType(
    {PRINTED: "the figures as they are printed, as strings", COMPUTED: "those that its rule gives, worked out here"}
)
"""The keys of the figures themselves; a table has exactly one."""
MEASURED_ONLY = ("peak_bytes", "allocated_bytes", "reserved_bytes", "device_bytes", "largest_batch", *TIMES)
"""Counts that depend on each buffer of a program. No source has a rule for them; it can only measure its own."""
NOT_TRAINED = ("largest_model", "largest_batch", "fits", "parameters", "block_matrices", *TIMES)
"""Counts that need no step."""
KEYS = (*TEXTS, *TABLES, *WORDS, *_FROM, "instead", "memory", "columns", "rows")


def check_keys(table: Mapping[str, Any]) -> None:
    """Check the keys. Raises: InputError for an unknown or missing key, a wrong kind of value, and a key without its
    companion."""
    for key in table:
        if key not in KEYS:
            hint = did_you_mean(key, KEYS, f"expected one of {', '.join(KEYS)}")
            raise InputError(f"unknown key {key!r}; {hint}")
    if "source" not in table:
        raise InputError("source is missing: name the paper and the section or table that prints it")
    _check_rows(table)
    if PRINTED not in table and COMPUTED not in table and "rows" not in table:
        raise InputError(f"{PRINTED} is missing: {_FROM[PRINTED]}; or {COMPUTED}: {_FROM[COMPUTED]}")
    for key, value in table.items():
        if key in TEXTS and not (isinstance(value, str) and value.strip()):
            raise InputError(f"{key} {value!r}: expected text")
        if key in TABLES and not isinstance(value, dict):
            raise InputError(f"{key} {value!r}: expected a table")
        if key in WORDS and not (isinstance(value, str) and value in WORDS[key]):
            hint = did_you_mean(value, WORDS[key], f"expected one of {', '.join(WORDS[key])}")
            raise InputError(f"{key} {value!r} is not known; {hint}")
    if ("rounding" in table) == ("within" in table):
        raise InputError(
            f"rounding is missing: one of {', '.join(ROUNDINGS)}, or within for what was measured, not both"
        )
    if COMPUTED in table and (other := next((key for key in (PRINTED, "within", "bold") if key in table), None)):
        raise InputError(
            f"{COMPUTED} and {other}: a figure is either computed here, or printed or measured by a source; leave "
            "one out"
        )
    if "outside" in table and ("within" not in table or "quantity" not in table):
        raise InputError(
            "outside: names causes that a count of a measured quantity leaves out; add quantity and within"
        )
    if "instead" in table and "within" in table:
        raise InputError("instead and within: give either the right figure or the allowed error; leave one out")
    if "instead" in table and "note" not in table:
        raise InputError("note is missing: say why the source's figures differ from its rule, or leave instead out")
    if ("beside" in table) != ("why" in table):
        raise InputError("beside and why go together: beside shows a count without a verdict, why says why it differs")
    if "quantity" not in table and "formula" not in table:
        raise InputError(f"quantity or formula is missing: name the printed quantity; counts are {', '.join(COUNTS)}")
    if ("quantity" in table) == ("formula_only" in table):
        raise InputError(
            f"formula_only: {table['quantity']} is counted; leave it out"
            if "quantity" in table
            else "quantity is missing: name the count of these figures, or say in formula_only why nothing is counted"
        )
    if "quantity" not in table and "within" in table:
        raise InputError("within: a measured figure is compared with a count; add quantity")
    if table.get("quantity") in MEASURED_ONLY and "within" not in table:
        raise InputError(
            f"within is missing: {table['quantity']} is a measurement of one program; set the allowed error"
        )


def _check_rows(table: Mapping[str, Any]) -> None:
    """Check the keys of a list of runs. Raises: InputError."""
    if ("columns" in table) != ("rows" in table):
        raise InputError("columns and rows go together: names, and a list of values for each run")
    for key in ("sweep", PRINTED, COMPUTED, "instead", "bold", "over"):
        if "rows" in table and key in table:
            raise InputError(f"rows and {key}: each row has its own run and figure; leave {key} out")
    for key in ("cases", "ranking", "mean_within"):
        if "rows" not in table and key in table:
            raise InputError(f"{key}: works only with rows; add rows, or leave it out")
    if "rows" in table and "mean_within" in table and "within" not in table:
        raise InputError("mean_within: set within to the allowed error of a single row")


def check_options(table: Mapping[str, Any], asked: Mapping[str, Quantity]) -> None:
    """Check that quantities go together, and with the keys that only some of them accept. Raises: InputError."""
    if len({quantity.dimension for quantity in asked.values()}) > 1:
        raise InputError(
            "quantity, formula and beside have different dimensions: use only bytes, only counts or only volumes"
        )
    for key in ("at", "memory", "calculator", "gpu"):
        needed = any(key in quantity.needs for quantity in asked.values())
        if needed and key not in table and not (key == "gpu" and "rows" in table):  # each row may have its own value
            raise InputError(f"{key} is missing: {table.get('quantity') or table.get('formula')} needs it")
        if key in table and not needed and not any(key in quantity.takes for quantity in asked.values()):
            raise InputError(f"{key} {table[key]!r}: nothing here uses it; leave it out")
    if table.get("counted_on") == TRAINING and not ("quantity" in table or "beside" in table):
        raise InputError(f'counted_on "{TRAINING}": nothing here is counted; leave it out')
    if table.get("counted_on") == TRAINING and table.get("quantity") in NOT_TRAINED:
        raise InputError(f'counted_on "{TRAINING}": {table["quantity"]} is not counted in training; leave it out')
