"""config.json beside transformers' own classes: the same sizes, windows, bases and scalings from the same file."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from config_files import FILES, file

from zerosim.config.huggingface.read import read_config_json
from zerosim.placement.families import DECODERS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")

NAMES = sorted(path.stem for path in FILES.glob("*.json"))
TOWERS = ("vision_config",)


def theirs(name: str) -> Any:
    """The decoder's configuration, as transformers makes it of the file."""
    values = {key: value for key, value in file(name).items() if key not in TOWERS}
    made = auto.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    return getattr(made, "text_config", made)


def first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_theirs(name: str) -> None:
    ours, config = read_config_json(FILES / f"{name}.json"), theirs(name)
    sizes, hidden, heads = ours.sizes, config.hidden_size, config.num_attention_heads
    assert sizes["layers"] == config.num_hidden_layers
    assert (sizes["hidden"], sizes["heads"], sizes["vocab"]) == (hidden, heads, config.vocab_size)
    assert sizes["head_dim"] == (first(config, "head_dim") or hidden // heads)
    if not getattr(config, "multi_query", False) or config.model_type == "gpt_bigcode":
        assert sizes["kv_heads"] == (first(config, "num_key_value_heads", "num_kv_heads") or heads)
    assert sizes["ffn"] == (
        first(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff") or 4 * hidden
    )
    of_padding = DECODERS[ours.family].first_position if config.model_type == "roberta" else 0
    assert sizes["positions"] + of_padding == first(config, "max_position_embeddings", "seq_length", "n_positions")
    own = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)  # T5's class ties every head
    assert sizes["tie_embeddings"] == own
    eps = first(config, "rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    assert sizes["norm_eps"] == (1e-5 if eps is None else eps)  # OPT's are nn.LayerNorm's


@pytest.mark.parametrize("name", NAMES)
def test_every_block_is_theirs(name: str) -> None:
    """The window, the base and the rotation of each block."""
    ours, config = read_config_json(FILES / f"{name}.json"), theirs(name)
    layers = int(ours.sizes["layers"])
    window = first(config, "sliding_window")
    kinds = first(config, "layer_types") or ["sliding_attention" if window else "full_attention"] * layers
    rope = first(config, "rope_parameters") or {}
    for number, kind in enumerate(kinds):
        block = ours.numbers.kind(number, ours.sizes["rope_base"])
        assert block.window == (window if kind == "sliding_attention" else 0)
        if "rope_theta" in rope or kind in rope:
            assert block.rope_base == (rope.get(kind) or rope)["rope_theta"]
        if (rotates := first(config, "no_rope_layers")) is not None:
            assert block.rotates == bool(rotates[number])
        if config.model_type == "cohere2":
            assert block.rotates == bool(block.window)


@pytest.mark.parametrize("name", NAMES)
def test_scalings_and_rotated_parts_are_theirs(name: str) -> None:
    ours, rope = read_config_json(FILES / f"{name}.json"), first(theirs(name), "rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    assert ours.numbers.scaling.kind == rope.get("rope_type", "default")
    if rope:
        assert ours.numbers.rotary_part == rope.get("partial_rotary_factor", 1.0)
    for key, value in ours.numbers.scaling.values:
        assert value == (tuple(rope[key]) if isinstance(value, tuple) else rope[key])
