"""Recomputed blocks whose routers' choices are kept: the bits of a run without recompute, and no second choice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from same import assert_same_training

from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.config import RunConfig
from zerosim.device.events import Kernel
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.run import run

BASE: dict[str, Any] = dict(
    model="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=256, seq=16, micro_batch=2, steps=2, lr=0.2,
    experts=8, top_k=2, expert_ffn=12, precision="bf16",
)  # fmt: skip
FULL: dict[str, Any] = dict(recompute="full", keep_router=True)
WAYS: list[dict[str, Any]] = [
    dict(ranks=1, stage=0, router_dtype="fp32"),
    dict(ranks=2, ep=2, stage=3, accumulate=2, bias_rate=0.1, aux_loss=0.1, z_loss=0.01),
    dict(ranks=2, ep=2, stage=3, dispatcher="allgather", gather="module"),
    dict(ranks=2, ep=2, stage=3, capacity_factor=1.0, recompute="1=full"),
    dict(ranks=4, pp=2, ep=2, stage=1, accumulate=3, pipeline="zb-h1"),
    dict(ranks=4, tp=2, ep=2, stage=2, sequence_parallel=True, precision="fp16", initial_scale_power=4),
    dict(ranks=2, ep=2, stage=3, precision="fp32", autocast="bf16", optimizer="sophia"),
]


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_bits_are_those_without_recompute(way: dict[str, Any]) -> None:
    without = {name: value for name, value in way.items() if name != "recompute"}
    assert_same_training(run(RunConfig(**BASE | FULL | way)), run(RunConfig(**BASE | without)))


@pytest.mark.parametrize(("dtype", "itemsize"), [("model", 2), ("fp32", 4)])
def test_a_block_keeps_logits_weights_and_numbers_of_experts(dtype: str, itemsize: int) -> None:
    """Of 32 tokens, 8 experts and 2 choices, beside the input of 16 numbers a token."""
    config = RunConfig(**BASE | FULL, router_dtype=dtype)
    rows = plan(config).saved["layers.0"]
    assert [(row.what, row.nbytes) for row in rows] == [
        ("input", 32 * 16 * 2), ("logits", 32 * 8 * itemsize), ("weights", 32 * 2 * itemsize), ("experts", 32 * 2 * 8)
    ]  # fmt: skip


def test_backward_neither_multiplies_by_the_gate_nor_chooses() -> None:
    def work(**changes: Any) -> tuple[Counter[str], int]:
        events = run(RunConfig(**BASE | dict(steps=1) | changes), keep_events=True).events[0]
        found = [event for event in events if isinstance(event, Kernel) and event.scope.phase == "backward"]
        return Counter(event.name for event in found), sum(event.flops for event in found)

    (again, flops), (kept, fewer) = work(recompute="full"), work(**FULL)
    gone = again - kept
    assert not kept - again
    assert gone == {"route": 2, "linear": 2}
    assert flops - fewer == 2 * (2 * 32 * 16 * 8 + 6 * 32 * 8)  # of two layers: a product, and the choice


def test_a_kernel_that_chooses_otherwise_the_second_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scores tie, a kernel that adds in another order may choose other experts, and gradients are another
    function's, unless the first choice is kept."""
    first, calls = NumpyBackend.route, Counter[str]()

    def route(logits: Any, bias: Any, how: Any, weights: Any, ids: Any) -> None:
        calls["route"] += 1
        first(logits if calls["route"] <= BASE["layers"] else -logits, bias, how, weights, ids)

    def grads(**changes: Any) -> Any:
        calls.clear()
        result = run(RunConfig(**BASE | dict(steps=1, ranks=1, precision="fp32") | changes))
        return np.concatenate([values.ravel() for values in result.weights.values()])

    wanted = grads()
    monkeypatch.setattr(NumpyBackend, "route", staticmethod(route))
    assert not np.array_equal(grads(recompute="full"), wanted)
    assert np.array_equal(grads(**FULL), wanted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(keep_router=True), "keep_router: recompute 'none' recomputes no whole blocks; pass --recompute full too"),
        (dict(keep_router=True, recompute="selective"), "recompute 'selective' recomputes no whole blocks"),
        (dict(FULL, experts=None, top_k=None, expert_ffn=None), "keep_router True: llama has no experts"),
    ],
)
def test_it_is_for_whole_blocks_with_experts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        RunConfig(**{name: value for name, value in (BASE | changes).items() if value is not None})
