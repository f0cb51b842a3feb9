"""config.json files: what they hold is read as published, and what is not modelled is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerosim.cli.main import main
from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.config.huggingface.read import read_config_json
from zerosim.config.presets.models import MODELS
from zerosim.device.device import Device
from zerosim.errors import InputError
from zerosim.train.build_model import build_model

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


def test_names_and_defaults(read: Any) -> None:
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
    assert read(LLAMA, head_dim=64).sizes["head_dim"] == 64
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
