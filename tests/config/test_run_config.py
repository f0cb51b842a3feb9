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

from zerosim.config import OPTIONS, PLAN_DEFAULTS, RunConfig, plan_config
from zerosim.config.parts import PARTS
from zerosim.errors import InputError

CONFIGS = [
    RunConfig(),
    RunConfig(stage=2, ranks=8, dp_replicate=2, model="gpt2", precision="fp16", betas=(0.8, 0.9), data="x.txt"),
    RunConfig(model="llama", hidden=128, parallel=2, schedule="cosine", world="mpi", ranks=6, ranks_per_process=2),
    RunConfig(model="flat", params="7.5B", units=3, capacity="32GB", bucket_bytes=None, collective="ring"),
]


def test_a_flat_name_is_a_field_of_a_part() -> None:
    config = RunConfig(stage=1, lr=0.1, schedule="cosine", parallel=2, data="x", upcast_grads=True, model="GPT2")
    assert (config.parallel.zero_stage, config.optim.lr, config.optim.lr_schedule) == (1, 0.1, "cosine")
    assert (config.world.max_running, config.data.file, config.grads.upcast) == (2, "x", True)
    assert config.model.hidden == 768


def test_replace_takes_flat_values() -> None:
    config = RunConfig(stage=1, model="gpt2", precision="fp16", loss_scale=8.0)
    assert config.replace(precision="bf16") == RunConfig(stage=1, model="gpt2", loss_scale=8.0)
    assert config.replace(stage=2, parallel=4).to_dict() == {**config.to_dict(), "stage": 2, "parallel": 4}
    assert config.replace(model="gpt").model == RunConfig().model  # another model brings its own sizes
    assert config.replace(model="gpt2", layers=2).model.hidden == 768


def test_another_stage_goes_without_the_options_that_it_does_not_have() -> None:
    config = RunConfig(stage=1, ranks=8, dp_replicate=2, reduce_bucket=1000, seed=3)
    assert config.at_stage(2) == config.replace(stage=2)
    assert config.at_stage(0) == RunConfig(stage=0, ranks=8, seed=3)
    ahead = RunConfig(recipe="deepspeed", prefetch=2)
    assert [ahead.at_stage(stage).gathering.prefetch for stage in range(4)] == [0, 0, 0, 2]
    assert [ahead.at_stage(stage).gathering.gather for stage in range(4)] == ["unit"] * 3 + ["module"]


def test_a_plan_assumes_what_is_not_said() -> None:
    assert {name: plan_config().to_dict()[name] for name in PLAN_DEFAULTS} == PLAN_DEFAULTS
    assert plan_config(micro_batch=2).data.micro_batch == 2


def test_what_follows_from_others_has_a_value_when_it_is_built() -> None:
    config = RunConfig(optimizer="muon", precision="fp16", recipe="fsdp2", stage=3, foreach=False)
    assert (config.parallel.partition, config.gathering.gather, config.optim.momentum) == ("owner", "module", 0.95)
    assert (config.precision.loss_scale, config.precision.grad_dtype) == ("dynamic", "fp32")
    assert (config.gathering.prefetch, config.optim.foreach, config.parallel.overlap) == (1, False, "all")
    written = config.to_dict()  # what was not said follows again when it is read
    assert [written[name] for name in ("lr", "partition", "prefetch", "grad_dtype", "foreach")] == [None] * 4 + [False]
    assert RunConfig.from_dict({**written, "optimizer": "sgd"}).parallel.partition == "slices"
    plain, with_lr = RunConfig(optimizer="adafactor-hf"), RunConfig(optimizer="adafactor-hf", lr=1e-2)
    assert (plain.optim.relative_step, with_lr.optim.relative_step) == (True, False)
    assert plain != with_lr


@pytest.mark.parametrize(
    ("values", "set_aside"),
    [
        ({"recipe": "deepspeed", "stage": 2, "partition": "owner"}, "grad_reduction reduce_bucket grads_in_partition"),
        ({"recipe": "deepspeed", "optimizer": "muon"}, "reduce_bucket overlap_comm"),
        ({"recipe": "deepspeed", "prefetch": 1}, "prefetch_elements max_live"),
        ({"recipe": "fsdp2", "prefetch_elements": 5}, "prefetch"),
        ({"recipe": "fsdp2", "reduce_bucket": 600}, "overlap_reduction"),
        ({"recipe": "deepspeed", "overlap_reduction": True}, "reduce_bucket overlap_comm"),
        ({"recipe": "megatron", "precision": "fp16", "upcast_grads": False}, "keep_upcast"),
        ({"recipe": "ddp", "stage": 0, "ranks": 1}, "grad_buckets"),
        ({"recipe": "ddp", "stage": 0, "ranks": 4, "tp": 2, "pp": 2, "accumulate": 2}, "grad_buckets"),
        ({"recipe": "ddp", "stage": 0, "ranks": 4, "tp": 2}, ""),
        ({"recipe": "ddp", "stage": 0, "ranks": 1, "grad_buckets": "copies"}, ""),
        ({"recipe": "deepspeed"}, ""),
        ({"partition": "owner", "gather": "module"}, ""),
    ],
)
def test_a_value_of_the_recipe_that_loses_is_set_aside_and_told(values: dict[str, Any], set_aside: str) -> None:
    config, names = RunConfig(**values), set_aside.split()
    off = RunConfig(**values, **{name: OPTIONS[name].default for name in names})
    assert (list(config.set_aside), off.set_aside, config) == (names, {}, off)
    for name, said in config.set_aside.items():
        assert said.startswith(f"recipe {values['recipe']}'s {name}")
        assert any(
            other in said for other in {*values, "muon", "prefetch_elements", "reduce_bucket"} - {"recipe", "stage"}
        )


def test_a_wish_that_this_stage_cannot_grant_is_told() -> None:
    asked = RunConfig(stage=0, overlap="gather")
    assert asked.set_aside == {"overlap": "overlap 'gather', stage 0 gathers nothing"}
    assert asked.at_stage(3).set_aside == {} == RunConfig(stage=0, overlap="all").set_aside
    through = RunConfig(stage=1, overlap="all", allgather_bucket=100)
    assert through.set_aside["overlap"].startswith("overlap 'all', not with allgather_bucket 100")
    assert (through.parallel.overlap, through.reduction.in_forward) == ("reduce", False)


@pytest.mark.parametrize(
    ("wish", "values", "in_detail"),
    [
        ("reduce", {"stage": 1}, {"overlap_reduction": True}),
        ("all", {}, {"overlap_reduction": True, "prefetch": 1}),
        ("all", {"stage": 2}, {"overlap_reduction": True, "overlap_param_gather": True}),
        ("gather", {"stage": 1}, {"overlap_param_gather": True}),
        ("all", {"stage": 0}, {"overlap_reduction": True}),
        ("all", {"stage": 1, "overlap_param_gather": False}, {"overlap_reduction": True}),
        ("all", {"recipe": "deepspeed"}, {"reduce_buffers": 2}),
        ("gather", {"recipe": "fsdp2"}, {"overlap_reduction": False}),
        ("none", {"recipe": "fsdp2"}, {"overlap_reduction": False, "prefetch": 0}),
        ("none", {"recipe": "deepspeed"}, {"prefetch_elements": 0, "max_live": 0, "overlap_comm": False}),
        ("reduce", {"recipe": "deepspeed", "partition": "owner", "stage": 2}, {"overlap_reduction": True}),
        ("all", {"prefetch": 2}, {"overlap_reduction": True}),
        ("none", {"prefetch_elements": 5}, {}),
    ],
)
def test_overlap_is_one_wish(wish: str, values: dict[str, Any], in_detail: dict[str, Any]) -> None:
    assert RunConfig(overlap=wish, **values) == RunConfig(**{**in_detail, **values})


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_a_configuration_is_a_value(config: RunConfig) -> None:
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), eval(repr(config))):
        assert twin == config
        assert hash(twin) == hash(config)
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert list(config.to_dict()) == list(OPTIONS)
    for name in PARTS:
        part = getattr(config, name)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, part)


def test_what_is_shown_is_what_is_not_the_default() -> None:
    assert repr(RunConfig()) == "RunConfig()"
    assert repr(RunConfig(stage=2, model="gpt2", seed=0)) == "RunConfig(model='gpt2', stage=2)"
    assert repr(RunConfig(recipe="fsdp2", prefetch=0)) == "RunConfig(recipe='fsdp2', prefetch=0)"


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
    least = f"more than {option.above}" if option.low is None else f"at least {option.low}"
    with pytest.raises(InputError, match=f"^{option.flat} .*expected {least} and at most {option.high}"):
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
    "overlap": ["none", "all", None],
    "overlap_reduction": [True, False, None],
    "upcast_grads": [True, None],
    "persistent_grads": [True, False],
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


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(_said(), _said())
@example({"model": "gpt2"}, {"hidden": 96})
@example({"model": "gpt2", "hidden": 96}, {"ffn": 3072})
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
            assert RunConfig(**after.given) == RunConfig.from_dict(after.to_dict()) == eval(repr(after)) == after


def test_what_mpirun_says_of_the_ranks_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "6")
    config = RunConfig(world="mpi")
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    assert config.replace(world="threads") == RunConfig(ranks=6)
