"""Names and layouts of released files: prefixes, heads, buffers, q|k|v by heads and groups, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built import builder

from zerosim.config import RunConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.released import CONFIG, INDEX, SINGLE
from zerosim.config.safetensors import Planned, read_header, write_tensors
from zerosim.errors import InputError
from zerosim.models.decoder import build_decoder
from zerosim.models.model import Shapes
from zerosim.models.released import OnDemand, from_groups, read_released, to_groups
from zerosim.models.save import planned, save_folder
from zerosim.placement.families import DECODERS
from zerosim.tensor.tensor import cpu
from zerosim.train.data import read_start

SIZES: dict[str, Any] = dict(layers=2, hidden=8, heads=4, seq=6, vocab=11)


def shapes_of(family: str, **sizes: Any) -> tuple[ModelConfig, Shapes]:
    model = ModelConfig(name=family, **{**SIZES, **sizes})
    return model, build_decoder(builder(cpu(), name=family, **{**SIZES, **sizes})).shapes()


def drawn(shapes: Shapes) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(path: Path, tensors: Mapping[str, Any]) -> str:
    names = {"float32": "F32", "uint8": "U8", "int64": "I64"}
    with path.open("wb") as file:
        write_tensors(
            file,
            [Planned(name, names[str(one.dtype)], one.shape, lambda one=one: one) for name, one in tensors.items()],
        )
    return str(path)


def files_of(family: str, **sizes: Any) -> tuple[ModelConfig, Shapes, dict[str, Any], dict[str, Any]]:
    """A model, its shapes, weights by our names, and the same as its file has them."""
    model, shapes = shapes_of(family, **sizes)
    weights = drawn(shapes)
    return model, shapes, weights, {one.name: one.values() for one in planned(model, weights)}


def read(path: str, model: ModelConfig, shapes: Shapes) -> dict[str, Any]:
    return {name: one() for name, one in read_released(path, model, shapes).items()}


def same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", DECODERS)
def test_every_family_goes_to_a_file_and_back(family: str, tmp_path: Path) -> None:
    model, shapes, weights, stored = files_of(family)
    save_folder(tmp_path, model, weights)
    assert same(read(str(tmp_path), model, shapes), weights)
    assert {name: one.shape for name, one in read_header(str(tmp_path / SINGLE)).items()} == {
        name: one.shape for name, one in stored.items()
    }


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize("rest", [(), (5,)])
def test_groups_are_the_queries_that_share_a_key_then_key_and_value(
    heads: int, kv_heads: int, rest: tuple[int, ...]
) -> None:
    """Row by row, as Falcon's and NeoX's code takes them apart."""
    model = ModelConfig(name="llama", hidden=12, heads=heads, kv_heads=kv_heads, head_dim=2)
    stored = np.arange((heads + 2 * kv_heads) * 2 * max(1, *rest, 1)).reshape(-1, *rest)
    rows, share = iter(stored), heads // kv_heads
    parts: dict[str, list[Any]] = {"q": [], "k": [], "v": []}
    for _ in range(kv_heads):
        for part, count in (("q", share), ("k", 1), ("v", 1)):
            parts[part] += [next(rows) for _ in range(2 * count)]
    assert np.array_equal(from_groups(stored, model), [*parts["q"], *parts["k"], *parts["v"]])
    assert np.array_equal(to_groups(from_groups(stored, model), model), stored)


@pytest.mark.parametrize(("family", "head"), [("bert", "cls.predictions"), ("roberta", "lm_head")])
def test_encoders_files_have_heads_of_other_tasks_and_a_second_head(family: str, head: str, tmp_path: Path) -> None:
    """As the first released files of BERT and RoBERTa: other names of norms, a pooler, numbers of positions."""
    model, shapes, weights, stored = files_of(family)
    table = stored[f"{family}.embeddings.word_embeddings.weight"]
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): values
        for name, values in stored.items()
    }
    beside = {
        f"{family}.pooler.dense.bias": np.ones(8, np.float32),
        "cls.seq_relationship.bias": np.ones(2, np.float32),
    }
    numbers = {f"{family}.embeddings.position_ids": np.arange(6)[None]}
    again = {f"{head}.decoder.weight": table, f"{head}.decoder.bias": stored[f"{head}.bias"]}
    path = write(tmp_path / "a.safetensors", {**older, **beside, **numbers, **again})
    assert same(read(path, model, shapes), weights)
    other = write(tmp_path / "b.safetensors", {**stored, f"{head}.decoder.weight": table + 1})
    with pytest.raises(
        InputError, match=r"differs from .*word_embeddings\.weight, and the model's head is tied to it$"
    ):
        read(other, model, shapes)


# -- names -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("gpt", "transformer.", ""),  # as GPT-2 was first released
        ("gpt", "transformer.", "model.transformer."),
        ("llama", "model.", ""),  # a base model, without its head
        ("opt", "model.decoder.", "decoder."),
        ("gemma", "model.", "language_model.model."),
    ],
)
def test_a_prefix_may_lack_or_be_longer(family: str, old: str, new: str, tmp_path: Path) -> None:
    model, shapes, weights, stored = files_of(family)
    renamed = {new + name.removeprefix(old) if name.startswith(old) else name: one for name, one in stored.items()}
    assert same(read(write(tmp_path / SINGLE, renamed), model, shapes), weights)


def test_the_head_has_its_familys_name(tmp_path: Path) -> None:
    _, _, _, stored = files_of("gpt_neox")
    assert "embed_out.weight" in stored
    assert {"lm_head.weight", "lm_head.bias"} < files_of("phi")[3].keys()


def test_a_tied_head_may_be_there_if_it_is_equal(tmp_path: Path) -> None:
    model, shapes, weights, stored = files_of("gpt")
    table = stored["transformer.wte.weight"]
    assert same(read(write(tmp_path / SINGLE, {**stored, "lm_head.weight": table}), model, shapes), weights)
    path = write(tmp_path / SINGLE, {**stored, "lm_head.weight": table + 1})
    with pytest.raises(
        InputError, match=r"tensor 'lm_head.weight' differs from transformer.wte.weight, and the model's"
    ):
        read(path, model, shapes)
    untied, more = shapes_of("gpt", tie_embeddings=False)
    assert np.array_equal(read(path, untied, more)["lm_head.weight"], table + 1)


def test_buffers_of_older_libraries_are_no_weights(tmp_path: Path) -> None:
    for family, names in {
        "gpt": ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"),
        "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
        "gpt_neox": ("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.rotary_emb.inv_freq"),
    }.items():
        model, shapes, weights, stored = files_of(family)
        masks = dict.fromkeys(names, np.ones((1, 2), np.uint8))
        assert same(read(write(tmp_path / SINGLE, {**masks, **stored}), model, shapes), weights)


# -- what does not fit -----------------------------------------------------------------------------------
def without(name: str) -> Any:
    return lambda stored: {one: values for one, values in stored.items() if one != name}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(NORM), r"the weights of .* do not fit the model: missing model.norm.weight$"),
        (lambda stored: {**stored, "extra": np.zeros(1, np.float32)}, "do not fit the model: unknown extra$"),
        (
            lambda stored: {**stored, NORM: np.zeros(9, np.float32)},
            r"model.norm.weight has shape \(9,\), expected \(8,\)",
        ),
        (
            lambda stored: {**stored, NORM: np.zeros(8, np.int64)},
            "tensor 'model.norm.weight' is I64: expected F64, F32",
        ),
        (
            lambda stored: {"base_model.model.q.lora_A.weight": stored[NORM]},
            "holds adapters .*: pass them as --adapters",
        ),
    ],
    ids=["missing", "extra", "shape", "dtype", "adapters"],
)
def test_tensors_that_do_not_fit_are_named(change: Any, said: str, tmp_path: Path) -> None:
    model, shapes, _, stored = files_of("llama")
    with pytest.raises(InputError, match=said):
        read_released(write(tmp_path / SINGLE, change(stored)), model, shapes)


@pytest.mark.parametrize(
    ("family", "other", "said"),
    [
        ("llama", "gpt", "; its names are those of gpt2, gpt_bigcode$"),
        ("llama", "qwen2", "; its names are those of qwen2, seed_oss$"),
        ("gpt", "gpt_neox", "; its names are those of gpt_neox$"),
        ("qwen3", "llama", "; its names are those of llama, mistral, gemma and 2 more$"),
    ],
)
def test_weights_of_another_family_are_told(family: str, other: str, said: str, tmp_path: Path) -> None:
    _, _, _, stored = files_of(other)
    with pytest.raises(InputError, match=said):
        read_released(write(tmp_path / SINGLE, stored), *shapes_of(family))


@pytest.mark.parametrize("values", [np.zeros(8, np.float32), np.zeros(9, np.float32)], ids=["names", "shapes"])
def test_weights_of_a_folder_name_its_own_model(values: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes, _, stored = files_of("llama")  # a known name, which hides a folder that is called so
    monkeypatch.chdir(tmp_path)
    Path("llama").mkdir()
    write(Path("llama", SINGLE), {**stored, "other" if values.size == 8 else NORM: values})
    Path("llama/config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"; the folder's own model is --model \./llama$"):
        read_released("llama", model, shapes)


# -- on demand -------------------------------------------------------------------------------------------
def test_weights_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    model, shapes, weights, _ = files_of("llama")
    save_folder(tmp_path, model, weights)
    start = read_start(RunConfig(model="llama", **SIZES, weights=str(tmp_path)), shapes)
    assert isinstance(start, OnDemand)
    (tmp_path / SINGLE).unlink()  # so that nothing was read yet
    assert len(start) == len(shapes) == len(list(start))
    assert "model.norm.weight" in start
    with pytest.raises(InputError, match="cannot read"):
        start["model.norm.weight"]


def test_nan_is_a_weight_too(tmp_path: Path) -> None:
    model, shapes, weights, _ = files_of("gpt")
    weights["wte.weight"][0, 0] = np.nan
    save_folder(tmp_path, model, weights)
    found = read(str(tmp_path), model, shapes)
    assert np.array_equal(found["wte.weight"], weights["wte.weight"], equal_nan=True)


def test_large_models_are_saved_in_shards(tmp_path: Path) -> None:
    """No shard is larger than asked, but for one with a single tensor."""
    model, shapes, weights, _ = files_of("llama")
    save_folder(tmp_path, model, weights, largest=1000)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files[0] == CONFIG
    assert INDEX in files
    shards = [read_header(str(tmp_path / file)) for file in files if file.endswith(".safetensors")]
    assert len(shards) > 3
    for shard in shards:
        assert len(shard) == 1 or sum(4 * one.numel for one in shard.values()) <= 1000
    assert same(read(str(tmp_path), model, shapes), weights)
