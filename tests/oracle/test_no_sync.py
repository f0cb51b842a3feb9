"""What FSDP holds of gradients between microbatches that it does not reduce: PyTorch's own, beside ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from zerosim import RunConfig, plan

BF16, FP32 = torch.bfloat16, torch.float32


def theirs(version: int, reduce_dtype: Any) -> float:
    """Return the bytes a parameter of gradients after two backwards of bf16 weights without a reduction."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)  # type: ignore[no-untyped-call]
    try:
        layers: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        if version == 1:
            mixed = MixedPrecision(param_dtype=BF16, reduce_dtype=reduce_dtype)
            model: Any = FullyShardedDataParallel(layers, device_id=torch.device("cpu"), mixed_precision=mixed)
            with model.no_sync():
                for _ in range(2):
                    model(torch.randn(4, 16)).sum().backward()
            grads = [model._handle.flat_param.grad]
        else:
            policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
            model = fully_shard(layers, mp_policy=policy, mesh=init_device_mesh("cpu", (4,)))
            model.set_requires_gradient_sync(False)
            for _ in range(2):
                model(torch.randn(4, 16)).sum().backward()
            found = model._get_fsdp_state()._fsdp_param_group.fsdp_params
            wide = [one.unsharded_accumulated_grad for one in found]
            grads = [one.unsharded_param.grad if w is None else w for one, w in zip(found, wide, strict=True)]
        return float(sum(grad.numel() * grad.element_size() for grad in grads) / sum(grad.numel() for grad in grads))
    finally:
        dist.destroy_process_group()


def ours(**changes: Any) -> float:
    sizes: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, vocab=256, ranks=4, steps=1, stage=3)
    result = plan(RunConfig(**sizes, accumulate=3, grad_sync=False, **changes))
    held = result.memory[0].marks["end_of_forward"].by_kind["unsharded_grad"]
    return held / sum(unit.numel for unit in result.units)


@pytest.mark.parametrize(
    ("version", "reduce_dtype", "changes", "each"),
    [
        (1, None, dict(), 2),
        (1, FP32, dict(compress="none"), 2),
        (2, FP32, dict(), 4),
        (2, BF16, dict(grad_dtype="bf16"), 2),
    ],
)
def test_unreduced_gradients_are_whole(version: int, reduce_dtype: Any, changes: dict[str, Any], each: int) -> None:
    """FSDP1 adds them in the gathered weights' dtype, whatever it reduces in. FSDP2 adds in the dtype of reductions."""
    assert theirs(version, reduce_dtype) == each
    assert ours(recipe=f"fsdp{version}", **changes) == each
