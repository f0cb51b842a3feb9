"""A plan's save on its page, in its JSON, in the stepper and the player."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import zerosim
from zerosim.analysis.checks import checks, formulas_agree
from zerosim.analysis.formulas.saving import GPU_HOURS, lost, young
from zerosim.analysis.saving import interval_of, save_time
from zerosim.cli.main import main
from zerosim.config import RunConfig, plan_config
from zerosim.config.parts.saving import SavingConfig
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.device.device import Phase
from zerosim.playback import Recorded, encode, record
from zerosim.report.saving import save_lines
from zerosim.report.verdict import Limit, fits, is_saves_fault
from zerosim.stepper import debug
from zerosim.train.plan import plan

LLAMA = "plan --model llama3-8b --ranks 8 --stage 3 --gpu h100-80"
PSI = 8_030_261_248


def said(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words.split()) == 0
    return " ".join(capsys.readouterr().out.split())


def values(words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main([*words.split(), "--json", "-", "-q"]) == 0
    return json.loads(capsys.readouterr().out)


def test_llama_3_fails_once_in_50_677_gpu_hours() -> None:
    assert Fraction(54 * 24 * 16384, 419) == GPU_HOURS
    assert round(GPU_HOURS) == 50_677
    shown = SavingConfig.options()["mtbf"].shown
    assert shown is not None
    assert f"{round(float(GPU_HOURS), -2):,.0f} GPU hours" in shown


def test_the_page_says_what_a_sharded_save_takes(capsys: pytest.CaptureFixture[str]) -> None:
    page = said(f"{LLAMA} --save-state --drive-rate 25GB", capsys)
    assert "each GPU writes its shards. The drives get 12.0 GB from each rank, 96.4 GB in all." in page
    assert "263 MB of host memory for a rank, 2.10 GB on the fullest node" in page
    assert "3.85 s of writing at 25 GB/s" in page
    assert "Young 1974" in page
    assert "arXiv 2407.21783, section 3.3.4" in page
    assert "Formulas and counts agree." in page


def test_an_unknown_rate_is_named_with_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    page = said(f"{LLAMA} --save-state", capsys)
    assert "which is not known: pass --drive-rate SIZE, or a --node whose drives' rate is known" in page
    assert "Save every" not in page
    assert "--gpu NAME" in said("plan --model gpt2 --ranks 4 --save-state", capsys)
    assert main(["plan", "--model", "gpt2", "--drive-rate", "1GB"]) == 2


def test_a_time_between_failures_asks_for_a_save(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt2", "--mtbf", "100"]) == 2
    assert "--mtbf 100: says how often to save; pass --save-state too" in capsys.readouterr().err
    page = said(f"{LLAMA} --save-state --drive-rate 25GB --mtbf 100", capsys)
    assert "A failure is expected every 100 h (--mtbf)" in page


def test_a_host_that_is_too_small_is_named() -> None:
    result = plan(plan_config(model="gpt2", ranks=8, stage=3, save_as="gathered"))
    for host, is_too_small in ((10**9, True), (10**10, False)):
        cluster = replace(cluster_of(find_hardware("h100-80")), host_bytes=host)
        lines = save_lines(result, cluster)
        assert any(line.startswith("That is more than the node's host has left") for line in lines) == is_too_small


@pytest.mark.parametrize("how", ["sharded", "gathered", "async"])
def test_json_has_the_save_and_the_step_is_what_it_is_without_one(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = values(f"{LLAMA} --drive-rate 25GB", capsys)
    found = values(f"{LLAMA} --drive-rate 25GB --save-as {how}", capsys)
    save = found.pop("save")
    assert "save" not in plain
    assert (plain["config"].pop("save_as"), found["config"].pop("save_as")) == (None, how)
    assert found == plain
    assert save["all_written_bytes"] == 12 * PSI
    assert save["received_bytes"] == (12 * PSI * 7 // 8 if how == "gathered" else 0)
    assert save["host_bytes"] == {"gathered": 12 * PSI, "async": 12 * PSI // 8}.get(how, save["host_bytes"])
    seconds, interval = save["seconds"], save["interval"]
    assert seconds["drives"] == pytest.approx(12 * PSI / 25e9)
    stands = seconds["gathers"] + seconds["to_host"] + (0 if how == "async" else seconds["drives"])
    assert seconds["stands_still"] == pytest.approx(stands)
    assert interval["mtbf"] == pytest.approx(float(GPU_HOURS) / 8 * 3600)
    assert interval["seconds"] == pytest.approx(math.sqrt(2 * stands * interval["mtbf"]))
    assert interval["lost"] == pytest.approx(math.sqrt(2 * stands / interval["mtbf"]))
    assert interval["steps"] == round(interval["seconds"] / found["time"]["step_s"])


def test_a_gathered_save_keeps_one_rank_busy_and_a_sharded_one_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Copies of one rank to the host have its link alone: 96 GB at 48 GB/s, and not an eighth of these."""
    sharded, gathered = (
        values(f"{LLAMA} --save-as {how}", capsys)["save"]["seconds"] for how in ("sharded", "gathered")
    )
    assert gathered["to_host"] == pytest.approx(8 * sharded["to_host"])
    assert sharded["gathers"] == 0 < gathered["gathers"]


def test_an_interval_is_as_long_as_the_drives_write() -> None:
    cluster = cluster_of(find_hardware("h100-80"), nvme_bytes_per_s=1e6)
    result = plan(plan_config(model="gpt2", ranks=8, stage=3, save_as="async", mtbf=0.001), cluster=cluster)
    cost = save_time(result, cluster)
    found = interval_of(result, cost)
    assert found is not None
    assert cost.stands is not None
    assert found.seconds == cost.drives
    assert young(cost.stands, found.mtbf) < found.seconds


def test_young_loses_the_least() -> None:
    best = young(60, 3600)
    assert best == pytest.approx(math.sqrt(2 * 60 * 3600))
    assert all(lost(60, best, 3600) < lost(60, best * factor, 3600) for factor in (0.5, 0.9, 1.1, 2))


def test_a_save_that_needs_more_than_its_step_does_not_fit() -> None:
    result = plan(plan_config(model="gpt", ranks=4, stage=3, save_as="gathered"))
    assert result.save is not None
    peak = max(memory.peak.total_bytes for memory in result.memory)
    larger = result.save._replace(peaks=[peak + 10] * 4)
    one, limit = replace(result, save=larger), Limit("", peak + 5)
    assert fits(result, limit)
    assert not fits(one, limit)
    assert is_saves_fault(one, limit)
    assert not is_saves_fault(one, Limit("", peak - 1))


@pytest.mark.parametrize(
    "fields", [{}, {"tp": 2}, {"pp": 2, "accumulate": 4}, {"dp_replicate": 2}, {"stage": 0}], ids=str
)
@pytest.mark.parametrize("how", ["sharded", "gathered", "async"])
def test_counts_equal_the_closed_forms(how: str, fields: dict[str, Any]) -> None:
    found = checks(plan(plan_config(**{"model": "gpt", "ranks": 8, "stage": 3, "save_as": how} | fields)))
    assert formulas_agree(found)
    assert all(one.saved for one in found)
    if not fields:
        texts = {check.name: check.text for check in found[0].saved}
        share = {"on the drives": "12Ψ/N"}
        due = {
            "sharded": share,
            "async": {**share, "on the host": "12Ψ/N"},
            "gathered": {"on the drives": "12Ψ", "received": "12(N-1)/NΨ", "on the host": "12Ψ"},
        }
        assert texts == due[how]


def test_frozen_weights_are_saved_as_they_are_stored() -> None:
    found = checks(plan(plan_config(model="gpt2", ranks=4, stage=3, lora_rank=4, base="nf4", save_as="sharded")))
    (check,) = found[0].saved
    assert check.agrees
    assert check.text == "2Ψ/N + 10Ψ_t/N - 2Ψ_q/N + Q/N"


def test_all_has_counts_beside_forms(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    page = said("plan --model gpt2 --ranks 4 --stage 3 --save-as gathered --all", capsys)
    assert "What a save takes, bytes per rank" in page
    assert "12(N-1)/NΨ" in page


# -- the stepper, the player, runs ----------------------------------------------------------------
@pytest.mark.parametrize("how", ["sharded", "gathered", "async"])
def test_the_stepper_stops_in_a_save_and_writes_nothing(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    with debug(RunConfig(stage=3, ranks=2, steps=1, save_state=str(folder), save_as=how)) as world:
        event = world.until(phase="save").event
        assert event.scope.phase == Phase.SAVE
        assert event.scope.step == 0
        assert "save" in str(world.until("after_save"))
    assert not folder.exists()


def test_pages_have_the_phase(tmp_path: Path) -> None:
    config = RunConfig(stage=3, ranks=2, steps=1, save_as="gathered", model="gpt", layers=1)
    for recorded in (
        record(config.replace(save_state=str(tmp_path / "states"))),
        Recorded(plan(config, keep_events=True)),
    ):
        (run,) = encode(recorded)["runs"]
        text = json.dumps(run)
        assert '"save"' in text
        assert '"after_save"' in text
    assert not (tmp_path / "states").exists()


def test_a_timeline_has_the_phase(tmp_path: Path) -> None:
    scenario = tmp_path / "run.toml"
    scenario.write_text('stage = 3\nranks = 2\nsave_as = "gathered"\nlayers = 1\n', encoding="utf-8")
    out = tmp_path / "timeline.svg"
    assert main(["plot", "timeline", str(scenario), "--out", str(out)]) == 0
    assert 'id="phase.save"' in out.read_text("utf-8")


def test_a_run_says_what_it_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "run --ranks 2 --stage 3 --steps 2 --save-as gathered"
    assert "The state was saved 1 time, at last after step 1 (gathered): 2.65 MB in all" in said(words, capsys)
    kept = said(f"{words} --save-state {tmp_path / 'states'}", capsys)
    assert "pass --save-state DIR" not in kept
    result = zerosim.run(RunConfig(ranks=2, stage=3, steps=2, save_as="async"))
    assert formulas_agree(checks(result))
    assert not any(result.live_bytes_after)
