"""TrainingArguments, axolotl's and LLaMA-Factory's files: real files, their traps, and their tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dialects.given import config_of, expectation, reading_of, unlike
from dialects.toml_keys import unlike_rows

from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.dialects import Context, Reading, read
from zerosim.dialects.axolotl import keys as axolotl_keys
from zerosim.dialects.hub_names import model_of_repository
from zerosim.dialects.llamafactory import keys as llamafactory_keys
from zerosim.dialects.trainer import keys as trainer_keys
from zerosim.errors import InputError

CHANGED: dict[str, dict[str, Any]] = {
    # FSDP1 has a recipe by now, and Liger's loss a word of its own
    "axolotl_fft_8b_liger_fsdp.yaml": {"recipe": "fsdp1", "loss": "liger"},
    "axolotl_qlora_fsdp_70b.yaml": {"recipe": "fsdp1"},
    # a word in the expectation: adapters in fp32 beside bf16, under autocast
    "llamafactory_lora_sft.yaml": {"precision": "bf16", "adapter_dtype": "fp32", "autocast": "bf16"},
    "swift_fsdp2.json": {},
}
"""The given files, and options of which their expectation is older than the product."""
DIFFERENT: dict[str, dict[str, tuple[str, str] | None]] = {
    "training_arguments": {  # modelled by now
        "fsdp_config.cpu_ram_efficient_loading": ("same", "load"),
        "forward_prefetch": ("same", "seconds"),
        "backward_prefetch": ("same", "bytes seconds"),
    },
    "axolotl": {"fp8": ("same", "seconds")},
    "llamafactory": dict.fromkeys(("fp8", "fp8_backend"), ("same", "seconds")),
}
TABLES = {
    "training_arguments": trainer_keys.TABLE,
    "axolotl": axolotl_keys.TABLE,
    "llamafactory": llamafactory_keys.TABLE,
}
FLAGS = {"model": "llama3-8b", "seq": 1024, "ranks": 8}


def of(tmp_path: Path, values: dict[str, Any], **given: Any) -> Reading:
    """Read these arguments."""
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"output_dir": "x", **values}), encoding="utf-8")
    return read([str(path)], Context(given={**FLAGS, **given}))


def yaml(tmp_path: Path, text: str, **given: Any) -> Reading:
    """Read this YAML."""
    path = tmp_path / "train.yaml"
    path.write_text(text, encoding="utf-8")
    return read([str(path)], Context(given={**FLAGS, **given}))


def axolotl(tmp_path: Path, *lines: str, **given: Any) -> Reading:
    usual = ("base_model: ./m", "micro_batch_size: 1", "gradient_accumulation_steps: 2")
    return yaml(tmp_path, "\n".join((*usual, *lines)), **given)


def factory(tmp_path: Path, *lines: str, **given: Any) -> Reading:
    return yaml(tmp_path, "\n".join(("model_name_or_path: ./m", *lines)), **given)


def refused(reading: Reading) -> dict[str, str]:
    return {one.key: one.why for one in reading.refusals}


def built(reading: Reading, **given: Any) -> RunConfig:
    return RunConfig(**{**PLAN_DEFAULTS, **reading.values, **FLAGS, **given})


@pytest.mark.parametrize("name", CHANGED)
def test_a_given_file_is_what_was_expected(name: str) -> None:
    reading, expected = reading_of(name), expectation(name)
    assert unlike(name, reading, CHANGED[name]) == {}
    assert {said.key for said in reading.said} == set(reading.document.keys)
    assert list(refused(reading)) == ([expected["refuse"]["key"]] if expected["refuse"] else [])
    assert set(expected["ignored"]) <= set(reading.of("ignored"))
    assert reading.of("auto").keys() == expected["auto"].keys()
    for phrase in expected["not_modelled"]:
        key = next((one for one in reading.document.keys if one.endswith(phrase)), None)
        assert key is None or key in reading.of("lacking") | reading.of("ignored")


def test_a_hubs_name_needs_its_file_or_a_flag() -> None:
    name = "llamafactory_lora_sft.yaml"
    with pytest.raises(
        InputError, match=r"model_name_or_path: zerosim: .* zerosim downloads nothing from a hub; pass --m"
    ):
        reading_of(name).check()
    assert config_of(reading_of(name, model="qwen3-4b"), model="qwen3-4b").model.name == "qwen3-4b"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"), ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("NousResearch/Meta-Llama-3.1-8B", "llama3.1-8b"), ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("Qwen/Qwen3-4B-Instruct-2507", None), ("example-org/llama-3-70b-fp16", None),
        ("mistralai/Mistral-7B-v0.3", None),
    ],
)  # fmt: skip
def test_a_known_repository_says_the_model(name: str, model: str | None) -> None:
    assert model_of_repository(name) == model


def test_an_empty_file_has_the_trainers_defaults(tmp_path: Path) -> None:
    config = built(of(tmp_path, {}))
    optim = config.optim
    assert (config.data.micro_batch, config.data.accumulate, optim.lr, optim.clip_norm) == (8, 1, 5e-5, 1.0)
    assert (optim.optimizer, optim.foreach, optim.weight_decay, optim.lazy_states) == ("adamw", False, 0.0, True)
    assert (config.parallel.recipe, config.parallel.zero_stage, config.precision.param_dtype) == ("ddp", 0, "fp32")
    assert (config.memory.loss, config.memory.saves, config.memory.attention) == ("hf-5", "eager", "flash")


def test_text_is_a_number_and_a_flag_wins(tmp_path: Path) -> None:
    values = {"per_device_train_batch_size": "4", "learning_rate": "1e-4", "gradient_accumulation_steps": "2"}
    reading = of(tmp_path, values, accumulate=16)
    assert (reading.values["micro_batch"], reading.values["lr"]) == (4, 1e-4)
    assert "--accumulate 16 replaces it" in reading.of("understood")["gradient_accumulation_steps"]


def test_fsdp_offload_params_is_dropped(tmp_path: Path) -> None:
    config = {"offload_params": True, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}
    reading = of(tmp_path, {"fsdp": True, "bf16": True, "fsdp_config": config})
    assert "the key is cpu_offload" in reading.of("ignored")["fsdp_config.offload_params"]
    assert "offload" not in reading.values
    assert reading.values["recipe"] == "fsdp2"
    assert of(tmp_path, {"fsdp": True, "fsdp_config": {"cpu_offload": True}}).values["offload"]


def test_version_1_is_full_shard_in_5_and_what_it_says_in_4(tmp_path: Path) -> None:
    values = {"fsdp": "shard_grad_op", "fsdp_config": {"version": 1}}
    assert of(tmp_path, values).values["stage"] == 3
    old = of(tmp_path, {**values, "warmup_ratio": 0.1})
    assert old.values["stage"] == 2
    assert "read as transformers 4" in " ".join(old.notes)
    assert of(tmp_path, {"fsdp": "full_shard", "group_by_length": True}).values["recipe"] == "fsdp1"


def test_transformers_4_is_read_where_its_keys_are_or_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"output_dir": "x", "optim": "adamw_hf", "warmup_ratio": 0.1}), encoding="utf-8")
    assert not read([str(path)], Context(given=FLAGS)).refusals
    new = read([str(path)], Context(given=FLAGS, versions={"transformers": (5, 24)}))
    assert list(refused(new)) == ["warmup_ratio", "optim"]
    assert "TypeError" in new.refusals[0].why
    path.write_text(json.dumps({"output_dir": "x"}), encoding="utf-8")
    old = read([str(path)], Context(given=FLAGS, versions={"transformers": (4, 48)}))
    assert (old.values["foreach"], old.values["loss"], old.reader) == (True, "hf-4.48", "transformers 4")


def test_checkpoints_by_their_new_name_win(tmp_path: Path) -> None:
    both = {"gradient_checkpointing": True, "activation_checkpointing": False}
    assert "recompute" not in of(tmp_path, both).values
    assert of(tmp_path, {"gradient_checkpointing": True}).values["recompute"] == "full"
    twice = {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": True}
    assert list(refused(of(tmp_path, twice))) == ["gradient_checkpointing"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("adamw_torch", {"optimizer": "adamw", "foreach": True}),
        ("paged_adamw_8bit", {"optimizer": "adam8bit", "paged_states": True}),
        ("adafactor", {"optimizer": "adafactor-hf", "relative_step": False}),
        ("lion_32bit", {"optimizer": "lion", "betas": (0.9, 0.999)}),
    ],
)
def test_optimizers_by_their_names(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    reading = of(tmp_path, {"optim": name})
    assert {key: reading.values[key] for key in values} == values
    built(reading)


@pytest.mark.parametrize(
    ("values", "key", "by"),
    [
        ({"optim": "AdamW"}, "optim", "transformers 5.24"),
        ({"optim": "galore_adamw"}, "optim", "zerosim"),
        ({"bf16": True, "fp16": True}, "fp16", "transformers 5.24"),
        ({"learning_rat": 1e-4}, "learning_rat", "transformers 5.24"),
        ({"fsdp": "hybrid_shard"}, "fsdp", "transformers 5.24"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size", "zerosim"),
        ({"fsdp": True, "deepspeed": "ds.json"}, "deepspeed", "transformers 5.24"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha", "zerosim"),
    ],
)
def test_it_is_refused(tmp_path: Path, values: dict[str, Any], key: str, by: str) -> None:
    first = of(tmp_path, values).refusals[0]
    assert (first.key, first.by) == (key, by)


def test_a_number_of_steps_never_becomes_the_plans(tmp_path: Path) -> None:
    reading = of(tmp_path, {"max_steps": 500_000})
    assert "steps" not in reading.values
    assert "500,000 steps" in reading.of("understood")["max_steps"]


def test_liger_is_its_own_loss(tmp_path: Path) -> None:
    values = of(tmp_path, {"use_liger_kernel": True}).values
    assert (values["loss"], values["saves"], values["kernels"]) == ("liger", "liger", "fused")
    less = {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False}}
    assert of(tmp_path, less).values["loss"] == "hf-5"


def test_axolotl_trains_bf16_weights_without_masters(tmp_path: Path) -> None:
    assert axolotl(tmp_path).values["precision"] == "bf16-pure"
    assert axolotl(tmp_path, "fsdp_config:", "  fsdp_version: 2").values["precision"] == "bf16"


def test_axolotl_without_a_version_is_fsdp1(tmp_path: Path) -> None:
    reading = axolotl(tmp_path, "fsdp: [full_shard, auto_wrap]", "fsdp_config:", "  fsdp_offload_params: true")
    assert (reading.values["recipe"], reading.values["offload"]) == ("fsdp1", "optimizer=host,params=host")
    assert "without fsdp_version this is FSDP1" in reading.notes


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        (("adapter: qlora", "lora_r: 8"), "adapter"),
        (("load_in_4bit: true",), "load_in_4bit"),
        (("adapter: lora", "lora_r: 8", "lora_modules_to_save: [lm_head]"), "lora_modules_to_save"),
        (("batch_size: 8",), "batch_size"),
        (("fsdp: [full_shard]", "deepspeed: x.json"), "deepspeed"),
        (("fsdp_config: {fsdp_version: 2}", "optimizer: adamw_bnb_8bit"), "optimizer"),
        (("unfrozen_parameters: ['model.layers.2[0-9]+']",), "unfrozen_parameters"),
    ],
)
def test_axolotl_refuses(tmp_path: Path, lines: tuple[str, ...], key: str) -> None:
    reading = axolotl(tmp_path, *lines)
    assert reading.refusals[0].key == key


def test_axolotls_context_needs_one_row(tmp_path: Path) -> None:
    assert axolotl(tmp_path, "context_parallel_size: 2", "sample_packing: true").values["context"] == "allgather"
    two = axolotl(tmp_path, "context_parallel_size: 2", micro_batch=2)
    assert "micro_batch_size must be set to 1" in refused(two)["context_parallel_size"]


def test_factorys_training_stage_is_not_zeros(tmp_path: Path) -> None:
    reading = factory(tmp_path, "stage: pt", "finetuning_type: full", "bf16: true")
    values = reading.values
    assert (values["stage"], values["recompute"], values["precision"], values["autocast"]) == (
        0,
        "full",
        "fp32",
        "bf16",
    )
    assert "recompute" not in factory(tmp_path, "finetuning_type: full", "disable_gradient_checkpointing: true").values
    assert list(refused(factory(tmp_path, "stage: dpo"))) == ["stage"]


def test_factorys_freeze_trains_the_last_layers(tmp_path: Path) -> None:
    """By the model's own names of its blocks: a pattern that no parameter has is refused."""
    assert factory(tmp_path, "finetuning_type: freeze").values["freeze"] == "*,!layers.30,!layers.31"
    assert factory(tmp_path, "finetuning_type: freeze", model="gpt2").values["freeze"] == "*,!h.10,!h.11"


def test_factory_refuses_unknown_keys_with_the_nearest(tmp_path: Path) -> None:
    first = factory(tmp_path, "lora_rankk: 8").refusals[0]
    assert (first.key, first.by, first.advice) == ("lora_rankk", "LLaMA-Factory ff6d4d1", "did you mean 'lora_rank'?")


def test_qlora_is_pefts(tmp_path: Path) -> None:
    lines = (
        "quantization_bit: 4",
        "bf16: true",
        "lora_rank: 16",
        "lora_target: q_proj,v_proj",
        "upcast_layernorm: true",
    )
    config = built(factory(tmp_path, "finetuning_type: lora", *lines))
    tuning = config.tuning
    assert (tuning.base, tuning.adapter_dtype, tuning.autocast, tuning.prepare_kbit) == ("nf4", "fp32", "bf16", True)
    assert (tuning.lora_alpha, tuning.lora_target, config.precision.param_dtype) == (32.0, "q,v", "bf16")


@pytest.mark.parametrize(
    ("model", "target", "words"),
    [
        ("qwen3-30b-a3b", "all", "all"),
        ("qwen3-8b", "all", "all-linear"),
        ("mixtral-8x7b", "gate,w1,w2,w3", "router,gate,down,up"),
    ],
)
def test_words_of_adapters_of_experts(tmp_path: Path, model: str, target: str, words: str) -> None:
    """LLaMA-Factory gives PEFT the names of all linear modules: not what PEFT's all-linear is beside experts."""
    reading = factory(tmp_path, f"lora_target: {target}", model=model)
    assert reading.values["lora_target"] == words


def test_an_accelerate_file_beside_arguments_wraps_the_model(tmp_path: Path) -> None:
    args, launch = tmp_path / "args.json", tmp_path / "launch.yaml"
    args.write_text(json.dumps({"output_dir": "x", "bf16": True, "per_device_train_batch_size": 2}), encoding="utf-8")
    launch.write_text(
        "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n",
        encoding="utf-8",
    )
    values = read([str(launch), str(args)], Context(given={"model": "llama3-8b"})).values
    config = RunConfig(**{**PLAN_DEFAULTS, **values, "model": "llama3-8b"})
    assert (config.parallel.recipe, config.precision.param_dtype, config.tuning.autocast) == ("fsdp2", "bf16", None)
    assert (config.mesh.ranks, config.data.micro_batch, config.reduction.compress) == (4, 2, "bf16")


@pytest.mark.parametrize("dialect", TABLES)
def test_the_table_is_that_of_the_facts(dialect: str) -> None:
    assert unlike_rows(dialect, TABLES[dialect]) == DIFFERENT[dialect]


def products(reading: Reading) -> dict[str, Any]:
    """Return the options of 8-bit products."""
    return {name: one for name, one in reading.values.items() if name.startswith("fp8")}


FSDP2 = ("fsdp_version: 2", "fsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}")


def test_axolotls_fp8_is_torchaos(tmp_path: Path) -> None:
    reading = axolotl(tmp_path, "fp8: true", "bf16: false", *FSDP2)
    reading.check()
    assert products(reading) == {"fp8": "tensorwise"}
    config = built(reading)
    assert (config.fp8.library, config.precision.stored) == ("torchao", "bf16")
    assert products(axolotl(tmp_path, "fp8: true", "fp8_config:", "  recipe: rowwise")) == {"fp8": "rowwise"}
    off = axolotl(tmp_path, "fp8: false", "fp8_config:", "  recipe: rowwise")
    assert (products(off), "fp8_config.recipe" in off.of("ignored")) == ({}, True)


def test_axolotls_gathers_in_eight_bits_need_fsdp2_and_tensorwise(tmp_path: Path) -> None:
    gather = "fp8_enable_fsdp_float8_all_gather"
    assert "requires FSDP2" in refused(axolotl(tmp_path, "fp8: true", f"{gather}: true"))[gather]
    rowwise = axolotl(tmp_path, "fp8: true", f"{gather}: true", *FSDP2, "fp8_config:", "  recipe: rowwise")
    assert "only supports the tensorwise recipe" in refused(rowwise)[gather]
    asked = axolotl(tmp_path, "fp8: true", f"{gather}: true", *FSDP2)
    asked.check()
    assert (products(asked), built(asked).fp8.gather) == ({"fp8": "tensorwise", "fp8_gather": True}, True)
    tuned = axolotl(tmp_path, "fp8: true", f"{gather}: true", *FSDP2, "adapter: lora", "lora_r: 8", "lora_alpha: 16",
                    "lora_target_linear: true")  # fmt: skip
    why = "FSDP gathers weights in 8 bits beside --lora-rank: not modelled, and it changes traffic, seconds"
    assert refused(tuned)[gather] == why
    axolotl(tmp_path, "fp8: true", f"{gather}: false", *FSDP2).check()


@pytest.mark.parametrize(
    ("backend", "values"),
    [
        ("auto", {"fp8": "tensorwise"}),
        ("torchao", {"fp8": "tensorwise"}),
        ("te", {"fp8": "delayed", "fp8_amax_history": 16, "fp8_amax_algo": "max"}),
    ],
)
def test_llamafactorys_backends(backend: str, values: dict[str, Any], tmp_path: Path) -> None:
    reading = factory(tmp_path, "finetuning_type: full", "fp8: true", f"fp8_backend: {backend}")
    reading.check()
    assert products(reading) == values
    config = built(reading)
    assert (config.fp8.made_by, config.precision.stored, config.tuning.autocast) == (None, "fp32", "bf16")


def test_llamafactory_refuses_fp8_beside_codes(tmp_path: Path) -> None:
    found = refused(factory(tmp_path, "fp8: true", "quantization_bit: 4"))
    assert "not compatible with quantization" in found["fp8, quantization_bit"]
    assert "MS-AMP" in refused(factory(tmp_path, "fp8: true", "fp8_backend: msamp"))["fp8_backend"]
    assert any("issue 9500" in one for one in factory(tmp_path, "fp8: true", "bf16: true").notes)
    off = factory(tmp_path, "fp8_backend: te")
    assert (products(off), "fp8_backend" in off.of("ignored")) == ({}, True)
