"""Intervals of measured steps: of which class, how many lie inside, what is said of them."""

from __future__ import annotations

import json
import math
import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerosim.analysis.expect import read_expectations
from zerosim.analysis.interval import FEWEST, Measured, coverage, interval, overlaps
from zerosim.analysis.step_interval import MeasuredStep, StepClass, read_steps, step_class
from zerosim.cli.main import main
from zerosim.config import RunConfig, plan_config
from zerosim.config.files import read_scenario_file
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware, presets
from zerosim.config.presets.published import BEST, best_published
from zerosim.report.interval import class_words, implausible, not_ranked
from zerosim.train.plan import plan

sys.path.insert(0, str(Path(__file__).parents[1]))

from step_errors import SCENARIOS, as_written, is_measured_step, measure, measured_tables, sampled

ONE = StepClass("a100-80", "fsdp2", "below 2B", False)


def rows(of: StepClass, *ratios: float) -> list[MeasuredStep]:
    return [Measured("s", of, ratio) for ratio in ratios]


RATIOS = st.lists(st.floats(-2, 2), min_size=FEWEST, max_size=60)


@given(RATIOS)
def test_an_interval_holds_eight_of_ten_of_its_class(ratios: list[float]) -> None:
    found = interval(ONE, rows(ONE, *ratios))
    assert found is not None
    inside = [ratio for ratio in ratios if found.low <= math.exp(ratio) <= found.high]
    assert len(inside) >= 0.8 * len(ratios)
    assert (found.rows, found.of) == (len(ratios), ONE)
    assert math.exp(min(ratios)) <= found.low <= found.high <= math.exp(max(ratios))


@settings(deadline=None)
@given(st.lists(st.floats(-2, 2), min_size=10, max_size=40, unique=True))
def test_a_row_left_out_lies_in_the_others_interval_eight_times_of_ten(ratios: list[float]) -> None:
    """Whatever the errors are. Of few rows it is one row less at most."""
    left_out = coverage(rows(ONE, *ratios))
    assert left_out.with_interval == len(ratios)
    assert left_out.inside >= math.floor(0.8 * len(ratios)) - 1


def test_small_classes_are_merged_upwards_in_their_order() -> None:
    sizes = rows(ONE._replace(size="above 20B"), *[0.1] * FEWEST)
    found = interval(ONE, rows(ONE, 1.0) + sizes)
    assert found is not None
    assert found.of == ONE._replace(size="")
    assert found.rows == FEWEST + 1
    gpus = rows(ONE._replace(gpu="a100-40"), *[0.1] * FEWEST)
    assert (of := interval(ONE, gpus)) is not None
    assert of.of == ONE._replace(size="", gpu="a100")
    frameworks = rows(ONE._replace(recipe="megatron"), *[0.1] * FEWEST)
    assert (of := interval(ONE, frameworks)) is not None
    assert of.of == ONE._replace(size="", gpu="a100", recipe="")
    for other in (ONE._replace(host_bound=True), ONE._replace(gpu="h100-80")):
        assert interval(ONE, rows(other, *[0.1] * 99)) is None
    assert interval(ONE, rows(ONE, *[0.1] * (FEWEST - 1))) is None


@given(st.sampled_from(read_steps()))
def test_every_merged_class_holds_its_parts(step: MeasuredStep) -> None:
    classes = step.of.merges()
    members = [{other for other in read_steps() if other.of.belongs(one)} for one in classes]
    assert step in members[0]
    assert all(small <= large for small, large in pairwise(members))


def test_the_table_has_every_measured_figure() -> None:
    """Of the scenarios, so that none is lost unseen."""
    assert {step.scenario for step in read_steps()} == {path.stem for path in SCENARIOS}
    assert {step.of.gpu for step in read_steps()} <= {device.name for device in presets()}
    assert all(math.isfinite(step.log_ratio) for step in read_steps())


def test_these_files_have_nothing_else_to_judge() -> None:
    """So test_check.py leaves them out, but for three that also print ratios of speeds."""
    others = {f"throughput_zero_figure{number}" for number in (2, 3, 4)}
    for path in SCENARIOS:
        expectations = read_expectations(read_scenario_file(str(path)))
        assert all(map(is_measured_step, expectations)) == (path.stem not in others), path


def test_steps_of_context_parallelism_are_a_class_apart_and_lie_where_others_do() -> None:
    """Seven were measured: too few for an interval of theirs."""
    context, others = ([step for step in read_steps() if step.of.context == has] for has in (True, False))
    assert len(context) == 7
    for step in context:
        assert interval(step.of, read_steps()) is None
        found = interval(step.of._replace(context=False), others)
        assert found is not None
        assert found.low <= math.exp(step.log_ratio) <= found.high


def test_rows_left_out_lie_inside() -> None:
    """Goal: eight of ten. How wide intervals are is said by `step_errors.py show` and in docs/time.md."""
    left_out = coverage(read_steps(), alike=True)
    assert left_out.inside >= 0.8 * left_out.with_interval
    assert "rows left out lie inside" in str(left_out)


def test_rows_of_a_source_left_out_whole_lie_inside() -> None:
    """Between 75 and 90 %: rows of one source err alike, and without that rule too few do."""
    of_others = coverage(read_steps(), by_scenario=True, alike=True)
    assert 0.75 * of_others.with_interval <= of_others.inside <= 0.9 * of_others.with_interval
    without = coverage(read_steps(), by_scenario=True)
    assert without.inside < 0.75 * without.with_interval


@pytest.mark.slow
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_table_is_what_the_clock_misses(path: Path) -> None:
    """And every figure is as near as its scenario says. Some rows are timed: all rows of three files, one of every so
    many of the others. A list's mean follows from the table, which has all of them. The three files' lists allow no
    more than a per cent beyond their worst row, and beyond their mean."""
    whole = measured_tables(path)
    is_whole = path.stem in ("steps_torchtitan", "steps_torchao", "steps_ml_engineering")
    every = 1 if is_whole else 3 + sum(len(table.cells) for table in whole) // 8
    tables, steps = measure(path, every)
    assert [cell.failures for table in tables for cell in table.cells if not cell.passed] == []
    assert [table.failures for table in as_written(path) if table.failures] == []
    written = iter([step for step in read_steps() if step.scenario == path.stem])
    rows = [list(islice(written, len(table.cells))) for table in whole]
    assert list(written) == []
    assert steps == [of[at] for table, of in zip(whole, rows, strict=True) for at in sampled(table, every)]
    for table in tables if is_whole else ():
        assert float(table.expectation.within - table.worst) < 0.01
        assert float(table.expectation.mean_within) - table.errors.mean_absolute < 0.01


def test_steps_of_experts_are_merged_over_gpus_and_never_with_others() -> None:
    of = StepClass("h800-80", "megatron", "above 20B", False, experts=True)
    others = rows(of._replace(experts=False), *[0.1] * FEWEST)
    assert interval(of, others) is None
    few = rows(of._replace(gpu="h100-80", size="2B to 20B"), *[0.2] * FEWEST)
    assert interval(of, [*others, *few[1:]]) is None
    found = interval(of, [*others, *few])
    assert found is not None
    assert (found.rows, found.of) == (FEWEST, of._replace(gpu="", size="", recipe=""))
    assert class_words(found.of, found.rows) == "8 of any framework on any GPU, experts"
    dense = of._replace(experts=False)
    assert interval(dense, [*others[1:], *few]) is None


def test_a_plan_says_where_measured_steps_lie(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model llama3-8b --ranks 64 --recipe fsdp2 --stage 3 --recompute full:2 --attention flash"
    assert main(["plan", *words.split(), "--gpu", "a100-80", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    time = json.loads(out)["time"]
    assert time["step_s_low"] < 2.82094 < time["step_s_high"]  # torchtitan
    assert time["interval_rows"] >= FEWEST
    assert time["interval_class"]["recipe"] == "fsdp2"
    said = " ".join(err.split())
    assert f"s for 8 of 10 measured steps like this one: {time['interval_rows']} of FSDP on A100-80" in said
    assert main(["plan", *words.split(), "--gpu", "h200-141", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    never = json.loads(out)["time"]
    assert (never["step_s_low"], never["interval_class"]) == (None, None)
    assert "Modelled, never compared" in " ".join(err.split())


def test_a_class_is_read_off_the_modelled_step() -> None:
    config = plan_config(model="llama3-8b", ranks=8, stage=3, recipe="fsdp2", attention="flash")
    time = plan(config, cluster=cluster_of(find_hardware("a100-80"))).time
    assert time is not None
    assert step_class(config, time, "a100-80") == StepClass("a100-80", "fsdp2", "2B to 20B", False)


def test_an_mfu_that_nobody_published_is_implausible() -> None:
    """In 8 bits MFU, of the peak of 16, is not compared with figures of 16 bits."""
    plain, eight = RunConfig(), RunConfig(model="llama", fp8="tensorwise")
    known = [device for device in presets() if best_published(device.name, plain.fp8) is not None]
    assert set(BEST) == {device.name.split("-")[0] for device in known} - {"dgx1"}  # a V100 too
    assert implausible(plain, 0.99, cluster_of(find_hardware("rtx4090"))) is None  # nobody published one
    for device in known:
        cluster, best = cluster_of(device), best_published(device.name, plain.fp8)
        assert best is not None
        assert best.source
        assert implausible(plain, best.mfu, cluster) is None
        said = f"above the best published one that we know for this GPU, {100 * best.mfu:.1f} %"
        assert said in str(implausible(plain, best.mfu + 0.001, cluster))
    assert implausible(eight, 0.99, cluster_of(find_hardware("h100"))) is None
    assert best_published("my-card", plain.fp8) is None


BANDS = st.tuples(st.floats(0, 9), st.floats(0, 9)).map(lambda ends: (min(ends), max(ends)))


@given(BANDS, BANDS)
def test_bands_that_overlap_are_not_ranked(one: tuple[float, float], other: tuple[float, float]) -> None:
    apart = one[1] < other[0] or other[1] < one[0]
    assert overlaps(one, other) == overlaps(other, one) == (not apart)
    assert not_ranked([one, other]) == (not apart)
    assert not_ranked([one, None]) == 1
