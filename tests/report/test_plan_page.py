"""The first pages of `plan` and `fit`: the answer first, parts that add up to the peak, every number with --all."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import RenderableType

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.analysis.compare import peak_rank
from zerosim.cli.main import main
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.report import plan as page
from zerosim.report.look import emit
from zerosim.report.plan import parts, plan_report
from zerosim.report.plan_tables import all_tables
from zerosim.report.verdict import Limit, alike, assumed, verdict
from zerosim.train.plan import plan

SMALL: dict[str, Any] = {"layers": 4, "hidden": 32, "heads": 4, "seq": 16, "micro_batch": 2}
V100 = find_hardware("v100-32")
CONFIGS: dict[str, dict[str, Any]] = {
    "one rank": {"ranks": 1},
    "stage 0": {"stage": 0, "ranks": 3},
    "stage 2": {"stage": 2, "ranks": 4, "recipe": "deepspeed"},
    "prefetch": {"stage": 3, "ranks": 4, "prefetch": 2},
    "modules": {"stage": 3, "ranks": 4, "gather": "module"},
    "recompute": {"stage": 3, "ranks": 2, "recompute": "full"},
    "mesh": {"stage": 1, "ranks": 8, "tp": 2, "pp": 2, "accumulate": 4},
    "kept": {"stage": 0, "ranks": 2, "tp": 2, "recompute": "full", "cpu_checkpointing": True},
    "estimate": {"stage": 2, "ranks": 2, "optimizer": "sophia", "recompute": "full", "cpu_checkpointing": True},
    "owners": {"stage": 3, "ranks": 3, "partition": "owner"},
    "muon": {"stage": 2, "ranks": 2, "optimizer": "muon"},
    "caching": {"stage": 2, "ranks": 2, "allocator": "caching"},
    "flat": {"model": "flat", "params": 1000, "units": 4, "stage": 3, "ranks": 4},
}


def small(name: str) -> RunConfig:
    sizes = {} if name == "flat" else SMALL
    return plan_config(**sizes, **CONFIGS[name])


def printed(report: RenderableType, width: int, monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8") -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    emit(report, stream)
    stream.seek(0)
    return stream.read()


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d,]*(?:\.\d+)?", text))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_add_up_to_the_peak(name: str) -> None:
    """To the byte, on every rank, at the peak and at every mark."""
    result = plan(small(name))
    for memory in result.memory:
        for at in (memory.peak, *memory.marks.values()):
            assert sum(parts(result.config, at).values()) == at.total_bytes
            assert all(nbytes > 0 for nbytes in parts(result.config, at).values())
    assert formulas_agree(checks(result))


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_page_has_no_letters_and_fits_into_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = plan(small(name))
    for width, encoding in ((80, "utf-8"), (80, "ascii"), (60, "utf-8"), (120, "utf-8")):
        text = printed(plan_report(result, Limit("v100-32", 32 * 10**9, V100)), width, monkeypatch, encoding)
        assert text.startswith("Fits: ")
        assert max(map(len, text.splitlines())) <= width
        assert not re.search(r"Ψ|Psi|\bN\b|\?", text)
        assert ("#" * page.BAR in text) == (encoding == "ascii")
        assert ("█" * page.BAR in text) == (encoding == "utf-8") or width == 60  # bars go first where there is no room
        assert " ".join(text.split()).endswith("zerosim explain (formulas with numbers).")


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_all_keeps_every_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is the first page, then every table; what each table shows alone is there."""
    cluster = cluster_of(V100) if name not in ("flat", "caching") else None
    result = plan(small(name), cluster=cluster)
    limit = Limit("v100-32", 32 * 10**9, V100)
    first = printed(plan_report(result, limit, cluster=cluster), 160, monkeypatch)
    everything = printed(plan_report(result, limit, cluster=cluster, all=True), 160, monkeypatch)
    assert everything.startswith(first[: first.index("More: ")].rstrip())
    tables = [table for table in all_tables(checks(result), limit, cluster) if table is not None]
    assert len(tables) > 8
    for table in tables:
        assert numbers(printed(table, 160, monkeypatch)) <= numbers(everything)
    memory = result.memory[peak_rank(result)]
    for at in (memory.peak, *memory.marks.values()):
        assert {f"{nbytes:,}" for nbytes in at.by_kind.values()} <= numbers(everything)


def test_a_gathered_block_is_named_with_its_gradient() -> None:
    result = plan(small("recompute"))
    memory = result.memory[0]
    held = parts(result.config, memory.peak)
    name = next(name for name in held if name.startswith("one gathered"))
    unit = name.partition("(")[2].rstrip(")")
    kinds = ("unsharded_param", "prefetched_param", "unsharded_grad")
    assert held[name] == sum(memory.peak.by_unit.get((unit, kind), 0) for kind in kinds) > 0


MEET: list[dict[str, Any]] = [
    dict(stage=3, offload="params=host", compress="top-k", grad_dtype="fp32"),
    dict(stage=3, offload="optimizer=nvme,params=nvme", lazy_states=True),
    dict(stage=3, offload="params=host", optimizer="adam8bit", hidden=4),
    dict(stage=3, offload="optimizer=nvme,params=nvme", secondary_shard=2, prefetch=2),
    dict(stage=3, offload="optimizer=nvme", gather="module", freeze="*,!ln_f", hidden=4, ranks=3),
    dict(stage=1, offload="optimizer=host,grads=nvme", partition="owner", lora_rank=2, layers=2, ranks=3),
    dict(stage=2, offload="optimizer=host,grads=nvme", pp=2, accumulate=4, clip_norm=0.5),
    dict(stage=2, offload="optimizer=host", partition="owner", recompute="full", cpu_checkpointing=True),
    dict(stage=2, offload="optimizer=nvme", delayed_update=1, pp=2, stage_layers="0,4", freeze="wte,wpe"),
    dict(stage=0, optimizer="adam8bit", freeze="h.0"),
    dict(stage=2, partition="owner", ranks_per_node=2, ranks=8),
    dict(stage=3, partition="owner", ranks_per_node=2, collective="ring"),
    dict(stage=0, ranks_per_node=2, lora_rank=1, lora_target="fc", hidden=6, heads=3),
    dict(stage=3, ranks_per_node=2, collective="ring", optimizer="adafactor", hidden=10, heads=2),
    dict(stage=1, ranks_per_node=1, tp=2, dp_replicate=2),
    dict(stage=3, ranks_per_node=2, hierarchical_gather=True, reshard_after_forward=False, accumulate=2),
    dict(stage=3, gather="module", reshard_after_forward=False, recompute="selective:mlp", lora_rank=2),
    dict(stage=3, gather="module", reshard_after_forward=False, recompute="full", lora_rank=2, layers=1),
    dict(stage=3, gather="module", recompute="selective:op", freeze="mlp", accumulate=2),
    dict(stage=3, gather="module", recompute="selective:layernorm,mlp", lora_rank=2, pp=2, accumulate=2),
    dict(stage=3, gather="module", recompute="selective:layernorm", freeze="*,!c_fc", accumulate=2),
    dict(stage=1, tp=2, sequence_parallel=True, loss="chunked", freeze="wte"),
    dict(stage=1, tp=2, sequence_parallel=True, loss="liger", freeze="wte"),
    dict(stage=0, tp=2, sequence_parallel=True, loss="liger"),
    dict(stage=1, saves="megatron", dropout=0.1, lora_rank=2),
    dict(stage=1, tp=2, recompute="selective:op", lora_rank=2, lora_target="down"),
    dict(stage=1, tp=2, recompute="selective:attn_proj", freeze="*,!mlp", sequence_parallel=True),
    dict(stage=1, tp=2, recompute="selective:op", model="phi"),
    dict(stage=1, tp=2, recompute="0=full+1=selective:mlp", model="phi", sequence_parallel=True),
    dict(stage=1, tp=2, recompute="0=selective:op+1=selective:mlp", layers=4, pp=2, accumulate=2),
    dict(stage=1, tp=2, recompute="0=selective:mlp+1=full", sequence_parallel=True, lora_rank=2, lora_target="down"),
    dict(stage=1, cp=2, recompute="0=selective+1=full", attention="flash"),
    dict(stage=3, gather="module", recompute="1=selective:layernorm,mlp", accumulate=2),
    dict(stage=1, tp=2, recompute="selective:attn_proj", model="gpt_neox", sequence_parallel=True),
    dict(stage=1, tp=2, recompute="selective:mlp", model="cohere", sequence_parallel=True, lora_rank=2),
]
"""Options that change one another's counts."""


@pytest.mark.quick(5)
@pytest.mark.parametrize("fields", MEET, ids=str)
def test_counts_and_formulas_agree_where_options_meet(fields: dict[str, Any]) -> None:
    assert formulas_agree(
        checks(plan(RunConfig(**{"ranks": 4, "steps": 1 + bool(fields.get("delayed_update")), **SMALL, **fields})))
    )


def test_an_mlp_has_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the first of its layers has a block's name."""
    text = printed(plan_report(plan(plan_config(model="mlp", ranks=4)), None, all=True), 160, monkeypatch)
    assert "Formulas and counts agree." in text
    assert "What layers.0 keeps" not in text


def test_what_does_not_agree_is_said_and_its_tables_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    result = plan(small("stage 2"))
    memory = result.memory[0]
    wrong = dataclasses.replace(memory.marks["end_of_backward"], by_kind={"param": 1})
    broken = dataclasses.replace(memory, marks={**memory.marks, "end_of_backward": wrong})
    other = dataclasses.replace(result, memory=(broken, *result.memory[1:]))
    assert not formulas_agree(checks(other))
    text = printed(plan_report(other, None), 160, monkeypatch)
    assert "Formulas and counts do not agree:" in text
    assert "≠" in text
    assert "Formulas and counts agree." in printed(plan_report(result, None), 160, monkeypatch)


def test_the_verdict_adds_peak_and_reserve() -> None:
    config = small("stage 2")
    limit = Limit("v100-32", 32 * 10**9, V100)
    reserve = limit.reserve(config)
    assert verdict(config, limit, 67 * 10**9) == (
        "Does not fit: peak 67.0 GB + 0.4 GB reserved for CUDA = 67.4 GB, on a 32 GB V100 (35.4 GB short)."
    )
    assert verdict(config, limit, 32 * 10**9 - reserve).endswith("= 32.0 GB, on a 32 GB V100 (0 B free).")
    assert verdict(config, limit, 32 * 10**9 - reserve + 1).endswith("(1 B short).")
    assert verdict(config, Limit("", 85 * 10**9), 10**9) == "Fits: peak 1.00 GB, on an 85 GB device (84.0 GB free)."
    assert "on a 1 GB device (" in verdict(config, Limit("", 10**9, V100), 10**3)  # --limit beside --gpu
    assert "reserved = " in verdict(config, Limit("v100-32", 32 * 10**9, V100, 10**9), 10**9)  # --reserve is no CUDA
    assert [alike(size, "67.4 GB") for size in (418 * 10**6, 67 * 10**9, 1000)] == ["0.4 GB", "67.0 GB", "1.00 KB"]
    assert (alike(5, "600 B"), alike(10**9, "187 GB")) == ("5 B", "1.0 GB")


def test_what_is_assumed_names_what_is_missing() -> None:
    config = small("stage 2")
    assert "CUDA and its libraries (--gpu NAME adds them)" in assumed(config, None)
    assert "CUDA" not in assumed(config, Limit("v100-32", 32 * 10**9, V100))
    assert "(--reserve SIZE adds them)" in assumed(small("flat"), Limit("v100-32", 32 * 10**9, V100))
    assert "on one rank," in assumed(small("one rank"), None)
    assert "on each of 2 data ranks," in assumed(small("mesh"), None)
    assert "--allocator" not in assumed(small("caching"), None)


def first_page(words: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert main(words.split()) == code
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("plan --ranks 4", 0, ["Needs 1.70 MB per GPU. A GPT: ZeRO-3 on 4 ranks."]),
        ("plan --ranks 8 --pp 2 --accumulate 4 --stage 1", 0, ["holds at the peak: pipeline stage 0, rank 0 (pp 0,"]),
        ("plan --ranks 4 --allocator caching --gpu v100-32", 0, ["Fits: the allocator takes", "unused inside the"]),
        ("plan --ranks 4 --allocator caching --limit 400KB", 3, ["Does not fit: rank 0 is out of memory", "What may"]),
        ("plan --ranks 4 --limit 1MB", 3, ["Does not fit: peak 1.57 MB, on a 1 MB device", "Cheapest change: --"]),
        ("plan --ranks 4 --limit 1KB", 3, ["No change that was tried fits: see zerosim fit --find mesh."]),
        (
            "plan --ranks 4 --recipe deepspeed --stage 0 --pp 2 --accumulate 4",
            0,
            ["Warning: recipe deepspeed's stage 0 in bf16 divides the optimizer"],
        ),
        ("plan --ranks 2 --optimizer sophia", 0, ["The step includes an estimate of curvature, as every 10th does"]),
        ("fit --limit 1MB --ranks 4", 3, ["Nothing fits. --micro-batch 1 takes the least. Does not fit: peak"]),
        ("fit --limit 9MB --ranks 4", 0, ["--micro-batch 13. Fits: peak", "--micro-batch 14 does not fit:"]),
        ("fit --limit 2MB --find ranks", 0, ["--ranks 3. Fits: peak", "--ranks 2 does not fit:"]),
        (
            "fit --limit 2MB --find mesh",
            0,
            ["--ranks 2 --", "--recipe paper", "Fits: peak", "By memory"],
        ),
    ],
)
def test_the_answer_comes_first(words: str, code: int, said: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = first_page(words, capsys, code)
    assert re.match(r"(Fits|Does not fit|Needs|Nothing fits|--|\d+ ranks: --)", text)
    assert all(one in text for one in said)
    assert "More: --all" in text
    assert "Live bytes" not in text


def test_the_time_is_said_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    text = first_page("plan --model gpt2-xl --stage 3 --ranks 8 --gpu h100", capsys)
    assert re.search(
        r"One step takes about 0\.\d+ s \(0\.\d+ to 0\.\d+ s for 8 of 10 measured steps like this one: \d+ of", text
    )
    assert "of FSDP on H100" in text
    assert "waits for ZeRO's collectives" in text
    assert "Modelled, not measured." in text
    assert "CUDA, NCCL, cuBLAS (estimated, not counted) 1.26 GB" in text
    alone = first_page("plan --model gpt2-xl --stage 3 --ranks 8", capsys)
    assert "tokens/s" not in alone


@pytest.mark.quick(1)
@pytest.mark.parametrize("what", ["micro-batch", "mesh"])
def test_json_does_not_depend_on_all(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--layers", "2", "--gpu", "v100-32", "--json", "-"]
    words += ["--ranks", "2"]
    words += ["--global-batch", "4"] if what == "mesh" else []
    verb = ["fit", "--find", what, *words] if what != "micro-batch" else ["plan", *words]
    assert main(verb) == 0
    first = capsys.readouterr()
    assert main([*verb, "--all"]) == 0
    everything = capsys.readouterr()
    assert everything.out == first.out
    assert numbers(first.err) - numbers(everything.err) <= {*numbers(first.err.partition("\n\n")[2])}
    assert "Outside the program" in everything.err
    assert "Outside the program" not in first.err


BY_UNIT = {  # plans whose units hold gathered and prefetched parameters and whole gradients, each in its way
    "whole gradients": {"stage": 2, "grad_sync": False, "accumulate": 2},
    "gathered, prefetched, whole gradients": {"stage": 3, "recipe": "fsdp2", "grad_sync": False, "accumulate": 2},
    "prefetched": {"stage": 3, "prefetch": 3},
    "modules": {"stage": 3, "gather": "module", "prefetch_elements": 4000},
    "reduced at the end": {"stage": 1},
}
NAMED = re.compile(
    r"(one|[\d,]+) (more )?(gathered|prefetched) (block|unit)s?( with (its|their) gradients?)?( \(\S+\))?"
    r"|one (block|unit)'s (?P<whole>whole gradient)( \(\S+\))|whole gradients of (?P<number>[\d,]+) (more )?units"
)


@pytest.mark.parametrize("name", BY_UNIT)
def test_a_row_of_units_is_named_by_the_kinds_that_they_hold(name: str) -> None:
    """Rows that say gathered, prefetched or gradient have exactly the bytes and the number of such units."""
    result = plan(plan_config(**SMALL, ranks=4, **BY_UNIT[name]))
    for memory in result.memory:
        for at in (memory.peak, *memory.marks.values()):
            kinds: dict[str, set[str]] = {}
            for (unit, kind), _ in at.by_unit.items():
                if kind in ("unsharded_param", "prefetched_param", "unsharded_grad"):
                    kinds.setdefault(unit, set()).add(kind)
            held = {
                "gathered": {unit for unit, those in kinds.items() if "unsharded_param" in those},
                "prefetched": {unit for unit, those in kinds.items() if min(those) == "prefetched_param"},
            }
            held["gradient"] = kinds.keys() - held["gathered"] - held["prefetched"]
            numbers = dict.fromkeys(held, 0)
            rows = parts(result.config, at)
            for row, match in ((row, NAMED.fullmatch(row)) for row in rows):
                if match is not None:
                    count = "one" if match["whole"] else match["number"] or match[1]
                    number = 1 if count == "one" else int(count.replace(",", ""))
                    numbers[match[3] or "gradient"] += number
                else:
                    assert not re.search(r"gather|prefetch|whole gradient", row), row
            assert numbers == {word: len(units) for word, units in held.items()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--ranks 2 --tp 2 --stage 2",
            "ZeRO-2 divides nothing here: it divides model states among data ranks, and --tp 2 on 2 ranks leaves one "
            "data rank. Pass more --ranks, or a lower --tp.",
        ),
        ("--ranks 4 --tp 2 --pp 2 --accumulate 2", "and --tp 2 x --pp 2 on 4 ranks leaves one data rank. Pass more"),
        ("--ranks 2 --dp-replicate 2 --stage 1", "leaves one data rank in each replica. Pass more --ranks, or a lower"),
        ("--ranks 1", "ZeRO-3 divides nothing on one rank."),
        ("--ranks 2 --tp 2 --stage 0", ""),
        ("--ranks 4 --tp 2", ""),
    ],
)
def test_a_plan_says_when_zero_divides_nothing(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = first_page(f"plan --layers 2 {words}", capsys)
    assert ("divides nothing" in page) == bool(said)
    assert said in page


def test_a_run_says_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    page = first_page("run --layers 1 --hidden 16 --heads 2 --seq 8 --steps 1 --ranks 2 --tp 2 --stage 2", capsys)
    assert page.endswith("leaves one data rank. Pass more --ranks, or a lower --tp.")


def test_gradients_that_stay_whole_are_not_called_gathered(capsys: pytest.CaptureFixture[str]) -> None:
    page = first_page("plan --layers 2 --ranks 4 --stage 2 --accumulate 2 --no-grad-sync", capsys)
    assert "gathered" not in page
    assert "one block's whole gradient (h.1) 0.20 MB" in page
    assert "whole gradients of 3 more units 0.17 MB" in page
