"""Every model that has a name here: those of papers (presets/models.py), and released ones (presets/released.toml).

A row of released.toml is read as a config.json is: its keys are a file's, without those that are a class's default.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from zerosim.config.presets.models import FAMILIES, MODELS, ModelPreset
from zerosim.errors import did_you_mean, wrong

PAPERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "GPT-2": ("gpt2",),
        "GPT-3, and OPT and BLOOM as GPTs": ("gpt3", "opt", "bloom"),
        "Llama 2, 3": ("llama",),
        "ZeRO's paper": ("zero",),
        "Megatron-LM's paper": ("megatron", "1t"),
    }
)
"""The families of `presets.models`: how their names begin."""


def find_model(name: str) -> ModelPreset:
    """Return the preset of that name, in any case. Raises: InputError with the nearest names for an unknown one."""
    preset = MODELS.get(name.lower()) or known_models().get(name.lower())
    if preset is not None:
        return preset
    names = [*FAMILIES, *known_models()]
    hint = did_you_mean(name.lower(), names, "zerosim zoo lists those that are", most=3, quote=str)
    raise wrong("model", f" {name!r} is not known; {hint}")


@cache
def known_models() -> Mapping[str, ModelPreset]:
    """Return all presets by name, in the order of their files."""
    return MappingProxyType({**MODELS, **{preset.name: preset for group in released().values() for preset in group}})


@cache
def released() -> Mapping[str, tuple[ModelPreset, ...]]:
    """Return the presets of released.toml, by the title of their family."""
    text = (files("zerosim.config.presets") / "released.toml").read_text("utf-8")
    return MappingProxyType({family["title"]: tuple(_models(family)) for family in tomllib.loads(text)["family"]})


def by_family() -> Mapping[str, tuple[ModelPreset, ...]]:
    """Return all presets, by the title of their family; those that are only in papers come last."""
    of_papers = {
        title: tuple(preset for preset in MODELS.values() if preset.name.startswith(starts))
        for title, starts in PAPERS.items()
    }
    models = {title: found for title, found in of_papers.items() if not title.endswith("paper")}
    return MappingProxyType({**models, **released(), **of_papers})


def _models(family: Mapping[str, Any]) -> Iterator[ModelPreset]:
    from zerosim.config.huggingface.read import model_of  # not at every start

    for name, repository, published, counted, *row in family["models"]:
        own = row.pop() if len(row) > len(family["columns"]) else {}
        columns = dict(zip(family["columns"], row, strict=True))
        keys = {"model_type": family["model_type"], **family["common"], **columns, **own}
        preset = model_of(f"model {name}", {key: None if one == "null" else one for key, one in keys.items()})
        source = f"config.json of {repository}"
        yield dataclasses.replace(
            preset, name=name, published=published, published_parameters=counted or None, source=source
        )
