"""`zerosim zoo`: list the models, devices, nodes and recipes that zerosim knows by name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from zerosim.cli.outputs import leave, output
from zerosim.cli.parser import Parser
from zerosim.config.known import known_models
from zerosim.config.presets import hardware, nodes, recipes
from zerosim.config.presets.models import ModelPreset
from zerosim.errors import InputError

ROOMS = ("models", "gpus", "nodes", "recipes")
FINE_TUNING = "fine-tuning"


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=(*ROOMS, FINE_TUNING),
        help="the list to show (default: all except fine-tuning, which plans which method fits which GPU)",
    )
    parser.add_argument(
        "word", nargs="?", default="", help="of models and fine-tuning: only names and families with it"
    )
    parser.add_argument("--json", metavar="OUT.json", help="all of it, of models those with the word; - for stdout")


def main(args: argparse.Namespace) -> int:
    from zerosim.report.zoo import found, zoo_report

    if args.word and args.what not in ("models", FINE_TUNING):
        raise InputError(f"zoo {args.what} {args.word}: only models and {FINE_TUNING} are chosen by a word")
    rooms = ROOMS if args.what is None else (args.what,)
    values = partial(_values, found(args.word))
    leave(args, output(args, "json"), values, lambda: zoo_report(rooms, args.word))
    return 0


def _values(models: Mapping[str, Sequence[ModelPreset]]) -> dict[str, Any]:
    """Return the JSON form: these models in the order of their files, and all else that has a name."""
    asked = {one.name for group in models.values() for one in group}
    fields = ("name", "family", "published", "published_parameters", "source", "notes")
    return {
        "schema": 1,
        "models": [
            {**{name: getattr(one, name) for name in fields}, "sizes": dict(one.sizes)}
            for one in known_models().values()
            if one.name in asked
        ],
        "gpus": [asdict(device) for device in hardware.presets()],
        "nodes": [asdict(node) for node in nodes.nodes()],
        "recipes": [asdict(recipe) for recipe in recipes.recipes()],
    }
