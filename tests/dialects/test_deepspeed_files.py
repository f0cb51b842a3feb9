"""DeepSpeed's JSON: real files, the rules of "auto", and what its own parser and engine refuse."""

from __future__ import annotations

from typing import Any

import pytest
from dialects.given import FOLDER, config_of, expectation, flags_of, reading_of, unlike
from dialects.toml_keys import unlike_rows

from zerosim.config import RunConfig
from zerosim.dialects import Context, Document, Reading, read, read_documents
from zerosim.dialects.deepspeed.keys import TABLE
from zerosim.dialects.reading import flat
from zerosim.errors import InputError

TRAINERS = {"recipe": "hf-deepspeed"}  # AdamW is the Trainer's; the recipe is younger than the expectations
CHANGED: dict[str, dict[str, Any]] = {
    "accelerate_z3_offload_fp16.json": {},
    "llamafactory_z0.json": TRAINERS,
    "llamafactory_z3.json": TRAINERS,
    "llamafactory_z3_offload.json": TRAINERS,
    "megatron_gpt2_z2_cpu_offload.json": {},
    "plain_z3_explicit.json": {},
    "zenflow_z2.json": {},
}


def reading(values: dict[str, Any], /, *without: str, **given: Any) -> Reading:
    """Read values as DeepSpeed itself would, on 8 ranks."""
    launcher = given.pop("launcher", "deepspeed")
    versions = given.pop("versions", {})
    batch = {} if "train_batch_size" in values else {"train_micro_batch_size_per_gpu": 1}
    document = Document("ds.json", "deepspeed", flat({**batch, **values}))
    context = Context({"ranks": 8, "model": "llama3-8b", **given}, launcher=launcher, versions=versions)
    return read_documents([document], context, without)


def zero(stage: int, **values: Any) -> dict[str, Any]:
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **values}}


@pytest.mark.parametrize("name", CHANGED)
def test_a_real_file_is_understood(name: str) -> None:
    pad = {"pad_vocab": True} if "tp" in flags_of(name) else {}
    one = reading_of(name, **pad)
    assert unlike(name, one, CHANGED[name], **pad) == {}
    expected, filled = expectation(name), one.of("auto")
    for key in expected["auto"]:
        assert any(own.endswith(key) for own in filled), key
    assert all(said.how in ("understood", "auto", "ignored", "lacking", "refused") for said in one.said)
    assert {said.key for said in one.said} == set(one.document.keys)
    lacking = " ".join(one.of("lacking"))
    for words in expected["not_modelled"]:
        key = words.split(":")[0].split(" ")[0].removeprefix("activation_checkpointing.")
        assert key in lacking or key in ("pin_memory", "contiguous_memory_optimization", "WarmupDecayLR", "zenflow")
    assert [x.key for x in one.refusals] == ([expected["refuse"]["key"]] if expected["refuse"] else [])


def test_a_file_that_a_newer_version_refuses() -> None:
    one = reading_of("axolotl_zero1_compile.json")
    assert [x.key for x in one.refusals] == ["compile.disable", "compile.backend"]
    with pytest.raises(InputError, match=r"compile.disable: deepspeed 0.19.8: ValidationError, extra inputs"):
        one.check()
    assert reading_of("axolotl_zero1_compile.json", "compile").refusals == ()


def test_one_bit_adam_by_the_version_that_had_it() -> None:
    name = "onebit_adam.json"
    assert [x.key for x in reading_of(name).refusals] == ["optimizer.type"]
    path = str(FOLDER / name)
    old = Context(flags_of(name), versions={"deepspeed": (0, 19, 6)})
    one = read([path], old, ["fp16", "gradient_clipping"])
    assert one.refusals == ()
    config = config_of(one, **flags_of(name), precision="bf16")
    theirs = expectation(name)["understood"]
    assert {key: config.value(key) for key in theirs if key != "precision"} == {
        key: value for key, value in theirs.items() if key != "precision"
    }


def test_accelerate_adds_bf16_beside_fp16_that_is_off() -> None:
    """TrainingArguments(bf16=True, deepspeed=FILE) run on transformers 5.24: bf16 is {"enabled": True}, fp16 is off."""
    for said in ("auto", False):
        values = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": said}}
        assert reading(values, launcher="trainer", precision="bf16").values["precision"] == "bf16"
        assert reading(values, launcher="trainer", precision="fp32").values["precision"] == "fp32"
        alone = reading(values, launcher="trainer")
        assert alone.values["precision"] == ("bf16" if said else "fp32")
        assert any("bf16=True is assumed" in note for note in alone.notes) == bool(said)
    auto = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}}
    assert reading(auto, launcher="trainer", precision="fp16").values["precision"] == "fp16"
    assert reading({**auto, "fp16": {"enabled": False}}, precision="bf16").values["precision"] == "fp32"


def test_without_a_model_its_width_alone_is_missing() -> None:
    values = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    document = Document("ds.json", "deepspeed", flat({"zero_optimization": values}))
    for launcher in ("trainer", "accelerate"):
        refusals = read_documents([document], Context({"ranks": 8, "micro_batch": 1}, launcher=launcher)).refusals
        assert [(one.key.rpartition(".")[2], one.by) for one in refusals] == [
            ("reduce_bucket_size", "zerosim"),
            ("stage3_prefetch_bucket_size", "zerosim"),
        ]


def test_no_offload_by_the_deprecated_key_is_no_offload() -> None:
    one = reading(zero(2, cpu_offload=False))
    one.check()
    assert "zero_optimization.cpu_offload" in one.of("ignored")
    assert "offload" not in one.values
    assert reading(zero(2, cpu_offload=True)).values["offload"] == "optimizer=host"


def test_two_zeros_mean_the_opposite_here() -> None:
    values = reading(zero(3, sub_group_size=0, stage3_max_live_parameters=0)).values
    assert (values["sub_group"], values["prefetch_elements"]) == (1, 0)
    assert "max_live" not in values
    other = reading(zero(3, stage3_max_live_parameters=0, stage3_prefetch_bucket_size=9)).values
    assert other["prefetch_elements"] == 0


@pytest.mark.parametrize(
    ("batch", "ranks", "found"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 8, (2, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 8, (2, 4)),
        ({"train_batch_size": 64}, 8, (8, 1)),
        ({"train_batch_size": 60, "train_micro_batch_size_per_gpu": 2}, 8, "60 != 2 * 3 * 8"),
        ({"train_batch_size": 60}, 8, "60 != 7 * 1 * 8"),
        ({"train_batch_size": 4}, 8, "Micro batch size per gpu: 0 has to be greater than 0"),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 16, "Gradient accumulation steps: 0 has to be"),
        ({"train_batch_size": "64"}, 8, "TypeError"),
    ],
)
def test_batches_by_deepspeeds_arithmetic(batch: dict[str, Any], ranks: int, found: Any) -> None:
    one = reading({**zero(2), **batch}, ranks=ranks)
    if isinstance(found, tuple):
        assert (one.values["micro_batch"], one.values["accumulate"]) == found
    else:
        assert found in one.refusals[0].why


def test_the_ranks_follow_from_three_batch_sizes() -> None:
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    document = Document("ds.json", "deepspeed", flat({**zero(2), **sizes}))
    assert read_documents([document], Context({"model": "llama3-8b"})).values["ranks"] == 8


AUTO = {"reduce_bucket_size": "auto", "overlap_comm": "auto", "sub_group_size": "auto"}


def test_auto_has_three_readers() -> None:
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    for launcher, bucket in (("trainer", 4096**2), ("accelerate", 4096**2)):
        one = reading({**zero(3, reduce_bucket_size="auto"), **sizes}, launcher=launcher, micro_batch=4)
        assert (one.values["reduce_bucket"], one.values["micro_batch"]) == (bucket, 4)
        assert one.refusals == ()
        refused = reading(zero(3, **AUTO), launcher=launcher).refusals
        assert [x.key.rpartition(".")[2] for x in refused] == ["overlap_comm", "sub_group_size"]
        assert "not found in kwargs" in refused[0].why
    alone = reading({**zero(3, **AUTO), "gradient_clipping": "auto"})
    assert "reduce_bucket" not in alone.values  # the recipe's 5e8
    assert [(x.key, "at the first step" in x.by) for x in alone.refusals] == [("gradient_clipping", True)]
    assert reading({"zero_optimization": {"stage": "auto"}}).values["stage"] == 0
    assert reading({"zero_optimization": {"stage": "auto"}}, launcher="accelerate").values["stage"] == 2


def test_auto_of_a_width_needs_the_model() -> None:
    document = Document("ds.json", "deepspeed", flat(zero(3, reduce_bucket_size="auto")))
    refusal = read_documents([document], Context({"ranks": 8}, launcher="trainer")).refusals[0]
    assert (refusal.key, refusal.advice) == ("zero_optimization.reduce_bucket_size", "pass --model too")


@pytest.mark.parametrize(
    ("values", "key", "why"),
    [
        ({"zero_optimization": {"stage": 3, "_comment": "x"}}, "zero_optimization._comment", "extra inputs"),
        ({"bf16": True}, "bf16", "TypeError"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled", "cannot both be on"),
        ({"bf16": {"enabled": True, "loss_scale": 0}}, "bf16.loss_scale", "extra inputs"),
        (zero(3, stage3_prefetch_bucket_size="5e7"), "zero_optimization.stage3_prefetch_bucket_size", "whole number"),
        (zero(2, reduce_bucket_size=0), "zero_optimization.reduce_bucket_size", "at least 1"),
        (zero(3, mics_shard_size=-1), "zero_optimization.mics_shard_size", "removed in 0.19.7"),
        ({"amp": {"enabled": False}}, "amp", "removed in 0.19.7"),
        (zero(2, cpu_offload=True, offload_optimizer={"device": "cpu"}), "zero_optimization.cpu_offload", "given too"),
        ({"optimizer": {"type": "adamw_torch"}}, "optimizer.type", "neither DeepSpeed's nor of torch.optim"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "optimizer.params.max_grad_norm", "Value"),
        (zero(3, offload_optimizer={"device": "nvme"}), "zero_optimization.offload_optimizer.device", "nvme_path"),
        (zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "zero_optimization.offload_optimizer.ratio", "3"),
        ({**zero(0), "data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype", "NotImplemented"),
        ({"scheduler": {"type": "Cosine"}}, "scheduler.type", "no scheduler of DeepSpeed"),
    ],
)
def test_what_deepspeed_refuses_is_one_line(values: dict[str, Any], key: str, why: str) -> None:
    one = reading(values)
    assert [x.key for x in one.refusals if why in x.why] == [key]
    with pytest.raises(InputError) as error:
        one.check()
    assert str(error.value).startswith("ds.json: ")
    assert "\n" not in str(error.value)


def test_what_changes_bytes_and_is_not_modelled_is_refused_unless_left_out() -> None:
    values = zero(3, stage3_max_reuse_distance=0)
    with pytest.raises(InputError, match="not modelled, and it changes bytes, traffic; --without zero_opt"):
        reading(values).check()
    reading(values, "zero_optimization.stage3_max_reuse_distance").check()
    reading(zero(3, stage3_max_reuse_distance=10**9)).check()  # the framework's default
    with pytest.raises(InputError, match="no such key; did you mean 'zero_optimization"):
        reading(values, "zero_optimisation")


@pytest.mark.parametrize(
    ("values", "given", "set_to"),
    [
        (zero(2, overlap_comm=True), {}, {"reduce_buffers": 2}),
        (zero(3, zero_hpz_partition_size=1), {}, {"secondary_shard": 0}),
        (zero(3, zero_hpz_partition_size=8, zero_quantized_weights=True), {}, {"secondary_shard": 8}),
        (zero(2, offload_param={"device": "cpu"}), {}, {"offload": None}),
        (zero(1, offload_optimizer={"device": "cpu"}), {}, {"offload": "optimizer=host", "pin_memory": True}),
        ({**zero(1), "data_types": {"grad_accum_dtype": "fp32"}}, {}, {"grad_dtype": "fp32", "persistent_grads": True}),
        ({**zero(2), "communication_data_type": "fp32"}, {}, {"grad_dtype": "fp32"}),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {}, {"precision": "fp32", "autocast": "bf16"}),
        ({**zero(3), "sequence_parallel_size": 2}, {}, {"cp": 2, "context": "ulysses"}),
        ({**zero(2), "tensor_parallel": {"autotp_size": 2}}, {"tp": 2}, {"tp": 2}),
        ({"optimizer": {"type": "Adam"}}, {}, {"optimizer": "adamw"}),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {}, {"optimizer": "adam"}),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {}, {"foreach": True}),
        (zero(2), {}, {"clip_norm": 1.0}),
        (zero(2), {"versions": {"deepspeed": (0, 19, 6)}}, {"clip_norm": 0.0}),
        ({"zero_optimization": True}, {}, {"stage": 1}),
    ],
)
def test_a_key_sets_its_option(values: dict[str, Any], given: dict[str, Any], set_to: dict[str, Any]) -> None:
    found = reading(values, **given).values
    assert {name: found.get(name) for name in set_to} == set_to


def test_a_trainers_other_values_are_a_mismatch() -> None:
    trainer = Document("args.json", "trainer", flat({"per_device_train_batch_size": 2, "bf16": True, "fsdp": False}))
    ds = Document("ds.json", "deepspeed", flat({**zero(2), "train_micro_batch_size_per_gpu": 4}))
    one = read_documents([trainer, ds], Context({"ranks": 8, "model": "llama3-8b"}))
    assert "ValueError: values differ from the Trainer's: train_micro_batch_size_per_gpu 4" in one.refusals[0].why


def test_every_given_file_makes_a_run() -> None:
    for name in CHANGED:
        without = [x.key for x in reading_of(name).refusals]
        given = {**flags_of(name), **({"pad_vocab": True} if "tp" in flags_of(name) else {})}
        assert isinstance(config_of(reading_of(name, *without), **given), RunConfig)


def test_the_table_is_that_of_the_facts() -> None:
    assert unlike_rows("deepspeed", TABLE) == MODELLED


MODELLED: dict[str, tuple[str, str] | None] = {
    # what zerosim models since the facts were written
    "zero_optimization.offload_optimizer.pin_memory": ("same", "host bytes"),
    "zero_optimization.offload_param.pin_memory": ("same", "host bytes"),
    "bf16.bf16_optimizer_states": ("near", "bytes"),
    "torch_autocast.enabled": ("same", "bytes"),
    "dtype": ("same", "bytes"),
    "sequence_parallel_size": ("near", "bytes traffic"),
    "data_parallel_size": ("near", "bytes traffic"),
}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"micro_batch": 2}, {"micro_batch": 2, "accumulate": 16}),
        ({"accumulate": 2}, {"micro_batch": 16, "accumulate": 2}),
        ({"micro_batch": 2, "accumulate": 16}, {"micro_batch": 2, "accumulate": 16}),
    ],
)
def test_a_flag_keeps_the_rows_of_a_step(given: dict[str, int], found: dict[str, int]) -> None:
    sizes = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    one = reading({**zero(2), **sizes}, **given)
    assert {name: one.values[name] for name in found} == found
    assert one.refusals == ()


def test_an_optimizer_flag_replaces_the_files() -> None:
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "eps": 1e-6, "max_coeff": 0.3}}}
    assert [x.key for x in reading(lamb).refusals] == ["optimizer.type"]
    one = reading(lamb, optimizer="lion")
    assert one.refusals == ()
    assert "eps" not in one.values
    sgd = reading({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}})
    assert (sgd.values["optimizer"], sgd.values["momentum"], sgd.refusals) == ("sgd", 0.9, ())


def test_every_refused_key_is_named_at_once() -> None:
    with pytest.raises(InputError, match=r"--without amp,elasticity,zero_optimization.aio plans the rest"):
        reading({"amp": {"enabled": 0}, "elasticity": {"a": 1}, **zero(3, aio={"block_size": 1, "x": 2})}).check()
