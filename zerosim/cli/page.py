"""`zerosim page`: write a page that answers in the browser, without a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import cache

from zerosim.cli.outputs import Output, written
from zerosim.cli.parser import Parser, add_kinds, flag_of, kind_parser
from zerosim.cli.plan import add_arguments as add_plan_flags
from zerosim.cli.plan import planned_config
from zerosim.config import RunConfig
from zerosim.errors import InputError, printable
from zerosim.units import format_bytes

WORDS = {"calculator": "memory by kind and traffic by model, ranks, ZeRO stage ..., from the closed forms, as HTML"}
MODELS = (
    "gpt2", "gpt2-xl", "gpt3-175b", "llama3.2-1b", "llama3.1-8b", "llama3.1-70b", "mistral-7b", "qwen2.5-7b",
    "qwen3-32b", "gemma2-9b", "phi-4", "bloom-7b1", "falcon-7b", "bert-large",
)  # fmt: skip
"""The models of a page if none are given."""
OF_POINT = ("model", "ranks", "tp", "stage", "precision", "recompute", "recipe", "micro_batch", "seq", "gpu")
"""The options of the command that counts a point, in order."""


def add_arguments(parser: Parser) -> None:
    add_kinds(parser, "kind", WORDS, width=12)


def main(args: argparse.Namespace) -> int:
    _, parser = kind_parser("page", "kind", WORDS, args.kind)
    add = parser.add_argument_group("the page").add_argument
    add("--out", "-o", metavar="FILE.html", required=True, help="output file")
    add("--model", metavar="NAME,...", help=f"presets to choose from (default: {', '.join(MODELS)})")
    with parser.naming_as_typed(args.words):
        asked = parser.parse(args.words)
        file = Output("--out", asked.out)
        file.check()
        names = MODELS if asked.model is None else tuple(dict.fromkeys(filter(None, asked.model.split(","))))
        if not names:
            raise InputError("--model: expected names of presets, such as gpt2-xl,llama3.1-8b")
        text = calculator_page(names).encode()
    with written((file, lambda out: out.write(text))):
        pass  # the text below is only true if nothing failed
    models = f"{len(names)} model{'s' * (len(names) > 1)}"
    print(f"{printable(asked.out)}, {format_bytes(len(text))}: a calculator of {models}. Open it in a browser.")
    return 0


def calculator_page(names: tuple[str, ...] = MODELS) -> str:
    """Return the calculator of these models. Raises: InputError for a model that it cannot show."""
    from zerosim.analysis.expressions import expressions
    from zerosim.playback.calculator import calculator

    return calculator(expressions(config_of, names), OF_POINT)


def config_of(values: Mapping[str, int | str | bool]) -> RunConfig:
    """Return the configuration of `zerosim plan` with these options on a GPU, as the page's command has them."""
    words = ["--gpu", "h100-80"]
    for name, value in values.items():
        words += [flag_of(name)] if value is True else [flag_of(name), str(value)]
    return config_of_words(words)


def config_of_words(words: Sequence[str]) -> RunConfig:
    """Return the configuration of `zerosim plan` with these words."""
    return planned_config(_plan_parser().parse(list(words)))


@cache
def _plan_parser() -> Parser:
    parser = Parser("zerosim plan", "")
    add_plan_flags(parser)
    return parser
