"""Two configurations: what differs, and one with a single setting of the other."""

from __future__ import annotations

import pytest

from zerosim.analysis.changes import sent, settings, with_one
from zerosim.analysis.knobs import pairs
from zerosim.config import RunConfig, plan_config
from zerosim.train.plan import plan
from zerosim.train.result import RunResult


def test_a_recipe_brings_what_follows_from_it() -> None:
    found = settings(RunConfig(), RunConfig(recipe="fsdp2"))
    assert [one.name for one in found if not one.follows] == ["recipe"]
    assert {"prefetch", "loss", "foreach"} <= {one.name for one in found if one.follows}
    assert settings(RunConfig(), RunConfig(recipe="paper", stage=3)) == []  # said, and no other value


@pytest.mark.parametrize("name", ["stage", "recompute", "bucket_bytes", "model", "lr"])
def test_one_setting_of_the_other_is_all_that_changes(name: str) -> None:
    a = RunConfig(model="gpt2", stage=3, prefetch=2, bucket_bytes=None, lr=0.1)
    b = RunConfig(model="gpt2-medium", stage=2, recompute="full")
    both = with_one(a, b, name).sure()
    assert both.value(name) == b.value(name)
    brought = {"stage": {"prefetch", "overlap"}, "model": {"layers", "hidden", "heads", "kv_heads", "ffn"}}
    assert {one.name for one in settings(a, both)} == {name} | brought.get(name, set())  # stage 2 prefetches nothing


def test_pairs_begin_with_what_changed_most() -> None:
    assert list(pairs({"x": 1, "y": 5}, {"y": 6, "z": 9}).items()) == [("z", (0, 9)), ("x", (1, 0)), ("y", (5, 6))]


def test_sent_is_the_mean_over_all_ranks() -> None:
    """A pipeline's ends send other messages than its middle, and few of its ranks are run."""

    def by_rank(result: RunResult) -> int:
        return sum(result.sent_bytes(rank, 0) + result.sent_bytes(rank, 0, "activations") for rank in range(8))

    result = plan(plan_config(model="gpt2", ranks=8, pp=4, stage=1, accumulate=4))
    assert sum(sent(result).values()) * 8 == by_rank(result)
    assert {axis for _, axis in sent(result)} == {"pp", "dp_shard"}
