"""step_errors.py write [NAME ...] | show: how far the clock is from each measured step of scenarios/.

`write` models every figure that was measured and that the clock knows, and writes two things: a line for each into
zerosim/analysis/step_errors.toml, out of which `zerosim plan` makes its interval, and into each list of runs its true
errors, as what a later clock may not be worse than. It takes ten minutes of a core; with names, such as
`steps_torchtitan`, the other files' lines stay. `show` says how many rows that were left out lie in the interval of the
others.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import median

from zerosim.analysis.expect import Expectation, Judged, Runs, judge, read_expectations
from zerosim.analysis.expect.judging import JudgedCell
from zerosim.analysis.expect.keys import MEASURED
from zerosim.analysis.interval import Measured, coverage
from zerosim.analysis.step_interval import FILE, MeasuredStep, StepClass, read_steps, step_class
from zerosim.config import RunConfig
from zerosim.config.files import read_scenario_file

FOLDER = Path(__file__).parents[1] / "scenarios"
SCENARIOS = [
    path for start in ("steps", "measured_time", "throughput") for path in sorted(FOLDER.glob(f"{start}*.toml"))
]
RATES = ("hardware_flops_per_s", "model_flops_per_s", "tokens_per_s")
HEAD = """# How far the clock is from measured steps: written by `python tests/step_errors.py write`, never by hand.
# A row is a figure of a scenario: its file, its class (analysis/step_interval.py), and ln(measured / modelled).
columns = ["scenario", "gpu", "recipe", "size", "host_bound", "adapters", "context", "experts", "log_ratio"]
rows = [
"""


def is_measured_step(expectation: Expectation) -> bool:
    """Whether the figures are measured steps that the clock models, and no ratios of two speeds."""
    timed = expectation.figures == MEASURED and expectation.quantity in ("step_seconds", *RATES)
    return timed and not any(cell.over for cell in expectation.cells)


def measured_tables(path: Path) -> list[Expectation]:
    """A scenario's tables of measured steps."""
    return [table for table in read_expectations(read_scenario_file(str(path))) if is_measured_step(table)]


SHORT = 512
"""The passes of chunks that a short plan runs at most, as `passes` counts them."""


LONG = 4096
"""The passes above which a plan takes half a minute."""


def passes(config: RunConfig) -> int:
    """Count the passes of chunks that a plan runs and times: what its time depends on most."""
    pp = config.mesh.pp
    return pp * config.chunks.each * min(config.data.accumulate, 4 * pp)


def sampled(table: Expectation, every: int) -> list[int]:
    """Choose one of every so many rows, at least one: the first with a short plan, or the one with the shortest. A row
    of 32 pipeline stages can take minutes: where each of so many is long, none is chosen, unless it is the only one."""
    work = [max(SHORT, passes(cell.config)) for cell in table.cells]
    starts = range(0, max(1, len(work) - every + 1), every)
    found = [min(range(start, min(start + every, len(work))), key=work.__getitem__) for start in starts]
    return [at for at in found if every == 1 or work[at] <= LONG] or [min(found, key=work.__getitem__)]


def measure(path: Path, every: int = 1) -> tuple[list[Judged], list[MeasuredStep]]:
    """A scenario judged, and its rows by class; of each table one of every so many rows (`sampled`)."""
    runs, steps, tables = Runs(), [], []
    for whole in measured_tables(path):
        expectation = replace(whole, cells=tuple(whole.cells[at] for at in sampled(whole, every)))
        tables.append(judge(expectation, runs))
        for cell, judged in zip(expectation.cells, tables[-1].cells, strict=True):
            time = runs.time(cell.config, cell.gpu, cell.bandwidth)
            of = step_class(cell.config, time, cell.gpu)
            ratio = math.log(float(cell.printed.value * cell.printed.scale) / float(judged.judged))
            steps.append(Measured(path.stem, of, round(-ratio if expectation.quantity in RATES else ratio, 4)))
    return tables, steps


def as_written(path: Path) -> list[Judged]:
    """A scenario judged by the table in place of the clock."""
    steps, tables = iter([step for step in read_steps() if step.scenario == path.stem]), []
    for expectation in measured_tables(path):
        cells = []
        for cell in expectation.cells:
            ratio = next(steps).log_ratio * (1 if expectation.quantity in RATES else -1)
            counted = Fraction(float(cell.printed.value * cell.printed.scale) * math.exp(ratio))
            cells.append(JudgedCell(cell.labels, cell.printed, None, counted, None, None, {}, ()))
        tables.append(Judged(expectation, tuple(cells)))
    return tables


def with_errors(text: str, tables: Sequence[Judged]) -> str:
    """A scenario whose tolerances are its true errors, in whole per cent."""
    parts = text.split("[[expect]]\n")
    for number, judged in enumerate(tables, 1):
        part = re.sub(r'^within = ".*"', f'within = "{_worst(judged)}%"', parts[number], flags=re.MULTILINE)
        mean = _percent(judged.errors.mean_absolute)
        part = re.sub(r'^mean_within = ".*"', f'mean_within = "{mean}%"', part, flags=re.MULTILINE)
        if (ranking := judged.expectation.ranking) is not None:
            kept = sum(rank > ranking.above for rank in judged.ranks)
            part = re.sub(r"(?<=groups = )\d+", str(kept), part, count=1)
        parts[number] = part
    return "[[expect]]\n".join(parts)


def _worst(judged: Judged) -> int:
    """The least share that passes: from 100 % on it is a factor, in both directions (judging.py)."""
    above, below = judged.errors.most, -judged.errors.least
    worst = _percent(max(above, below))
    return worst if worst < 100 else _percent(max(above, below / (1 - below) if below > 0 else 0))


def _percent(share: float) -> int:
    return max(1, math.ceil(100 * share))


def write(*names: str) -> None:
    asked = [path for path in SCENARIOS if not names or path.stem in names]
    if missing := set(names) - {path.stem for path in asked}:
        raise SystemExit(f"{', '.join(missing)}: expected {', '.join(path.stem for path in SCENARIOS)}")
    stems = {path.stem for path in asked}
    steps = [step for step in read_steps() if step.scenario not in stems] if names else []
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(measure, asked))
    for path, (tables, own) in zip(asked, found, strict=True):
        if tables and tables[0].expectation.is_list:
            path.write_text(with_errors(path.read_text("utf-8"), tables), "utf-8")
        steps += own
        for judged in tables:
            print(f"{path.stem}: {judged.expectation.title}: {judged.errors}")
            if judged.ranks:
                above = sum(rank > 0.8 for rank in judged.ranks)
                print(f"  ranks: median {median(judged.ranks):.2f}, above 0.8 in {above} of {len(judged.ranks)} groups")
    lines = [_line(step) for step in sorted(steps, key=lambda step: step.scenario)]
    FILE.write_text(HEAD + "".join(lines) + "]\n", "utf-8")
    read_steps.cache_clear()
    show()


def _line(step: MeasuredStep) -> str:
    of: StepClass = step.of
    return f"  {json.dumps([step.scenario, *of, step.log_ratio])},\n"


def show() -> None:
    """Of all rows, and of each generation of GPUs: how many that are left out lie inside, how wide intervals are."""
    steps = read_steps()
    print(f"all: {coverage(steps, alike=True)}")
    print(f"all, whole scenarios left out: {coverage(steps, by_scenario=True, alike=True)}")
    for gpu in dict.fromkeys(step.of.gpu.split("-")[0] for step in steps):
        print(f"{gpu}: {coverage([step for step in steps if step.of.gpu.split('-')[0] == gpu], alike=True)}")


if __name__ == "__main__":
    {"write": write, "show": show}[sys.argv[1]](*sys.argv[2:])
