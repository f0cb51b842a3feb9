"""torchtitan 0.2's TOML: what its parser and trainer refuse, and what each key sets here."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from dialects.given import FILES, config_of, expectation, flags_of, reading_of, unlike

from zerosim.dialects import Context, Reading, document_of
from zerosim.dialects.reading import Document, flat
from zerosim.dialects.rows import by_key
from zerosim.dialects.torchtitan import TABLE, read
from zerosim.errors import InputError

OURS = [name for name in FILES if name.startswith("titan")]
CHANGED: dict[str, dict[str, Any]] = {
    "titan_deepseek_v3_16b.toml": {
        "model": "deepseek-v2-lite",  # 27 blocks, 64 experts, 6 of them for a token, latent attention
        "recipe": "fsdp2",
        "schedule": "cosine",
        "min_lr": 2.2e-5,
        "loss": "lean",  # compile covers the loss: no fp32 copy of the logits
        "kernels": "eager",
        "bias_rate": 1e-3,  # torchtitan's load_balance_coeff
        "keep_root_units": False,  # reshard default: the table is freed after forward, norm and head are not
        "keep_last_unit": True,
    },
    "titan_llama3_405b.toml": {"loss": "lean", "keep_root_units": False, "keep_last_unit": True},
    "titan_llama3_8b.toml": {"loss": "torch", "keep_root_units": False, "keep_last_unit": True},
}
MODELLED = {
    "optimizer.early_step_in_backward": "same",
    "parallelism.context_parallel_degree": "same",
    "parallelism.context_parallel_load_balancer": "same",
    "parallelism.context_parallel_rotate_method": "same",
    "parallelism.expert_parallel_degree": "same",
    "parallelism.expert_tensor_parallel_degree": "same",
    "parallelism.expert_parallel_comm_backend": "same",
    "model.converters": "same",
    "quantize.linear.float8.recipe_name": "same",
    "quantize.linear.float8.filter_fqns": "same",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": "same",
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": "near",
    "quantize.linear.mx.recipe_name": "same",
    "quantize.linear.mx.filter_fqns": "same",
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": "ignored",
}
"""Keys that keys.toml calls missing."""
FULL = {"model": {"name": "llama3", "flavor": "8B"}, "training": {"local_batch_size": 2, "seq_len": 4096}}


def reading(sections: dict[str, Any], **given: Any) -> Reading:
    """Read sections beside FULL's."""
    merged = {**FULL, **sections}
    merged |= {
        name: {**FULL[name], **keys} for name, keys in sections.items() if name in FULL and isinstance(keys, dict)
    }
    return read(Document("titan.toml", "torchtitan", flat(merged)), Context(given=given))


def parallel(**keys: Any) -> dict[str, Any]:
    return {"parallelism": keys}


@pytest.mark.parametrize("name", OURS)
def test_given_file(name: str) -> None:
    found = reading_of(name)
    assert unlike(name, found, CHANGED[name]) == {}
    assert set(found.document.keys) == {said.key for said in found.said}
    assert tuple(refusal.key for refusal in found.refusals) == ()
    for start in (line.partition(":")[0].rstrip("*.") for line in expectation(name)["ignored"]):
        keys = [key for key in found.document.keys if start in key]
        assert keys
        assert set(keys) <= set(found.of("ignored")), start
    assert "steps" not in found.values
    config_of(found, **flags_of(name))


def test_without_the_converter_the_rest_is_planned() -> None:
    found = reading_of("titan_llama3_405b.toml", "model.converters")
    found.check()
    assert found.of("ignored").keys() >= {"quantize.linear.float8.filter_fqns"}


def test_the_given_file_in_eight_bits() -> None:
    name, gather = "titan_llama3_405b.toml", "quantize.linear.float8.enable_fsdp_float8_all_gather"
    found = reading_of(name)
    found.check()
    fp8 = config_of(found, **flags_of(name)).fp8
    assert (fp8.gather, found.sources["fp8_gather"]) == (True, gather)
    assert not config_of(reading_of(name, gather), **flags_of(name)).fp8.gather
    assert (fp8.kind, fp8.library, fp8.exact_first, fp8.exact_last) == ("tensorwise", "torchao", 0, 0)


def converted(name: str, /, **keys: Any) -> dict[str, Any]:
    """Return sections with this converter, and keys of its own section."""
    return {"model": {"converters": [f"quantize.linear.{name}"]}, "quantize": {"linear": {name: keys}}}


HEAD = {"filter_fqns": ["output"]}


@pytest.mark.parametrize(
    ("sections", "values"),
    [
        (converted("float8", **HEAD), {"fp8": "tensorwise"}),
        (converted("float8", recipe_name="rowwise", **HEAD), {"fp8": "rowwise"}),
        (
            converted("float8", recipe_name="rowwise_with_gw_hp", **HEAD),
            {"fp8": "rowwise", "fp8_exact_wgrad": True},
        ),
        ({"model": {"converters": ["float8"]}}, {"fp8": "tensorwise"}),
        (
            converted("float8", enable_fsdp_float8_all_gather=True, **HEAD),
            {"fp8": "tensorwise", "fp8_gather": True},
        ),
        (converted("mx"), {"fp8": "mxfp8", "fp8_library": "torchao"}),
        (
            converted("mx", recipe_name="mxfp8_cublas_rceil"),
            {"fp8": "mxfp8", "fp8_library": "torchao", "mx_rounding": "rceil"},
        ),
        (
            converted("float8", filter_fqns=["output", "router.gate", "layers.0.", "layers.30.", "layers.31"]),
            {"fp8": "tensorwise", "fp8_exact_first": 1, "fp8_exact_last": 2},
        ),
    ],
)  # fmt: skip
def test_a_converter_is_eight_bits(sections: dict[str, Any], values: dict[str, Any]) -> None:
    found = reading(sections, ranks=8)
    got = {name: one for name, one in found.values.items() if name.startswith(("fp8", "mx_"))}
    assert got == values
    found.check()
    config_of(found, ranks=8)


def test_scales_of_gathers_are_all_reduced_once_a_step() -> None:
    name = "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    gathers = {"enable_fsdp_float8_all_gather": True}
    once = reading(converted("float8", **gathers, **{name.rpartition(".")[2]: True}), ranks=8)
    assert "one all-reduce for the scales of each unit" in once.of("understood")[name]
    assert not any("a scale of each weight" in one for one in once.notes)
    assert any("a scale of each weight" in one for one in reading(converted("float8", **gathers), ranks=8).notes)
    assert name in reading(converted("float8", **{name.rpartition(".")[2]: True}), ranks=8).of("ignored")


def test_a_short_name_is_noted() -> None:
    assert any("as quantize.linear.mx" in one for one in reading({"model": {"converters": ["mx"]}}, ranks=8).notes)


def test_only_the_head_without_output_is_noted() -> None:
    assert not any("converts the head" in one for one in reading(converted("float8", **HEAD), ranks=8).notes)
    assert any("converts the head" in one for one in reading(converted("float8"), ranks=8).notes)


@pytest.mark.parametrize(
    ("sections", "given", "key", "words"),
    [
        ({"training": {"local_batch_size": "4"}}, {}, "training.local_batch_size", "'4': expected a whole number"),
        ({"training": {"local_batch_size": 4.5}}, {}, "training.local_batch_size", "4.5: expected a whole number"),
        ({"training": 3}, {}, "training", "expected a section [training]"),
        ({"activation_checkpoint": {"mode": "fulll"}}, {}, "activation_checkpoint.mode", "Invalid AC mode: fulll"),
        (
            {"activation_checkpoint": {"selective_ac_option": 2}}, {},
            "activation_checkpoint.selective_ac_option", "has no attribute 'isdigit'",
        ),
        ({"training": {"batch_size": 4}}, {}, "training.batch_size", "it is training.local_batch_size in 0.2.2"),
        (
            converted("float8", recipe_name="blockwise"), {"ranks": 8}, "quantize.linear.float8.recipe_name",
            "not in valid names",
        ),
        (
            converted("float8", recipe_name="rowwise", enable_fsdp_float8_all_gather=True), {"ranks": 8},
            "quantize.linear.float8.recipe_name, quantize.linear.float8.enable_fsdp_float8_all_gather",
            "together with recipe_name",
        ),
        (
            {**converted("float8", enable_fsdp_float8_all_gather=True), "training": {"enable_cpu_offload": True}},
            {"ranks": 8}, "quantize.linear.float8.enable_fsdp_float8_all_gather",
            "FSDP gathers weights in 8 bits beside --offload: not modelled",
        ),
        (
            converted("float8", enable_fsdp_float8_all_gather=True), {"ranks": 8, "optimizer": "muon"},
            "quantize.linear.float8.enable_fsdp_float8_all_gather", "in 8 bits beside --optimizer muon: not modelled",
        ),
        (
            converted("float8", filter_fqns=["attention.wk", "auto_filter_small_kn"]), {"ranks": 8},
            "quantize.linear.float8.filter_fqns", "attention.wk, auto_filter_small_kn: some maps of a block",
        ),
        (
            converted("float8", filter_fqns=["layers.3."]), {"ranks": 8}, "quantize.linear.float8.filter_fqns",
            "neither the first nor the last",
        ),
        (converted("mx", recipe_name="mxfp4_cutlass"), {"ranks": 8}, "quantize.linear.mx.recipe_name", "4 bits"),
        (
            {**converted("mx"), **parallel(tensor_parallel_degree=2), "compile": {"enable": True}}, {"ranks": 8},
            "compile.enable", "TP not yet supported",
        ),
        (
            {"model": {"converters": ["float8", "mx"]}}, {"ranks": 8}, "model.converters", "one of them can convert",
        ),
        (
            {"model": {"converters": ["quantize.grouped_mm.mx"]}}, {"ranks": 8}, "model.converters",
            "experts' maps in 8 bits",
        ),
        ({"float8": {"enable_float8_linear": True}}, {}, "float8.enable_float8_linear", "[quantize.linear.float8]"),
        ({"parallelism": {"tensor_paralel_degree": 2}}, {}, "parallelism.tensor_paralel_degree", "Invalid field names"),
        ({"job": {"custom_config_module": "mine"}}, {}, "job.custom_config_module", "zerosim imports nothing"),
        ({"experimental": {"custom_import": "mine"}}, {}, "experimental.custom_import", "zerosim imports nothing"),
        (
            {"experimental": {"custom_args_module": "os"}}, {}, "experimental.custom_args_module",
            "zerosim imports nothing",
        ),
        (
            parallel(data_parallel_shard_degree=4), {"ranks": 6}, "parallelism.data_parallel_shard_degree",
            "WORLD_SIZE(6)",
        ),
        (parallel(tensor_parallel_degree=3), {"ranks": 8}, "parallelism.tensor_parallel_degree", "WORLD_SIZE(8)"),
        (
            parallel(data_parallel_replicate_degree=2, tensor_parallel_degree=4, data_parallel_shard_degree=1), {},
            "parallelism.data_parallel_replicate_degree", "DDP has not supported",
        ),
        (
            {"training": {"global_batch_size": 60}}, {"ranks": 8}, "training.global_batch_size",
            "must be multiple of local batch size times data-parallel degree (60 % (2 * 8) != 0)",
        ),
        (
            parallel(pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=3), {"ranks": 8},
            "parallelism.pipeline_parallel_microbatch_size", "Batch size 2 must be divisible by microbatch_size 3",
        ),
        (
            parallel(pipeline_parallel_degree=2, pipeline_parallel_schedule="DualPipeV"), {"ranks": 8},
            "parallelism.pipeline_parallel_schedule", "schedule DualPipeV: not modelled",
        ),
        (
            parallel(pipeline_parallel_degree=2, pipeline_parallel_schedule="2F2B"), {"ranks": 8},
            "parallelism.pipeline_parallel_schedule", "Unknown schedule name '2F2B'",
        ),
        (
            parallel(pipeline_parallel_degree=2, pipeline_parallel_layers_per_stage=4), {"ranks": 8},
            "parallelism.pipeline_parallel_layers_per_stage", "Number of virtual stages (9)",
        ),
        (
            parallel(tensor_parallel_degree=2, enable_async_tensor_parallel=True), {"ranks": 8},
            "parallelism.enable_async_tensor_parallel", "Async TP requires 'model'",
        ),
        (
            parallel(tensor_parallel_degree=2, disable_loss_parallel=True), {"ranks": 8},
            "parallelism.disable_loss_parallel", "whole logits",
        ),
        (
            {**parallel(context_parallel_degree=2), "training": {"seq_len": 4098}}, {"ranks": 8}, "training.seq_len",
            "must be divisible by the product of TP degree (1) and 2 * CP degree (2)",
        ),
        (
            {**parallel(context_parallel_degree=2), "model": {"name": "deepseek_v3", "flavor": "16B"}}, {"ranks": 8},
            "parallelism.context_parallel_degree", "only supports SDPA",
        ),
        (
            {
                **parallel(tensor_parallel_degree=4, expert_parallel_degree=2, expert_tensor_parallel_degree=2),
                "model": {"name": "deepseek_v3", "flavor": "16B"},
            },
            {"ranks": 8}, "parallelism.expert_tensor_parallel_degree", "ETP=TP or ETP=1",
        ),
        ({"optimizer": {"name": "SGD"}}, {}, "optimizer.name", "expected one of AdamW, Adam"),
        ({"model": {"flavor": "9B"}}, {}, "model.flavor", "llama3 has 8B, 70B, 405B"),
        ({"model": {"name": "vlm"}}, {}, "model.flavor", "pass --model"),
        ({"fault_tolerance": {"enable": True}}, {}, "fault_tolerance.enable", "torchft"),
        (
            {"activation_checkpoint": {"mode": "memory_budget"}}, {}, "activation_checkpoint.mode",
            "requires model to be compiled",
        ),
        (
            {"activation_checkpoint": {"mode": "memory_budget"}, "compile": {"enable": True}}, {},
            "activation_checkpoint.mode", "a compiler's budget",
        ),
    ],
)  # fmt: skip
def test_refused(sections: dict[str, Any], given: dict[str, Any], key: str, words: str) -> None:
    found = reading(sections, **given)
    assert found.refusals[0].key == key
    with pytest.raises(InputError) as error:
        found.check()
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("titan.toml: ")


@pytest.mark.parametrize(
    ("sections", "given", "values"),
    [
        ({}, {}, {"stage": 3, "recipe": "fsdp2", "precision": "bf16", "micro_batch": 2, "accumulate": 1}),
        ({"training": {"global_batch_size": 64}}, {"ranks": 8}, {"accumulate": 4}),
        ({"training": {"global_batch_size": 64}}, {"ranks": 8, "micro_batch": 4}, {"accumulate": 2}),
        (parallel(data_parallel_shard_degree=4, data_parallel_replicate_degree=2), {}, {"ranks": 8, "dp_replicate": 2}),
        (parallel(fsdp_reshard_after_forward="never"), {}, {"reshard_after_forward": False}),
        (
            parallel(fsdp_reshard_after_forward="always"), {},
            {"reshard_after_forward": True, "keep_root_units": False, "keep_last_unit": False},
        ),
        # 32 blocks, the table and the head are 34: 9, 9, 8 and 8, of which table and head are one each
        (
            {**parallel(pipeline_parallel_degree=4), "training": {"local_batch_size": 4}}, {"ranks": 8},
            {
                "pp": 4, "micro_batch": 1, "accumulate": 4, "reshard_after_forward": False, "grad_sync": False,
                "pipeline": "1f1b", "stage_layers": "8,9,8,7",
            },
        ),
        (
            parallel(pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B"), {"ranks": 8},
            {"pipeline": "interleaved", "virtual_stages": 2, "stage_layers": "8,9,8,7", "accumulate": 2},
        ),
        (
            parallel(context_parallel_degree=2), {"ranks": 8},
            {"cp": 2, "context": "allgather", "context_order": "zigzag"},
        ),
        (
            parallel(context_parallel_degree=2, context_parallel_rotate_method="alltoall"), {"ranks": 8},
            {"context": "ring"},
        ),
        (parallel(data_parallel_shard_degree=1, data_parallel_replicate_degree=8), {}, {"stage": 0, "recipe": "ddp",
            "precision": "fp32", "autocast": "bf16", "bucket_bytes": 104857600, "ranks": 8}),
        ({}, {"ranks": 1}, {"stage": 0, "precision": "fp32", "autocast": "bf16"}),
        ({"training": {"dtype": "bfloat16"}}, {}, {"precision": "bf16-pure"}),
        ({"training": {"mixed_precision_reduce": "bfloat16"}}, {}, {"precision": "bf16", "compress": "bf16"}),
        ({"training": {"enable_cpu_offload": True}}, {}, {"offload": "optimizer=host,params=host", "pin_memory": True}),
        ({"optimizer": {"implementation": "for-loop"}}, {}, {"foreach": False, "for_loop": True}),
        ({"optimizer": {"early_step_in_backward": True}}, {}, {"optimizer_in_backward": True, "clip_norm": 0.0}),
        ({"activation_checkpoint": {"selective_ac_option": "op"}}, {}, {"recompute": "selective:op"}),
        ({}, {"seq": 8192}, {"recompute": "full:2", "seq": 8192, "kernels": "eager", "loss": "torch"}),
        ({"activation_checkpoint": {"selective_ac_option": "40"}}, {}, {"recompute": "none"}),
        ({"compile": {"enable": True}}, {}, {"kernels": "compiled", "loss": "lean"}),
        ({"compile": {"enable": True, "backend": "eager"}}, {}, {"kernels": "eager", "loss": "torch"}),
        ({"lr_scheduler": {"decay_type": "cosine", "min_lr_factor": 0.1}}, {}, {"schedule": "cosine", "min_lr": 8e-5}),
    ],
)  # fmt: skip
def test_understood(sections: dict[str, Any], given: dict[str, Any], values: dict[str, Any]) -> None:
    found = reading(sections, **given)
    found.check()
    assert {name: found.values[name] for name in values} == values
    config_of(found, **given)


def test_without_effect() -> None:
    """Experts of a dense model, quantisation without a converter, a budget in another mode, the steps."""
    found = reading(
        {
            **parallel(expert_parallel_degree=8, pipeline_parallel_schedule="GPipe"),
            "quantize": {"linear": {"mx": {"recipe_name": "mxfp8_cublas"}}},
            "training": {"steps": 500_000},
            "debug": {},
        }
    )
    found.check()
    assert not {"ep", "pipeline", "steps"} & set(found.values)
    ignored = found.of("ignored")
    assert {"parallelism.expert_parallel_degree", "parallelism.pipeline_parallel_schedule", "debug"} < set(ignored)
    assert found.of("understood")["training.steps"] == "500,000 steps; a plan has one"


def test_a_table_for_each_key_of_the_facts() -> None:
    rows = by_key(TABLE)
    for fact in tomllib.loads(Path(__file__).with_name("keys.toml").read_text("utf-8"))["key"]:
        if fact["dialect"] != "torchtitan_02" or fact["key"].startswith("("):
            continue
        first, *others = fact["key"].split(", ")
        section = first.partition(".")[0]
        for name in (first, *(one if "." in one else f"{section}.{one}" for one in others)):
            keys = [key for key in rows if key == name or (name.endswith("*") and key.startswith(name[:-1]))]
            keys = keys or [key for key in rows if key.startswith(section) and key.endswith(name.partition(".")[2])]
            assert keys, name
            for key in keys:
                assert rows[key].says == MODELLED.get(key, fact["says"]), key
                assert set(rows[key].changes.split()) == set(fact["changes"].replace("-", "").split()) or (
                    rows[key].says == "ignored"
                ), key
    assert all(len(row.does) < 140 for row in TABLE)


def test_a_file_of_our_own_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "gpt"\nstage = 3\n', encoding="utf-8")
    assert document_of(str(path)) is None
    path.write_text("[training]\nseq_len = 4096\nseq_len = 2048\n", encoding="utf-8")
    with pytest.raises(InputError, match="not valid TOML: Cannot overwrite a value"):
        document_of(str(path))
