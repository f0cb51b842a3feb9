"""A configuration is eight frozen parts; flat names are keywords, flags and keys, each declared once."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zerosim.config import (
    OPTIONS,
    PLAN_DEFAULTS,
    DataConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    WorldConfig,
    plan_config,
)
from zerosim.config.run import PARTS
from zerosim.errors import InputError

CONFIGS = [
    RunConfig(),
    RunConfig(stage=2, ranks=8, dp_replicate=2, model="gpt2", precision="fp16", betas=(0.8, 0.9), data="x.txt"),
    RunConfig(model="llama", hidden=128, parallel=2, schedule="cosine", world="mpi", ranks=6, ranks_per_process=2),
    RunConfig(model="flat", params="7.5B", units=3, capacity="32GB", bucket_bytes=None, collective="ring"),
]


def test_flat_keywords_and_parts_make_one_configuration() -> None:
    flat = RunConfig(stage=1, ranks=8, model="gpt2", precision="fp16", schedule="cosine", parallel=2, data="x", seed=3)
    parts = RunConfig(
        model=ModelConfig(name="gpt2"),
        mesh=MeshConfig(ranks=8),
        parallel=ParallelConfig(zero_stage=1),
        precision=PrecisionConfig(param_dtype="fp16"),
        optim=OptimConfig(lr_schedule="cosine"),
        data=DataConfig(file="x", seed=3),
        world=WorldConfig(max_running=2),
    )
    mixed = RunConfig(mesh=MeshConfig(ranks=8), stage=1, model=ModelConfig(name="gpt2"), precision="fp16",
                      optim=OptimConfig(lr_schedule="cosine"), parallel=2, data="x", seed=3)  # fmt: skip
    assert flat == parts == mixed
    assert (flat.parallel.zero_stage, flat.optim.lr_schedule, flat.world.max_running) == (1, "cosine", 2)


def test_replace_takes_flat_values_and_parts() -> None:
    config = RunConfig(stage=1, model="gpt2", precision="fp16", loss_scale=8.0)
    assert config.replace(precision="bf16").precision == PrecisionConfig(param_dtype="bf16", loss_scale=8.0)
    assert config.replace(precision=PrecisionConfig()).precision == PrecisionConfig()
    assert config.replace(stage=2, parallel=4).to_dict() == {**config.to_dict(), "stage": 2, "parallel": 4}
    assert config.replace(model="gpt").model == ModelConfig()  # another model brings its own sizes
    assert config.replace(model="gpt2", layers=2).model.hidden == 768
    assert dataclasses.replace(config, seed=9) == config.replace(seed=9)
    assert config.replace(memory=MemoryConfig(recompute="full"), saves="megatron").memory == MemoryConfig(
        recompute="full", saves="megatron"
    )


def test_another_stage_goes_without_the_options_that_it_does_not_have() -> None:
    config = RunConfig(stage=1, ranks=8, dp_replicate=2, reduce_bucket=1000, seed=3)
    assert config.at_stage(2) == config.replace(stage=2)
    assert config.at_stage(0) == RunConfig(stage=0, ranks=8, seed=3)


def test_a_plan_assumes_what_no_part_says() -> None:
    assert {name: plan_config().to_dict()[name] for name in PLAN_DEFAULTS} == PLAN_DEFAULTS
    assert plan_config(micro_batch=2).data.micro_batch == 2
    own = plan_config(memory=MemoryConfig(), data=DataConfig(micro_batch=3))
    assert (own.memory.saves, own.data.micro_batch, own.parallel.bucket_bytes) == ("lean", 3, None)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_a_configuration_is_a_value(config: RunConfig) -> None:
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), eval(repr(config))):
        assert twin == config
        assert hash(twin) == hash(config)
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert list(config.to_dict()) == list(OPTIONS)
    for name in PARTS:
        part = getattr(config, name)
        assert eval(repr(part)) == part
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, part)


def test_what_is_shown_is_what_is_not_the_default() -> None:
    assert repr(RunConfig()) == "RunConfig()"
    assert repr(RunConfig(stage=2, model="gpt2", seed=0)) == "RunConfig(model='gpt2', stage=2)"
    assert repr(ParallelConfig(zero_stage=1)) == "ParallelConfig(zero_stage=1)"


def test_every_field_is_declared_once_and_well() -> None:
    assert len(OPTIONS) == sum(len(part.options()) for part in PARTS.values())
    assert list(inspect.signature(RunConfig).parameters) == list(OPTIONS)
    for option in OPTIONS.values():
        assert option.help, option.flat
        assert option.choices or option.metavar or option.kinds[0] == "bool", option.flat
        option.check(option.default)
        for word in option.choices:
            option.check(option.taken(word))
        for bound in (option.low, option.high):
            if bound is not None:
                option.check(bound)
        too_low = None if option.low is None else option.low - 1
        for beyond in (too_low, option.above, option.below):
            if beyond is not None:
                with pytest.raises(InputError, match=option.flat):
                    option.check(beyond)


@pytest.mark.parametrize("option", [o for o in OPTIONS.values() if o.high is not None], ids=lambda o: o.flat)
def test_what_is_out_of_range_is_named_by_its_flat_name(option: Any) -> None:
    with pytest.raises(InputError, match=f"^{option.flat} .*expected at least {option.low} and at most {option.high}"):
        RunConfig(model="flat", **{option.flat: type(option.high)(option.high + option.high)})


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("stage", "3", "stage '3': expected int"),
        ("dp_replicate", 2.0, "dp_replicate 2.0: expected int"),
        ("betas", 0.9, "betas 0.9: expected"),
        ("lr", True, "lr True: expected"),
        ("capacity", "lots", "capacity 'lots' is not a size"),
        ("tp", 3, "tp 3 does not divide ranks 4"),
    ],
)
def test_from_python_a_field_has_its_own_name(field: str, value: Any, said: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(said)}"):
        RunConfig(**{field: value})


def test_a_keyword_that_there_is_not_is_named() -> None:
    with pytest.raises(TypeError, match="'stge': did you mean 'stage'"):
        RunConfig(stge=2)
    with pytest.raises(InputError, match="mesh 4: expected a MeshConfig"):
        RunConfig(mesh=4)


def test_an_error_carries_its_field_and_begins_with_another_name_where_it_begins_with_the_field(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        '{"model_type": "gpt2", "n_embd": 96, "n_head": 6, "n_layer": 2, "n_positions": 8, "vocab_size": 256}',
        encoding="utf-8",
    )
    cases: list[tuple[str, dict[str, Any]]] = [
        ("tp", {"tp": 3, "dp_replicate": 2}),
        ("betas", {"betas": (0.9, 2.0)}),
        ("units", {"model": "flat", "units": 5, "ranks": 2, "pp": 2}),
        ("stage_layers", {"stage_layers": "1,0", "ranks": 2, "pp": 2}),
    ]
    for field, values in cases:
        with pytest.raises(InputError) as refused:
            RunConfig(**values)
        said, told = refused.value, pickle.loads(pickle.dumps(refused.value))
        assert (said.field, told.field) == (field, field)
        assert str(told.called(f"--{field}")) == f"--{said}"
        assert str(said.called("--x").called("--y")) == str(said.called("--x"))
    with pytest.raises(InputError, match=r"config\.json: heads 7 do not divide") as refused:
        RunConfig(model=str(file), heads=7)
    assert refused.value.field == "heads"
    assert str(refused.value.called("--heads")) == str(refused.value)


SAID: dict[str, list[Any]] = {
    "model": ["gpt", "llama", "mlp", "flat", "gpt2", "GPT2-XL", "llama2-7b"],
    "layers": [2, 4, None],
    "hidden": [96, 192, None],
    "heads": [6, 12, None],
    "kv_heads": [6],
    "ffn": [256],
    "seq": [32, 2048],
    "vocab": [512],
    "params": ["1M"],
    "stage": [0, 1, 2, 3],
    "recipe": ["paper", "ddp", "deepspeed", "fsdp2", "megatron"],
    "ranks": [2, 8, None],
    "dp_replicate": [1, 2],
    "tp": [1, 2],
    "pp": [1, 2],
    "sequence_parallel": [True],
    "partition": ["owner", None],
    "reduce_bucket": [1000, None],
    "prefetch": [1, None],
    "prefetch_elements": [100],
    "gather": ["module", "unit", None],
    "bucket_bytes": [None, "1MB"],
    "precision": ["fp32", "bf16-pure"],
    "grad_dtype": ["fp32", None],
    "optimizer": ["sgd", "muon", "adafactor"],
    "lr": [0.1, None],
    "betas": [(0.8, 0.9), None],
    "recompute": ["full", "selective"],
    "saves": ["megatron"],
}


@st.composite
def _said(draw: st.DrawFn) -> dict[str, Any]:
    return {
        name: draw(st.sampled_from(SAID[name])) for name in draw(st.sets(st.sampled_from(sorted(SAID)), max_size=4))
    }


def _outcome(make: Callable[[], RunConfig]) -> object:
    try:
        return make()
    except InputError as error:
        return str(error), error.field


@settings(max_examples=150, deadline=None)
@given(_said(), _said())
@example({"model": "gpt2"}, {"hidden": 96})
@example({"model": "gpt2", "layers": 2}, {"model": "llama"})
@example({"hidden": 96, "layers": 2}, {"hidden": None})
@example({"optimizer": "muon"}, {"stage": 1})
def test_a_replaced_configuration_is_the_one_that_is_made_at_once(first: dict[str, Any], then: dict[str, Any]) -> None:
    before = _outcome(lambda: RunConfig(**first))
    if isinstance(before, RunConfig):
        known = pickle.loads(pickle.dumps(before))
        after = _outcome(lambda: known.replace(**then))
        assert after == _outcome(lambda: RunConfig(**{**first, **then}))
        if isinstance(after, RunConfig):
            assert RunConfig(**after.given) == RunConfig.from_dict(after.to_dict()) == after


def test_what_mpirun_says_of_the_ranks_and_what_a_part_says_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = RunConfig(model=ModelConfig(name="gpt2", layers=2))
    assert wide.replace(hidden=96).model == ModelConfig(name="gpt2", layers=2, hidden=96)
    assert wide.replace(layers=None, model=ModelConfig(hidden=96)).given == {"model": "gpt", "hidden": 96}
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "6")
    config = RunConfig(world="mpi")
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    assert config.replace(world="threads") == RunConfig(ranks=6)
