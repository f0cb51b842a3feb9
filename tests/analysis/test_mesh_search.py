"""The search for meshes: its bounds hold, its best is the best of its own table, and time may end it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from zerosim.analysis.cheapest import changes
from zerosim.analysis.estimate import Bounds, Estimate
from zerosim.analysis.mesh_search import Known, Meshes, Stopped, best_meshes
from zerosim.analysis.meshes import beside, ladders, mesh_values
from zerosim.analysis.search import Devices, Tried
from zerosim.cli.main import main
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.train.plan import Figures, figures_within, plan
from zerosim.train.result import RunResult

SMALL: dict[str, Any] = dict(layers=4, hidden=64, heads=4, seq=32, vocab=256, ranks=4)
A100 = cluster_of(find_hardware("a100-80"), node_gpus=2)
BATCH = 4


def unlimited(asked: RunConfig) -> Figures:
    figures = figures_within(asked, 10**15, A100)
    assert figures is not None
    return figures


def estimate(asked: RunConfig) -> Estimate:
    return Known(asked, Devices(10**15, cluster=A100)).estimate(asked)


def best_of(config: RunConfig, batch: int, devices: Devices, node: int = 8, **more: Any) -> Meshes:
    return best_meshes(config, ladders(config, batch, node), devices, node=node, **more)


EXPERTS: dict[str, Any] = dict(model="llama", experts=8, top_k=2, expert_ffn=128)


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "near"), [({}, 1.0), (EXPERTS, 1.02)], ids=["dense", "experts"])
def test_it_finds_what_planning_all_finds_and_no_plan_is_below_its_bounds(experts: dict[str, Any], near: float) -> None:
    """It plans few and never changes what is far from the best: of these experts whole rows with tp, 1.4 % faster."""
    config = plan_config(**SMALL, **experts)
    least = Bounds(config, A100)
    everything: dict[RunConfig, Figures] = {}
    for ladder in ladders(config, BATCH, 2):
        for asked in (*ladder, *beside(ladder[0], 2)):
            took = everything[asked] = unlimited(asked)
            assert took.time is not None
            assert took.time.seconds >= least.seconds(asked)
            assert took.peak_bytes >= least.nbytes(asked)
    room = sorted(took.peak_bytes for took in everything.values())[len(everything) // 3]
    result = best_of(config, BATCH, Devices(room, cluster=A100), node=2)
    assert result.ended
    fits = [took.time.seconds for took in everything.values() if took.peak_bytes <= room and took.time is not None]
    found = [one.time.seconds for one in result.found if one.time is not None]
    assert found[0] <= near * min(fits)
    assert found == sorted(found)
    assert result.planned < len(everything)
    assert all(one.config.global_batch == BATCH and one.peak_bytes <= room for one in result.found)
    assert len({one.config for one in result.found}) == len(result.found)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "mesh",
    [
        dict(ranks=4, stage=3),
        dict(ranks=4, pp=2, stage=1),
        dict(ranks=4, tp=2, stage=2),
        dict(EXPERTS, ranks=4, ep=4, stage=1),
        dict(EXPERTS, ranks=4, ep=2, tp=2, sequence_parallel=True, etp=1, stage=3),
    ],
    ids=str,
)
def test_an_estimate_is_near_the_plan(mesh: dict[str, Any]) -> None:
    asked = plan_config(**{**SMALL, "layers": 24, "vocab": 64, **mesh}, accumulate=4, recompute="selective")
    took, (seconds, nbytes) = unlimited(asked), estimate(asked)
    assert took.time is not None
    assert seconds == pytest.approx(took.time.seconds, rel=0.02)
    assert nbytes == (0 if asked.mesh.pp > 1 else pytest.approx(took.peak_bytes, rel=0.02))


def test_a_layers_experts_are_shared_by_nobody_or_by_the_most_ranks() -> None:
    """Those of a node, and all that divide the experts; beside the best, the next fewer and more."""
    config = plan_config(**SMALL | {"ranks": 16}, **EXPERTS)
    found = [ladder[0].mesh.axes for ladder in ladders(config, BATCH, 4)]
    assert {(axes.ep, axes.etp) for axes in found if axes.tp == axes.pp == 1} == {(1, 1), (4, 1), (8, 1)}
    assert {(axes.ep, axes.etp) for axes in found if axes.tp == 2 and axes.pp == 4} == {(1, 2), (4, 1)}
    others = [one.mesh.axes for one in beside(config.replace(tp=2, sequence_parallel=True, ep=4, etp=1), 4)]
    assert {(axes.ep, axes.etp) for axes in others} == {(4, 1), (2, 1), (8, 1), (4, 2)}
    asked = plan_config(**SMALL, **EXPERTS, stage=1)
    assert "--ep 4" in [flags for _, flags in changes(asked)]
    assert mesh_values(asked.replace(ep=4))["ep"] == 4
    assert "ep" not in mesh_values(plan_config(**SMALL))


@pytest.mark.parametrize("node", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "mesh",
    [
        dict(ranks=8),
        dict(ranks=8, tp=2),
        dict(ranks=12, tp=4),
        dict(ranks=20),
        dict(ranks=2),
        dict(ranks=16, dp_replicate=2),
    ],
)
def test_replicas_fill_a_node_each_and_still_divide_the_states(node: int, mesh: dict[str, Any]) -> None:
    asked = plan_config(**{**SMALL, **mesh}, stage=3)
    found = [one.mesh.axes for one in beside(asked, node) if one.mesh.dp_replicate != asked.mesh.dp_replicate]
    assert all(axes.dp_shard > 1 and axes.dp_shard * axes.tp == node for axes in found)
    shards = node // asked.mesh.tp
    is_whole = 1 < shards < asked.mesh.shards and asked.mesh.shards % shards == 0
    assert bool(found) == (is_whole and asked.mesh.dp_replicate == 1)  # else they are given


def test_what_goes_with_few_blocks_only_is_estimated_whole() -> None:
    """A pattern of block 3 matches nothing in a model of two blocks."""
    frozen = plan_config(**{**SMALL, "layers": 8}, freeze="h.3")
    took = unlimited(frozen)
    assert took.time is not None
    assert estimate(frozen) == (took.time.seconds, took.peak_bytes)
    least = Bounds(frozen, A100)
    assert least.seconds(frozen) <= took.time.seconds
    assert least.nbytes(frozen) <= took.peak_bytes


def test_a_ladder_is_made_of_what_other_options_allow() -> None:
    offloaded = plan_config(**SMALL, offload_activations=True)
    again = {tuple(one.memory.recompute for one in ladder) for ladder in ladders(offloaded, 4, 8)}
    assert again == {("none", "selective")}
    grouped = dict(pipeline="interleaved", micro_batch_group=3)
    of_pipelines = [ladder[0] for ladder in ladders(plan_config(**SMALL), 12, 8, grouped) if ladder[0].mesh.pp > 1]
    assert {one.data.accumulate for one in of_pipelines} == {3, 6, 12}
    assert any(ladder[0].mesh.pp == 1 for ladder in ladders(plan_config(**SMALL), 12, 8, grouped))


def test_where_even_one_row_is_too_much_nothing_is_planned_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[RunConfig, bool]] = []

    def within(devices: Devices, config: RunConfig) -> Tried | None:
        has_limit = devices.nbytes < 10**18
        asked.append((config, has_limit))
        return None if has_limit else Tried(config, 10**9)

    monkeypatch.setattr(Devices, "within", within)
    result = best_of(plan_config(**SMALL), 64, Devices(10**8))
    assert not result.found
    assert result.planned == 0
    assert len(asked) == len(set(asked)) > 0


@pytest.mark.slow
def test_without_a_clock_memory_ranks() -> None:
    whole = list[RunConfig]()
    result = best_of(plan_config(**SMALL), BATCH, Devices(10**12), say=lambda asked, tried: whole.append(asked))
    assert result.planned == len(whole) > 0
    peaks = [one.peak_bytes for one in result.found]
    assert peaks == sorted(peaks)
    assert all(one.time is None for one in result.found)


def test_time_that_is_up_leaves_the_best_so_far() -> None:
    left = iter(range(4))

    def check_time() -> None:
        if next(left, None) is None:
            raise Stopped

    result = best_of(plan_config(**SMALL), BATCH, Devices(10**12, cluster=A100), check_time=check_time)
    assert not result.ended
    assert len(result.found) == 1


# -- at a shell -------------------------------------------------------------------------------------
WORDS = [f"--{name}={value}" for name, value in SMALL.items()]


def test_the_first_is_the_fastest_of_the_table_and_its_flags_plan_it(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [word for word in WORDS if not word.startswith("--ranks")]
    assert main(["fit", "--find", "mesh", *WORDS, "--gpu", "a100-80", "--global-batch", "8", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)["meshes"]
    seconds = [one["time"]["step_s"] for one in found]
    assert seconds == sorted(seconds)
    flags = re.search(r"--ranks .*?(?= A GPT)", " ".join(err.split()))
    assert flags is not None
    assert main(["plan", *sizes, "--gpu", "a100-80", *flags[0].split(), "--json", "-", "--quiet"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["time"] == found[0]["time"]
    assert planned["peak_bytes"] == found[0]["peak_bytes"]


@pytest.mark.slow
def test_a_time_limit_and_ctrl_c_show_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["fit", "--find", "mesh", "--gpu", "a100-80", "--global-batch", "4", *WORDS]
    assert main([*asked, "--time-limit", "0.01"]) in (0, 3)
    assert "Stopped after" in " ".join(capsys.readouterr().out.split())
    ran = 0

    def interrupted(*given: Any, **options: Any) -> RunResult:
        nonlocal ran
        ran += 1
        if ran == 12:
            raise KeyboardInterrupt
        return plan(*given, **options)

    monkeypatch.setattr("zerosim.analysis.search.plan", interrupted)
    assert main(asked) == 130
    said = " ".join(capsys.readouterr().out.split())
    assert "there may be better ones" in said
    assert "--micro-batch" in said


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "words",
    ["--ranks-per-node 2", "--offload-activations", "--freeze h.3", "--micro-batch-group 3 --pipeline interleaved",
     "--overlap-param-gather", "--grad-buckets views"],
)  # fmt: skip
def test_given_options_narrow_a_search_and_do_not_end_it(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The best is planned with the flags that are given, without those that it has no use for."""
    sizes = ["--ranks=2", "--layers=4", "--hidden=16", "--heads=2", "--seq=4", "--vocab=16"]
    given = ["--limit", "10MB", *words.split(), *sizes]
    assert main(["fit", "--find", "mesh", "--global-batch", "6", *given]) == 0
    said = " ".join(capsys.readouterr().out.split())
    flags = said.split(" A GPT")[0]
    gone = (
        re.findall(r"--\S+(?: [^-:]\S*)?", match[1]) if (match := re.search("Leave out (.*?): this mesh", said)) else []
    )
    kept = f" {' '.join(given)} "
    for flag in gone:
        assert f" {flag} " in kept
        kept = kept.replace(f" {flag} ", " ")
    assert main(["plan", *kept.split(), *flags.split(), "--quiet"]) == 0


@pytest.mark.slow
def test_the_fewest_ranks_that_fit_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [word for word in WORDS if not word.startswith("--ranks")]
    alone = unlimited(plan_config(**SMALL).replace(ranks=1, stage=0, recompute="full")).peak_bytes
    asked = ["fit", "--find", "mesh", *sizes, "--json", "-", "--quiet", "--limit"]
    assert main([*asked, str(alone // 2)]) == 0
    found = json.loads(capsys.readouterr().out)["meshes"]
    assert len({one["ranks"] for one in found}) == 1
    assert found[0]["ranks"] > 1
    assert main([*asked, "2KB"]) == 3
