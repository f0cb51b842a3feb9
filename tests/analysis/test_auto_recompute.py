"""--recompute auto: it fits by a whole plan, is never slower than none, selective and full, and is the best of all
assignments to four blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from zerosim.analysis import recompute_choices
from zerosim.analysis.auto_recompute import PLAIN, auto
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import Cluster, cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.errors import InputError
from zerosim.train.plan import Figures, figures_within, plan

ANY = 10**15
A100 = cluster_of(find_hardware("a100-80"))


def figures(config: RunConfig, room: int = ANY, cluster: Cluster = A100) -> tuple[float, int] | None:
    """Seconds and peak bytes, if they fit."""
    found: Figures | None = figures_within(config, room, cluster)
    if found is None:
        return None
    assert found.time is not None
    return found.time.seconds, found.peak_bytes


def of_auto(config: RunConfig, room: int, cluster: Cluster = A100) -> float:
    """The seconds of auto's answer, which fits."""
    found = auto(config, room, cluster)
    assert found is not None
    assert {**found.given, "recompute": 0} == {**config.given, "recompute": 0}
    seen = figures(found, room, cluster)
    assert seen is not None
    return seen[0]


FOUR: dict[str, dict[str, Any]] = {
    "llama": dict(model="llama3-8b", ranks=8, stage=3, recipe="fsdp2", attention="flash", micro_batch=2, seq=4096),
    "gpt": dict(model="gpt2", ranks=1, stage=0, micro_batch=8, attention="flash"),
    "eager": dict(model="gpt2-xl", ranks=8, stage=1, recipe="megatron", accumulate=2, micro_batch=2, dropout=0.1),
}
FEW = ["none", "selective:mlp_act", "full"]
MORE = ["none", "selective:layernorm", "selective:mlp_act", "full"]
EVERY = [*MORE, "selective:layernorm,mlp_act"]
"""The words of a block. Of four, all assignments are 256, of five 625."""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("llama", FEW),
        *(pytest.param(case, EVERY if case == "llama" else MORE, marks=pytest.mark.slow) for case in FOUR),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_of_all_assignments_to_four_blocks_it_finds_the_best(
    case: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plan_config(layers=4, **FOUR[case])
    monkeypatch.setattr(recompute_choices, "words_of", lambda config: iter(words))
    found = list[tuple[float, int]]()
    for each in product(words, repeat=4):
        spelled = "+".join(f"{block}={word}" for block, word in enumerate(each))
        seen = figures(config.replace(recompute=spelled))
        assert seen is not None
        found.append(seen)
    peaks = sorted(peak for _, peak in found)
    for share in range(0, 100, 7):
        room = peaks[0] + (peaks[-1] - peaks[0]) * share // 100
        best = min(seconds for seconds, peak in found if peak <= room)
        assert of_auto(config, room) <= best * (1 + 1e-9)  # `selective` is no word here, and may be faster
    assert auto(config, peaks[0] * 9 // 10, A100) is None


FIVE: dict[str, dict[str, Any]] = {
    "llama3-8b": dict(seq=8192),
    "llama2-13b": dict(seq=4096),
    "opt-6.7b": dict(seq=2048, micro_batch=8),
    "qwen2.5-7b": dict(seq=4096),
    "mistral-7b": dict(seq=4096),
}


@pytest.mark.parametrize(
    "model", ["llama3-8b", *(pytest.param(name, marks=pytest.mark.slow) for name in list(FIVE)[1:])]
)
def test_between_none_and_full_it_is_faster_than_both(model: str) -> None:
    usual = dict(micro_batch=4, ranks=8, stage=3, recipe="usual", attention="flash")
    config = plan_config(**{**usual, **FIVE[model], "model": model})
    none, _, full = plain = [seen for word in PLAIN if (seen := figures(config.replace(recompute=word))) is not None]
    for share in (30, 60):
        room = full[1] + (none[1] - full[1]) * share // 100
        best = min(seconds for seconds, peak in plain if peak <= room)
        assert of_auto(config, room) < best / 1.03, share
    assert auto(config, none[1], A100) == config


WAYS: list[dict[str, Any]] = [
    dict(pp=2, accumulate=4, tp=2, stage=1),
    dict(pp=2, accumulate=4, pipeline="interleaved", virtual_stages=2, layers=8),
    dict(stage=3, gather="module", recipe="deepspeed", layers=3),
    dict(stage=3, cpu_checkpointing=True, recompute="full"),
    dict(stage=2, allocator="caching"),
    dict(stage=3, recipe="fsdp2", ranks=256, seq=256, layers=4),
    dict(model="mixtral-8x7b", layers=3, stage=3, seq=1024),
    dict(model="t5-small"),
    dict(stage=1, offload_activations=True),
]


LONG = ("gather",)
"""A leaf module is planned part by part, which takes ten times as long."""


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way.keys() & {*LONG} else ()) for way in WAYS], ids=str
)
def test_it_is_never_slower_than_all_blocks_alike(way: dict[str, Any]) -> None:
    usual = {} if "t5" in str(way) else dict(model="llama3.2-1b", layers=6, seq=2048, ranks=8)
    config = plan_config(**{**usual, **way})
    plain = list(_plain(config))
    peaks = sorted(peak for _, peak in plain)
    for share in (0, 40, 100):
        room = peaks[0] + (peaks[-1] - peaks[0]) * share // 100
        assert of_auto(config, room) <= min(seconds for seconds, peak in plain if peak <= room)


def _plain(config: RunConfig) -> Iterator[tuple[float, int]]:
    for word in PLAIN:
        try:
            seen = figures(config.replace(recompute=word))
        except InputError:
            continue
        assert seen is not None
        yield seen


def test_nothing_is_planned_before_it_is_chosen() -> None:
    with pytest.raises(InputError, match="recompute 'auto': not chosen yet"):
        plan(plan_config(model="gpt2", recompute="auto"))
