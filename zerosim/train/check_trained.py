"""Rules for the patterns of a run's `TuningConfig`: its model's names are known once it is declared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from zerosim.config import RunConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.tuning import is_target, matches, renames
from zerosim.errors import InputError, did_you_mean, wrong
from zerosim.models.model import Model
from zerosim.placement.block import FEED_FORWARD
from zerosim.placement.layout import Layout
from zerosim.placement.spec import FlatSpec, unit_of


def rules(config: RunConfig, model: Model) -> Iterator[InputError]:
    """Yield a pattern that matches no parameter, and what leaves nothing to train."""
    tuning = config.tuning
    if not tuning.is_on:
        return
    names = list(model.shapes())
    for pattern in tuning.patterns:
        word = pattern.removeprefix("!")
        if not any(matches(word, name) for name in names):
            yield wrong("freeze", f" {pattern!r}: matches no parameter of {config.model.name}; {nearest(word, names)}")
    maps = config.model.targets(by_module=tuning.lora_by_rows) if tuning.lora_rank else {}
    for word in tuning.targets:
        if not any(is_target(word, name, one.words) for name, one in maps.items()):
            known = dict.fromkeys(word for one in maps.values() for word in one.words)
            near = did_you_mean(word, known, nearest(word, names))
            yield wrong("lora_target", f" {word!r}: matches no linear map of {config.model.name}'s blocks; {near}")
    gate, up, _ = FEED_FORWARD
    if maps and renames(config.model.decoder.block, tuning) and len({gate, up} & {*tuning.targets}) == 1:
        why = "in an expert's stack gate and up are one weight, and PEFT adapts both or none; choose gate,up"
        yield wrong("lora_target", f" {tuning.lora_target!r}: {why}")
    if tuning.base is not None and not any(flat.format for flat in model.flats):
        yield wrong("base", f" {tuning.base!r}: no linear map of a block is frozen; leave base out, or freeze one")
    if not any(map(tuning.trains, names)):
        yield wrong("freeze", f" {tuning.freeze!r}: everything is frozen; train something, as '*,!{names[-1]}' does")


def nearest(word: str, names: Sequence[str]) -> str:
    """Return a hint with the nearest part of these names."""
    runs = dict[str, None]()
    for name in names[:100]:
        parts = name.split(".")
        for start in range(len(parts)):
            for stop in range(start + 1, len(parts) + 1):
                runs[".".join(parts[start:stop])] = None
    listed = names[0] if len(names) == 1 else f"{names[0]}, {names[1]}{', ...' * (len(names) > 2)}"
    return did_you_mean(word, runs, f"its parameters are {listed}", most=3)


def num_active(model: ModelConfig, flats: Iterable[FlatSpec]) -> int:
    """Count the parameters that work for one token, a tied one once: of a layer's experts the chosen ones alone."""
    found = 0
    for weight in (weight for flat in flats for weight in flat.weights):
        numel = math.prod(weight.whole_shape)
        found += model.active(numel) if is_of_experts(model, weight.name) else numel
    return found


def is_of_experts(model: ModelConfig, name: str) -> bool:
    """Return whether a weight of this name has a matrix or a bias of each expert."""
    experts = model.block_of(unit_of(name)).mlp.experts if model.has_experts else None
    return experts is not None and any(f".{stack}" in name for stack in experts.stacks)


def counts_of(config: RunConfig, layout: Layout) -> dict[str, int]:
    """Return the JSON form of both, of models with experts."""
    active = {"num_active": num_active(config.model, layout.flats.values())} if config.model.has_experts else {}
    return active | {"num_trained": num_trained(layout)}


def num_trained(layout: Layout) -> int:
    """Count the trained parameters of the whole model, a tied one once."""
    trained = (flat for name, flat in layout.flats.items() if layout.is_trained(name))
    return sum(math.prod(weight.whole_shape) for flat in trained for weight in flat.weights)
