"""Whatever is said to fit is planned again with its own flags, and fits; whatever is said not to fit is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from zerosim.analysis import advice
from zerosim.analysis.cheapest import changes, cheapest_fits
from zerosim.analysis.expect.largest import fits
from zerosim.analysis.mesh_search import best_meshes
from zerosim.analysis.meshes import ladders
from zerosim.analysis.search import Devices, Found, most_that_fits
from zerosim.config import RunConfig, plan_config
from zerosim.errors import InputError, OutOfMemory
from zerosim.train.plan import peak_of, peak_within, plan
from zerosim.train.run import DEFAULT_STEPS

SMALL: dict[str, Any] = dict(hidden=256, heads=4, seq=256)
KNOBS = {
    "exact": (None,),
    "caching": (
        None,
        "expandable_segments:True",
        "max_split_size_mb:64",
        "garbage_collection_threshold:0.8",
        "roundup_power2_divisions:8",
    ),
    "arena": (None, "defragment:False", "fit:first,defragment:False"),
}


def drawn(seed: int, models: tuple[str, ...] = ("gpt", "llama")) -> tuple[RunConfig, int]:
    """A configuration, and a capacity around the peak of its live bytes."""
    draw = random.Random(f"what fits {seed}")
    while True:
        model, allocator = draw.choice(models), draw.choice(("exact", "caching", "caching", "caching", "arena"))
        recipe, stage, ranks = draw.choice(("paper", "deepspeed", "fsdp2", "megatron", "ddp")), draw.randrange(4), 1
        values: dict[str, Any] = {} if model.startswith("gpt2") else SMALL | {"layers": draw.choice((1, 2, 4))}
        values |= {} if model.startswith("gpt2") else {"vocab": draw.choice((256, 50_000))}
        values |= {"reduce_bucket": 10**6} if recipe == "deepspeed" and stage else {}
        ranks = draw.choice((1, 2, 4))
        if draw.random() < 0.3 and ranks > 1:
            values |= {"pp": 2, "accumulate": draw.choice((1, 4, 16)), "pipeline": draw.choice(("gpipe", "1f1b"))}
        values |= {"allocator": allocator, "allocator_conf": draw.choice(KNOBS[allocator])}
        try:
            config = plan_config(
                model=model, recipe=recipe, stage=stage, ranks=ranks, micro_batch=draw.choice((1, 2, 4)), **values
            )
        except InputError:
            continue  # a recipe without that stage
        live = peak_of(config.replace(allocator="exact", allocator_conf=None))
        return config, int(live * draw.choice((0.3, 0.5, 0.7, 0.9, 0.97, 1.0, 1.02, 1.1)))


def runs_within(config: RunConfig, capacity: int) -> bool:
    try:
        result = plan(config.replace(capacity=capacity))
    except OutOfMemory:
        return False
    return max(memory.peak.total_bytes for memory in result.memory) <= capacity


def with_flags(config: RunConfig, flags: str) -> RunConfig:
    words = flags.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return config.replace(**{
        flag.removeprefix("--").replace("-", "_"): int(word) if word.isdigit() else word for flag, word in pairs
    })  # fmt: skip


def check_answer(config: RunConfig, field: str, found: Found, capacity: int) -> None:
    if found.best is not None:
        assert runs_within(config.replace(**{field: found.best.value}), capacity), found.best
    if found.beyond is not None:
        assert not runs_within(config.replace(**{field: found.beyond.value}), capacity), found.beyond


def check_seed(config: RunConfig, capacity: int) -> None:
    if not runs_within(config, capacity):
        for tip in cheapest_fits(config, capacity, peak_within):
            assert runs_within(with_flags(config, tip.split(" would fit")[0]), capacity), tip
    found = most_that_fits(config, "micro_batch", Devices(capacity).tried)
    check_answer(config, "micro_batch", found, capacity)


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", [1, 6, 7, 9, 12, 21, 33, 34, 47, 48])
def test_tips_and_answers_are_planned_again(seed: int) -> None:
    check_seed(*drawn(seed))


@pytest.mark.slow
def test_many_tips_and_answers_are_planned_again() -> None:
    for seed in range(75, 100):
        check_seed(*drawn(seed, ("gpt", "llama", "gpt2", "gpt2-medium")))


def test_the_fewest_ranks_are_planned_again() -> None:
    own: dict[str, Any] = dict(layers=4, vocab=256, stage=3, allocator_conf="expandable_segments:True")
    config = plan_config(model="gpt", **SMALL, **own, allocator="caching")
    least = peak_of(config.replace(ranks=16), 10**12)
    for capacity in (least, 3 * least // 2):
        found = most_that_fits(config, "ranks", Devices(capacity).tried)
        check_answer(config, "ranks", found, capacity)
        assert found.best is not None


@pytest.mark.slow
def test_meshes_are_planned_again_and_judged_by_what_is_reserved() -> None:
    config = plan_config(model="gpt", **SMALL, layers=2, vocab=256, allocator="caching", micro_batch=4)
    alone = peak_of(config.replace(ranks=1), 10**12)
    room = alone * 2 // 3
    asked = config.replace(ranks=4)
    result = best_meshes(asked, ladders(asked, 16, 8), Devices(room))
    assert result.found
    for one in result.found:
        memory = plan(one.config.replace(capacity=room)).memory
        assert one.peak_bytes == max(rank.reserved_bytes for rank in memory)
        assert one.peak_bytes > max(rank.peak.total_bytes for rank in memory)


def test_blocks_that_are_left_from_one_step_may_be_too_much_in_the_next() -> None:
    config = plan_config(
        model="llama",
        **SMALL,
        layers=4,
        vocab=50_000,
        stage=3,
        ranks=2,
        recipe="fsdp2",
        pp=2,
        loss="torch",
        allocator="caching",
    )
    capacity = 369_721_383
    assert runs_within(config, capacity)
    assert peak_of(config, capacity) <= capacity
    assert not runs_within(config.replace(steps=2), capacity)
    assert peak_of(config.replace(steps=2), capacity) > capacity


def test_a_run_is_advised_for_the_steps_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunConfig] = []

    def cheapest(config: RunConfig, *_: object, **__: object) -> str | None:
        asked.append(config)
        return None

    monkeypatch.setattr(advice, "cheapest_fit", cheapest)
    tiny: dict[str, Any] = dict(layers=1, hidden=32, heads=2, seq=16, capacity=200_000)
    for steps in (None, 3):
        with pytest.raises(OutOfMemory):
            advice.run(RunConfig(**tiny, allocator="caching", steps=steps))
    assert [config.optim.steps for config in asked] == [DEFAULT_STEPS, 3]


def test_what_was_extended_fits_only_with_all_of_its_micro_batches() -> None:
    sizes: dict[str, Any] = dict(layers=2, hidden=32, heads=2, seq=16, vocab=8192)
    config = plan_config(model="gpt", **sizes, ranks=2, pp=2, stage=0, accumulate=64)
    peak = peak_of(config)
    assert peak > peak_of(config.replace(accumulate=4))
    assert fits(config, peak)
    assert not fits(config, peak - 1)


@pytest.mark.parametrize("recipe", ["paper", "deepspeed", "fsdp2", "megatron", "ddp"])
def test_flags_lead_to_the_change_that_was_tried(recipe: str) -> None:
    config = plan_config(
        model="gpt", **SMALL, layers=2, ranks=4, micro_batch=4, stage=1, recipe=recipe, allocator="caching",
        reduce_bucket=10**6 if recipe == "deepspeed" else None,
    )  # fmt: skip
    for changed, flags in changes(config, ("host", "nvme")):
        assert with_flags(config, flags) == changed, flags
