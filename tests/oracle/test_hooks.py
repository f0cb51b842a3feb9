"""fp16 casts and PowerSGD beside PyTorch's own communication hooks, on gloo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.comm.groups import Groups
from zerosim.comm.runtime import Context, World, launch
from zerosim.device.device import Kind
from zerosim.dtypes import fp32
from zerosim.parallel.compression.casts import Cast
from zerosim.parallel.compression.powersgd import PowerSGD
from zerosim.parallel.exchange import Slices
from zerosim.parallel.gathers import AllGather
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import Mesh
from zerosim.placement.zero import zero_rows
from zerosim.tensor.flat import Flat

from .test_distributed import in_processes

STEPS, ROWS, COLUMNS, RANK = 5, 24, 16, 2


def ours(exchange: Slices, grads: Any, q: Any = None) -> list[list[Any]]:
    """[rank][step] what an exchange makes of these gradients (steps, ranks, rows, columns) at stage 0."""

    def program(ctx: Context) -> list[Any]:
        mesh, device = Mesh(dp_shard=2), ctx.device
        flat = Flat("w", device, fp32, fp32)
        flat.declare("w.weight", (ROWS, COLUMNS))
        layout = Layout(mesh, [flat.spec], {**zero_rows(0), **exchange_of[ctx.rank].states})
        flat.held = layout.held("w", layout.own(ctx.rank, "w"), layout.padded("w"))
        mine = exchange_of[ctx.rank]
        mine.join(Groups(mesh, ctx.comm))
        for state in mine.states:
            mine.place(flat, state)
        if q is not None:
            device.backend.from_host(q.reshape(-1), mine.kept["q", "w"].array)
        found = []
        for step, each in enumerate(grads[:, ctx.rank]):
            with device.scope(step=step):
                grad = device.alloc((flat.numel,), fp32, Kind.GRAD)
                device.backend.from_host(each.reshape(-1), grad.array)
                reduced = mine.launch_in_place([flat], [grad]).wait()
                own = mine.own_window(flat, grad, reduced[0] if isinstance(reduced, list) else reduced)
                found.append(device.backend.to_host(own.array).reshape(ROWS, COLUMNS).copy())
        return found

    exchange_of = [type(exchange)(*exchange_args(exchange)) for _ in range(2)]
    return launch(program, World(ranks=2))


def exchange_args(exchange: Slices) -> tuple[Any, ...]:
    if isinstance(exchange, PowerSGD):
        return 0, exchange.rank, exchange.warmup, exchange.seed
    return (0,)


@pytest.fixture(scope="module")
def task() -> tuple[Any, Any]:
    random = np.random.default_rng(7)
    grads = random.standard_normal((STEPS, 2, ROWS, COLUMNS)).astype(np.float32)
    q, _ = np.linalg.qr(random.standard_normal((COLUMNS, RANK)))
    return grads, q.astype(np.float32)


@pytest.fixture(scope="module")
def torchs(task: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hooks")
    np.savez(folder / "tasks.npz", grads=task[0], q=task[1])
    return in_processes(2, "oracle.hook_worker", folder, "fp16", "powersgd")


def test_a_cast_is_torchs_fp16_hook(task: tuple[Any, Any], torchs: list[dict[str, Any]]) -> None:
    """Gloo adds halves, each of which was divided and rounded before: one rounding more than ours."""
    for rank, found in enumerate(ours(Cast(), task[0])):
        for mine, theirs in zip(found, torchs[rank]["fp16"], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2 * 2.0**-10 * np.abs(task[0]).max())


def test_powersgd_is_torchs_hook_from_its_second_step_on(task: tuple[Any, Any], torchs: list[dict[str, Any]]) -> None:
    """From the same Q: products, order of averages, residual and warm start. Torch's first steps are exact ones."""
    mine = ours(PowerSGD(AllGather(), RANK, 2, 0), task[0], task[1])
    for rank in range(2):
        for step, theirs in enumerate(torchs[rank]["powersgd"]):
            np.testing.assert_allclose(mine[rank][step], theirs, atol=2e-6, err_msg=f"step {step}")
            assert (step < 2) == np.allclose(theirs, task[0][step].mean(0), atol=1e-6)
