"""Models by name: sizes that give the published number of parameters, and names that are found."""

from __future__ import annotations

from decimal import Decimal

import pytest
from config_files import FILES

from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.config.huggingface.read import read_config_json
from zerosim.config.known import by_family, find_model, known_models, released
from zerosim.config.presets.models import FAMILIES, MODELS, ModelPreset, family_sizes
from zerosim.device.device import Device
from zerosim.errors import InputError
from zerosim.train.build_model import build_model
from zerosim.units import parse_count

EXACT = {
    # Counted on released weights.
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    # By hand: (V + s) h + L (12 h^2 + 13 h) + 2 h.
    "gpt3-175b": (50257 + 2048) * 12288 + 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288,
    "1t": (51200 + 2048) * 25600 + 128 * (12 * 25600**2 + 13 * 25600) + 2 * 25600,
    # OPT's own count has two more rows of positions; BLOOM's, 176,247,271,424, no positions and one norm more.
    "opt-175b": 174_604_468_224 - 2 * 12288,
    "bloom-176b": 176_247_271_424 + 2048 * 14336 - 2 * 14336,
    "zero-fig2-100b": (50257 + 1024) * 8192 + 125 * (12 * 8192**2 + 13 * 8192) + 2 * 8192,
}
ODD_ONE_OUT = "zero-fig4-1.38b-base"  # its layers and width do not give the size that the paper prints


def count(name: str) -> int:
    """On a layout: nothing is placed."""
    return build_model(RunConfig(model=name), Device(0, make_backend("numpy"))).num_parameters


@pytest.mark.parametrize("name", EXACT)
def test_exact_counts(name: str) -> None:
    assert count(name) == EXACT[name]
    published = MODELS[name].published_parameters
    assert published is None or published == EXACT[name]


@pytest.mark.parametrize("preset", MODELS.values(), ids=lambda preset: preset.name)
def test_counts_are_what_the_source_prints(preset: ModelPreset) -> None:
    """To the last digit where a count is printed. Names, as 70B, and ZeRO's labels are rounder: within 7%."""
    printed, counted = parse_count(preset.published), count(preset.name)
    if preset.name == ODD_ONE_OUT:
        assert counted == 1_212_031_488
    elif preset.name in ("gpt3-175b", "1t") or preset.name.startswith("megatron-"):
        digits = Decimal(preset.published[:-1])
        places = len(preset.published[:-1].partition(".")[2])
        assert round(counted * digits / printed, places) == digits
    else:
        assert abs(counted - printed) <= 0.07 * printed


@pytest.mark.parametrize("preset", MODELS.values(), ids=lambda preset: preset.name)
def test_every_preset_has_every_size_of_its_family_and_a_source(preset: ModelPreset) -> None:
    assert preset.sizes.keys() == family_sizes(preset.family).keys()
    assert preset.source
    assert preset.sizes["dropout"] == (0.1 if preset.family == "gpt" else 0.0)
    assert preset.sizes["tie_embeddings"] is (preset.family == "gpt")
    with pytest.raises(TypeError):
        preset.sizes["layers"] = 1  # type: ignore[index]


def test_the_papers_configurations_stand_once_each() -> None:
    rows = [tuple(MODELS[n].sizes[k] for k in ("layers", "hidden", "heads")) for n in MODELS if n.startswith("zero-")]
    assert len(rows) == len(set(rows)) == 31


def test_llamas_share_key_and_value_heads_as_published() -> None:
    assert {n: MODELS[n].sizes["kv_heads"] for n in MODELS if n.startswith("llama")} == {
        "llama2-7b": 32,
        "llama2-13b": 40,
        "llama2-70b": 8,
        "llama3-8b": 8,
        "llama3-70b": 8,
        "llama3.1-405b": 8,
    }
    assert MODELS["llama2-7b"].sizes["rope_base"] == 10_000
    assert MODELS["llama3-8b"].sizes["rope_base"] == 500_000
    assert "rotary" in MODELS["llama3.1-405b"].notes[0]


def test_released_models_have_sources_and_families() -> None:
    presets = [preset for group in released().values() for preset in group]
    assert len(presets) >= 60
    assert len({preset.name for preset in presets} | set(MODELS)) == len(presets) + len(MODELS)
    assert len({preset.source for preset in presets}) == len(presets)
    assert {preset.name for group in by_family().values() for preset in group} == set(known_models())
    for preset in presets:
        assert preset.source.startswith("config.json of ")
        assert preset.published_parameters is None or parse_count(preset.published) == pytest.approx(
            preset.published_parameters, rel=0.02
        )
        known = "planned without dropout", "are yours: --mtp-layers"
        notes = [note for note in preset.notes if not any(words in note for words in known)]
        assert notes == [], preset.name


@pytest.mark.slow  # scenarios/families.toml has most of them
@pytest.mark.parametrize("name", [preset.name for group in released().values() for preset in group])
def test_released_models_have_their_parameters(name: str) -> None:
    preset, counted = known_models()[name], count(name)
    if preset.published_parameters is not None:
        assert counted == preset.published_parameters
    assert abs(counted - parse_count(preset.published)) <= 0.05 * counted


def test_a_row_is_its_file() -> None:
    """Presets of released.toml are read as files are: with the same numbers and rows."""
    for path in sorted(FILES.glob("*.json")):
        preset = known_models().get(path.stem)
        if preset is None or preset.name in MODELS:
            continue
        file = read_config_json(path)
        assert (preset.family, preset.sizes) == (file.family, file.sizes), path.stem
        assert (preset.decoder, preset.numbers) == (file.decoder, file.numbers), path.stem


def test_names_in_any_case_and_near_misses() -> None:
    assert find_model("LLaMA3.1-405B") is MODELS["llama3.1-405b"]
    with pytest.raises(InputError, match=r"model 'gpt2-xxl' is not known; did you mean gpt2-xl"):
        find_model("gpt2-xxl")
    assert find_model("Qwen2.5-7B") is known_models()["qwen2.5-7b"]
    with pytest.raises(InputError, match=r"did you mean llama"):
        find_model("lama")
    with pytest.raises(InputError, match=r"zerosim zoo lists"):
        find_model("?")
    assert not set(FAMILIES) & set(known_models())


def test_a_familys_defaults_follow_what_is_given() -> None:
    assert family_sizes("gpt", {"hidden": 128, "seq": 32})["ffn"] == 512
    assert family_sizes("gpt", {"seq": 32})["positions"] == 32
    assert family_sizes("gpt", {"heads": 8})["kv_heads"] == 8
    llama = family_sizes("llama")
    assert (llama["ffn"], llama["kv_heads"], llama["tie_embeddings"]) == (192, 2, False)
    assert family_sizes("llama", {"hidden": 4096})["ffn"] == 10944  # 8/3 of it, up to a multiple of 32
    assert family_sizes("llama", {"heads": 1})["kv_heads"] == 1
    assert family_sizes("llama", {"heads": 3, "kv_heads": 3})["kv_heads"] == 3
    assert family_sizes("flat")["params"] == 1_000_000
    assert "params" not in family_sizes("gpt")
    with pytest.raises(InputError, match=r"expected one of gpt, llama, .*, mlp, flat"):
        family_sizes("t6")
