"""What the words of `zerosim run` configure."""

from __future__ import annotations

from zerosim.cli import options
from zerosim.cli.parser import Parser
from zerosim.config import RunConfig


def parsed(*words: str) -> RunConfig:
    parser = Parser("zerosim run", "")
    options.add_run_flags(parser)
    return options.run_config(parser.parse(words))
