"""What a search of meshes looks through: what a framework runs, layers cut as evenly as can be, plausible first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from zerosim.analysis.mesh_search import Meshes, best_meshes
from zerosim.analysis.meshes import beside, ladder, ladders, layers_cut, mesh_values
from zerosim.analysis.recompute import ever_more_recompute
from zerosim.analysis.search import Devices, Tried
from zerosim.cli.main import main
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.presets.published import BEST, Published
from zerosim.config.presets.recipes import find_recipe

NODE = 4
SIZES: dict[str, Any] = dict(model="llama", layers=6, hidden=128, heads=4, seq=128, vocab=512, ranks=8)
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": dict(experts=8, top_k=2, expert_ffn=128),
    "adapters": dict(lora_rank=8),
}
A100 = cluster_of(find_hardware("a100-80"), node_gpus=NODE)


def usual(model: str = "dense", **more: Any) -> RunConfig:
    return plan_config(**{**SIZES, **MODELS[model], "recipe": "usual", "attention": "flash", **more})


def space(config: RunConfig, batch: int) -> Iterator[RunConfig]:
    for family in ladders(config, batch, NODE):
        yield from family
        for one in family:
            yield from beside(one, NODE)


# -- recipes ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch", [2, 16])
@pytest.mark.parametrize("model", MODELS)
def test_all_that_is_searched_is_what_a_framework_runs(model: str, batch: int) -> None:
    """Its ZeRO stages and schedules. In a pipeline nobody gathers per microbatch; Megatron-LM has no adapters."""
    found = list(space(usual(model), batch))
    names = {one.parallel.recipe for one in found}
    assert names == {"ddp", "deepspeed", "fsdp2", "megatron"} - ({"megatron"} if model == "adapters" else set())
    assert {one.mesh.pp > 1 for one in found} == {False, True}
    for one in found:
        recipe, stage, is_piped = find_recipe(one.parallel.recipe), one.parallel.zero_stage, one.mesh.pp > 1
        if one.mesh.shards > 1:
            assert stage in (recipe.pipelined if is_piped else recipe.stages), one
        assert not (is_piped and stage == 3), one
        assert one.memory.recompute in ever_more_recompute(one.replace(recompute="none")), one
        schedule = one.parallel.pipeline_schedule if is_piped else "1f1b"
        assert schedule in (("1f1b", "interleaved") if recipe.name == "megatron" else SCHEDULES), one


SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")


@pytest.mark.parametrize("recipe", ["paper", "deepspeed", "fsdp2", "megatron"])
def test_a_given_recipe_is_the_only_one(recipe: str) -> None:
    config = usual(recipe=recipe)
    assert {one.parallel.recipe for one in space(config, 16)} == {recipe}


@pytest.mark.parametrize("way", [dict(precision="bf16-pure"), dict(recipe="paper")], ids=str)
def test_without_masters_there_is_no_framework_to_follow(way: dict[str, Any]) -> None:
    assert {one.parallel.recipe for one in space(usual(**way), 16)} == {"paper"}


@pytest.mark.parametrize(
    ("recipe", "attention", "more"),
    [
        ("paper", "eager", ("selective", "full")),
        ("paper", "flash", ("selective:layernorm,mlp_act", "selective:layernorm,mlp", "full")),
        ("megatron", "eager", ("selective", "full")),
        ("megatron", "flash", ("selective:layernorm", "selective:layernorm,mlp", "full")),
        ("fsdp2", "flash", ("selective:op", "full:2", "full")),
        ("deepspeed", "flash", ("full",)),
        ("ddp", "eager", ("full",)),
    ],
)
def test_a_ladder_is_what_the_framework_recomputes(recipe: str, attention: str, more: tuple[str, ...]) -> None:
    """Flash attention stores no scores: nobody recomputes its core."""
    config = usual(recipe=recipe, stage=0 if recipe == "ddp" else 1, attention=attention)
    assert ever_more_recompute(config) == ("none", *more)
    held = next(ladders(config, 16, NODE))
    assert list(dict.fromkeys(one.memory.recompute for one in held)) == ["none", *more]


@pytest.mark.parametrize(("recipe", "loss"), [("fsdp2", "liger"), ("deepspeed", "liger"), ("paper", "lean")])
def test_ligers_loss_comes_before_recompute_where_no_rank_has_a_part_of_the_head(recipe: str, loss: str) -> None:
    alone, cut = usual(recipe=recipe, stage=1), usual(recipe=recipe, stage=1, tp=2, sequence_parallel=True)
    (first, *more), (own, *others) = ladder(alone), ladder(cut)
    assert [one.memory.loss for one in more] == [loss] * len(more)
    assert (more[0].memory.recompute == "none") == (loss == "liger")
    assert {one.memory.loss for one in others} == {own.memory.loss}
    assert {one.memory.loss for one in ladder(alone.replace(loss="torch"))} == {"torch"}
    assert first.memory.loss != "liger"


def test_megatrons_families_have_its_fused_loss_unless_another_one_is_given() -> None:
    for given, loss in (({}, "megatron-fused"), ({"loss": "megatron"}, "megatron")):
        config = usual(recipe="megatron", stage=1, **given)
        assert {family[0].memory.loss for family in ladders(config, 16, NODE)} == {loss}


def test_deepspeeds_stage_3_shares_no_experts() -> None:
    """Its own layers of experts refuse that stage."""
    config = usual(experts=8, top_k=2, expert_ffn=64)
    found = {(one[0].parallel.recipe, one[0].parallel.zero_stage) for one in ladders(config, 16, NODE)
             if one[0].mesh.ep > 1}  # fmt: skip
    assert ("fsdp2", 3) in found
    assert ("deepspeed", 3) not in found


# -- plausible --------------------------------------------------------------------------------------
def searched(config: RunConfig, batch: int = 8) -> Meshes:
    return best_meshes(config, ladders(config, batch, NODE), Devices(10**18, cluster=A100), node=NODE)


def mfu(tried: Tried) -> float:
    assert tried.time is not None
    return tried.time.model_flops / (tried.time.seconds * tried.config.mesh.ranks * A100.peak_flops)


def publish(monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    monkeypatch.setattr("zerosim.analysis.search.best_published", lambda gpu, fp8: Published(most, "this test"))


@pytest.mark.slow
def test_what_nobody_published_is_never_first_while_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is the best of those at or below the published MFU; above all of them it is the fastest."""
    config = usual(ranks=4)
    free = searched(config)
    highest = mfu(free.found[0])
    for most in (0.9 * highest, 0.5 * highest):
        publish(monkeypatch, most)
        result = searched(config)
        assert result.ended
        assert mfu(result.found[0]) <= most
        slow = [mfu(one) > most for one in result.found]
        assert slow == sorted(slow)
        same = [one for one in result.found if mfu(one) <= most]
        assert same == sorted(same, key=lambda one: one.order)
    publish(monkeypatch, 0.0)
    assert searched(usual(ranks=2), 2).found[0].order == min(one.order for one in searched(usual(ranks=2), 2).found)


@pytest.mark.slow
def test_the_papers_8b_on_8_a100_is_no_faster_than_anyone_was(capsys: pytest.CaptureFixture[str]) -> None:
    words = "fit --find mesh --model llama3-8b --ranks 8 --gpu a100-80 --recipe paper --json - --quiet"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)["meshes"]
    assert {one["recipe"] for one in found} == {"paper"}
    assert found[0]["time"]["mfu"] <= BEST["a100"].mfu


# -- layers -----------------------------------------------------------------------------------------
def counts_of(layers: int, pp: int) -> list[int]:
    """Return how many layers each stage has, as a configuration with these options has them."""
    cut = layers_cut(layers, pp)
    config = RunConfig(model="llama", hidden=8, heads=1, layers=layers, ranks=pp, pp=pp, accumulate=pp, **cut)
    return list(config.layers_by_chunk(layers))


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32])
def test_a_pipelines_ends_have_no_more_layers_than_the_others_and_no_stage_has_none(pp: int) -> None:
    for layers in range(pp, 131):
        counts = counts_of(layers, pp)
        assert len(counts) == pp
        assert sum(counts) == layers
        assert min(counts) >= 1, (layers, counts)
        assert max(counts) - min(counts) <= 2 - (layers % pp == 0), (layers, counts)
        if pp > 2:
            assert max(counts[0], counts[-1]) <= min(counts[1:-1]), (layers, counts)
            assert max(counts[1:-1]) - min(counts[1:-1]) <= 1, (layers, counts)


@pytest.mark.parametrize(
    ("layers", "pp", "counts"),
    [
        (126, 16, [7, *[8] * 14, 7]),
        (80, 16, [5] * 16),
        (61, 8, [7, *[8] * 5, 7, 7]),
        (30, 4, [7, 8, 8, 7]),
        (7, 2, [4, 3]),
    ],
)
def test_ends_are_balanced_as_people_balance_them(layers: int, pp: int, counts: list[int]) -> None:
    """405B has 126 layers for that reason (2407.21783, 3.3.2)."""
    assert counts_of(layers, pp) == counts


# -- what is said -----------------------------------------------------------------------------------
def test_layers_are_told_by_pipeline_stage_and_not_by_chunk() -> None:
    config = usual(recipe="megatron", stage=1, ranks=2, pp=2, layers=8, accumulate=4)
    for more in ({}, dict(pipeline="interleaved", virtual_stages=2), dict(stage_layers="5,3")):
        asked = config.replace(**more)
        assert mesh_values(asked)["layers_by_stage"] == ([5, 3] if "stage_layers" in more else [4, 4])


def test_what_an_allocator_refuses_keeps_its_counted_bytes() -> None:
    """A device of exactly the peak has no room for the caching allocator's gaps."""
    config = usual(recipe="fsdp2", stage=3)
    exact = Devices(10**18, cluster=A100).tried(config)
    for is_strict in (False, True):
        tried = Devices(exact.peak_bytes, cluster=A100, is_strict=is_strict).tried(config)
        assert tried.peak_bytes == exact.peak_bytes
        assert tried.too_small == (("device",) if is_strict else ())
