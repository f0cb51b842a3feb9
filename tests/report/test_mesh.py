"""What is printed about a run or a plan on a mesh: its shape, rows by pipeline stage, every mark an agreement."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import RenderableType

from zerosim.analysis.blocks import check_block
from zerosim.analysis.capabilities import note_of
from zerosim.analysis.checks import checks
from zerosim.analysis.compare import MARK
from zerosim.analysis.formulas import STATES
from zerosim.analysis.mesh_search import Meshes
from zerosim.analysis.search import Tried
from zerosim.config import RunConfig, plan_config
from zerosim.report.compare import Comparison
from zerosim.report.fit import Search, mesh_report
from zerosim.report.look import emit
from zerosim.report.notebook import result_html
from zerosim.report.plan import plan_report
from zerosim.report.tables import states_table, summary, traffic_table
from zerosim.report.verdict import Limit
from zerosim.report.words import by_stage, shape
from zerosim.train.plan import figures_within, plan
from zerosim.train.run import run

SIZES: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 4, "seq": 8, "micro_batch": 1, "steps": 1}


def printed(report: RenderableType) -> str:
    stream = io.StringIO()
    emit(report, stream)
    return stream.getvalue()


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def test_summary_names_the_mesh_and_agrees_everywhere() -> None:
    config = RunConfig(**SIZES, ranks=8, tp=2, pp=2, stage=1, accumulate=4)
    text = printed(summary(run(config)))
    assert text.startswith("ZeRO-1 on 8 ranks: pp 2 x dp 2 x tp 2\n")
    assert "8 x 8 tokens" in text  # rows of a global batch by data ranks: 2 x 4 x 1
    assert "≠" not in text
    assert text.count("✓") == 2 * 4 + 2 * 6  # four states; five operations and their total
    assert "Of Ψ each rank holds Ψ_r = 5,552 on stage 0, 5,456 on stage 1" in on_one_line(text)
    for line in ("all_reduce tp", "send pp", "reduce_scatter dp_shard", "72bsh + 24bs", "2E/N"):
        assert line in on_one_line(text)
    assert "Peak by pipeline stage" in text


@pytest.mark.parametrize("kind", STATES)
def test_a_wrong_byte_count_is_marked_at_its_state_and_its_stage(kind: str) -> None:
    """Of eight states on two pipeline stages one byte too many marks its own and its stage's total."""
    result = run(RunConfig(**SIZES, ranks=4, pp=2, stage=1, accumulate=2))
    memory = list(result.memory)
    snapshot = memory[3].marks[MARK]
    wrong = replace(snapshot, by_kind={**snapshot.by_kind, kind: snapshot.by_kind[kind] + 1})
    memory[3] = replace(memory[3], marks={**memory[3].marks, MARK: wrong})
    lines = printed(states_table(checks(replace(result, memory=memory)))).splitlines()
    first, second = [line for line in lines if line.split()[:1] == ["agree"]]
    assert first.split() == ["agree", *"✓✓✓✓"]
    assert second.split() == ["agree", *("≠" if name in (kind, "total") else "✓" for name in (*STATES, "total"))]
    assert "least of a rank" in "".join(lines)  # ranks 2 and 3 are no longer alike


def test_wrong_traffic_of_an_axis_is_marked_at_its_row_and_its_total() -> None:
    result = run(RunConfig(**SIZES, ranks=4, tp=2, stage=1))
    rows = [
        row._replace(sent_bytes=row.sent_bytes + 8) if (row.axis, row.op) == ("tp", "all_reduce") else row
        for row in result.traffic[0]
    ]
    found = checks(replace(result, traffic=[rows, *result.traffic[1:]]), 0)[0].traffic
    assert [(check.name, check.axis) for check in found if not check.agrees] == [("all_reduce", "tp"), ("total", "")]
    *parts, total = checks(result, 0)[0].traffic
    assert total.agrees
    assert (total.calls, total.mean) == (sum(check.calls for check in parts), sum(check.mean for check in parts))


def test_an_axis_of_one_rank_has_neither_row_nor_column() -> None:
    texts = (printed(traffic_table(checks(plan(plan_config(**SIZES, ranks=4, stage=2, tp=tp))))) for tp in (1, 2, 4))
    one, two, alone = texts
    assert "×(N-1)/N, bytes" in one
    assert not {"axis", "pipeline", "dp_shard", "tp"} & set(one.split())
    assert {"axis", "dp_shard", "tp"} <= set(two.split())
    assert "pipeline" not in two
    assert "reduce_scatter" not in alone
    assert "×(t-1)/t, bytes" in alone


@pytest.mark.slow
def test_ranks_that_are_alike_share_a_row() -> None:
    config = plan_config(model="llama2-70b", ranks=1024, tp=16, pp=8, stage=1, accumulate=8, recompute="full", seq=128)
    text = printed(plan_report(plan(config), Limit("a100-80", 80 * 10**9), all=True))
    flat = on_one_line(text)
    assert text.startswith(
        "Fits: peak 3.36 GB, on an 80 GB a100-80 (76.6 GB free).\nllama2-70b: ZeRO-1 on 1,024 ranks "
    )
    assert "ranks of a100-80: pp 8 x dp 8 x tp 16. 69.0B parameters, 8,192 tokens a step." in flat
    assert "pipeline stage 0, rank 0 (pp 0, dp_shard 0, tp 0)" in flat
    assert "8 microbatches (1 for each stage) of 1 row of 128 tokens on each of 8 data ranks" in flat
    assert "8 key-value heads are fewer than the 16 ranks: 2 neighbours hold a copy of each" in flat
    assert "Of 1,024 ranks 16 were simulated" in flat
    assert "stages 1 to 6" in text
    assert "≠" not in text
    assert max(len(line) for line in text.splitlines()) <= 160
    assert "Live bytes of rank 0 (pp 0, dp_shard 0, tp 0), by kind" in text


def test_sequence_parallelism_and_replicas() -> None:
    config = plan_config(**SIZES, ranks=8, tp=2, dp_replicate=2, stage=3, sequence_parallel=True)
    text = printed(plan_report(plan(config), None, all=True))
    assert "ZeRO-3 on 8 ranks: dp_replicate 2 x dp_shard 2 x tp 2" in text
    assert "≠" not in text
    assert "2S/N" in text
    assert "27bsh" in text
    assert "S = 544, weights of whose gradients each of the t ranks holds a share" in on_one_line(text)
    assert "stage 0" not in text  # without a pipeline every rank is alike


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_2_and_3_in_a_pipeline_say_what_they_cost(stage: int) -> None:
    text = note_of(RunConfig(**SIZES, ranks=4, pp=2, stage=stage, accumulate=4), "about")
    assert f"ZeRO-{stage} in a pipeline reduces gradients once per microbatch, 4 times a step" in text
    assert ("8 times" in text) == (stage == 3)
    assert "DeepSpeed refuses" in text
    assert "DeepSpeed" not in note_of(RunConfig(**SIZES, ranks=4, pp=2, stage=1, accumulate=4), "about")


def test_interleaved_pipelines_are_told_in_chunks() -> None:
    text = note_of(RunConfig(**SIZES, ranks=2, pp=2, stage=1, accumulate=4, pipeline="interleaved"), "about")
    assert "Interleaved 1F1B over 2 stages x 2 chunks of 1 layer" in text
    assert "min(2(p-i-1)+(v-1)p+1, vm) chunks" in text
    assert "(p-1)/(vm) = 1/8" in text


def test_a_first_stage_without_layers_is_planned() -> None:
    config = plan_config(**SIZES, ranks=2, pp=2, stage=1, stage_layers="0,4")
    text = printed(plan_report(plan(config), None, all=True))
    assert "keeps for backward" not in text
    assert "≠" not in text


def test_units_that_stay_gathered_are_explained() -> None:
    """GPipe on four microbatches: the table of stage 0 is gathered once for 4 forwards and a backward."""
    sizes: dict[str, Any] = {**SIZES, "vocab": 32, "model": "llama", "ranks": 4, "pp": 2, "stage_layers": "0,4"}
    config = RunConfig(**sizes, stage=3, accumulate=4, pipeline="gpipe", keep_last_unit=True)
    said = on_one_line(printed(traffic_table(checks(plan(config)))))
    assert "U = 2,048 on stage 0, 512 on stage 1, units" in said  # 4Vh, Vh
    assert "U = " not in printed(traffic_table(checks(plan(config.replace(keep_last_unit=False)))))


def test_compare_on_a_mesh() -> None:
    config = RunConfig(**SIZES, ranks=8, tp=2, pp=2, accumulate=2)
    comparison = Comparison("stage", {stage: run(config.at_stage(stage)) for stage in (0, 1)})
    text = printed(comparison)
    assert text.startswith("Stages 0 and 1 on 8 ranks: pp 2 x dp 2 x tp 2, recipe paper, ")
    assert "exchanged" in text
    assert "4Ψ_r + 12Ψ_r/N" in text
    assert "≠" not in text
    assert "bit-identical" in text
    assert "DeepSpeed" not in text


def test_html_has_a_row_for_what_differs() -> None:
    page = result_html(plan(RunConfig(**SIZES, ranks=16, tp=2, pp=2, stage=1, accumulate=2)))
    assert "(pp 2 x dp_shard 4 x tp 2)" in page
    assert "pp 0, dp_shard 0, tp 0" in page
    assert "pp 1, dp_shard 0, tp 0" in page
    assert "tp 1)" not in page


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "10sbh + 24sbh/t + 5as²b/t"),
        ({"recompute": "selective"}, "10sbh + 24sbh/t"),
        ({"sequence_parallel": True}, "34sbh/t + 5as²b/t"),
        ({"sequence_parallel": True, "recompute": "selective"}, "34sbh/t"),
        ({"sequence_parallel": True, "keep_gathered": True}, "4sbh + 30sbh/t + 5as²b/t"),
        ({"recompute": "full"}, "2sbh"),
        ({"sequence_parallel": True, "recompute": "full"}, "2sbh/t"),
    ],
)
def test_activations_of_a_block_on_t_ranks(changes: dict[str, Any], text: str) -> None:
    """2205.05198, Table 2, to the byte."""
    sizes = {**SIZES, "hidden": 32, "dropout": 0.1, "micro_batch": 2}
    result = plan(plan_config(**sizes, ranks=4, tp=4, **changes))
    check = check_block(result.config, result.saved["h.0"])
    assert check.agrees
    assert check.text == text


def test_words() -> None:
    assert shape(RunConfig(**SIZES, ranks=8)) == ""
    assert shape(RunConfig(**SIZES, ranks=8, dp_replicate=2)) == "dp_replicate 2 x dp_shard 4"
    assert shape(RunConfig(**SIZES, ranks=8, tp=4)) == "dp 2 x tp 4"
    assert shape(RunConfig(**SIZES, ranks=4, tp=4)) == "tp 4"
    assert by_stage([3, 3]) == "3"
    assert by_stage([5, 4, 4, 6]) == "5 on stage 0, 4 on stages 1 to 2, 6 on stage 3"


def test_fit_lists_meshes() -> None:
    config = RunConfig(**SIZES, ranks=1, accumulate=4)
    took = figures_within(config, 10**12)
    assert took is not None
    result = Meshes([Tried(config, took.peak_bytes)], 3, 2, 1, 0)
    text = printed(mesh_report(Search("mesh", config, Limit("", 10**12)), 4, result))
    assert "By memory" in text
    assert "--ranks 1 --stage" in text
    nothing = printed(mesh_report(Search("mesh", config, Limit("", 10)), 4, Meshes([], 3, 2, 0, 2)))
    assert "Nothing fits on up to 1 rank" in nothing
