"""`zerosim zoo`: the models, devices and recipes that zerosim knows by name."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from zerosim.cli.parser import Parser
from zerosim.cli.run import human_stream, json_text, output, write_json
from zerosim.config.presets import hardware, models, recipes

ROOMS = ("models", "gpus", "recipes")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("what", nargs="?", choices=ROOMS, help="one of them (default: all)")
    parser.add_argument("--json", metavar="OUT.json", help="all of it; - for stdout")


def main(args: argparse.Namespace) -> int:
    figures = output(args, "json")
    if args.json is not None:
        values = _values()
        if figures is not None:
            figures.write(lambda file: write_json(file, values))
        else:
            sys.stdout.write(json_text(values))
    from zerosim.report.look import emit
    from zerosim.report.zoo import zoo_report

    emit(zoo_report(ROOMS if args.what is None else (args.what,)), human_stream(args))
    return 0


def _values() -> dict[str, Any]:
    presets = [models.find_model(name) for name in models.model_names()]
    fields = ("name", "family", "published", "published_parameters", "source")
    return {
        "schema": 1,
        "models": [
            {
                **{name: getattr(preset, name) for name in fields},
                "notes": list(preset.notes),
                "sizes": dict(preset.sizes),
            }
            for preset in presets
        ],
        "gpus": [asdict(device) for device in hardware.presets()],
        "recipes": [asdict(recipe) for recipe in recipes.recipes()],
    }
