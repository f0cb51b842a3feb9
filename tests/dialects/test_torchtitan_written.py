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
from zerosim.dialects.torchtitan.pipeline import SCHEDULES
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
    if values["precision"] == "bf16":
        values |= draw.choice(({}, {"compress": "bf16"}))
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


SCRIPTS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "smallest": (
        {"loss": "hf-5"},
        ("fully_shard(block, **policy)", "(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"),
        ("checkpoint_wrapper", "parallelize_module", "set_requires", "clip", "groups", "compile", "Offload", "F."),
    ),
    "two meshes": (
        {"tp": 2, "dp_replicate": 2, "accumulate": 4, "grad_sync": False, "clip_norm": 1.0, "recompute": "full:2"},
        (
            'mesh["dp_replicate", "dp_shard"]', "clip_grads_with_norm_", "groups.setdefault(p.device_mesh, [])",
            "set_requires_gradient_sync(micro == ACCUMULATE - 1)", "if (index + 1) % 2 == 0:",
        ),
        ("clip_grad_norm_",),
    ),
    "host": (
        {"offload": "optimizer=host,params=host", "pin_memory": True, "kernels": "compiled", "model": "gpt2"},
        ("CPUOffloadPolicy(pin_memory=", '"cpu:gloo,cuda:nccl"', "block.compile()", "GPT2Config("),
        (),
    ),
    "kept": (
        {"reshard_after_forward": False, "precision": "bf16-pure", "schedule": "cosine", "warmup": 10},
        ("fully_shard(block, **policy, reshard_after_forward=False)", "model.to(torch.bfloat16)", "LambdaLR"),
        ("MixedPrecisionPolicy",),
    ),
    "hpZ": ({"secondary_shard": 4, "ranks_per_node": 4}, ("reshard_after_forward=min(4, SHARD)",), ()),
    "other sizes": ({"model": "qwen3-8b"}, ('AutoConfig.from_pretrained("config.json")',), ()),
}  # fmt: skip


def small(**values: Any) -> RunConfig:
    usual = {"model": "llama3-8b", "ranks": 8, "optimizer": "adamw", "micro_batch": 1, "bucket_bytes": None}
    return RunConfig(**{**usual, "recipe": "fsdp2", "attention": "flash", **values})


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_the_parts_that_its_configuration_needs(name: str) -> None:
    values, has, lacks = SCRIPTS[name]
    text = fsdp2.written(small(**values))
    ast.parse(text)
    assert text.startswith("# ")
    assert [part for part in has if part not in text] == []
    assert [part for part in lacks if part in text] == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stage": 1}, "stage 1"),
        ({"pp": 2, "accumulate": 4}, "pp 2"),
        ({"cp": 2}, "cp 2"),
        ({"model": "gpt2", "tp": 2}, "tp 2"),
        ({"precision": "fp16"}, "precision 'fp16'"),
        ({"model": "flat", "attention": "eager"}, "model 'flat'"),
    ],
)
def test_what_no_script_can_have(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fsdp2.written(small(**values))


@pytest.mark.parametrize("writer", [torchtitan, torchtitan_toml])
def test_what_no_torchtitan_can_have(writer: Any) -> None:
    for values in ({"stage": 1}, {"stage": 0, "tp": 2, "recipe": "ddp"}):
        with pytest.raises(InputError, match="torchtitan"):
            writer.written(small(**values))


def test_sizes_without_a_flavor() -> None:
    other = small(layers=2)
    assert "[model]" not in torchtitan_toml.written(other)
    with pytest.raises(InputError, match="no flavor"):
        torchtitan.written(other)


@pytest.mark.parametrize("seed", range(12))
def test_page_of_torchtitan_3(seed: int) -> None:
    """It is Python, and its calls say what the TOML of 0.2 says."""
    config = drawn(seed)
    if config.model.name == "llama4-scout":  # gone in 0.3
        return
    tree = ast.parse(torchtitan.written(config))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    words = {word.arg: word.value for call in calls for word in call.keywords}
    sections = tomllib.loads(torchtitan_toml.written(config))
    for section in ("training", "lr_scheduler"):
        for key, value in sections[section].items():
            assert ast.literal_eval(words[key]) == value
    assert ast.literal_eval(words["data_parallel_shard_degree"]) == config.mesh.axes.dp_shard
    assert ast.literal_eval(words["disable_cuda_graphs"]) is True
