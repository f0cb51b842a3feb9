"""Tables: their numbers are the run's, their marks are computed, and they can be read at any width."""

from __future__ import annotations

import dataclasses
import html
import io
import re
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from processes import SECONDS
from rich.console import Console, Group, RenderableType
from rich.table import Column
from rich.text import Text

from zerosim.analysis import formulas
from zerosim.analysis.checks import checks, formulas_agree
from zerosim.analysis.compare import MARK, last_whole_step
from zerosim.config import OPTIONS, PLAN_DEFAULTS, RunConfig
from zerosim.errors import OutOfMemory
from zerosim.ledger.memory import Snapshot
from zerosim.ledger.traffic import TrafficRow
from zerosim.lessons.tables import table
from zerosim.optim.control import StepReport
from zerosim.placement.memories import HOST
from zerosim.report import progress, words
from zerosim.report.compare import Comparison, largest_difference, same_bits
from zerosim.report.failures import out_of_memory
from zerosim.report.look import Adaptive, Grid, emit, prose, right
from zerosim.report.names import show
from zerosim.report.notebook import COLUMNS, InNotebook
from zerosim.report.plan_tables import holders_table, memory_table
from zerosim.report.plots.style import contrast
from zerosim.report.progress import mean_over_ranks, progress_on
from zerosim.report.tables import owners_table, sample_text, states_table, summary, traffic_table
from zerosim.train.memory import RankMemory
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

STAGES = (0, 1, 2, 3)


@cache
def trained(**changes: Any) -> RunResult:
    """A small run in which N = 3 divides no unit."""
    small = dict(layers=1, hidden=10, heads=2, seq=7, vocab=257, steps=2, ranks=3, micro_batch=1)
    return run(RunConfig(**{**small, **changes}))


def text_of(shown: RenderableType, width: int = 160, encoding: str = "utf-8", terminal: bool = False) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=stream, width=width, force_terminal=terminal, color_system=None, highlight=False, _environ={}).print(
        shown
    )
    stream.seek(0)
    return stream.read()


def flat(text: str) -> str:
    return " ".join(text.split())


# -- the checks -------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "changes",
    [
        dict(accumulate=2),
        dict(accumulate=2, stage=2),
        dict(accumulate=2, stage=1),
        dict(keep_last_unit=True),
        dict(keep_last_unit=True, tie_embeddings=False),
        dict(keep_last_unit=True, tie_embeddings=False, accumulate=2, partition="owner"),
        dict(reshard_after_forward=False),
        dict(reshard_after_forward=False, keep_last_unit=True, tie_embeddings=False),
        dict(tie_embeddings=False),
        dict(grad_dtype="fp32"),
        dict(grad_dtype="bf16", precision="fp32", stage=1),
        dict(precision="fp32"),
        dict(precision="fp64", stage=2),
        dict(precision="fp16", loss_scale=1.0),
        *(dict(optimizer=name) for name in OPTIONS["optimizer"].choices),
        dict(optimizer="sgd", momentum=0.9, precision="fp32"),
        dict(optimizer="adafactor-hf", momentum=0.9, precision="fp32", stage=1),
        dict(optimizer="sgd", precision="fp32", stage=1),
        dict(model="mlp", keep_last_unit=True),
        dict(ranks=1),
        dict(ranks=9, stage=1),
        dict(bucket_bytes=None, stage=1),
        dict(bucket_bytes=700, stage=0),
    ],
    ids=str,
)
def test_counts_and_formulas_agree_in_every_corner(changes: dict[str, Any]) -> None:
    result = trained(**changes)
    assert [check.agrees for check in checks(result)[0].states] == [True] * 4
    assert all(check.agrees for check in checks(result, 1)[0].sent)
    assert "≠" not in text_of(summary(result))


def with_memory(result: RunResult, rank: int, change: Callable[[Snapshot], Snapshot]) -> RunResult:
    memory = list(result.memory)
    marks = {**memory[rank].marks, MARK: change(memory[rank].marks[MARK])}
    memory[rank] = RankMemory(marks, memory[rank].peak)
    return dataclasses.replace(result, memory=memory)


def plus(counts: Mapping[str, int], kind: str, extra: int) -> dict[str, int]:
    return {**counts, kind: counts.get(kind, 0) + extra}


@pytest.mark.parametrize("kind", formulas.STATES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_wrong_byte_count_is_marked(stage: int, kind: str) -> None:
    wrong = with_memory(trained(stage=stage), 1, lambda s: dataclasses.replace(s, by_kind=plus(s.by_kind, kind, 1)))
    agrees = {check.name: check.agrees for check in checks(wrong)[0].states}
    assert agrees == {**dict.fromkeys(agrees, True), kind: False, "total": False}
    assert text_of(states_table(checks(wrong))).count("≠") == 2


def test_bytes_on_the_wrong_rank_are_marked() -> None:
    """The mean is right; what each rank must hold is not."""
    wrong = with_memory(trained(), 0, lambda s: dataclasses.replace(s, by_kind=plus(s.by_kind, "optim", 4)))
    wrong = with_memory(wrong, 1, lambda s: dataclasses.replace(s, by_kind=plus(s.by_kind, "optim", -4)))
    check = checks(wrong)[0].states[2]
    assert check.mean == check.formula
    assert not check.agrees


def test_padding_that_is_not_named_is_marked() -> None:
    wrong = with_memory(trained(), 2, lambda s: dataclasses.replace(s, padding=plus(s.padding, "grad", -2)))
    assert [check.agrees for check in checks(wrong)[0].states] == [True, False, True, False]


def with_rows(result: RunResult, rank: int, change: Callable[[TrafficRow], TrafficRow | None]) -> RunResult:
    traffic = [list(rows) for rows in result.traffic]
    traffic[rank] = [changed for row in traffic[rank] if (changed := change(row)) is not None]
    return dataclasses.replace(result, traffic=traffic)


@pytest.mark.parametrize("stage", STAGES)
def test_wrong_traffic_is_marked(stage: int) -> None:
    result = trained(stage=stage)
    op = checks(result, 1)[0].sent[0].name
    wrong = with_rows(
        result, 1, lambda row: row._replace(sent_bytes=row.sent_bytes + 1) if row.op == op and row.step == 1 else row
    )
    assert [check.agrees for check in checks(wrong, 1)[0].sent] == [False, *[True] * (len({0} - {stage})), False]
    assert "≠" in text_of(traffic_table(checks(wrong)))


def test_a_comparison_marks_what_a_plan_marks() -> None:
    """States in another memory, copies, buffers and bytes that leave a node as well as states and messages."""
    result = trained(stage=2, offload="optimizer=host", ranks=4, ranks_per_node=2)

    def to_the_device(memory: RankMemory) -> RankMemory:
        host = memory.others[HOST]
        there = host.marks[MARK].by_kind
        left = dataclasses.replace(host.marks[MARK], by_kind=plus(there, "optim", -there["optim"]))
        here = dataclasses.replace(memory.marks[MARK], by_kind={**memory.marks[MARK].by_kind, "optim": there["optim"]})
        others = {**memory.others, HOST: host._replace(marks={**host.marks, MARK: left})}
        return dataclasses.replace(memory, marks={**memory.marks, MARK: here}, others=others)

    def twice(row: TrafficRow) -> TrafficRow:
        return row._replace(payload_bytes=2 * row.payload_bytes) if row.purpose == "offload" else row

    elsewhere = dataclasses.replace(result, memory=[to_the_device(memory) for memory in result.memory])
    copied = with_rows(result, 0, twice)
    assert all(check.agrees for check in checks(elsewhere)[0].states)
    for one, marks in ((result, "✓ ✓"), (elsewhere, "≠ ✓"), (copied, "✓ ≠")):
        found, comparison = checks(one), Comparison("stage", {2: one})
        assert formulas_agree(found) == (marks == "✓ ✓")
        lines = [line.split()[-1] for line in text_of(comparison).splitlines() if line.startswith("agrees")]
        assert " ".join(lines) == marks
        said = comparison.to_dict()["columns"]["2"]["formulas"]
        assert said["agree"] == formulas_agree(found)
        assert [check["agrees"] for check in said["checks"][0]] == [
            check.agrees for check in (*found[0].of_memory, *found[0].of_step)
        ]


def test_the_note_gives_the_codes_of_the_step_shown() -> None:
    """In DGC's warm-up the first steps send more."""
    fields = dict(compress="dgc", compress_warmup=3, steps=5, optimizer="sgd", momentum=0.9, precision="fp32")
    result = trained(stage=1, **fields)
    first, last = (checks(result, step)[0] for step in (0, 4))
    assert last.of.held["Z"] < first.of.held["Z"]
    assert all(check.agrees for check in (*first.sent, *last.sent))
    assert f"Z = {last.of.held['Z']:,}, " in flat(text_of(traffic_table(checks(result))))


def test_missing_and_unexpected_operations_are_marked() -> None:
    missing = with_rows(trained(), 0, lambda row: None if row.op == "all_gather" else row)
    assert {check.name: check.agrees for check in checks(missing, 1)[0].sent} == {
        "reduce_scatter": True, "all_gather": False, "total": False,
    }  # fmt: skip
    strange = with_rows(trained(), 0, lambda row: row._replace(op="gossip") if row.op == "all_gather" else row)
    assert {check.name: check.agrees for check in checks(strange, 1)[0].sent}["gossip"] is False


def test_what_native_collectives_sent_is_modelled_and_agrees_with_nothing() -> None:
    """Payload is counted, a ring's bytes are not: there is no mark."""
    result = trained()
    rows = [
        [row._replace(sent_bytes=None, received_bytes=None, modelled_bytes=row.sent_bytes) for row in rank]
        for rank in result.traffic
    ]
    text = text_of(traffic_table(checks(dataclasses.replace(result, traffic=rows))))
    assert {"payload", "ring's"} <= set(text.split())
    assert not {"✓", "≠", "agree"} & set(text.split())
    assert f"{checks(result, 1)[0].sent[0].payload:,}" in text


def test_padding_in_traffic_is_exact() -> None:
    """Counted less the formula, on every rank."""
    result = trained()
    for check in checks(result, 1)[0].sent[:2]:
        padding = check.with_padding - check.formula
        assert {Fraction(sent) - padding for sent in check.counted} == {check.formula}
        assert padding > 0
    assert all(check.with_padding == check.formula for check in checks(trained(stage=0), 1)[0].sent)


# -- how it looks -------------------------------------------------------------------------------------
@pytest.mark.quick(2)
@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    "changes", [dict(), dict(ranks=9, partition="owner", stage=2), dict(ranks=8, stage=1)], ids=str
)
def test_a_summary_fits_and_loses_no_digit(changes: dict[str, Any], width: int) -> None:
    result = trained(**changes)
    text = text_of(summary(result), width, terminal=True)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    for check in [*checks(result)[0].states, *checks(result, 1)[0].sent]:
        assert show(check.formula) in text
    comparison = text_of(Comparison("stage", {result.config.parallel.zero_stage: result}), width, terminal=True)
    assert max(len(line.rstrip()) for line in comparison.splitlines()) <= width


def test_millions_of_parameters_fit_into_60_columns() -> None:
    result = trained(ranks=2, hidden=100, vocab=20_011, tie_embeddings=False, steps=1)
    text = text_of(summary(result), 60, terminal=True)
    assert result.num_parameters > 4_000_000
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 60
    assert "…" not in text


def test_a_pipe_has_no_boxes_and_ascii_has_names() -> None:
    piped = text_of(summary(trained()))
    assert not set(piped) & set("─━│┃")
    named = text_of(summary(trained()), encoding="ascii")
    assert named.isascii()
    assert "3Psi + 2VD" in named
    assert " ok" in named


def test_what_an_encoding_lacks_becomes_a_question_mark() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    emit(prose("é and Ψ"), stream)
    stream.seek(0)
    assert stream.read() == "? and Psi\n"


def test_few_ranks_have_a_row_each_and_many_have_three() -> None:
    few, many = text_of(states_table(checks(trained(ranks=8)))), text_of(states_table(checks(trained(ranks=9))))
    assert "rank 7" in few
    assert "rank 0" not in many
    for row in ("least of a rank", "mean ", "most of a rank"):
        assert row in many


def test_the_summary_holds_the_runs_numbers() -> None:
    result = trained(partition="owner")
    text = flat(text_of(summary(result)))
    peak = max(memory.peak.total_bytes for memory in result.memory)
    for part in (
        f"{result.num_parameters:,} parameters",
        f"{result.mean_losses[0]:.3f} → {result.mean_losses[-1]:.3f}",
        "ln 257 = 5.549",
        f"({peak:,} B)",
        "ZeRO-3 keeps on each rank on average 1/3",
    ):
        assert part in text
    for memory in result.memory:
        states = memory.model_states()
        assert all(f"{nbytes:,}" in text for nbytes in [*states.values(), sum(states.values())])
    control = result.sent_bytes(0, 1, "control")
    assert f"Control traffic (norm and overflow flags): {control:,} B per rank." in text


def test_owners_are_named() -> None:
    result = trained(partition="owner")
    text = text_of(owners_table(result))
    for rank in range(3):
        own = [unit for unit in result.units if unit.owner == rank]
        line = next(line for line in text.splitlines() if line.split()[:1] == [str(rank)])
        assert flat(line) == f"{rank} {sum(u.numel for u in own):,} {', '.join(u.name for u in own)}"
    assert "5 more 0 nothing" in flat(text_of(owners_table(trained(partition="owner", ranks=9))))


def test_skipped_steps_are_told_and_their_traffic_is_not_taken() -> None:
    result = trained(precision="fp16", stage=1, initial_scale_power=24, hysteresis=1, steps=24)
    skipped = [step.skipped for step in result.steps]
    assert any(skipped)
    assert not all(skipped)
    last = last_whole_step(result)
    assert last is not None
    assert f"{sum(skipped)} of 24 steps skipped" in text_of(summary(result))
    assert "≠" not in text_of(summary(result))

    every = dataclasses.replace(result, steps=[StepReport(1.0, 2.0, True, 0.1) for _ in result.steps])
    assert last_whole_step(every) is None
    assert "every step was skipped" in text_of(summary(every))

    ended = [*result.steps[: last + 1], *(StepReport(1.0, 2.0, True, 0.1) for _ in result.steps[last + 1 :])]
    assert ended[last].skipped is False
    assert f"in step {last}, the last" in text_of(traffic_table(checks(dataclasses.replace(result, steps=ended))))


def test_samples_cannot_move_the_cursor() -> None:
    result = dataclasses.replace(trained(), sample=b"ok\x1b[2J\xff\nline")
    result = dataclasses.replace(result, config=result.config.replace(sample="a"))
    text = text_of(sample_text(result))
    assert "\x1b" not in text
    assert "aok·[2J" in text


def test_moments_are_told() -> None:
    assert words.moment(2, "backward", "h.3") == "in step 2, backward of h.3"
    assert words.moment(-1, "init", "wte") == "at the start, while wte was placed"
    assert "sample" in words.moment(-1, "evaluate", "h.0")


def test_out_of_memory_shows_bytes_and_advice() -> None:
    error = OutOfMemory("no", rank=2, requested=300, kind="grad", capacity=1000, live={"param": 600, "temp": 200})
    text = text_of(out_of_memory(error))
    assert "Live on rank 2" in text
    assert "75.0 %" in text
    assert "Asked for: 300 B of grad; 800 of 1,000 B were live, so 200 B were left." in text
    error.advice = "--stage 3 would fit"
    assert "Tried for you: --stage 3 would fit." in text_of(out_of_memory(error))


# -- several stages -----------------------------------------------------------------------------------
def test_stages_with_the_same_bits_are_grouped_and_others_measured() -> None:
    results = {stage: trained(stage=stage) for stage in STAGES}
    assert Comparison("stage", results).identical == [["0", "1", "2", "3"]]

    other = {name: array.copy() for name, array in results[2].weights.items()}
    other["wte.weight"][3, 4] += 0.5
    changed = {**results, 2: dataclasses.replace(results[2], weights=other)}
    comparison = Comparison("stage", changed)
    assert comparison.identical == [["0", "1", "3"], ["2"]]
    assert comparison.differences == {("0", "2"): pytest.approx(0.5)}
    assert comparison.contradictions == [("0", "2")]
    assert "≠" in text_of(comparison)
    assert comparison.to_dict()["weights"]["differences"][0]["columns"] == ["0", "2"]

    twice = {stage: dataclasses.replace(one, config=one.config.replace(accumulate=2)) for stage, one in changed.items()}
    accumulated = Comparison("stage", twice)
    assert accumulated.contradictions == []


def test_bits_are_compared_and_not_values() -> None:
    zero, minus = {"w": np.zeros(2, np.float32)}, {"w": -np.zeros(2, np.float32)}
    nan = {"w": np.full(2, np.nan, np.float32)}
    assert largest_difference(zero, minus) == 0
    assert not same_bits(zero, minus)
    assert same_bits(nan, {"w": nan["w"].copy()})
    assert not same_bits(zero, {"w": np.zeros(2, np.float64)})
    assert not same_bits(zero, {"v": np.zeros(2, np.float32)})
    assert np.isnan(largest_difference(zero, nan))


# -- progress -----------------------------------------------------------------------------------------
def test_progress_is_the_mean_over_ranks_in_order() -> None:
    seen: list[tuple[int, float]] = []
    reporter = mean_over_ranks(4, lambda done, loss: seen.append((done, loss)))
    gate = threading.Barrier(4)

    def rank_program(rank: int) -> None:
        for step in range(50):
            reporter(rank, step, float(step + rank))
            gate.wait(SECONDS)

    threads = [threading.Thread(target=rank_program, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(step, step + 1.5) for step in range(50)]


def test_lines_are_few() -> None:
    stream = io.StringIO()
    with progress_on(stream, 1, 600, "ZeRO-3") as reporter:
        for step in range(600):
            reporter(0, step, 1.0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "ZeRO-3  step   0 of 600  loss 1.0000"
    assert lines[-1] == "ZeRO-3  step 599 of 600  loss 1.0000"
    assert len(lines) <= 14


def test_a_long_run_says_how_far_it_is_between_its_twelfths(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(progress, "SILENT_S", 0.0)
    with progress.progress_on(stream, 1, 10**8, "ZeRO-3") as reporter:
        for step in range(3):
            reporter(0, step, 1.0)
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["0", "1", "2"]


def test_steps_are_counted_from_one_origin_in_one_report() -> None:
    """Progress, the traffic's step and the peak's, and the JSON: a number names the same step in all of them."""
    stream = io.StringIO()
    changes = dict(layers=1, hidden=8, heads=2, seq=4, micro_batch=1)
    with progress_on(stream, 2, 3, "ZeRO-3") as reporter:
        result = run(RunConfig(ranks=2, stage=3, steps=3, **changes), progress=reporter)  # type: ignore[arg-type]
    progress = re.findall(r"step (\d+) of 3  loss ([\d.]+)", stream.getvalue())
    assert [(int(step), loss) for step, loss in progress] == [
        (step, f"{loss:.4f}") for step, loss in enumerate(result.mean_losses)
    ]
    shown = flat(text_of(summary(result)))
    last, peak = result.traffic[0][-1].step, result.memory[0].peak.scope.step
    assert f"in step {last}, the last" in shown
    assert f"in step {peak}, " in shown
    assert (progress[-1][0], progress[0][0]) == (str(last), "0")


def test_a_result_is_shown_in_a_notebook() -> None:
    result = trained(partition="owner")
    comparison = Comparison("stage", {3: result})
    found = checks(result)
    for shown in (summary(result), states_table(found), traffic_table(found), owners_table(result), comparison):
        bundle = shown._repr_mimebundle_([], [])
        assert "rank" in bundle["text/plain"]
        words = html.unescape(re.sub(r"<[^>]*>", "", bundle["text/html"]))
        assert words.split() == bundle["text/plain"].split()
        assert "white-space:pre-wrap" in bundle["text/html"]  # what is wider than a page is wrapped, not cut


def test_a_notebook_shows_no_more_columns_than_a_page_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide tables are folded: no line is longer than a printed page, and no number is cut."""
    monkeypatch.delenv("JUPYTER_COLUMNS", raising=False)
    config = RunConfig(model="1t", stage=3, ranks=1024, recompute="full", steps=1, **PLAN_DEFAULTS)
    result = plan(config)
    wide = table([f"column {n}" for n in range(9)], [[10**12 + n for n in range(9)]], title="wide " * 40)
    found = checks(trained())
    for shown in (summary(trained()), memory_table(result), holders_table(result), states_table(found), wide):
        text = shown._repr_mimebundle_([], [])["text/plain"]
        assert max(len(line) for line in text.splitlines()) <= COLUMNS < 80
        assert "…" not in text
    monkeypatch.setenv("JUPYTER_COLUMNS", "200")
    assert "1,000,000,000,008" in wide._repr_mimebundle_([], [])["text/plain"]


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_what_a_notebook_shows_can_be_read_on_light_and_on_dark(page: str) -> None:
    shown = Group(*(Text("words", style=style) for style in ("green", "bold red", "yellow", "dim", "cyan", "blue")))
    bundle = type("Shown", (InNotebook,), {"__rich__": lambda self: shown})()._repr_mimebundle_()
    colors = re.findall(r"(?<![-\w])color: (#\w{6})", bundle["text/html"])
    assert len(colors) >= 6
    assert all(contrast(color, page) >= 3.9 for color in colors)


# -- the one builder of tables ------------------------------------------------------------------------
def test_a_table_is_described_once_and_built_for_each_console() -> None:
    grid = Grid("name", right("bytes"), Column("Ψ", style="dim"))
    grid.add("first", 1_234_567, Fraction(5, 2))
    grid.rule()
    grid.add("[sum]", None, True, style="bold")
    piped = text_of(Adaptive(grid)).splitlines()
    assert [line.split() for line in piped if "--" not in line] == [
        ["name", "bytes", "Ψ"], ["first", "1,234,567", "2.50"], ["[sum]", "✓"],
    ]  # fmt: skip
    assert "--" in piped[1]
    assert "--" in piped[3]
    assert "─" in text_of(Adaptive(grid), terminal=True)
    assert text_of(Adaptive(grid), encoding="ascii").split()[2:3] == ["Psi"]
    assert "1.23 MB" in text_of(Adaptive(grid.short()))
    assert "1,234,567" in text_of(Adaptive(grid))
    assert "Ψ" not in text_of(Adaptive(grid.without("Ψ")))
    assert "Ψ" in text_of(Adaptive(grid.filled()))
    empty = Grid("name", right("padding"), "agree", right("zero"))
    empty.add("sum", None, False, 0)
    assert text_of(Adaptive(empty.filled())).split()[:3] == ["name", "agree", "zero"]
    pair = Grid("operation", right("sent"), "axis")
    pair.add("all_reduce", 12, "tp")
    assert text_of(Adaptive(pair.joined("operation", "axis"))).split()[-3:] == ["all_reduce", "12", "tp"]
    assert "12" in text_of(Adaptive(pair.joined("pipeline", "operation")))
    formula = Grid(right("volume"))
    formula.add("3Ψ + 2VD")
    assert [line.strip() for line in text_of(Adaptive(formula.stacked())).splitlines()][-2:] == ["3Ψ", "+ 2VD"]
    narrow = text_of(Adaptive(grid, grid.without("bytes", "Ψ")), width=12)
    assert flat(narrow).startswith("name ")
    assert "bytes" not in narrow
