"""What is written for torchtitan and plain FSDP2: a TOML that reads back as the same run, and pages of Python."""

from __future__ import annotations

import ast
import random
import tomllib
from typing import Any

import pytest

from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.config.parts import OPTIONS
from zerosim.dialects import Context
from zerosim.dialects.reading import Document, flat
from zerosim.dialects.torchtitan import read
from zerosim.dialects.torchtitan_pipeline import SCHEDULES
from zerosim.dialects.written import fsdp2, torchtitan, torchtitan_toml
from zerosim.errors import InputError

MODELS = ("llama3-8b", "llama3-70b", "qwen3-0.6b", "deepseek-v2-lite", "llama4-scout", "gpt-oss-20b")
SAID = {"attention": "flash", "lazy_states": True, "warmup": 200, "recipe": "fsdp2"}
"""What torchtitan does in any case."""


def drawn(seed: int) -> RunConfig:
    """Return a configuration that torchtitan can say."""
    draw = random.Random(seed)
    while True:
        try:
            return RunConfig(**{**PLAN_DEFAULTS, **SAID, **_values(draw)})
        except InputError:
            continue


def _values(draw: random.Random) -> dict[str, Any]:
    model = draw.choice(MODELS)
    has_experts, family = not model.startswith(("llama3", "qwen")), model.partition("-")[0]
    is_piped, is_ring = family not in ("qwen3", "gpt"), family in ("llama3", "llama4", "qwen3")
    tp, cp, replicate = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2)) if is_ring else 1, draw.choice((1, 1, 2))
    pp = draw.choice((1, 1, 2, 4)) if is_piped else 1
    shard, micro = draw.choice((2, 4, 8)), draw.choice((1, 2))
    values: dict[str, Any] = {
        "model": model, "seq": draw.choice((2048, 4096, 8192)), "ranks": tp * cp * pp * replicate * shard,
        "tp": tp, "cp": cp, "pp": pp, "dp_replicate": replicate, "micro_batch": micro, "stage": 3,
        "accumulate": draw.choice((1, 2, 8)) * (2 * pp if pp > 1 else 1),
        "precision": draw.choice(("bf16", "bf16", "fp32", "bf16-pure")), "optimizer": draw.choice(("adam", "adamw")),
        "lr": draw.choice((3e-4, 8e-5, 1.7e-3)), "betas": (0.9, draw.choice((0.95, 0.999))), "eps": 1e-8,
        "weight_decay": draw.choice((0.0, 0.1)), "clip_norm": draw.choice((0.0, 1.0)),
        "recompute": draw.choice(("none", "full", "full:2", "full:3", "selective:op")),
        "kernels": draw.choice(("eager", "compiled")), "loss": draw.choice(("lean", "torch")),
        "foreach": False,
    }  # fmt: skip
    values |= draw.choice(({}, {"foreach": True}, {"for_loop": True}))
    if tp > 1:
        values |= {"sequence_parallel": True}
        values |= {"tp_comm_overlap": True} if values["kernels"] == "compiled" and draw.random() < 0.5 else {}
    if cp > 1:
        values |= {"context": draw.choice(("allgather", "ring")), "context_order": "zigzag"}
    if has_experts:
        values |= {"bias_rate": 1e-3, "ep": draw.choice((1, shard, shard * tp))}
        values |= {"etp": draw.choice((1, tp))} if values["ep"] > 1 and tp > 1 else {}
        values |= {"dispatcher": "deepep"} if values["ep"] > 1 and values.get("etp", 1) == 1 and pp == 2 else {}
    if draw.random() < 0.3:
        values |= {"schedule": "cosine", "min_lr": float(f"{values['lr'] * draw.choice((0, 0.1, 0.3)):.12g}")}
    if draw.random() < 0.2:
        values |= {"offload": "optimizer=host,params=host", "pin_memory": True}
    root = {"keep_root_units": False, "keep_last_unit": False}
    if pp == 1:
        values |= draw.choice((root, root | {"keep_last_unit": True}, {"reshard_after_forward": False}))
    else:
        layers, chunks = RunConfig(model=model, ranks=1).model.layers, pp * 2
        values |= {"grad_sync": False, "pipeline": draw.choice(list(SCHEDULES.values()))}
        values |= draw.choice((root, {"reshard_after_forward": False}))
        if values["pipeline"] == "interleaved":
            values["virtual_stages"] = draw.choice((2, 3))
            chunks = pp * values["virtual_stages"]
        elif values["pipeline"] != "zb-v":
            chunks = pp
        counts = [layers // chunks + (index < layers % chunks) for index in range(chunks)]
        if draw.random() < 0.5:
            counts[0], counts[1] = counts[0] - 1, counts[1] + 1
        if len(set(counts)) > 1:
            values["stage_layers"] = ",".join(map(str, counts))
    return values


@pytest.mark.parametrize("seed", range(40))
def test_toml_reads_back_as_the_same_run(seed: int) -> None:
    config = drawn(seed)
    keys = flat(tomllib.loads(torchtitan_toml.written(config)))
    reading = read(Document("titan.toml", "torchtitan", keys), Context())
    reading.check()
    back = RunConfig(**{**PLAN_DEFAULTS, **reading.values})
    assert {
        name: (config.value(name), back.value(name)) for name in OPTIONS if config.value(name) != back.value(name)
    } == {}
