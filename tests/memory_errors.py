"""memory_errors.py write | show: how far a plan's peak is from each measured run of scenarios/.

`write` plans every run whose memory was measured and writes a line for each into zerosim/analysis/memory_errors.toml,
out of which `zerosim plan` makes its interval. `show` says how many rows that were left out lie in the interval of the
others.
"""

from __future__ import annotations

import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from zerosim.analysis.expect import Expectation, Runs, judge, read_expectations
from zerosim.analysis.expect.keys import MEASURED
from zerosim.analysis.interval import Measured, coverage
from zerosim.analysis.memory_interval import ALLOCATED, DEVICE, FILE, MeasuredPeak, memory_class, read_peaks
from zerosim.config.files import read_scenario_file

FOLDER = Path(__file__).parents[1] / "scenarios"
NUMBERS = {"peak_bytes": ALLOCATED, "device_bytes": DEVICE}
HEAD = """# How far plans are from measured memory: written by `python tests/memory_errors.py write`, never by hand.
# A row: its scenario, its class (analysis/memory_interval.py), and ln(measured / planned).
columns = ["scenario", "framework", "trained", "number", "log_ratio"]
rows = [
"""


def is_measured_memory(expectation: Expectation) -> bool:
    """Whether the figures are memory that runs of a framework held, and no differences of it."""
    is_memory = expectation.figures == MEASURED and expectation.quantity in NUMBERS and not expectation.spared_from
    return is_memory and expectation.cells[0].config.parallel.recipe != "paper"


def measure(path: Path, runs: Runs | None = None) -> list[MeasuredPeak]:
    """A scenario's rows by class; `runs` are those that were made for it."""
    runs, rows = runs or Runs(), []
    for expectation in read_expectations(read_scenario_file(str(path))):
        if not is_measured_memory(expectation):
            continue
        cells = zip(expectation.cells, judge(expectation, runs).cells, strict=True)
        for cell, judged in cells:
            of = memory_class(cell.config, NUMBERS[expectation.quantity])
            ratio = math.log(float(cell.printed.value * cell.printed.scale) / float(judged.judged))
            rows.append(Measured(path.stem, of, round(ratio, 4)))
    return rows


SCENARIOS = [
    path
    for path in sorted(FOLDER.glob("measured_*.toml"))
    if any(map(is_measured_memory, read_expectations(read_scenario_file(str(path)))))
]


def write() -> None:
    with ProcessPoolExecutor(2) as pool:
        rows = [row for found in pool.map(measure, SCENARIOS) for row in found]
    lines = (f"  {json.dumps([row.scenario, *row.of, row.log_ratio])},\n" for row in rows)
    FILE.write_text(HEAD + "".join(lines) + "]\n", "utf-8")
    read_peaks.cache_clear()
    show()


def show() -> None:
    """Of all rows, and of each class: how many that are left out lie inside, how wide intervals are."""
    rows = read_peaks()
    print(f"all: {coverage(rows)}")
    print(f"all, whole scenarios left out: {coverage(rows, by_scenario=True)}")
    for of in dict.fromkeys(row.of for row in rows):
        print(f"{', '.join(of)}: {coverage([row for row in rows if row.of == of])}")


if __name__ == "__main__":
    {"write": write, "show": show}[sys.argv[1]]()
