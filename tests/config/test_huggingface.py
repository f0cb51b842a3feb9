"""config.json files: what they hold is read as published, and what is not modelled is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerosim.cli.main import main
from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.config.huggingface import read_config_json
from zerosim.config.presets.models import MODELS
from zerosim.device.device import Device
from zerosim.errors import InputError
from zerosim.train.build import build_model

# As released, less the keys that say nothing about the model (token ids, dtype, generation).
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
SCALED = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """read(base, change=..., dropped=None): the preset of a file with those keys; a change to `...` drops the key."""

    def read(base: dict[str, Any], **changes: Any) -> Any:
        values = {key: value for key, value in {**base, **changes}.items() if value is not ...}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values), "utf-8")
        return read_config_json(path)

    return read


@pytest.mark.parametrize(("base", "name"), [(GPT2, "gpt2"), (LLAMA, "llama3-8b")])
def test_a_released_file_is_the_preset(read: Any, tmp_path: Path, base: dict[str, Any], name: str) -> None:
    preset = read(base)
    assert preset.family == MODELS[name].family
    sizes = dict(MODELS[name].sizes)
    assert dict(preset.sizes) == sizes | {"seq": min(sizes["seq"], 4096)}
    assert preset.notes == ()
    model = build_model(RunConfig(model=str(tmp_path / "config.json")), Device(0, make_backend("numpy")))
    assert model.num_parameters == MODELS[name].published_parameters


def test_aliases_and_defaults(read: Any) -> None:
    renamed = {
        "n_embd": ..., "n_layer": ..., "n_head": ..., "n_positions": ..., "n_ctx": ...,
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 1024,
    }  # fmt: skip
    assert read(GPT2, **renamed).sizes == read(GPT2).sizes
    assert read(GPT2, n_positions=...).sizes["positions"] == 1024
    assert read(GPT2, n_inner=None).sizes["ffn"] == 3072
    assert read(GPT2, n_inner=1000).sizes["ffn"] == 1000
    assert read(GPT2, tie_word_embeddings=False).sizes["tie_embeddings"] is False
    assert read(GPT2, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0).sizes["dropout"] == 0.0
    assert read(LLAMA, num_key_value_heads=...).sizes["kv_heads"] == 32
    assert read(LLAMA, rms_norm_eps=...).sizes["norm_eps"] == 1e-6
    assert read(LLAMA, rope_theta=...).sizes["rope_base"] == 10000.0
    assert read(LLAMA, tie_word_embeddings=...).sizes["tie_embeddings"] is False
    assert read(LLAMA, head_dim=128).sizes == read(LLAMA).sizes
    newer = read(LLAMA, rope_theta=..., rope_parameters={"rope_theta": 500000.0, "rope_type": "default"})
    assert newer == read(LLAMA)


@pytest.mark.parametrize(
    ("base", "key", "positions", "words", "seq", "noted"),
    [
        (LLAMA, "max_position_embeddings", 131072, "", 4096, True),
        (LLAMA, "max_position_embeddings", 131072, "--seq 4096", 4096, False),
        (LLAMA, "max_position_embeddings", 131072, "--seq 8192", 8192, False),
        (LLAMA, "max_position_embeddings", 2048, "", 2048, False),
        (GPT2, "n_positions", 8192, "", 4096, True),
        (GPT2, "n_positions", 4096, "", 4096, False),
    ],
)
def test_positions_are_no_default_for_a_row(
    read: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    base: dict[str, Any],
    key: str,
    positions: int,
    words: str,
    seq: int,
    noted: bool,
) -> None:
    """A row has 4,096 tokens or as many as there are positions, unless --seq says it. The table keeps its rows."""
    small = {"n_layer": 1, "n_ctx": ...} if base is GPT2 else {"num_hidden_layers": 1}
    read(base, **{key: positions}, **small)
    assert main(["plan", "--model", str(tmp_path / "config.json"), "--ranks", "2", *words.split()]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert f"1 row of {seq:,} tokens on each of 2 ranks" in page
    note = f"--seq {seq} was assumed. The file's {positions:,} positions are its longest row; pass --seq"
    assert (note in page) == noted
    assert ("was assumed" in page) == noted
    config = RunConfig(model=str(tmp_path / "config.json"))
    assert config.model.positions == positions


def test_what_no_count_depends_on_is_noted(read: Any) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        (note,) = read(LLAMA, **{key: SCALED}).notes
        assert note.startswith(f"{key} llama3: scaled rotary angles are not modelled")
    (note,) = read(LLAMA, attention_dropout=0.1).notes
    assert "attention_dropout 0.1" in note
    (note,) = read(LLAMA, model_type="mistral", sliding_window=None).notes
    assert "is a llama" in note


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (GPT2, {"n_embd": ...}, r"hidden_size \(or d_model, n_embd\) is missing"),
        (GPT2, {"vocab_size": ...}, "vocab_size is missing"),
        (LLAMA, {"intermediate_size": ...}, "intermediate_size is missing"),
        (GPT2, {"n_layer": "12"}, "n_layer '12': expected a whole number"),
        (GPT2, {"n_layer": 12.0}, "n_layer 12.0: expected a whole number"),
        (GPT2, {"n_layer": True}, "n_layer True: expected a whole number"),
        (GPT2, {"n_layer": 0}, "n_layer 0: expected a whole number of at least 1"),
        (LLAMA, {"vocab_size": -5}, "vocab_size -5: expected"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps 0: expected a number more than 0"),
        (LLAMA, {"rope_theta": float("inf")}, "rope_theta inf: expected a number"),
        (LLAMA, {"rope_scaling": 4}, "rope_scaling 4: expected an object"),
        (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings 1: expected true or false"),
        (GPT2, {"resid_pdrop": 1.5}, r"resid_pdrop 1.5: expected a chance in \[0, 1\)"),
        (GPT2, {"resid_pdrop": 0.2}, "zerosim models one rate for all three"),
        (GPT2, {"n_head": 7}, "7 heads do not divide hidden size 768"),
        (GPT2, {"hidden_size": 1024}, "hidden_size 1024 and n_embd 768 name the same size"),
        (GPT2, {"activation_function": "relu"}, "activation_function 'relu' is not modelled"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights false is not modelled"),
        (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads 5 do not divide 32 heads"),
        (LLAMA, {"head_dim": 64}, "head_dim 64: only hidden / heads = 128 is modelled"),
        (LLAMA, {"hidden_size": 96, "head_dim": 3}, "heads of 3 columns cannot be rotated in pairs"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not modelled: expected silu"),
        (LLAMA, {"attention_bias": True}, "attention_bias true is not modelled"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias true is not modelled"),
        (LLAMA, {"model_type": "mistral"}, "sliding_window 4096 is not modelled"),
        (LLAMA, {"model_type": "mistral", "sliding_window": 1024}, "sliding_window 1024 is not modelled"),
        (LLAMA, {"model_type": "qwen2"}, r"'qwen2' is not modelled \(biases of q, k and v\); gpt2 and llama"),
        (LLAMA, {"model_type": "bloom"}, "model_type 'bloom' is not modelled; gpt2 and llama are"),
        (LLAMA, {"model_type": ["llama"]}, "is not modelled; gpt2 and llama are"),
        (LLAMA, {"model_type": ...}, "model_type is missing; gpt2 and llama are"),
    ],
    ids=lambda value: json.dumps(value, default=str) if isinstance(value, dict) and len(value) < 4 else "",
)
def test_what_is_refused_is_named(read: Any, base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(base, **changes)
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"{'model_type': 'gpt2'}", "is not JSON"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"[" * 200_000, "deep"),
        (b"[1]", "holds a JSON list: expected an object"),
        (b"null", "expected an object"),
    ],
    ids=["empty", "quotes", "bytes", "deep", "list", "null"],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_config_json(path)
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none.json: No such file"):
        read_config_json(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"is a directory: pass the file, .*config.json"):
        read_config_json(tmp_path)
