"""A candidate is a configuration, or the reason why it is refused; every search makes its candidates that way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerosim.analysis.candidate import candidate, candidate_at, taken_back, with_micro_batches
from zerosim.cli.main import main
from zerosim.config import RunConfig, run
from zerosim.config.parts import CAPABILITIES, Capability, Parts
from zerosim.errors import InputError, wrong

ROOT = Path(__file__).parents[2] / "zerosim"
SEARCHES = (
    *(f"analysis/{name}.py" for name in ("search", "cheapest", "left_out", "advice", "changes")),
    *(f"analysis/{name}.py" for name in ("meshes", "mesh_search", "estimate", "offload_ways")),
    *("cli/fit.py", "cli/fit_search.py", "report/fit.py"),
)


@pytest.mark.parametrize("name", SEARCHES)
def test_no_search_changes_a_configuration_by_itself(name: str) -> None:
    """`replace` and `at_stage` of a configuration take keywords; those of strings do not."""
    calls = [node for node in ast.walk(ast.parse((ROOT / name).read_text("utf-8"))) if isinstance(node, ast.Call)]
    methods = [call for call in calls if isinstance(call.func, ast.Attribute)]
    made = [call.func.attr for call in methods if isinstance(call.func, ast.Attribute) and call.keywords]
    assert not {"replace", "at_stage"} & set(made)


def test_a_refused_candidate_says_why_and_of_which_option() -> None:
    config = RunConfig(offload_activations=True)
    fine, refused = candidate(config, recompute="selective"), candidate(config, recompute="full")
    assert fine.sure() == RunConfig(offload_activations=True, recompute="selective")
    assert (refused.config, refused.field) == (None, "offload_activations")
    assert "saves only the inputs of blocks" in refused.why_not
    assert candidate(config, recompute="full", **taken_back(["offload_activations"])).sure() == RunConfig(
        recompute="full"
    )


def test_at_another_stage_an_option_that_it_does_not_have_is_left_out() -> None:
    config = RunConfig(stage=1, own_grads_only=True)
    assert candidate(config, stage=2).field == "own_grads_only"
    assert candidate_at(config, 2).sure() == RunConfig(stage=2)


def test_what_is_taken_back_has_its_default_again() -> None:
    config = RunConfig(bucket_bytes=None, prefetch=2, stage=3)
    assert candidate(config, **taken_back(["bucket_bytes", "prefetch"])).sure() == RunConfig(stage=3)


def test_the_fewest_microbatches_are_those_that_a_pipeline_can_group() -> None:
    """Groups of 3 on 2 pipeline stages: of 4 microbatches one would be left alone."""
    grouped = RunConfig(layers=4, pp=2, pipeline="interleaved", micro_batch_group=3, accumulate=6)
    assert [with_micro_batches(grouped, fewest).sure().data.accumulate for fewest in (2, 4, 6, 7)] == [3, 5, 6, 8]
    refused = with_micro_batches(grouped, 2, heads=3)
    assert refused.field == "heads"


GPT = "--model gpt --layers 2 --hidden 32 --heads 4 --seq 16"
SEARCHED = (
    f"plan {GPT} --ranks 4 --stage 0 --micro-batch 8 --limit 500KB",
    f"plan {GPT} --ranks 4 --stage 1 --micro-batch 8 --limit 500KB",
    f"fit {GPT} --ranks 4 --limit 2MB",
    f"fit {GPT} --find ranks --limit 400KB",
    f"fit {GPT} --ranks 4 --limit 2MB --find lora-rank",
    f"fit {GPT} --ranks 4 --limit 2MB --find mesh",
    f"fit {GPT} --ranks 2 --limit 500KB --find offload --host-memory 64GB",
)


@pytest.mark.parametrize("line", SEARCHED)
def test_a_rule_that_refuses_candidates_ends_no_search(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new rule may refuse whatever is tried, but nothing that was typed."""
    asked, refused = list[str](), set[str]()

    def rules(parts: Parts) -> Iterator[InputError]:
        mesh, given = parts.mesh, parts.parallel
        what = (mesh.ranks, mesh.tp, mesh.pp, given.zero_stage, given.partition, parts.memory.recompute)
        tried = repr((what, parts.offload.where, parts.data.micro_batch, parts.tuning.lora_rank, parts.gathering))
        asked.append(tried)
        if tried != asked[0] and sum(tried.encode()) % 2 == 0:
            refused.add(tried)
            yield wrong("bucket_bytes", ": a new rule refuses it")

    monkeypatch.setattr(run, "CAPABILITIES", (*CAPABILITIES, Capability(rules)))
    assert main(line.split()) in (0, 3)
    assert refused
