"""8-bit Adam beside bitsandbytes on the CPU, on the same gradients.

bitsandbytes finds codes in two ways there. In torch it takes the nearest entry, as zerosim does. For fp32 it has a
kernel, which goes by 65,536 cells: what it takes may be further from the value than the nearest entry is, by a cell.
Small numbers have several entries in one cell. Adam divides by their roots, so weights are compared in both ways.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from zerosim.backends.numpy.quantize import dynamic_map, nearest, quantize
from zerosim.device.device import Kind
from zerosim.dtypes import fp32, uint8
from zerosim.optim.adam8bit import Adam8bit
from zerosim.optim.control import StepControl
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.updater import Updater
from zerosim.placement.rows import Held
from zerosim.tensor.flat import Flat, whole
from zerosim.tensor.tensor import cpu

from .compare import within


def bnb() -> Any:
    """Imported by the tests: it takes seconds."""
    return pytest.importorskip("bitsandbytes")


@pytest.fixture(autouse=True)
def _torch_has_its_ops() -> None:
    bnb()


STEPS, LR, BETAS, DECAY = 20, 1e-2, (0.9, 0.95), 0.1
CELL = 2.0**-15
SHAPES = {"large": (70, 100), "edge": (64, 64), "small": (63, 65)}  # the last one has 4,095 elements


def codes_in_torch(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bitsandbytes' codes by the nearest entry: what it does for formats that have no kernel."""
    codes, absmax = torch.ops.bitsandbytes.quantize_blockwise(values.double(), table, 256)
    return codes, absmax


@pytest.mark.parametrize("signed", [True, False])
def test_the_tables_are_equal(signed: bool) -> None:
    np.testing.assert_array_equal(dynamic_map(signed), bnb().functional.create_dynamic_map(signed=signed).numpy())


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_and_its_kernel_is_within_a_cell_of_them(signed: bool) -> None:
    random, table = np.random.default_rng(0), dynamic_map(signed)
    values = np.concatenate([random.uniform(-1, 1, 100_000), 10 ** random.uniform(-8, 0, 100_000)]).astype(np.float32)
    values = values if signed else np.abs(values)
    values[::256] = 1  # so that every block is divided by 1
    mine, absmax = quantize(values, table)
    theirs, scales = codes_in_torch(torch.tensor(values), torch.tensor(table))
    np.testing.assert_array_equal(mine, theirs.numpy())
    np.testing.assert_array_equal(absmax, scales.numpy())
    np.testing.assert_array_equal(mine, nearest(values, table))
    fast, _ = torch.ops.bitsandbytes.quantize_blockwise(torch.tensor(values), torch.tensor(table), 256)
    fast = fast.numpy()
    assert (np.abs(table[fast] - values) <= np.abs(table[mine] - values) + CELL).all()
    apart = np.abs(fast.astype(int) - mine)
    print(f"its kernel: codes up to {apart.max()} apart, {(apart > 0).mean():.1%} of them")
    assert apart[np.abs(values) > 1e-3].max() == 1  # where entries are further apart than cells


def weights_and_gradients() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    random = np.random.default_rng(0)

    def draw() -> dict[str, Any]:
        return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}

    return draw(), [draw() for _ in range(STEPS)]


def run_zerosim(weights: dict[str, Any], grads: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Final weights and states, of one flat buffer."""
    device = cpu()
    flat = Flat("all", device, fp32, fp32)
    for name, shape in SHAPES.items():
        flat.declare(name, shape)
    flat.held = Held(whole(flat.numel), flat.numel)
    flat.param_shard = device.alloc((flat.numel,), fp32, Kind.PARAM)
    updater = Updater(Adam8bit(*BETAS, 1e-8, DECAY), StepControl(LRSchedule(LR)))
    updater.allocate(flat)
    for index, name in enumerate(SHAPES):
        flat.write(index, weights[name], exact_master=False)
    for step in grads:
        flat.grad_shard = device.alloc((flat.numel,), fp32, Kind.GRAD)
        device.backend.from_host(np.concatenate([step[name].reshape(-1) for name in SHAPES]), flat.grad_shard.array)
        assert updater.decide(1.0) == 1
        updater.update(flat, 1.0)
    final = {name: flat.window(flat.shard(), index).array for index, name in enumerate(SHAPES)}
    assert flat.states["exp_avg"].dtype == uint8
    return final, {name: state.array for name, state in flat.states.items()}


def run_bitsandbytes(weights: dict[str, Any], grads: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    parameters = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in weights.items()}
    optimizer = bnb().optim.Adam8bit(parameters.values(), lr=LR, betas=BETAS, eps=1e-8, weight_decay=DECAY)
    for step in grads:
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(step[name])
        optimizer.step()
    states = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}, states


def test_twenty_steps_with_the_nearest_codes_are_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are rounded in another order. Where that turns a code, a weight is off by some of a step's length."""
    from bitsandbytes.backends.cpu import ops

    def nearest_codes(values: Any, table: Any, absmax: Any, codes: Any, block: int) -> None:
        for into, found in zip((codes, absmax), codes_in_torch(values, table), strict=True):
            into.copy_(found)

    monkeypatch.setattr(ops, "_quant_blockwise_fp32_direct", nearest_codes)
    weights, grads = weights_and_gradients()
    mine, states = run_zerosim(weights, grads)
    theirs, their_states = run_bitsandbytes(weights, grads)
    within("a tensor of 4,095 elements", mine["small"], theirs["small"], atol=4 * 2.0**-22)
    assert [their_states[name]["state1"].dtype for name in SHAPES] == [torch.uint8, torch.uint8, torch.float32]
    for code, scale, names in (("exp_avg", "exp_avg_absmax", "1"), ("exp_avg_sq", "exp_avg_sq_absmax", "2")):
        coded = [their_states[name] for name in ("large", "edge")]
        codes = np.concatenate([state[f"state{names}"].numpy().reshape(-1) for state in coded])
        scales = np.concatenate([state[f"absmax{names}"].numpy() for state in coded])
        apart = np.abs(codes.astype(int) - states[code])
        print(f"{code}: {(apart > 0).sum()} of {apart.size} codes are other ones")
        assert apart.max() <= 1
        assert (apart > 0).mean() <= 1e-3
        within(scale, states[scale], scales, rtol=1e-4)
    for name in ("large", "edge"):
        off = np.abs(mine[name] - theirs[name])
        print(f"{name}: {(off > 4 * 2.0**-22).sum()} of {off.size} weights off by a code, at most {off.max():.1e}")
        assert (off > 4 * 2.0**-22).mean() <= 1e-3
        assert off.max() <= LR / 10


def test_twenty_steps_with_its_kernels_codes_end_nearby() -> None:
    """Within 1 % of the way that weights went, by the root of mean squares."""
    weights, grads = weights_and_gradients()
    (mine, _), (theirs, _) = run_zerosim(weights, grads), run_bitsandbytes(weights, grads)
    within("a tensor of 4,095 elements", mine["small"], theirs["small"], atol=4 * 2.0**-22)
    for name in ("large", "edge"):
        way = np.sqrt(np.mean((mine[name] - weights[name]) ** 2))
        off = np.sqrt(np.mean((mine[name] - theirs[name]) ** 2))
        print(f"{name}: {off / way:.2%} of the way")
        assert off <= 0.01 * way


def test_embeddings_keep_floats_where_bitsandbytes_makes_them() -> None:
    """Its own layer says so to what all its optimizers ask, which is begun anew each time; torch's does not."""
    manager = bnb().optim.GlobalOptimManager.get_instance()
    for layer, kept in ((bnb().nn.Embedding, torch.float32), (torch.nn.Embedding, torch.uint8)):
        table = layer(80, 60)
        optimizer = bnb().optim.Adam8bit(table.parameters())
        table(torch.arange(80)).sum().backward()
        optimizer.step()
        manager.initialize()
        assert optimizer.state[table.weight]["state1"].dtype == kept
