"""An option of a capability is read in the capability's own files, and in others only where a table says why.

`python tests/test_homes.py` prints that table, of docs/architecture.md, as it is now. A read is an attribute of a part,
also through a name or a parameter that holds the part: `config.offload.is_on`, `offload.is_on`, `self.grads.late`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from zerosim.config.parts import PARTS
from zerosim.config.parts.model import ModelConfig

ROOT = Path(__file__).parent.parent / "zerosim"
PAGE = ROOT.parent / "docs" / "architecture.md"
KINDS = {kind.__name__: part for part, kind in PARTS.items()}
MEMBERS = {part: {name for name in dir(kind) if not name.startswith("_")} for part, kind in PARTS.items()}

IN_SHARED_PARTS = {
    "zeropp": "mesh.secondary_shard gathering.quantized_weights gathering.hierarchical_gather "
    "reduction.quantized_gradients",
    "compression": "reduction.compress reduction.block reduction.ratio reduction.rank reduction.warmup "
    "reduction.is_encoded reduction.is_exact",
    "delayed": "grads.late",
    "in_backward": "grads.in_backward",
    "tiles": "gathering.tiles",
    "hybrid": "parallel.replica_reduction",
    "tensor": "parallel.pad_vocab",
    "sequence": "parallel.sequence_parallel parallel.keep_gathered",
    "pipeline": "parallel.pipeline parallel.pipeline_schedule parallel.virtual_stages parallel.micro_batch_group "
    "parallel.stage_layers parallel.layers_given parallel.balance_ends parallel.num_chunks "
    "parallel.fewest_micro_batches parallel.keep_last_inputs",
    "recompute": "memory.recompute memory.again",
    "kept_inputs": "memory.partition_activations memory.cpu_checkpointing memory.offload_activations "
    "memory.stash_window",
    "allocators": "memory.allocator memory.allocator_conf",
    "lazy": "optim.lazy_states",
    "paging": "memory.paged_states",
    "zero": "parallel.partition parallel.overlap",
}
"""By capability, its options in a part with others'. A part that is not listed here is a capability of its own."""
COMMON = {"model", "mesh", "parallel", "precision", "optim", "data", "memory", "world", "clock"}
"""Parts whose other options are about no capability."""
OF_STAGES = {"reduction", "gathering", "grads"}
"""Parts whose other options are those of ZeRO's stages, the capability `zero`."""
OWNERS = {option: name for name, options in IN_SHARED_PARTS.items() for option in options.split()}
HOMES = {
    "zero": ("parallel/", "tensor/", "analysis/facts"),
    "zeropp": ("parallel/quantized", "parallel/hybrid", "train/check_quantized", "grading/second_shard"),
    "tiles": ("parallel/gathering",),
    "tuning": ("nn/lora", "nn/halves", "models/adapters", "models/peft", "train/check_trained"),
    "recompute": ("tensor/discarded", "functional/policy", "parallel/activations"),
    "kept_inputs": ("nn/saves_on_host", "parallel/activations", "analysis/capabilities/recompute"),
    "sequence": ("analysis/capabilities/tensor",),
    "experts": ("parallel/balance",),
}
"""Files and folders of a capability whose path does not have its name."""
SIZES = {
    "mesh sizes": {"mesh.ranks", "mesh.axes", "mesh.others", "mesh.shards", "mesh.tp", "mesh.pp", "mesh.dp_replicate"},
    "ZeRO stage": {"parallel.zero_stage"},
    "model sizes": {f"model.{option.attribute}" for option in ModelConfig.options().values()},
}
"""What half of the program reads: the number of files may only shrink."""


def owner_of(option: str) -> str:
    """The capability whose option this is, such as grads.late; '' for those that are about none."""
    part = option.split(".")[0]
    return OWNERS.get(option) or ("" if part in COMMON else "zero" if part in OF_STAGES else part)


def is_home(file: str, capability: str) -> bool:
    """Whether a file is a capability's own: it has the name in its path, or in its name with other words."""
    if file.startswith(("config/parts/", *HOMES.get(capability, ()))):  # a rule about two capabilities reads both
        return True
    return any(f"_{capability}_" in f"_{word}_" for word in file.removesuffix(".py").split("/"))


def holders(nodes: list[ast.AST]) -> dict[str, set[str]]:
    """The names in a file that hold a part, by annotation or assignment, and which."""
    found: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            target = node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", "")
            found[target] |= {KINDS[word] for word in re.findall(r"\w+", ast.unparse(node.annotation)) if word in KINDS}
        if isinstance(node, ast.Assign | ast.NamedExpr):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name, value in zip(several(target), several(node.value), strict=False):
                    if isinstance(value, ast.Attribute) and value.attr in PARTS:
                        found[last_word(name)].add(value.attr)
    return found


def several(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def last_word(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def read_in(tree: ast.AST) -> Iterator[str]:
    """The options that a file reads, as part.attribute."""
    nodes = list(ast.walk(tree))
    held = holders(nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            word = last_word(node.value)
            parts = held.get(word, set()) | ({word} & PARTS.keys() if isinstance(node.value, ast.Attribute) else set())
            yield from (f"{part}.{node.attr}" for part in parts if node.attr in MEMBERS[part])


EVERY_OPTION = "dialects/"
"""Reads and writes files with all options of a run, so it has no home."""


@cache
def reads() -> dict[str, set[str]]:
    """By file, the options that it reads."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}
    texts = {file: text for file, text in texts.items() if not file.startswith(EVERY_OPTION)}
    names_one = re.compile(rf"\b({'|'.join(KINDS)})\b|\.({'|'.join(PARTS)})\b")  # the others read none
    return {file: set(read_in(ast.parse(text))) for file, text in texts.items() if names_one.search(text)}


def away() -> dict[str, set[str]]:
    """By file, the options of capabilities that are not at home there."""
    found = {
        file: {one for one in options if (name := owner_of(one)) and not is_home(file, name)}
        for file, options in reads().items()
    }
    return {file: options for file, options in found.items() if options}


def files_reading(options: set[str]) -> int:
    return sum(bool(read & options) for file, read in reads().items() if not file.startswith("config/parts/"))


def listed() -> dict[str, tuple[set[str], str]]:
    """The table of the page: by file its options, and why they are read there."""
    rows = re.findall(r"^\| `([\w/]+\.py)` \| ([^|]+) \| ([^|]*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return {file: (set(re.findall(r"`([^`]+)`", options)), why.strip()) for file, options, why in rows}


def sizes() -> str:
    return ", ".join(f"{name} in {files_reading(options)} files" for name, options in SIZES.items())


def test_an_option_is_read_at_home_or_the_page_says_why() -> None:
    table = listed()
    assert {file: options for file, (options, _) in table.items()} == away()
    assert [file for file, (_, why) in table.items() if not why] == []


def test_sizes_are_read_in_no_more_files_than_the_page_says() -> None:
    page = PAGE.read_text("utf-8")
    for name, options in SIZES.items():
        most = re.search(rf"{name} in (\d+) files", page)
        assert most is not None
        assert files_reading(options) <= int(most[1]), f"{name}: pass what a file needs of it instead"


def test_every_listed_option_exists() -> None:
    for option in {*OWNERS, *(one for options in SIZES.values() for one in options)}:
        part, name = option.split(".")
        assert name in MEMBERS[part], option


if __name__ == "__main__":
    print(f"{sum(map(len, away().values()))} options in {len(away())} files\n")
    print("| file | options | why there |\n|---|---|---|")
    for file, options in away().items():
        print(f"| `{file}` | {', '.join(f'`{one}`' for one in sorted(options))} | {listed().get(file, ('', ''))[1]} |")
    print(f"\n{sizes()}")
