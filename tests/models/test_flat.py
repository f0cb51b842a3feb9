"""The flat model: exactly so many parameters, each with a gradient, in every stage and at every size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference

from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.models.flat import add_columns
from zerosim.tensor.gradcheck import gradcheck
from zerosim.tensor.tensor import Tensor, cpu, tensor
from zerosim.train.build_model import build_model
from zerosim.train.plan import plan
from zerosim.train.run import run

SIZES = [(1, 1), (7, 7), (100, 3), (256, 1), (300, 2), (1000, 7)]  # fewer, as many and more than the 19 of a vocabulary
TINY: dict[str, Any] = dict(model="flat", seq=5, vocab=19, steps=2, micro_batch=1, seed=3, lr=1e-2)


@pytest.mark.parametrize(("params", "units"), [*SIZES, (10**12, 8), (10**12 + 5, 999)])
def test_exactly_so_many_in_units_as_equal_as_can_be(params: int, units: int) -> None:
    model = build_model(RunConfig(model="flat", params=params, units=units), cpu())
    sizes = [unit.flat.numel for unit in model.units]
    assert model.num_parameters == sum(sizes) == params
    assert len(sizes) == units
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("numel", [2, 5, 13])
def test_gradients_are_the_derivative(numel: int) -> None:
    gradcheck(lambda x, w: add_columns(x, w, 5, 0.3), [(2, 3, 5), (numel,)])


def test_a_parameter_belongs_to_one_column() -> None:
    device = cpu()
    weight = tensor(np.arange(1.0, 8.0), device)
    out = add_columns(tensor(np.zeros((1, 2)), device, dtype="int64"), weight, 3, 0.5).numpy()
    assert (out == [[[0.5 * (1 + 4 + 7), 0.5 * (2 + 5), 0.5 * (3 + 6)]] * 2]).all()


def test_nothing_but_handles_is_kept(device: Device, live: Callable[[], int]) -> None:
    x = tensor(np.zeros((2, 3, 5)), device, requires_grad=True)
    weight = tensor(np.zeros(12), device, requires_grad=True)
    out = add_columns(x, weight, 5, 1.0)
    node = out.node
    before = live()
    del x, out
    assert live() == before - 2 * 4 * 30
    assert node is not None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("params", "units"), SIZES)
def test_every_parameter_has_a_gradient(params: int, units: int, precision: str) -> None:
    """Nowhere 0, and in a column all the same."""
    config = RunConfig(**TINY, params=params, units=units, precision=precision, ranks=1)
    layout = build_model(config, cpu())
    weights = {spec.name: reference.initial_values(spec, 3) for flat in layout.flats for spec in flat.spec.weights}
    batch = np.random.default_rng(0).integers(0, 19, (1, 6))
    _, grads = reference.rank_gradients(config, weights, batch, 0, 0, scale=256.0)
    assert sum(grad.size for grad in grads.values()) == params
    for grad in grads.values():
        values = grad.astype(np.float64)
        assert (values != 0).all()
        assert (values[19:] == values[: len(values) - 19][: len(values[19:])]).all()


@pytest.mark.quick(2)
@pytest.mark.bits
@pytest.mark.parametrize(("params", "units"), SIZES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_stages_give_the_references_bits(params: int, units: int, ranks: int, tmp_path: Path) -> None:
    options = {**TINY, "params": params, "units": units, "ranks": ranks}
    tokens = np.random.default_rng(5).integers(0, 19, size=(2, ranks, 6), dtype=np.int64)
    np.savez(tmp_path / "tokens.npz", tokens=tokens)
    weights, losses = reference.train(RunConfig(**options), tokens)
    for stage in range(4):
        result = run(RunConfig(**options, stage=stage, tokens=str(tmp_path / "tokens.npz")))
        assert result.losses == losses
        assert all((result.weights[name] == value).all() for name, value in weights.items())
        assert result.live_bytes_after == [0] * ranks


@pytest.mark.slow
def test_it_learns_how_often_each_byte_occurs() -> None:
    """From ln 256, what no knowledge costs, towards the entropy of single bytes, the least that it can reach."""
    for params, units in ((10_000, 3), (1_000_000, 8)):
        result = run(RunConfig(model="flat", params=params, units=units, stage=3, ranks=2, steps=60))
        assert result.mean_losses[0] == pytest.approx(np.log(256), abs=0.05)
        assert 2.8 < result.mean_losses[-1] < 3.5


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter"), [(0, 16.0), (1, 4 + 12 / 1024), (2, 2 + 14 / 1024), (3, 16 / 1024)]
)
def test_a_trillion_parameters_on_shapes(stage: int, bytes_per_parameter: float) -> None:
    """ZeRO's Table 1, last row: 16,000, 4,011, 2,013 and 15.6 GB; all but a millionth of it is model states."""
    config = RunConfig(
        model="flat", params=10**12, units=8, ranks=1024, stage=stage, precision="fp16", bucket_bytes=None
    )
    result = plan(config)
    assert result.num_parameters == 10**12
    end = result.memory[0].marks["end_of_backward"].by_kind
    states = sum(end.get(kind, 0) for kind in ("param", "grad", "optim"))
    assert states == pytest.approx(bytes_per_parameter * 1e12, rel=1e-8)
    peak = result.memory[0].peak.by_kind
    assert sum(peak.get(kind, 0) for kind in ("activation", "activation_grad", "temp")) < 1e6


def test_token_ids_stand_for_zeros() -> None:
    device = cpu()
    weight = tensor(np.ones(4), device, requires_grad=True)
    ids: Tensor = tensor([[3, 1, 2]], device, dtype="int64")
    out = add_columns(ids, weight, 4, 1.0)
    assert out.shape == (1, 3, 4)
    out.sum().backward()
    assert weight.grad is not None
    assert (weight.grad.numpy() == 3).all()
