"""The bandwidth at which communication hides: against its closed form, and as a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerosim.analysis.break_even import exposed_share, hides_from, record_step, within_from
from zerosim.cli.main import main
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.run import plan_config
from zerosim.train.plan import plan

A100 = replace(
    cluster_of(find_hardware("a100-80")), latency=0.0, host=0.0, contention=0.0, collectives=None
)  # links alone
GPT: dict[str, Any] = dict(model="gpt", layers=4, hidden=512, heads=8, seq=256, vocab=1024, micro_batch=4, ranks=4)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_where_all_is_waited_for_it_is_a_quotient(stage: int) -> None:
    """Without latencies a step takes C + V/B: V/B is a share s of it at B = (1-s)/s V/C."""
    config = plan_config(**GPT, stage=stage)
    step = record_step(config, A100)
    sent = plan(config).sent_bytes(0, 0) + plan(config).sent_bytes(0, 0, "control")
    for share in (0.1, 0.5):
        expected = (1 - share) / share * sent / step.on(A100).compute
        assert hides_from(step, A100, share) == pytest.approx(expected, rel=2e-3)


def test_what_overlaps_hides_at_less() -> None:
    waiting, late, ahead = (
        record_step(plan_config(**GPT, stage=3, **one), A100)
        for one in ({}, dict(overlap_reduction=True), dict(overlap_reduction=True, prefetch=1))
    )
    found = [hides_from(step, A100) for step in (waiting, late, ahead)]
    assert None not in found
    assert found[0] == found[1] > 1.5 * found[2]  # the next unit's gather stands behind the reduction, in its stream


def test_stage_3_costs_half_as_much_again_where_links_decide() -> None:
    one, three = (record_step(plan_config(**GPT, tie_embeddings=False, stage=stage), A100) for stage in (1, 3))
    speed = within_from(three, one, 1.2, A100)
    assert speed is not None
    at, below = (replace(A100, link=factor * speed) for factor in (1.0, 0.99))
    assert three.on(at).seconds / one.on(at).seconds <= 1.2 < three.on(below).seconds / one.on(below).seconds
    slow = replace(A100, link=1e3)
    assert three.on(slow).seconds / one.on(slow).seconds == pytest.approx(1.5, rel=0.01)
    assert within_from(three, one, 0.5, A100) is None
    assert exposed_share(three.on(replace(A100, link=1e18))) < 1e-3


def test_the_picture_and_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plot", "overlap", "--gpu", "a100-80", "--ranks", "16", "--layers", "2", "--stages", "1,3", "-q"]
    assert main([*words, "-o", str(tmp_path / "overlap.svg"), "--json", "-"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["link"] == "nic"
    for line in values["stages"].values():
        assert line["step_s"] == sorted(line["step_s"], reverse=True)
    drawn = (tmp_path / "overlap.svg").read_text("utf-8")
    assert "line.ZeRO-3" in drawn
    assert ">10 GB/s</text>" in drawn
    assert ">10 GB</text>" not in drawn
    assert main(["plot", "overlap", "--gpu", "a100-80", "--ranks", "1", "-o", str(tmp_path / "one.svg")]) == 2
    assert "choose 2 or more" in capsys.readouterr().err


def test_a_plan_says_what_would_hide_its_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --model llama3-8b --layers 4 --ranks 64 --recompute full --gpu h100-80 --nic 100GB"

    def said(*more: str) -> str:
        main([*words.split(), *more])
        *_, found = " ".join(capsys.readouterr().out.split()).partition("can be hidden: ")
        return found.partition(".")[0]

    assert said("--stage", "0", "--recipe", "paper") == "--overlap reduce"
    assert said("--stage", "1", "--recipe", "megatron") == "--overlap all"
    assert said("--stage", "3", "--recipe", "paper") == "--overlap all"
    assert said("--stage", "2", "--recipe", "deepspeed") == "--overlap all"
    assert said("--stage", "2", "--recipe", "deepspeed", "--overlap", "all") == ""
    assert said("--stage", "3", "--recipe", "fsdp2") == ""
