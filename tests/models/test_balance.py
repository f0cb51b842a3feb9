"""A router's own losses, biases and capacity: the same however a batch is cut into ranks and microbatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from same import assert_close

from zerosim.backends.forms import Choice
from zerosim.config import RunConfig
from zerosim.functional.router import Capacity, RouterLosses, route, with_losses
from zerosim.nn.balance import Balance
from zerosim.placement.block import BALANCE
from zerosim.tensor.gradcheck import gradcheck
from zerosim.tensor.tensor import Tensor, cpu, tensor
from zerosim.train.result import RunResult
from zerosim.train.run import run

BASE: dict[str, Any] = dict(
    model="llama", layers=2, hidden=32, heads=4, seq=16, experts=5, top_k=2, expert_ffn=24, steps=2, stage=1,
    precision="fp32", optimizer="sgd", lr=1.0, clip_norm=0.0,
)  # fmt: skip
CUTS = [(ranks, accumulate) for ranks in (1, 2, 4) for accumulate in (1, 2, 4) if ranks * accumulate <= 4]


def cut(ranks: int, accumulate: int, **more: Any) -> RunResult:
    """A step on 4 rows: so many on each rank, in so many microbatches."""
    own = dict(ranks=ranks, accumulate=accumulate, micro_batch=4 // ranks // accumulate)
    return run(RunConfig(**BASE | own | more))


LOSSES = {
    "z": dict(z_loss=0.5),
    "sequence": dict(aux_loss=0.5, aux_loss_over="sequence"),
    "batch": dict(aux_loss=0.5),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_routers_losses_weigh_the_same_however_a_batch_is_cut(name: str, tmp_path: Path) -> None:
    """transformers' Trainer counts them once for each rank and microbatch. The balance of a batch is not the mean of
    its parts', unless these are alike: here its rows are."""
    row = np.random.default_rng(2).integers(0, 256, (2, 1, 17))
    np.savez(tmp_path / "equal.npz", tokens=np.repeat(row, 4, axis=1))
    data = dict(tokens=str(tmp_path / "equal.npz")) if name == "batch" else {}
    losses: dict[str, Any] = LOSSES[name] | data
    whole, without = cut(1, 1, **losses), cut(1, 1, **data)
    assert apart(whole, without) > 1e-3
    for ranks, accumulate in CUTS[1:]:
        assert apart(cut(ranks, accumulate, **losses), whole) < 5e-6, (ranks, accumulate)
    assert apart(cut(2, 1, **losses, tp=2, sequence_parallel=True, micro_batch=4), whole) < 5e-6


def apart(one: RunResult, other: RunResult) -> float:
    return max(float(np.abs(one.weights[name] - other.weights[name]).max()) for name in other.weights)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("losses", [RouterLosses(0.7, 0.0, 1), RouterLosses(0.7, 0.3, 3)], ids=["batch", "sequences"])
def test_gradients_of_a_routers_losses(scores: str, losses: RouterLosses) -> None:
    """The op hands weights on and adds the gradient of a loss that it does not compute: here it is written out."""
    how, rng = Choice(scores), np.random.default_rng(5)
    values = 2 * rng.standard_normal((6, 5))
    device = cpu()
    logits = tensor(values, device, dtype="fp64", requires_grad=True)
    weights, way = route(logits, 2, how)
    (with_losses(weights, logits, way.ids, how, losses, lambda: 0.5) * 0.0).sum().backward()

    def loss(x: Any) -> float:
        each = 1 / (1 + np.exp(-x)) if scores == "sigmoid" else np.exp(x)
        probs = each / each.sum(1, keepdims=True)
        ids, total = way.ids.array, 0.0
        for run_of in np.split(np.arange(6), losses.runs):
            share = np.bincount(ids[run_of].reshape(-1), minlength=5) / (len(run_of) * 2)
            total += losses.balance * 5 * float((share * probs[run_of].mean(0)).sum()) / losses.runs
        return 0.5 * (total + losses.size * float((np.log(np.exp(x).sum(1)) ** 2).mean()))

    assert logits.grad is not None
    for at in np.ndindex(values.shape):
        step = np.zeros_like(values)
        step[at] = 1e-6
        expected = (loss(values + step) - loss(values - step)) / 2e-6
        assert logits.grad.numpy()[at] == pytest.approx(expected, abs=1e-8)


def test_weights_pass_a_routers_losses_unchanged() -> None:
    def passed(logits: Tensor) -> Tensor:
        weights, way = route(logits * 4.0, 2, Choice())
        return with_losses(weights, logits * 4.0, way.ids, Choice(), RouterLosses(), lambda: 1.0)

    gradcheck(passed, [(6, 5)])


def test_a_bias_moves_up_for_experts_below_the_mean() -> None:
    balance = Balance(0.25, 1)
    balance.join("gate", 4, biased=True)
    balance.move({"gate": [2.0, 2.0, 8.0, 4.0]})
    assert balance.biases["gate"] == [0.25, 0.25, -0.25, 0.0]
    balance.move({"gate": [5.0, 1.0, 1.0, 1.0]})
    assert balance.biases["gate"] == [0.0, 0.5, 0.0, 0.25]


@pytest.mark.parametrize("way", [dict(), dict(recompute="full"), dict(tp=2, micro_batch=4)], ids=str)
def test_all_ranks_have_the_biases_of_the_whole_batch(way: dict[str, Any]) -> None:
    """Recomputed blocks do not count twice, nor do ranks of tp."""
    whole = cut(1, 1, bias_rate=2**-10, lr=1e-3, steps=3)
    names = [name for name in whole.weights if name.endswith(BALANCE)]
    assert names == [f"model.layers.{layer}.mlp.gate.{BALANCE}" for layer in (0, 1)]
    for name in names:
        assert (whole.weights[name] * 2**10 % 1 == 0).all()
        assert np.abs(whole.weights[name]).max() > 0
    for ranks, accumulate in CUTS if not way else [(way.get("tp", 1), 1)]:
        found = cut(ranks, accumulate, bias_rate=2**-10, lr=1e-3, steps=3, **way)
        assert all((found.weights[name] == whole.weights[name]).all() for name in names), (ranks, accumulate)


def test_biases_are_saved_and_loaded_with_weights(tmp_path: Path) -> None:
    both = cut(1, 1, bias_rate=0.125, steps=1, lr=1e-2)
    np.savez(tmp_path / "w.npz", **both.weights)
    again = cut(1, 1, bias_rate=0.125, steps=1, lr=1e-30, weights=str(tmp_path / "w.npz"))
    fresh = {name: bias for name, bias in both.weights.items() if not name.endswith(BALANCE)}
    np.savez(tmp_path / "fresh.npz", **fresh)
    without = cut(1, 1, bias_rate=0.125, steps=1, lr=1e-30, weights=str(tmp_path / "fresh.npz"))
    assert again.losses != without.losses
    name = next(name for name in both.weights if name.endswith(BALANCE))
    assert set(np.round((again.weights[name] - both.weights[name]) / 0.125).tolist()) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("by_weight", [False, True])
def test_choices_beyond_a_capacity_are_dropped(by_weight: bool) -> None:
    logits = np.zeros((8, 4))
    logits[:, 1], logits[:, 2] = np.arange(8.0) + 9, 5.0  # all choose expert 1, then expert 2
    way = route(tensor(logits, cpu(), dtype="fp64"), 2, Choice(), capacity=Capacity(0.75, by_weight))[1].routing()
    assert (way.chosen, way.counts, way.dropped) == ((0, 8, 8, 0), (0, 3, 3, 0), 10)
    tokens = (way.order.array // 2).reshape(2, 3).tolist()
    assert tokens == ([[5, 6, 7], [0, 1, 2]] if by_weight else [[0, 1, 2], [0, 1, 2]])


def test_a_run_counts_what_it_drops_and_padding_changes_nothing() -> None:
    short, padded = (cut(2, 1, capacity_factor=0.8, pad_to_capacity=pads) for pads in (False, True))
    assert short.routed == padded.routed
    assert short.routed.choices == 2 * 2 * 4 * 16 * 2  # steps, layers, rows, tokens, experts of each
    assert 0 < short.routed.dropped < short.routed.choices
    assert_close(padded, short, 1e-6)
    assert cut(2, 1, capacity_factor=5.0).routed.dropped == 0
