"""8-bit AdamW beside torchao's on the CPU: which tensors have codes, and twenty steps along the same gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from zerosim.config import RunConfig, plan_config
from zerosim.device.device import Kind
from zerosim.dtypes import DType, bf16, fp32
from zerosim.optim.adam8bit import Adam8bit
from zerosim.optim.control import StepControl
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.rounding import Rounding
from zerosim.optim.updater import Updater
from zerosim.placement.rows import Held
from zerosim.report.warnings import warnings_of
from zerosim.tensor.flat import Flat, whole
from zerosim.tensor.tensor import cpu
from zerosim.train.plan import plan

optim: Any = pytest.importorskip("torchao.optim")

STEPS, LR, BETAS, DECAY = 20, 1e-2, (0.9, 0.95), 0.1
SHAPES = {"a": (16, 512), "edge": (64, 64), "small": (63, 65), "odd": (70, 100), "b": (512, 9)}
"""`small` has 4,095 elements, `odd` 7,000, which 256 do not divide."""
HALVES = {fp32: torch.float32, bf16: torch.bfloat16}


def draws() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    random = np.random.default_rng(0)

    def draw() -> dict[str, Any]:
        return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}

    return draw(), [draw() for _ in range(STEPS)]


def ours(dtype: DType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Final weights, and the states by name, of one flat buffer without masters."""
    weights, grads = draws()
    device = cpu()
    flat = Flat("all", device, dtype, dtype)
    for name, shape in SHAPES.items():
        flat.declare(name, shape)
    flat.held = Held(whole(flat.numel), flat.numel)
    flat.param_shard = device.alloc((flat.numel,), dtype, Kind.PARAM)
    rounding = Rounding("nearest", 0) if dtype is bf16 else None
    optimizer = Adam8bit(*BETAS, 1e-8, DECAY, whole_blocks=True)
    updater = Updater(optimizer, StepControl(LRSchedule(LR)), rounding=rounding)
    updater.allocate(flat)
    for index, name in enumerate(SHAPES):
        flat.write(index, weights[name], exact_master=False)
    for step in grads:
        flat.grad_shard = device.alloc((flat.numel,), dtype, Kind.GRAD)
        device.backend.from_host(np.concatenate([step[name].reshape(-1) for name in SHAPES]), flat.grad_shard.array)
        assert updater.decide(1.0) == 1
        updater.update(flat, 1.0)
    final = {name: flat.window(flat.shard(), index).array for index, name in enumerate(SHAPES)}
    return {name: value.astype(np.float32) for name, value in final.items()}, dict(flat.states)


def theirs(dtype: DType) -> tuple[dict[str, Any], dict[str, Any]]:
    weights, grads = draws()
    half = HALVES[dtype]
    parameters = {name: torch.nn.Parameter(torch.tensor(value).to(half)) for name, value in weights.items()}
    optimizer = optim.AdamW8bit(parameters.values(), lr=LR, betas=BETAS, eps=1e-8, weight_decay=DECAY)
    with torch.compiler.set_stance("force_eager"):
        for step in grads:
            for name, parameter in parameters.items():
                parameter.grad = torch.tensor(step[name]).to(half)
            optimizer.step()
    states = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
    return {name: parameter.detach().float().numpy() for name, parameter in parameters.items()}, states


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_states_have_torchaos_bytes_and_weights_end_where_its_weights_end(dtype: DType) -> None:
    """Within 1 % of the way that weights went, by the root of mean squares."""
    (mine, states), (final, kept) = ours(dtype), theirs(dtype)
    coded = [name for name in SHAPES if hasattr(kept[name]["exp_avg"], "codes")]
    assert coded == ["a", "edge", "b"]
    floats = [kept[name]["exp_avg"] for name in SHAPES if name not in coded]
    assert {state.dtype for state in floats} == {HALVES[dtype]}
    for state in ("exp_avg", "exp_avg_sq"):
        assert states[state].nbytes == sum(kept[name][state].codes.nbytes for name in coded)
        assert states[f"{state}_absmax"].nbytes == sum(kept[name][state].scale.nbytes for name in coded)
        assert states[f"{state}_float"].nbytes == sum(each.nbytes for each in floats)
        assert kept["a"][state].qmap.nbytes == 1024  # a table beside each state, which we omit
    start, _ = draws()
    for name in SHAPES:
        way = np.sqrt(np.mean((mine[name] - start[name]) ** 2))
        off = np.sqrt(np.mean((mine[name] - final[name]) ** 2))
        print(f"{name}: {off / way:.2%} of the way")
        assert off <= 0.01 * way


def test_adapters_have_the_codes_that_torchao_gives_them() -> None:
    """q's and v's adapters of one block, fp32: every A and B of rank 16 has whole blocks; of rank 1, none has."""
    for rank, bytes_each in ((16, 2 + 8 / 256), (1, 8)):
        sizes: dict[str, Any] = dict(
            model="llama", layers=1, hidden=320, heads=4, seq=4, vocab=256, steps=1, kv_heads=4
        )
        config = RunConfig(**sizes, lora_rank=rank, adapter_dtype="fp32", optimizer="adam8bit-torchao", stage=0)
        result = plan(config)
        trained = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((rank, 320), (320, rank)) * 2]
        optimizer = optim.AdamW8bit(trained)
        new = [optimizer._new_buffer(one, signed) for one in trained for signed in (True, False)]
        real = sum(b.codes.nbytes + b.scale.nbytes if hasattr(b, "codes") else b.nbytes for b in new)
        assert sum(result.memory[0].states.values()) == real == 4 * 320 * rank * bytes_each


@pytest.mark.parametrize(("ranks", "coded"), [(16, [True, True]), (32, [True, False])])
def test_under_fsdp2_torchao_decides_by_the_rows_of_a_rank(ranks: int, coded: list[bool]) -> None:
    """B of 4,096 rows and rank 16 has 65,536 elements, 4,096 on each of 16 ranks. A rank has a row of A, or none. A
    plan decides by the whole tensor, and says so."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)  # type: ignore[no-untyped-call]
    try:
        mesh = dist.init_device_mesh("cpu", (ranks,))
        adapter = torch.nn.Sequential(torch.nn.Linear(4096, 16, bias=False), torch.nn.Linear(16, 4096, bias=False))
        optimizer = optim.AdamW8bit(fully_shard(adapter, mesh=mesh).parameters())
        states = [optimizer._new_buffer(one, True).to_local() for one in adapter.parameters()]
    finally:
        dist.destroy_process_group()
    assert [hasattr(one, "codes") for one in states] == coded
    config = plan_config(ranks=ranks, stage=3, recipe="fsdp2", lora_rank=4, optimizer="adam8bit-torchao")
    said = f"torchao decides by a rank's rows of a tensor: below {4096 * ranks:,} elements in all"
    assert said in " ".join(warnings_of(config, None, None, None))
