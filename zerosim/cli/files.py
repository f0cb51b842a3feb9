"""Files of other frameworks on the command line: `zerosim plan ds_config.json --model qwen2.5-7b --ranks 8`.

What a file does not say comes from flags, and flags override a file. `dialects/` reads it.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from zerosim.cli.outputs import Fill, Output
from zerosim.cli.parser import Parser, flag_of
from zerosim.config import OPTIONS, PLAN_DEFAULTS, RunConfig
from zerosim.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from zerosim.dialects import Document, Reading
    from zerosim.dialects.writing import Written

LAUNCHERS = ("trainer", "accelerate", "deepspeed")
LIBRARIES = ("deepspeed", "transformers")
WRITTEN = ("deepspeed", "accelerate", "torchtitan", "torchtitan-toml", "megatron", "fsdp2")
"""The names of `dialects.kinds`, which every start would import."""
_ASKED = {"model": "a model, such as --model llama3-8b or its config.json", "ranks": "the GPUs: --ranks N"}


def add_file_flags(parser: Parser) -> None:
    """Add the flags that say how a file of another framework is read."""
    add: Callable[..., Any] = parser.add_argument_group("files of other frameworks").add_argument
    add("--launcher", choices=LAUNCHERS, help='who fills a DeepSpeed file\'s "auto" (default: trainer, if it has one)')
    add("--read-as", metavar="NAME==VERSION,...", help="read by an older library, such as deepspeed==0.19.6")
    add("--without", metavar="KEY,...", help="leave out these keys or sections of the file")


def add_write_flag(add: Callable[..., Any]) -> None:
    """Add --write."""
    what = "this run as another framework's file, with a launch script beside it for what the file cannot say"
    add("--write", nargs=2, metavar=("|".join(WRITTEN), "PATH"), help=what)


def files_of(args: argparse.Namespace, config: RunConfig) -> Files | None:
    """Return the files of --write, checked but not yet written; None without it.

    Raises: InputError for an unknown kind, a path that cannot be written, and a run that the framework cannot do.
    """
    if getattr(args, "write", None) is None:
        return None
    from zerosim.dialects.kinds import DIALECTS
    from zerosim.dialects.writing import write

    kind, path = args.write
    if kind not in DIALECTS:
        hint = did_you_mean(kind, DIALECTS, f"expected one of {', '.join(DIALECTS)}")
        raise InputError(f"--write {kind}: {hint}")
    if not path.endswith(DIALECTS[kind].suffix):
        raise InputError(f"--write {kind} {path}: expected a name that ends with {DIALECTS[kind].suffix}")
    launch = f"{path[: -len(DIALECTS[kind].suffix)]}.launch.sh"
    inputs = [getattr(args, "scenario", None), getattr(args, "beside", None)]
    outputs = Output(f"--write {kind}", path), Output(f"--write {kind}", launch)
    for one in outputs:
        one.check(inputs)
    return Files(*outputs, write(config, kind, path))


class Files(NamedTuple):
    """A framework's file and its launch script, and what goes into them."""

    file: Output
    launch: Output
    made: Written

    def fills(self) -> list[tuple[Output, Fill]]:
        """Return both files with the functions that write them."""
        return [
            (self.file, lambda out: out.write(self.made.text.encode())),
            (self.launch, lambda out: out.write(self.made.launch.encode())),
        ]

    def text(self) -> str:
        """Return in a sentence which files there are, and what only the launch script says."""
        rest = ", ".join(name for name in self.made.rest if name not in ("model", "ranks"))
        also = f" The file cannot say {rest}: the script's line says it." if rest else ""
        return f"Wrote {self.file.path} and {self.launch.path}.{also}"


def reading_of(args: argparse.Namespace) -> Reading | None:
    """Return the files of another framework as they were read; None for a scenario of zerosim's own, and without one.

    Raises: InputError for a file that cannot be read, and for flags that need one.
    """
    if not hasattr(args, "reading"):
        args.reading = _read(args)
    found: Reading | None = args.reading
    return found


def _read(args: argparse.Namespace) -> Reading | None:
    paths = [path for path in (getattr(args, "scenario", None), getattr(args, "beside", None)) if path is not None]
    is_asked = [name for name in ("launcher", "read_as", "without") if getattr(args, name, None) is not None]
    documents: list[Document] = []
    if paths:
        from zerosim.dialects import Context, document_of, read_documents  # not at every start

        documents = [found for path in paths if (found := document_of(path)) is not None]
    if len(documents) < len(paths) and len(paths) > 1:
        raise InputError(f"{' and '.join(paths)}: two files belong together only if other frameworks read both")
    if not documents:
        if is_asked:
            raise InputError(f"{flag_of(is_asked[0])}: needs a file of another framework, such as ds_config.json")
        return None
    given = {name: value for name, value in vars(args).items() if name in OPTIONS and value is not None}
    context = Context(given, launcher=getattr(args, "launcher", None) or "", versions=versions_of(args))
    names = (getattr(args, "without", None) or "").split(",")
    return _on_nodes(read_documents(documents, context, [name.strip() for name in names if name.strip()]), given)


def _on_nodes(reading: Reading, given: Mapping[str, Any]) -> Reading:
    """Return the reading without a file's ranks a node, if the mesh has no such nodes here; a note says so."""
    if "ranks_per_node" not in reading.values or "ranks_per_node" in given:
        return reading
    try:
        RunConfig(**{**PLAN_DEFAULTS, **reading.values, **given})
    except InputError as error:
        if error.field == "ranks_per_node":
            values = {name: value for name, value in reading.values.items() if name != "ranks_per_node"}
            note = f"the file's {reading.values['ranks_per_node']} ranks a node are left out: {error}"
            return dataclasses.replace(reading, values=values, notes=(*reading.notes, note))
    return reading


def versions_of(args: argparse.Namespace) -> Mapping[str, tuple[int, ...]]:
    """Return the versions of --read-as. Raises: InputError for an unknown library, and for no version."""
    found: dict[str, tuple[int, ...]] = {}
    for word in (getattr(args, "read_as", None) or "").split(","):
        if not word.strip():
            continue
        name, sign, version = re.sub(r"(?<!=)=(?!=)", "==", word.strip()).partition("==")
        if name not in LIBRARIES:
            hint = did_you_mean(name, LIBRARIES, f"expected one of {', '.join(LIBRARIES)}")
            raise InputError(f"--read-as {name}: {hint}")
        if not sign or not re.fullmatch(r"\d{1,6}(\.\d{1,6})*", version):
            raise InputError(f"--read-as {word.strip()}: expected a version, such as {name}==0.19.6")
        found[name] = tuple(int(part) for part in version.split("."))
    return found


def file_values(args: argparse.Namespace, reading: Reading, *, any_ranks: bool = False) -> dict[str, Any]:
    """Return a file's values for a run. Raises: InputError for what its framework or zerosim refuses, and for a model
    or a number of ranks that neither the file nor a flag says."""
    reading.check()
    for name, words in _ASKED.items():
        if name not in reading.values and getattr(args, name, None) is None and not (any_ranks and name == "ranks"):
            raise InputError(f"{reading.document.path}: does not say {words}")
    stage = getattr(args, "stage", None)  # over the file's: its options that this stage does not have go with it
    values = {name: value for name, value in reading.values.items() if stage is None or stage in OPTIONS[name].stages}
    if stage is not None and stage < 3 and "params=" in values.get("offload", ""):
        values["offload"] = ",".join(one for one in values["offload"].split(",") if not one.startswith("params="))
    if "offload" in reading.values and not values.get("offload"):
        values = {name: value for name, value in values.items() if name not in ("offload", "pin_memory")}
    return values
