"""The search's answer beside layouts that others published: the same model, GPUs, rows and build, and at least as fast.

One layout is no rival: its plan is faster than any MFU that was published for its GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.analysis.mesh_search import best_meshes
from zerosim.analysis.meshes import ladders
from zerosim.analysis.search import Devices
from zerosim.config import plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.report.verdict import Limit

TITAN: dict[str, Any] = dict(recipe="fsdp2", stage=3)
MEGATRON: dict[str, Any] = dict(recipe="megatron", stage=1, overlap="all")
LLAMA_13B: dict[str, Any] = dict(model="llama", layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824)
GPT: dict[str, Any] = dict(model="gpt", seq=4096, positions=4096, vocab=131072, dropout=0.0)
PTD: dict[str, Any] = dict(model="gpt", seq=2048, vocab=51200, dropout=0.1, precision="fp16")
OF_PTD: dict[str, Any] = dict(recipe="megatron", stage=0, tp=8, recompute="full", micro_batch=1)
OF_405B: dict[str, Any] = dict(TITAN, tp=8, sequence_parallel=True, micro_batch=2, recompute="full")
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "torchtitan, Llama 2 70B": (
        "a100-80", 64, dict(model="llama2-70b", seq=4096), dict(TITAN, micro_batch=2, recompute="full")),
    "torchtitan, Llama 3 8B": ("a100-80", 64, dict(model="llama3-8b"), dict(TITAN, recompute="full:2")),
    "torchtitan, Llama 2 13B": (
        "a100-80", 64, dict(LLAMA_13B, vocab=32000, seq=4096), dict(TITAN, micro_batch=2, recompute="selective:op")),
    "torchtitan, Llama 3.1 405B": ("h100-96", 128, dict(model="llama3.1-405b", seq=8192), OF_405B),
    "Megatron-LM's table, 192 GPUs": (
        "h100-80", 192, dict(GPT, layers=32, hidden=6144, heads=48),
        dict(MEGATRON, tp=4, sequence_parallel=True, accumulate=4)),
    "Megatron-LM's table, 768 GPUs": (
        "h100-80", 768, dict(GPT, layers=84, hidden=8192, heads=64),
        dict(MEGATRON, tp=8, pp=2, sequence_parallel=True, accumulate=8)),
    "2104.04473, 18.4B": (
        "a100-80", 256, dict(PTD, layers=40, hidden=6144, heads=48), dict(OF_PTD, accumulate=32)),
    "2104.04473, 39.1B": (
        "a100-80", 512, dict(PTD, layers=48, hidden=8192, heads=64), dict(OF_PTD, pp=2, accumulate=48)),
    "2104.04473, 76.1B": (
        "a100-80", 1024, dict(PTD, layers=60, hidden=10240, heads=80), dict(OF_PTD, pp=4, accumulate=56)),
    "torchtitan, Llama 3.1 8B, compiled": (
        "h100-96", 128, dict(model="llama3-8b", seq=8192, kernels="compiled"),
        dict(TITAN, micro_batch=2, recompute="selective:op")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_answer_is_at_least_as_fast(name: str) -> None:
    gpu, ranks, model, layout = LAYOUTS[name]
    device = find_hardware(gpu)
    limit = Limit(device.name, device.memory_bytes, device)
    devices = Devices(limit.nbytes, limit.reserve, cluster_of(device, node_gpus=8))
    published = plan_config(**model, **layout, ranks=ranks, attention="flash")
    base = plan_config(**model, ranks=ranks, attention="flash", recipe="usual")
    known = devices.within(published)
    assert known is not None
    assert known.time is not None
    found = best_meshes(base, ladders(base, published.global_batch, 8), devices, most=1).found[0]
    assert found.time is not None
    assert found.config.global_batch == published.global_batch
    assert found.config.parallel.recipe != "paper"
    if devices.is_implausible(known):
        assert not devices.is_implausible(found)
    else:
        assert found.time.seconds <= known.time.seconds
