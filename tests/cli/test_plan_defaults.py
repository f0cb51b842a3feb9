"""What plan and fit take where nobody said: recipe, attention, microbatches of a pipeline; and what they warn of."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.config.presets.recipes import NAMES, find_recipe, usual_recipe

SIZES = ("--layers", "2", "--hidden", "64", "--heads", "4", "--seq", "16")
TINY = (*SIZES, "--ranks", "4")
GPU = (*TINY, "--gpu", "a100-80")
DEVICE = 'name = "mine"\nmemory_bytes = "24GB"\npeak_flops = 1e14\nhbm_bytes_per_s = "1TB"\nlink_bytes_per_s = "9GB"\n'


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON of a command, whether what it plans fits or not."""
    capsys.readouterr()
    assert main([*words, "--json", "-", "--quiet"]) in (0, 3)
    return json.loads(capsys.readouterr().out)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return figures(capsys, "plan", *words)["config"]


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main([*words]) in (0, 3)
    return " ".join(capsys.readouterr().out.split())


# -- the recipe -------------------------------------------------------------------------------------
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("flags", "recipe"),
    [
        ("--stage 3", "fsdp2"),
        ("--stage 3 --tp 2", "fsdp2"),
        ("--stage 2", "deepspeed"),
        ("--stage 1", "deepspeed"),
        ("--stage 0", "ddp"),
        ("--stage 1 --tp 2", "megatron"),
        ("--stage 0 --pp 2", "megatron"),
        ("--stage 2 --tp 2", "megatron"),
        ("--stage 3 --precision bf16-pure", "paper"),
        ("--stage 3 --recipe deepspeed", "deepspeed"),
        ("--stage 1 --tp 2 --recipe paper", "paper"),
    ],
)
def test_with_a_gpu_the_recipe_is_what_people_run(flags: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("plan", "fit"):
        assert figures(capsys, verb, *GPU, *flags.split())["config"]["recipe"] == recipe
    assert planned(capsys, *TINY, *flags.split())["recipe"] == (recipe if "--recipe" in flags else "paper")


@pytest.mark.slow
def test_a_recipe_that_nobody_gave_is_said_to_be_so_in_the_first_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("plan", "fit"):
        assert "Recipe fsdp2, as people run stage 3 (none was given)." in page(capsys, verb, *GPU)[:350]
        assert "(none was given)" not in page(capsys, verb, *GPU, "--recipe", "fsdp2")
    assert "recipe paper" in page(capsys, "plan", *TINY)


def test_what_a_plan_advises_is_what_is_planned_then(capsys: pytest.CaptureFixture[str]) -> None:
    """At another stage people run another recipe: the peak that is advised is that of the command as typed."""
    words = (*TINY, "--vocab", "64", "--gpu", "a100-80", "--reserve", "0", "--limit", "1.2MB", "--stage", "0")
    advice = figures(capsys, "plan", *words)["advice"]
    flags, _, said = advice.partition(" would fit: its peak is ")
    again = figures(capsys, "plan", *words[:-2], *flags.split())
    assert flags.startswith("--stage")
    assert again["config"]["recipe"] == usual_recipe(again["config"]["stage"]) != "ddp"
    assert f"{again['peak_bytes'] / 1e6:.2f} MB" in said or f"{again['peak_bytes'] / 1e3:.0f} KB" in said


@pytest.mark.quick(1)
@pytest.mark.parametrize("verb", ["plot memory -o x.svg", "plot throughput -o x.svg --sizes 2,3"])
def test_pictures_of_several_stages_have_each_stages_recipe(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*verb.split(), *GPU, "--json", "-"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["config"]["recipe"] == "fsdp2"
    assert "with flash attention and recipes ddp, deepspeed and fsdp2" in told.err
    assert main(["plot", "timeline", *GPU, "-o", "x.svg", "--json", "-"]) == 0  # of one stage
    assert json.loads(capsys.readouterr().out)["config"]["recipe"] == "fsdp2"


@pytest.mark.slow
@pytest.mark.parametrize("given", [[], ["--recipe", "paper"], ["--recipe", "deepspeed"]], ids=str)
def test_a_search_of_meshes_is_of_what_frameworks_run_or_of_the_given_recipe(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags that it answers with plan what it ran."""
    more = ["--ranks", "4", "--global-batch", "8"]
    device = ["--gpu", "a100-80", "--reserve", "0"]
    assert main(["fit", "--find", "mesh", *SIZES, *device, *more, *given, "--json", "-"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)["meshes"]
    flags = re.search(r"--ranks .*?(?=\. Fits| A GPT)", " ".join(told.err.split()))
    assert flags is not None
    assert f"--recipe {found[0]['recipe']}" in flags[0]
    recipes = {one["recipe"] for one in found}
    assert recipes == {given[1]} if given else recipes <= {"ddp", "deepspeed", "fsdp2", "megatron"}
    assert figures(capsys, "plan", *SIZES, *device, *flags[0].split())["peak_bytes"] == found[0]["peak_bytes"]


def test_every_stage_has_a_usual_recipe_which_has_that_stage() -> None:
    for stage in range(4):
        assert stage in find_recipe(usual_recipe(stage)).stages
        assert RunConfig(stage=stage, recipe="usual") == RunConfig(stage=stage, recipe=usual_recipe(stage))
        assert RunConfig(stage=stage, recipe="usual").replace(stage=3).parallel.recipe == usual_recipe(3)
    usual = {usual_recipe(stage, is_cut=cut) for stage in range(4) for cut in (False, True)}
    assert usual == {*NAMES} - {"paper", "hf-deepspeed", "fsdp1"}


# -- attention --------------------------------------------------------------------------------------
def test_attention_is_what_the_gpu_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On every GPU, a limit or a file's too, a kernel that keeps no scores. Without one it is as `run` has it."""
    mine = tmp_path / "mine.toml"
    mine.write_text(DEVICE, "utf-8")
    for words, attention in (
        ((), "eager"),
        (("--gpu", "a100-80"), "flash"),
        (("--gpu", "v100-32"), "flash"),
        (("--gpu", str(mine)), "flash"),
        (("--limit", "24GB"), "flash"),
        (("--gpu", "a100-80", "--limit", "24GB"), "flash"),
        (("--gpu", "a100-80", "--attention", "eager"), "eager"),
    ):
        assert planned(capsys, *TINY, *words)["attention"] == attention
    assert "flash attention, recompute" in page(capsys, "plan", *GPU)
    assert main(["plot", "memory", "--layers", "1", "-o", str(tmp_path / "x.svg")]) == 0
    assert capsys.readouterr().out.endswith("x.svg\n")


def test_a_v100_runs_pytorchs_memory_efficient_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    """Flash's bytes, with the time of another kernel; Megatron's cuDNN one does not run there either."""
    v100 = (*TINY, "--gpu", "v100-32", "--precision", "fp16")
    assert "(PyTorch's memory-efficient kernel on v100-32)" in page(capsys, "plan", *v100)
    for more in ((), ("--tp", "2", "--stage", "1")):
        usual, given = planned(capsys, *v100, *more), planned(capsys, *v100, *more, "--flash-kernel", "fa2")
        assert (usual["flash_kernel"], given["flash_kernel"]) == ("xformers", "fa2")


def test_a_scenario_says_itself_what_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text('model = "gpt2"\nranks = 8\npp = 4\nlayers = 4\n', "utf-8")
    config = planned(capsys, str(tmp_path / "run.toml"), "--gpu", "h100")
    assert [config[name] for name in ("attention", "recipe", "accumulate")] == ["eager", "paper", 1]


def test_a_flat_model_is_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    flat = planned(capsys, "--model", "flat", "--params", "1M", "--gpu", "v100-32")
    assert (flat["recipe"], flat["attention"]) == ("paper", "eager")


# -- microbatches ----------------------------------------------------------------------------------
@pytest.mark.quick(1)
@pytest.mark.parametrize("more", ["", "--pipeline interleaved", "--pipeline zb-h1", "--pipeline zb-v"])
def test_a_pipeline_has_four_micro_batches_a_stage(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*TINY, "--layers", "4", "--pp", "2", "--stage", "1", *more.split())
    assert planned(capsys, *words)["accumulate"] == 8
    assert planned(capsys, *words, "--accumulate", "6")["accumulate"] == 6
    assert "Assumed: 8 microbatches (4 for each stage) of 1 row" in page(capsys, "plan", *words)
    assert RunConfig(pp=2).data.accumulate == 1


# -- warnings ---------------------------------------------------------------------------------------
WARNED = [
    ("--gpu v100-32", "v100-32 has no bf16 arithmetic: --precision fp16"),
    ("--gpu a100-80 --stage 1 --tp 4 --node-gpus 2", "tp 4 crosses nodes of 2 GPUs in every layer: --tp 2"),
    ("--stage 1 --pp 2 --accumulate 1",
     "1 microbatch for 2 pipeline stages, some of which always wait: --accumulate 8"),
    ("--recipe megatron --stage 3",
     "recipe megatron itself has no stage 3 (it has 0, 1): zerosim applies its rules "
     "to the paper's stage; --recipe fsdp2 has it"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "warning"), WARNED)
def test_each_warning_names_the_better_flag(flags: str, warning: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Which ends it."""
    assert figures(capsys, "plan", *TINY, *flags.split())["warnings"] == [warning]
    assert f"Warning: {warning}." in page(capsys, "plan", *TINY, *flags.split())
    better = warning[warning.index("--") :].removesuffix(" has it").split()
    assert figures(capsys, "plan", *TINY, *flags.split(), *better)["warnings"] == []


def test_a_near_miss_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """With less than 2 % of the device free; by fit too."""
    words = (*TINY, "--attention", "flash")
    peak = figures(capsys, "plan", *words)["peak_bytes"]
    for share, warned in ((1.0, True), (1.019, True), (1.021, False)):
        found = figures(capsys, "plan", *words, "--limit", str(int(peak * share)))
        assert any("are free: --allocator caching" in warning for warning in found["warnings"]) is warned
    assert figures(capsys, "plan", *words, "--limit", str(peak - 1))["warnings"] == []
    most = figures(capsys, "fit", *words, "--limit", str(peak))
    assert most["best"]["value"] == 1
    assert "are free: --allocator caching" in most["warnings"][0]
    assert "Warning: only 0 B (0.0 %) are free" in page(capsys, "fit", *words, "--limit", str(peak))


# -- beside a run -----------------------------------------------------------------------------------
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "words", [TINY, (*TINY, "--stage", "1", "--pp", "2"), (*TINY, "--recipe", "fsdp2"), (*TINY, "--micro-batch", "2")]
)
def test_a_plan_names_every_flag_that_makes_it_a_run(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """With those flags it counts the run's bytes, of memory and of traffic, to the last one, and names none."""
    told = page(capsys, "plan", *words)
    flags = shlex.split(told.split("zerosim run with the same flags also uses ")[1].split(": pass them")[0])
    again, run = (figures(capsys, *asked) for asked in (("plan", *words, *flags), ("run", *words, "--steps", "1")))
    for rank in again["ranks"]:
        beside = run["ranks"][rank["rank"]]
        assert (rank["memory"], rank["traffic"]) == (beside["memory"], beside["traffic"])
    assert "zerosim run with the same flags" not in page(capsys, "plan", *words, *flags)


# -- defaults beside given values ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ("--fp32-softmax", {"attention": "eager", "fp32_softmax": True}),
        ("--pp 2 --pipeline interleaved --micro-batch-group 3 --layers 4", {"accumulate": 9, "attention": "flash"}),
        ("--pp 2 --stage 2 --optimizer sgd --momentum 0.9 --compress dgc --grad-dtype fp32", {"accumulate": 1}),
    ],
)
def test_a_default_gives_way_to_given_values(
    flags: str, values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, *TINY, *flags.split(), "--limit", "1GB")
    assert found | values == found


def test_what_is_wrong_beside_every_default_is_told_as_given(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ("--heads 3", "--heads 3 --pp 2", "--heads 3 --fp32-softmax --pp 2"):
        assert main(["plan", *TINY, *flags.split(), "--limit", "1GB"]) == 2
        assert capsys.readouterr().err == "zerosim: error: --heads 3 do not divide hidden 64: choose heads that do\n"


def test_the_fewest_ranks_are_searched_among_those_that_other_options_allow(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "--find", "ranks", *SIZES, "--limit", "700KB"]
    for flags, step in (
        ("--ranks-per-node 8", 8),
        ("--secondary-shard 3", 3),
        ("--dp-replicate 2 --ranks-per-node 2", 4),
    ):
        found = figures(capsys, *words, *flags.split())
        assert found["best"]["value"] % step == 0
        assert main(["plan", *words[3:], *flags.split(), "--ranks", str(found["best"]["value"]), "--quiet"]) == 0
