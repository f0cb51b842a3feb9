"""Any run, written as another framework's file with its launch script and read back, is the same run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from random_configs import drawn

from zerosim.config import OPTIONS, PLAN_DEFAULTS, RunConfig
from zerosim.dialects import Context, Document, document_of_text, read_documents
from zerosim.dialects.kinds import DIALECTS
from zerosim.dialects.launch import read as read_launch
from zerosim.dialects.shell import document_of_script
from zerosim.dialects.writing import NOT_SAID, write
from zerosim.errors import InputError

RECIPES = {"deepspeed": "deepspeed", "accelerate": "fsdp2", "torchtitan-toml": "fsdp2", "megatron": "megatron"}
READ = [kind for kind, dialect in DIALECTS.items() if dialect.reader]


def read_back(config: RunConfig, kind: str) -> RunConfig:
    """Write both files and read them."""
    path = f"out{DIALECTS[kind].suffix}"
    made = write(config, kind, path)
    launch = document_of_script("out.launch.sh", "launch", made.launch)
    if not DIALECTS[kind].reader:
        values: Mapping[str, Any] = read_launch(launch, Context()).values
    else:
        document = document_of_text(path, DIALECTS[kind].reader, made.text)
        launcher = "deepspeed" if kind == "deepspeed" else ""
        values = read_documents([document, launch], Context(launcher=launcher)).values
    return RunConfig(**{**PLAN_DEFAULTS, **values})


def unequal(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the options in which they differ, without those of this machine."""
    return {
        name: (one.value(name), other.value(name))
        for name in OPTIONS
        if name not in NOT_SAID and one.value(name) != other.value(name)
    }


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 8)) for seed in range(50)])
def test_a_written_run_reads_back(kind: str, seed: int) -> None:
    rng = random.Random(1000 + seed)

    def make(fields: Mapping[str, Any]) -> tuple[RunConfig, RunConfig]:
        config = RunConfig(**{**PLAN_DEFAULTS, **fields})
        return config, read_back(config, kind)

    fixed = {"recipe": RECIPES[kind]} if kind in RECIPES and rng.random() < 0.7 else {}
    _, (config, again) = drawn(rng, make, **fixed)
    assert unequal(config, again) == {}


@pytest.mark.parametrize("kind", DIALECTS)
def test_blocks_that_differ_are_in_the_script_alone(kind: str) -> None:
    recompute, recipe = "0=full+1-2=selective:layernorm,mlp", RECIPES.get(kind, "fsdp2")
    config = RunConfig(**PLAN_DEFAULTS, model="llama3-8b", ranks=8, recipe=recipe, recompute=recompute)
    made = write(config, kind, f"out{DIALECTS[kind].suffix}")
    assert f"--recompute {recompute}" in made.launch
    assert unequal(config, read_back(config, kind)) == {}


EIGHT_BITS: tuple[dict[str, Any], ...] = (
    {"fp8": "tensorwise"},
    {"fp8": "tensorwise", "fp8_library": "te", "fp8_exact_first": 1},
    {"fp8": "rowwise", "fp8_exact_wgrad": True, "fp8_exact_first": 1, "fp8_exact_last": 2},
    {"fp8": "delayed", "fp8_amax_history": 16, "fp8_amax_algo": "max", "fp8_margin": 1},
    {"fp8": "delayed", "fp8_format": "e4m3", "fp8_exact_wgrad": True, "fp8_exact_first": 2},
    {"fp8": "blockwise", "fp8_exact_last": 3},
    {"fp8": "blockwise", "fp8_library": "deepseek"},
    {"fp8": "mxfp8", "fp8_format": "hybrid", "fp8_exact_first": 1},
    {"fp8": "mxfp8", "fp8_library": "torchao", "mx_rounding": "even"},
    {"fp8": "mxfp8", "fp8_library": "torchao", "mx_rounding": "rceil", "fp8_exact_last": 1},
    {"fp8": "mxfp8", "fp8_library": "torchao", "kernels": "compiled", "tp": 2},
    {"fp8": "tensorwise", "fp8_gather": True, "fp8_exact_first": 1},
    {"fp8": "tensorwise", "fp8_library": "te", "fp8_param_gather": True},
    {"fp8": "delayed", "fp8_amax_history": 16, "fp8_amax_algo": "max", "fp8_param_gather": True},
    {"fp8": "blockwise", "fp8_library": "deepseek", "fp8_param_gather": True},
)


def in_eight_bits(kind: str, values: Mapping[str, Any]) -> RunConfig:
    recipe = RECIPES.get(kind, "fsdp2")
    leaves = recipe == "deepspeed" and values.get("fp8_param_gather")  # stage 3 would gather leaf modules
    stage = 1 if leaves or (recipe == "megatron" and not values.get("fp8_gather")) else 3
    if recipe == "megatron" and values.get("fp8_gather"):  # its own library is Transformer Engine
        values = {**values, "fp8_library": "torchao"}
    return RunConfig(**PLAN_DEFAULTS, model="llama3-8b", ranks=8, seq=1024, recipe=recipe, stage=stage, **values)


@pytest.mark.parametrize("kind", DIALECTS)
@pytest.mark.parametrize("values", EIGHT_BITS, ids=lambda values: "-".join(map(str, values.values())))
def test_products_in_eight_bits_read_back(kind: str, values: dict[str, Any]) -> None:
    if kind == "deepspeed" and "fp8_gather" in values:
        return
    config = in_eight_bits(kind, values)
    assert unequal(config, read_back(config, kind)) == {}


@pytest.mark.parametrize(
    ("kind", "values", "said", "rest"),
    [
        ("accelerate", EIGHT_BITS[0], ("mixed_precision: fp8", "backend: AO"), set()),
        ("accelerate", EIGHT_BITS[3], ("backend: TE", "amax_history_len: 16"), set()),
        ("accelerate", EIGHT_BITS[5], ("mixed_precision: bf16",), {"fp8", "fp8_exact_last"}),
        ("torchtitan-toml", EIGHT_BITS[2], ('"rowwise_with_gw_hp"', '"layers.31."'), set()),
        ("torchtitan-toml", EIGHT_BITS[9], ('"mxfp8_cublas_rceil"',), set()),
        ("torchtitan-toml", EIGHT_BITS[8], ('"mxfp8_cublas"',), {"mx_rounding"}),
        ("torchtitan-toml", EIGHT_BITS[3], (), {"fp8", "fp8_amax_history", "fp8_amax_algo", "fp8_margin"}),
        ("megatron", EIGHT_BITS[1], ("--fp8-recipe tensorwise", "--first-last-layers-bf16"), set()),
        ("megatron", EIGHT_BITS[3], ("--fp8-format hybrid", "--fp8-amax-compute-algo max"), set()),
        ("megatron", EIGHT_BITS[0], ("--fp8-recipe tensorwise",), set()),
        ("deepspeed", EIGHT_BITS[0], (), {"fp8"}),
        ("accelerate", EIGHT_BITS[0], ("enable_fsdp_float8_all_gather: false",), set()),
        ("accelerate", EIGHT_BITS[11], ("enable_fsdp_float8_all_gather: true",), {"fp8_exact_first"}),
        ("accelerate", EIGHT_BITS[13], ("backend: TE",), {"fp8_param_gather"}),
        (
            "torchtitan-toml",
            EIGHT_BITS[11],
            ("enable_fsdp_float8_all_gather = true", "precompute_float8_dynamic_scale_for_fsdp = true"),
            set(),
        ),
        ("megatron", EIGHT_BITS[12], ("--fp8-recipe tensorwise", "--fp8-param-gather"), set()),
        ("megatron", EIGHT_BITS[13], ("--fp8-param-gather",), set()),
        ("megatron", EIGHT_BITS[14], (), {"fp8", "fp8_library", "fp8_param_gather"}),
        ("torchtitan", EIGHT_BITS[2], ("Float8LinearConverter.Config(recipe_name=", '"layers.0."'), None),
        (
            "torchtitan",
            EIGHT_BITS[0],
            ("# --fp8 tensorwise of torchao: torchtitan 0.3 has no converter for it.",),
            None,
        ),
        ("fsdp2", EIGHT_BITS[0], ("# --fp8 tensorwise: not in this script. torchao would convert",), None),
    ],
)
def test_products_in_eight_bits_are_in_the_file_or_beside_it(
    kind: str, values: dict[str, Any], said: tuple[str, ...], rest: set[str] | None
) -> None:
    made = write(in_eight_bits(kind, values), kind, f"out{DIALECTS[kind].suffix}")
    assert all(one in made.text for one in said)
    beside = {name for name in made.rest if name.startswith(("fp8", "mx_"))}
    assert beside == (set(values) if rest is None else rest)


def test_megatron_keeps_codes_of_divided_states_alone() -> None:
    values = {"fp8": "delayed", "fp8_param_gather": True}
    config = RunConfig(**PLAN_DEFAULTS, model="llama3-8b", ranks=8, seq=1024, recipe="megatron", stage=0, **values)
    assert "--fp8-param-gather" not in write(config, "megatron", "out.sh").text
    assert unequal(config, read_back(config, "megatron")) == {}


def test_replicas_are_no_part_of_deepspeeds_file() -> None:
    config = RunConfig(stage=3, ranks=4, dp_replicate=2, recipe="deepspeed")
    with pytest.raises(InputError, match=r"no replicas since 0\.19\.7"):
        write(config, "deepspeed", "ds.json")


def test_a_file_says_all_that_it_can_and_the_script_the_rest() -> None:
    config = RunConfig(
        **PLAN_DEFAULTS, model="llama3-8b", ranks=16, ranks_per_node=8, recipe="deepspeed", recompute="full",
        accumulate=8, reduce_bucket=10**8, offload="optimizer=host", pin_memory=True, clip_norm=0.5, seq=4096,
    )  # fmt: skip
    made = write(config, "deepspeed", "ds.json")
    assert set(made.rest) == {"model", "ranks", "ranks_per_node", "recompute", "seq"}
    assert "# zerosim: --model llama3-8b --ranks 16" in made.launch
    assert "deepspeed --num_nodes 2 --num_gpus 8 train.py --deepspeed ds.json" in made.launch


def test_a_launch_script_alone_is_refused() -> None:
    with pytest.raises(InputError, match="pass the file that it launches too"):
        read_documents([Document("a.sh", "launch", {"flags": ["--ranks", "8"]})], Context())
