"""accelerate's file: real files, the launcher's traps, its table, and files that are written and read back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from dialects.given import config_of, expectation, reading_of, unlike
from dialects.toml_keys import unlike_rows

from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.dialects import Context, Reading, read, read_documents
from zerosim.dialects.accelerate.keys import TABLE
from zerosim.dialects.reading import Document, flat
from zerosim.dialects.text import parse_yaml
from zerosim.dialects.written.accelerate import written
from zerosim.errors import InputError

CHANGED: dict[str, dict[str, Any]] = {
    "llamafactory_fsdp_two_nodes.yaml": {"recipe": "fsdp1"},  # version 1 has a recipe of its own by now
    "trl_context_parallel.yaml": {"cp": 2},  # modelled by now, so nothing is refused
    "trl_fsdp1.yaml": {"recipe": "fsdp1"},
    "trl_fsdp2.yaml": {},
    "trl_zero3.yaml": {},
}
"""The given files, and options of which their expectation is older than the product."""
FLAGS = {"model": "llama3-8b", "seq": 1024, "micro_batch": 1}
DIFFERENT = {
    # modelled by now
    **dict.fromkeys(("cp_backend", "cp_comm_strategy"), ("same", "bytes traffic")),
    **{f"parallelism_config.parallelism_config_{name}_size": ("same", "bytes traffic") for name in ("cp", "sp")},
    "fsdp_config.fsdp_cpu_ram_efficient_loading": ("same", "load peak"),
    "deepspeed_config.zero3_init_flag": ("same", "load"),
    "fp8_config.*": ("same", "seconds"),
    # of Ulysses' keys the size alone changes bytes
    **{f"sp_{name}": ("ignored", "none") for name in ("backend", "seq_length", "seq_length_is_variable",
                                                       "attn_implementation")},
}  # fmt: skip


def of(tmp_path: Path, text: str, **given: Any) -> Reading:
    """Read this YAML behind usual lines."""
    path = tmp_path / "launch.yaml"
    whole = text if "distributed_type" in text else f"distributed_type: FSDP\nnum_processes: 8\n{text}"
    path.write_text(whole, encoding="utf-8")
    return read([str(path)], Context(given={**FLAGS, **given}))


def fsdp(tmp_path: Path, *lines: str, **given: Any) -> Reading:
    """Read an FSDP section of these lines, with blocks as units."""
    section = "".join(f"  {line}\n" for line in ("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", *lines))
    return of(tmp_path, f"mixed_precision: bf16\nfsdp_config:\n{section}", **given)


def refused(reading: Reading) -> dict[str, str]:
    return {one.key: one.why for one in reading.refusals}


@pytest.mark.parametrize("name", CHANGED)
def test_a_given_file_is_what_was_expected(name: str) -> None:
    reading = reading_of(name)
    if expectation(name)["run"] is not None:
        assert unlike(name, reading, CHANGED[name]) == {}
    assert not reading.refusals
    assert {said.key for said in reading.said} == set(reading.document.keys)
    for phrase in expectation(name)["ignored"]:
        assert any(key.endswith(phrase.partition(":")[0]) for key in reading.of("ignored"))


def test_context_parallelism_shards_states_too() -> None:
    config = config_of(reading_of("trl_context_parallel.yaml"))
    assert (config.mesh.cp, config.mesh.axes.dp_shard, config.mesh.shards) == (2, 1, 2)
    assert (config.context.how, config.memory.recompute, config.memory.attention) == ("allgather", "full", "flash")


def test_gradients_are_sent_in_bf16_and_kept_in_fp32(tmp_path: Path) -> None:
    config = config_of(fsdp(tmp_path, "fsdp_version: 2", accumulate=4), **FLAGS)
    assert (config.reduction.compress, config.precision.grad_dtype, config.grads.sync) == ("bf16", "fp32", False)


def test_version_1_is_the_default_and_ignores_reshard(tmp_path: Path) -> None:
    reading = fsdp(tmp_path, "fsdp_reshard_after_forward: SHARD_GRAD_OP")
    assert reading.values["recipe"] == "fsdp1"
    assert reading.values["stage"] == 3
    assert "fsdp_config.fsdp_reshard_after_forward" in reading.of("ignored")


def test_version_2_keeps_what_is_not_resharded(tmp_path: Path) -> None:
    reading = fsdp(tmp_path, "version: 2", "reshard_after_forward: false", "offload_params: true")
    assert reading.values["reshard_after_forward"] is False
    assert reading.values["stage"] == 3
    assert reading.values["offload"] == "optimizer=host,params=host"
    assert reading.values["pin_memory"]
    for wrong in ("FULL_SHARD", "4"):
        reading = fsdp(tmp_path, "version: 2", f"reshard_after_forward: {wrong}")
        assert list(refused(reading)) == ["fsdp_config.reshard_after_forward"]


def test_strategies_are_stages_and_replicas(tmp_path: Path) -> None:
    for strategy, stage in (("SHARD_GRAD_OP", 2), (1, 3), ("NO_SHARD", 0)):
        assert fsdp(tmp_path, f"fsdp_sharding_strategy: {strategy}").values["stage"] == stage
    text = "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 2\nfsdp_config:\n  fsdp_sharding_strategy: "
    reading = of(tmp_path, f"{text}HYBRID_SHARD\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n")
    assert (reading.values["dp_replicate"], reading.values["ranks_per_node"]) == (2, 4)


def test_backward_has_nothing_to_gather_early_where_units_stay(tmp_path: Path) -> None:
    key, early = "fsdp_config.fsdp_backward_prefetch", "fsdp_backward_prefetch: BACKWARD_PRE"
    reading = fsdp(tmp_path, "fsdp_sharding_strategy: SHARD_GRAD_OP", early)
    reading.check()
    assert key in reading.of("ignored")
    assert "prefetch" not in reading.values
    assert fsdp(tmp_path, "fsdp_sharding_strategy: FULL_SHARD", early).values["prefetch"] == 1


def test_without_a_policy_the_model_is_one_unit(tmp_path: Path) -> None:
    reading = of(tmp_path, "fsdp_config:\n  fsdp_version: 2\n")
    with pytest.raises(InputError, match=r"launch.yaml: fsdp_config.fsdp_auto_wrap_policy: zerosim: the whole model"):
        reading.check()


def test_ddp_in_bf16_is_autocast(tmp_path: Path) -> None:
    values = of(tmp_path, "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n").values
    assert (values["precision"], values["autocast"], values["recipe"], values["stage"]) == ("fp32", "bf16", "ddp", 0)
    given = of(tmp_path, "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n", precision="bf16")
    assert "autocast" not in given.values


def test_the_plugin_writes_its_own_defaults(tmp_path: Path) -> None:
    top = "distributed_type: DEEPSPEED\nnum_processes: 8\n"
    values = of(tmp_path, f"{top}deepspeed_config: {{}}\n").values
    assert (values["stage"], values["clip_norm"], values["recipe"]) == (2, 1.0, "deepspeed")
    reading = of(tmp_path, f"{top}deepspeed_config:\n  gradient_clipping: 0\n  offload_param_device: cpu\n")
    assert reading.values["clip_norm"] == 1.0
    assert "offload" not in reading.values
    assert "deepspeed_config.offload_param_device" in reading.of("ignored")


def test_a_deepspeed_file_excludes_what_it_says(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n"
    reading = of(tmp_path, f"{text}  deepspeed_config_file: ds.json\n  zero_stage: 3\n")
    keys = [key for one in reading.refusals for key in one.key.split(", ")]
    assert keys[:2] == ["deepspeed_config.zero_stage", "mixed_precision"]
    assert "stage" not in reading.values


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        ("mixed_precision: no\n", "mixed_precision", "'bool' object has no attribute 'lower'"),
        ("mixed_precision: bfloat16\n", "mixed_precision", "expected one of no"),
        ("gradient_accumulation_steps: 4\n", "gradient_accumulation_steps", "unknown keys"),
        ("distributed_type: FSPD\nnum_processes: 8\n", "distributed_type", "not a valid DistributedType"),
        ("distributed_type: FSDP\n", "num_processes", "manually pass in"),
        ("distributed_type: MULTI_GPU\nnum_processes: 7\nnum_machines: 2\n", "num_processes", "are 6 processes"),
        ("parallelism_config:\n  dp_shard_size: 8\n", "parallelism_config.dp_shard_size", "stays 1"),
    ],
)
def test_the_launcher_refuses(tmp_path: Path, text: str, key: str, why: str) -> None:
    assert why in refused(of(tmp_path, text))[key]


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"cp": 2, "sp": 2}, "sp"), ({"dp_replicate": 2, "tp": 4}, "dp_replicate"), ({"tp": 8}, "dp_shard"),
        ({"dp_shard": 2, "tp": 2}, "dp_shard"),
    ],
)  # fmt: skip
def test_sizes_of_a_mesh_are_checked_as_there(tmp_path: Path, sizes: dict[str, int], key: str) -> None:
    section = "".join(f"  parallelism_config_{name}_size: {size}\n" for name, size in sizes.items())
    reading = of(
        tmp_path, f"fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        f"parallelism_config:\n{section}",
    )  # fmt: skip
    assert list(refused(reading)) == [f"parallelism_config.parallelism_config_{key}_size"]


def test_dropped_keys_are_told_with_the_nearest(tmp_path: Path) -> None:
    said = fsdp(tmp_path, "fsdp_version: 2", "offload_param: true", "reduce_bucket_size: 1").of("ignored")
    assert "did you mean 'fsdp_offload_params'?" in said["fsdp_config.offload_param"]
    assert "drops it without a word" in said["fsdp_config.reduce_bucket_size"]


def test_the_table_is_that_of_the_facts() -> None:
    assert unlike_rows("accelerate", TABLE) == DIFFERENT


def drawn(seed: int) -> dict[str, Any]:
    """Return values of a run that accelerate's file can say."""
    draw = random.Random(seed)
    recipe, half = draw.choice(("fsdp2", "fsdp2", "fsdp1", "deepspeed", "ddp")), draw.choice(("bf16", "fp16", None))
    ranks = draw.choice((4, 8, 16))
    values = dict(FLAGS, ranks=ranks, recipe=recipe, lazy_states=True, accumulate=draw.choice((1, 4)))

    def some(share: float = 0.4) -> bool:
        return draw.random() < share

    if some():
        values["ranks_per_node"] = ranks // 2
    if recipe == "ddp":
        wide = {"loss_scale": "dynamic", "skip_nonfinite": True} if half == "fp16" else {}
        return {**values, "stage": 0, "precision": "fp32", **({"autocast": half} if half else {}), **wide}
    values |= {"precision": half or "fp32", "stage": 3 if recipe == "fsdp2" else draw.choice((2, 3))}
    whole = values["stage"] == 3
    if recipe == "deepspeed":
        values |= {"stage": draw.choice((0, 1, 2, 3)), "clip_norm": draw.choice((0.5, 1.0))}
        if values["stage"] and some():
            values["offload"] = "optimizer=host" + ",params=host" * (values["stage"] == 3 and some())
        return values
    values |= {"grad_sync": values["accumulate"] == 1, "recompute": draw.choice(("none", "full"))}
    if some():
        values["host_load"] = draw.choice(("first", "every"))
    if some(0.2):
        values |= {"offload": "optimizer=host" + ",params=host" * whole, "pin_memory": True}
    if recipe == "fsdp1":
        if whole:
            values |= {"prefetch": 1, "forward_prefetch": some()} if some(0.7) else {"prefetch": 0}
        values |= {"use_reentrant": False} if values["recompute"] == "full" else {}
        return values | ({"dp_replicate": 2} if "ranks_per_node" in values and some() else {})
    values |= {"compress": half} if half else {}
    values |= {"reshard_after_forward": some(0.7), "kernels": draw.choice(("compiled", "eager"))}
    for name in ("dp_replicate", "tp", "cp"):
        if some(0.3) and ranks > 2:
            values[name], ranks = 2, ranks // 2
    return values | ({"context": draw.choice(("ring", "allgather"))} if "cp" in values else {})


def read_back(text: str, given: dict[str, Any]) -> Reading:
    return read_documents([Document("x.yaml", "accelerate", flat(parse_yaml("x.yaml", text)))], Context(given=given))


@pytest.mark.parametrize("seed", range(40))
def test_a_written_file_is_read_back_as_the_same_run(seed: int) -> None:
    values = drawn(seed)
    config, flags = RunConfig(**{**PLAN_DEFAULTS, **values}), {**FLAGS, "accumulate": values["accumulate"]}
    reading = read_back(written(config), flags)
    assert not reading.refusals
    assert RunConfig(**{**PLAN_DEFAULTS, **reading.values, **flags}) == config


def test_a_pipeline_cannot_be_written() -> None:
    with pytest.raises(InputError, match="pp 2: accelerate has no pipeline; write megatron or torchtitan"):
        written(RunConfig(model="llama3-8b", ranks=8, pp=2, stage=0, accumulate=2))


def eight_bits(tmp_path: Path, *lines: str, kind: str = "MULTI_GPU") -> Reading:
    """Read mixed_precision fp8 with these lines of fp8_config."""
    section = "".join(f"  {line}\n" for line in lines)
    head = f"distributed_type: {kind}\nnum_processes: 8\nmixed_precision: fp8\n"
    return of(tmp_path, head + (f"fp8_config:\n{section}" if lines else ""))


def products(reading: Reading) -> dict[str, Any]:
    return {name: one for name, one in reading.values.items() if name.startswith("fp8")}


DEFAULT = "accelerate's default, enable_fsdp_float8_all_gather true"
LONG = {"fp8_amax_history": 1024, "fp8_amax_algo": "max"}
"""Transformer Engine's defaults, which accelerate leaves."""


@pytest.mark.parametrize(
    ("lines", "values"),
    [
        ((), {"fp8": "tensorwise"}),
        (("backend: AO",), {"fp8": "tensorwise"}),
        (("backend: TE",), {"fp8": "delayed", **LONG}),
        (("backend: TE", "amax_compute_algo: most_recent"), {"fp8": "delayed", **LONG}),
        (
            ("fp8_backend: TE", "fp8_format: E4M3", "margin: 2", "amax_history_len: 16", "amax_compute_algo: max"),
            {"fp8": "delayed", "fp8_format": "e4m3", "fp8_margin": 2, **LONG, "fp8_amax_history": 16},
        ),
        (
            ("backend: TE", "override_linear_precision: [false, false, true]"),
            {"fp8": "delayed", **LONG, "fp8_exact_wgrad": True},
        ),
        (("backend: TE", "use_mxfp8_block_scaling: true"), {"fp8": "mxfp8"}),
    ],
)
def test_products_in_eight_bits(lines: tuple[str, ...], values: dict[str, Any], tmp_path: Path) -> None:
    reading = eight_bits(tmp_path, *lines)
    reading.check()
    assert products(reading) == values
    assert {one.key for one in reading.said} == set(reading.document.keys)
    config = config_of(reading, **FLAGS)
    assert (config.precision.stored, config.tuning.autocast) == ("fp32", "bf16")


@pytest.mark.parametrize(
    ("lines", "key", "words"),
    [
        (("backend: te",), "backend", "'te' is not a valid FP8BackendType"),
        (("backend: MSAMP",), "backend", "MS-AMP"),
        (("backend: TE", "fp8_format: E5M2"), "fp8_format", "Pure E5M2"),
        (("backend: TE", "override_linear_precision: [true, false, true]"), "override_linear_precision", "Only wgrad"),
        (("backend: TE", "override_linear_precision: false,false,true"), "override_linear_precision", "list of three"),
        (
            ("backend: TE", "use_mxfp8_block_scaling: true", "amax_history_len: 16"), "amax_history_len",
            "not supported for MXFP8",
        ),
    ],
)  # fmt: skip
def test_backends_refuse(lines: tuple[str, ...], key: str, words: str, tmp_path: Path) -> None:
    assert words in refused(eight_bits(tmp_path, *lines))[f"fp8_config.{key}"]


def test_torchao_under_fsdp(tmp_path: Path) -> None:
    def reading(*lines: str, fp8: str = "AO") -> Reading:
        section = "".join(f"  {line}\n" for line in ("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", *lines))
        return of(tmp_path, f"mixed_precision: fp8\nfp8_config:\n  backend: {fp8}\nfsdp_config:\n{section}")

    load, two = "fsdp_cpu_ram_efficient_loading: false", "fsdp_version: 2"
    usual = reading(load, two)
    usual.check()
    config = config_of(usual, **FLAGS)
    assert (config.fp8.kind, config.reduction.compress, config.precision.stored) == ("tensorwise", "bf16", "bf16")
    assert (config.fp8.gather, usual.sources["fp8_gather"]) == (True, DEFAULT)
    assert f"{DEFAULT}: FSDP gathers weights in 8 bits." in usual.notes
    off = reading(load, two, fp8="AO\n  enable_fsdp_float8_all_gather: false")
    assert products(off) == {"fp8": "tensorwise"}
    assert not any("FSDP gathers weights" in one for one in off.notes)
    key = "fp8_config.enable_fsdp_float8_all_gather"
    on = reading(load, two, fp8=f"AO\n  {key[11:]}: true")
    on.check()
    assert (on.sources["fp8_gather"], config_of(on, **FLAGS).fp8.gather) == (key, True)
    assert not any("FSDP gathers weights" in one for one in on.notes)
    assert key in reading(load, fp8=f"AO\n  {key[11:]}: true").of("ignored")
    assert "cpu_ram_efficient_loading is not supported" in refused(reading(two))["mixed_precision"]
    named = reading(two, "fsdp_cpu_ram_efficient_loading: true")
    assert list(refused(named)) == ["fsdp_config.fsdp_cpu_ram_efficient_loading"]
    reading(two, fp8="TE").check()


@pytest.mark.parametrize(
    ("lines", "given", "beside"),
    [
        (("fsdp_offload_params: true",), {}, "--offload"),
        ((), {"stage": 2}, "--stage 2"),
        ((), {"lora_rank": 8}, "--lora-rank"),
        ((), {"freeze": "*,!layers.31"}, "--freeze"),
        ((), {"precision": "fp32"}, "--precision fp32"),
        ((), {"optimizer_in_backward": True}, "--optimizer-in-backward"),
        ((), {"fp8": "rowwise"}, "--fp8 rowwise"),
        ((), {"fp8_library": "te"}, "--fp8-library te"),
    ],
)
def test_other_options_exclude_gathers_in_eight_bits(
    lines: tuple[str, ...], given: dict[str, Any], beside: str, tmp_path: Path
) -> None:
    fsdp = ("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading: false",
            "fsdp_version: 2", *lines)  # fmt: skip
    section = "".join(f"  {line}\n" for line in fsdp)
    text = f"mixed_precision: fp8\nfsdp_config:\n{section}fp8_config:\n  backend: AO\n"
    usual = of(tmp_path, text, **given)
    usual.check()
    assert f"{DEFAULT}: FSDP gathers weights in 8 bits. Beside {beside} zerosim gathers them in 16 bits." in usual.notes
    assert not config_of(usual, **{**FLAGS, **given}).fp8.gather
    name = "fp8_config.enable_fsdp_float8_all_gather"
    found = refused(of(tmp_path, f"{text}  {name[11:]}: true\n", **given))
    assert found[name].startswith(f"FSDP gathers weights in 8 bits beside {beside}: not modelled")


def test_training_arguments_replace_fp8(tmp_path: Path) -> None:
    arguments = Document("args.json", "trainer", {"output_dir": "x", "bf16": True})

    def reading(*backend: str) -> Reading:
        keys = {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "fp8"}
        keys |= dict.fromkeys(["fp8_config.backend"] * len(backend), "".join(backend))
        return read_documents([arguments, Document("a.yaml", "accelerate", keys)], Context(given=FLAGS))

    assert any("no product is in 8 bits" in one for one in reading().notes)
    assert products(reading()) == {}
    assert "has no attribute 'config'" in refused(reading("AO"))["mixed_precision"]
    assert products(reading("TE")) == {"fp8": "delayed", **LONG}


def test_eight_bits_of_megatrons_plugin(tmp_path: Path) -> None:
    assert (
        "plugin for Megatron-LM" in refused(eight_bits(tmp_path, "backend: TE", kind="MEGATRON_LM"))["mixed_precision"]
    )
    plain = of(tmp_path, "distributed_type: NO\nmixed_precision: bf16\nfp8_config:\n  backend: TE\n")
    assert plain.of("ignored")["fp8_config.backend"] == "only mixed_precision fp8 reads it"
