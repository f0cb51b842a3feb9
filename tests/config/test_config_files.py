"""Configuration files as their families publish them: sizes, numbers, rows and notes, as in `files/expected.toml`."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from config_files import FILES, file, model

from zerosim.config import RunConfig
from zerosim.config.huggingface.read import model_of, read_config_json
from zerosim.config.numbers import NEUTRAL, UNSCALED, Kind, Numbers, Scaling
from zerosim.config.parts.model import ModelConfig
from zerosim.placement.families import DECODERS, t5

EXPECTED = tomllib.loads((FILES / "expected.toml").read_text("utf-8"))
SIZES = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "positions", "vocab", "tie_embeddings", "norm_eps",
    "rope_base", "dropout",
)  # fmt: skip


def test_every_file_is_expected() -> None:
    assert {path.stem for path in FILES.glob("*.json")} == EXPECTED.keys()
    assert len(EXPECTED) >= 32


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_file_is_read(name: str) -> None:
    preset, expected = read_config_json(FILES / f"{name}.json"), EXPECTED[name]
    assert preset.family == expected["family"]
    assert [preset.sizes[size] for size in SIZES] == expected["sizes"]
    assert list(preset.notes) == expected.get("notes", [])
    numbers = {one.name: getattr(preset.numbers, one.name) for one in fields(Numbers)}
    scaling = numbers.pop("scaling")
    neutral = {name: getattr(NEUTRAL, name) for name in numbers}
    assert numbers == neutral | expected.get("numbers", {})
    said = {"kind": scaling.kind, **{key: value for key, value in scaling.values if not isinstance(value, tuple)}}
    assert said == expected.get("scaling", {"kind": "default"})
    assert RunConfig(model=str(FILES / f"{name}.json")).model.notes == preset.notes


def test_rows_that_differ_from_their_familys() -> None:
    changed = {name for name in EXPECTED if model(name).decoder is not None}
    assert changed == {"falcon-40b", "flan-t5-xl", "gpt-neox-20b", "starcoder-15.5b"}
    assert model("flan-t5-xl").decoder == t5("geglu")
    assert model("gpt-neox-20b").decoder == row("gpt_neox", between="gelu_tanh")
    assert model("starcoder-15.5b").decoder == row("gpt_bigcode", between="gelu")
    block = DECODERS["falcon"].block
    two = {"attention": block.attention._replace(before="ln_attn"), "mlp": block.mlp._replace(before="ln_mlp")}
    assert model("falcon-40b").decoder == row("falcon", **two)


def row(family: str, **changes: Any) -> Any:
    decoder = DECODERS[family]
    return decoder._replace(block=decoder.block._replace(**changes))


def test_keys_that_change_a_row() -> None:
    def block(name: str, **changes: Any) -> Any:
        decoder = model(name, **changes).decoder
        assert decoder is not None
        return decoder.block

    def has_bias(block: Any) -> tuple[bool, bool, bool]:
        return block.attention.columns.bias, block.attention.rows.bias, block.mlp.rows.bias

    assert has_bias(block("llama2-7b", attention_bias=True)) == (True, True, False)
    assert has_bias(block("llama2-7b", mlp_bias=True)) == (False, False, True)
    assert has_bias(block("opt-30b", enable_bias=False)) == (False, False, False)
    assert has_bias(block("starcoder2-15b", use_bias=False)) == (False, False, False)
    assert has_bias(block("pythia-12b", attention_bias=False)) == (False, False, True)
    assert block("pythia-12b", use_parallel_residual=False).parallel is False
    assert block("command-r-35b", use_qk_norm=True).qk_norm == "heads"
    assert block("llama2-7b", hidden_act="gelu_pytorch_tanh").between == "geglu"
    assert block("gpt2", activation_function="relu").between == "relu"
    older = block("falcon-7b", bias=True, multi_query=False, parallel_attn=False)
    assert has_bias(older) == (True, True, True)
    assert older.mlp.before == "post_attention_layernorm"
    assert not older.parallel
    assert model("falcon-7b", multi_query=False).sizes["kv_heads"] == 71
    assert model("falcon-40b", num_ln_in_parallel_attn=1).decoder is None
    assert model("starcoder-15.5b", multi_query=False).sizes["kv_heads"] == 48
    assert model("gpt2", scale_attn_weights=False).numbers.query_scale == 1.0
    assert model("gpt2", attn_pdrop=0.0).sizes["dropout"] == 0.0


@pytest.mark.parametrize(("heads", "rotated"), [(16, 64), (93, 30), (91, 26)])
def test_a_head_has_as_many_rotated_columns_as_its_file_says(tmp_path: Path, heads: int, rotated: int) -> None:
    values = file("gpt-j-6b", n_embd=4096 // heads * heads, n_head=heads, rotary_dim=rotated)
    (path := tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    assert ModelConfig(name=str(path)).rotated == rotated


def test_blocks_that_differ() -> None:
    full, sliding = "full_attention", "sliding_attention"

    def windows(name: str, **changes: Any) -> tuple[int, int, int]:
        numbers = model(name, **changes).numbers
        return numbers.window, numbers.full_every, numbers.window_from

    some: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 64}
    assert windows("qwen2.5-0.5b", **some) == (64, 0, 24)
    assert windows("qwen2.5-0.5b", **some, max_window_layers=20) == (64, 0, 20)
    assert windows("qwen2.5-0.5b", **some, max_window_layers=0) == (64, 0, 0)
    assert windows("qwen2.5-0.5b", **some, layer_types=[full] * 24) == (0, 0, 0)
    assert windows("qwen2.5-0.5b", **some, layer_types=[sliding, sliding, full] * 8) == (64, 3, 0)
    assert windows("qwen2.5-0.5b", **some, layer_types=[full] * 4 + [sliding] * 20) == (64, 0, 4)
    assert windows("gemma2-27b", sliding_window=None) == (0, 0, 0)
    assert windows("gemma3-1b", sliding_window_pattern=4) == (512, 4, 0)
    assert windows("gemma3-1b", layer_types=[sliding] * 26) == (512, 0, 0)
    assert windows("mistral-7b", model_type="ministral", layer_types=[sliding, full] * 16) == (4096, 2, 0)
    command = model("command-r7b", layer_types=[full] * 32).numbers
    assert not any(command.kind(number, 1e4).rotates for number in range(32))
    command = model("command-r7b", layer_types=[full, *[sliding] * 31]).numbers
    assert [command.kind(number, 1e4).rotates for number in range(32)] == [False, *[True] * 31]
    assert model("smollm3-3b", no_rope_layers=None, no_rope_layer_interval=6).numbers.plain_every == 6
    assert model("smollm3-3b", no_rope_layers=[1] * 40).numbers.plain_every == 0
    assert model("smollm3-3b", no_rope_layers=[0] * 36).numbers.plain_every == 1
    plain = [number % 4 == 3 for number in range(36)]
    for kinds in (None, [sliding if slides else full for slides in plain]):
        small = model("smollm3-3b", use_sliding_window=True, sliding_window=512, layer_types=kinds).numbers
        assert [small.kind(number, 1e4) for number in range(36)] == [Kind(512 * p, 1e4, not p) for p in plain]


def test_scalings_of_rotary_angles() -> None:
    def scaling(**values: Any) -> Scaling:
        return model("llama2-7b", rope_scaling=values).numbers.scaling

    original = ("original_max_position_embeddings", 4096.0)
    assert scaling(type="linear", factor=2) == Scaling("linear", (("factor", 2.0),))
    assert scaling(rope_type="dynamic", factor=4.0) == Scaling("dynamic", (("factor", 4.0),))
    assert scaling(rope_type="default") == UNSCALED
    assert scaling(type="yarn", factor=2.0) == Scaling("yarn", (("factor", 2.0), original))
    yarn = scaling(type="yarn", factor=2.0, truncate=False, beta_fast=8, attention_factor=None)
    assert yarn == Scaling("yarn", (("factor", 2.0), original, ("beta_fast", 8.0), ("truncate", False)))
    long = model("phi-3-mini-128k").numbers.scaling
    lists = file("phi-3-mini-128k")["rope_scaling"]
    assert dict(long.values)["short_factor"] == tuple(lists["short_factor"])
    assert dict(long.values)["long_factor"] == tuple(lists["long_factor"])
    for older in ("su", "yarn"):
        assert model("phi-3-mini-128k", rope_scaling={**lists, "type": older}).numbers.scaling == long


def test_transformers_4_and_5_say_the_same() -> None:
    older = file("llama3.1-8b")
    newer = {**older.pop("rope_scaling"), "rope_theta": older.pop("rope_theta")}
    assert model_of("config.json", {**older, "rope_parameters": newer}) == model("llama3.1-8b")
    assert model("llama3.1-8b", rope_parameters={"rope_type": "default"}, rope_scaling=...).sizes["rope_base"] == 5e5
    part = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4}
    assert model("phi-2", rope_parameters=part, rope_theta=..., partial_rotary_factor=...) == model("phi-2")
    neox = model("pythia-12b", rope_parameters=..., rotary_pct=0.5, rotary_emb_base=1000)
    assert (neox.numbers.rotary_part, neox.sizes["rope_base"]) == (0.5, 1000.0)
    assert model("pythia-12b", rope_parameters=...) == model("pythia-12b")
    text = file("gemma3-4b")["text_config"]
    older_text = {key: value for key, value in text.items() if key not in ("rope_parameters", "layer_types")}
    older_text["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    assert model("gemma3-4b", text_config=older_text) == model("gemma3-4b")


def test_blocks_with_a_window_have_angles_of_their_own() -> None:
    text = file("gemma3-4b")["text_config"]
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}

    def numbers(**kinds: Any) -> tuple[float, str]:
        read = model("gemma3-4b", text_config={**text, "rope_parameters": kinds}).numbers
        return read.rope_local, read.scaling.kind

    plain = {"rope_type": "default", "rope_theta": 5e5}
    assert numbers(full_attention=plain, sliding_attention=plain) == (0.0, "default")
    assert numbers(full_attention=scaled, sliding_attention=plain) == (5e5, "linear")  # unscaled, of the same base
    assert numbers(full_attention=scaled, sliding_attention=scaled) == (0.0, "linear")
    assert numbers(full_attention=scaled) == (1e4, "linear")
    assert numbers(sliding_attention=plain) == (5e5, "default")


def test_notes() -> None:
    quantized = model("llama2-7b", quantization_config={"quant_method": "gptq", "bits": 4})
    assert quantized.notes == ("quantization_config: planned without it: weights are those of --dtype, or of --base",)
    near = model("qwen3-8b", rms_norm_eps=..., rms_norm_epsilon=1e-6)
    assert near.notes == ("rms_norm_epsilon (did you mean rms_norm_eps?): not read, no qwen3 has such a key",)
    inside = model("llama2-7b", rope_scaling={"type": "linear", "factor": 2.0, "alpha": 3})
    assert inside.notes == ("rope_scaling: alpha: not read, no scaling of rotary angles has it",)
    window = model("llama2-7b", sliding_window=4096)
    assert window.notes == ("sliding_window 4096: this family has no windows",)
    beside = model("gemma3-4b", quantization_config={}, tower_count=2)
    assert beside.notes == (
        "planned without its vision tower",
        "quantization_config: planned without it: weights are those of --dtype, or of --base",
        "tower_count: not read, beside text_config",
    )
    head = model("gemma-2b", head_dim=...)
    assert head.notes == ("head_dim 256: missing in the file, the default of its class",)
