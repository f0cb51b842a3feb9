"""Write a configuration as another framework's files: the file itself, and a launch script for all that it cannot say.

The rest is found by reading: the text is read back by our own reader, and whatever differs from the configuration goes
into the script's line `# zerosim: FLAGS`. So both files together, read back, are the same configuration.
"""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from zerosim.config import OPTIONS, PLAN_DEFAULTS, WITH_VALUES, RunConfig
from zerosim.dialects import Context, document_of_text, read_documents
from zerosim.dialects.kinds import DIALECTS, Dialect
from zerosim.dialects.tell import LAUNCH, WHOLE
from zerosim.errors import InputError

NOT_SAID = ("steps", "seed", "parallel", "backend", "world", "ranks_per_process", *WITH_VALUES.split())
"""Options of this machine and of values, which no framework's file has."""
_MOST_READINGS = 5


class Written(NamedTuple):
    """The two files, and the options that only the launch script says."""

    text: str
    launch: str
    rest: Mapping[str, Any]


def write(config: RunConfig, kind: str, path: str) -> Written:
    """Return the file of this kind that will be at `path`, and its launch script.

    Raises: InputError for an unknown kind, and for a configuration that the framework's file cannot say at all.
    """
    dialect = DIALECTS[kind]
    module: Any = importlib.import_module(f"zerosim.dialects.written.{kind.replace('-', '_')}")
    text: str = module.written(config)
    rest = _rest(config, dialect, text, path)
    return Written(text, _launch(config, dialect, path, rest), rest)


def said_by(config: RunConfig, dialect: Dialect, text: str, path: str, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the text says, read back with the ranks of the configuration, and beside `rest`."""
    if not dialect.reader:
        return {}
    given = {**{name: config.value(name) for name in ("ranks", "tp", "pp", "cp")}, **rest}
    launcher = "deepspeed" if dialect.reader == "deepspeed" else ""
    document = document_of_text(path, dialect.reader, text)
    reading = read_documents([document], Context(given, launcher=launcher))
    reading.check()
    return dict(reading.values)


def _rest(config: RunConfig, dialect: Dialect, text: str, path: str) -> dict[str, Any]:
    """Return the options beside the file with which the configuration is the same.

    A reader may conclude more from a file once it knows them, so it reads again until nothing differs.
    """
    given = {name: value for name, value in config.given.items() if name not in NOT_SAID}
    values = said_by(config, dialect, text, path, {})
    rest: dict[str, Any] = {
        name: given.get(name, config.value(name))
        for name in ("model", "ranks")
        if values.get(name) != config.value(name)
    }
    for name in ("recipe", "stage"):  # they bring others
        if values.get(name, OPTIONS[name].default) != config.value(name):
            rest[name] = config.value(name)
    for name, value in given.items():  # in one pass: the sizes of a model go together
        if values.get(name, PLAN_DEFAULTS.get(name, OPTIONS[name].default)) != value:
            rest.setdefault(name, value)
    for _ in range(_MOST_READINGS):
        values = said_by(config, dialect, text, path, rest)
        try:
            here = RunConfig(**{**PLAN_DEFAULTS, **values, **rest})
        except InputError:  # the file's values go together with others only
            rest = {**rest, **given, **{name: config.value(name) for name in values if name not in NOT_SAID}}
            here = RunConfig(**{**PLAN_DEFAULTS, **values, **rest})
        unlike = [name for name in OPTIONS if name not in NOT_SAID and here.value(name) != config.value(name)]
        if not unlike:
            break
        rest |= {name: config.value(name) for name in unlike}
    return rest


def _launch(config: RunConfig, dialect: Dialect, path: str, rest: Mapping[str, Any]) -> str:
    ranks, each = config.mesh.ranks, config.mesh.ranks_per_node or min(config.mesh.ranks, 8)
    nodes = max(1, ranks // each)
    torch = f"--nnodes {nodes} --nproc-per-node {each}"
    command = dialect.command.format(
        path=shlex.quote(path),
        stem=path.rpartition("/")[2].rpartition(".")[0],
        each=each,
        nodes=f"--num_nodes {nodes} " if nodes > 1 else "",
        torch=torch,
    )
    mark = LAUNCH if dialect.reader else WHOLE
    about = "What the file beside it cannot say" if dialect.reader else "The whole run"
    lines = ["#!/bin/bash", f"# {about}, as flags of zerosim:", f"{mark}{flags(rest)}"]
    if config.memory.allocator_conf and config.memory.allocator == "caching":
        lines.append(f"export PYTORCH_CUDA_ALLOC_CONF={config.memory.allocator_conf}")
    return "\n".join([*lines, command, ""])


def flags(values: Mapping[str, Any]) -> str:
    """Return values as words of a command line."""
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, tuple | list):
            words += [flag, *map(json.dumps, value)]
        else:
            words += [flag, "none" if value is None else str(value)]
    return shlex.join(words)
