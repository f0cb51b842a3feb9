"""A model's weights under the names and in the layouts of released files, which its family's row says.

zerosim's names are the files' but for the head's and a prefix. A fused map with `Map.stored` has its q|k|v side by side
here, and one after the other for each head (GPT-NeoX, BLOOM) or each group of heads (Falcon) in files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from zerosim.config.parts.model import ModelConfig
from zerosim.config.released import stored_tensors
from zerosim.config.safetensors import Stored
from zerosim.errors import InputError
from zerosim.models.model import Shapes, check_names, check_shapes
from zerosim.models.stacks import stacked
from zerosim.placement.block import Block, Decoder
from zerosim.placement.families import DECODERS
from zerosim.units import few

_BUFFERS = re.compile(
    r"(.*\.)?(rotary(_emb)?\.inv_freq|(attn|attention)\.(bias|masked_bias))|.*\.position_ids|.*\.e_score_correction_bias"
)
"""Names of tensors in files of older libraries that are computed, not trained: masks, rotary angles, numbers."""
_FURTHER = "eh_proj.weight"
"""What blocks of multi-token prediction alone have. A model without them leaves them out, as transformers does. One
with them leaves out their copies of the table and of the head."""
_BESIDE = re.compile(r"\w+\.pooler\..*|cls\.seq_relationship\..*|(cls\.predictions|lm_head)\.decoder\.bias")
"""Names in an encoder's files of other tasks' heads, and of the bias a second time."""
_COPIES = re.compile(
    r"(en|de)coder\.embed_tokens\.weight|decoder\..*\.EncDecAttention\.relative_attention_bias\.weight"
)
"""Names in T5's files of copies of the table, and of a bias that no T5 reads."""
_COMPARED = 2**22  # elements that are compared at once


class OnDemand(Mapping[str, Any]):
    """Weights by name, each computed whenever it is asked for, and kept nowhere."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Any:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _beside(path: str, model: ModelConfig) -> str:
    """Return a hint where the model is known by name, though the folder says which one it is."""
    if model.is_of_file or not os.path.isfile(os.path.join(path, "config.json")):
        return ""
    return f"; the folder's own model is --model {path if os.sep in path else os.path.join('.', path)}"


def _untied(model: ModelConfig, missing: Collection[str]) -> str:
    """Return a hint where only a head is missing: the released one is the token table."""
    if not model.has_blocks or model.tie_embeddings or missing != {f"{model.decoder.head}.weight"}:
        return ""
    return "; their head is tied to the token table (tie_word_embeddings): leave out --no-tie-embeddings"


def read_released(path: str, model: ModelConfig, shapes: Shapes) -> dict[str, Callable[[], Any]]:
    """Return by zerosim's names how to read each weight of a file or a folder, for the model with those `shapes`.

    Raises: InputError, before any weight is read, for bad files, names and shapes that are not the model's, and a head
    that differs from the table it is tied to.
    """
    return read_found(stored_tensors(path), path, model, shapes)


def read_found(
    tensors: Mapping[str, Stored], path: str, model: ModelConfig, shapes: Shapes
) -> dict[str, Callable[[], Any]]:
    """Return the same for tensors that were found in a checkpoint, `path`."""
    found = stacked(tensors, model)
    if model.is_masked:  # BERT's first files say gamma and beta
        found = {re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name)): one for name, one in found.items()}
    if adapters := [name for name in found if ".lora_A." in name or ".lora_B." in name]:
        raise InputError(f"{path} holds adapters ({few(adapters)}): pass them as --adapters, and the base as --weights")
    names = stored_names(model, shapes, found)
    whose, own = f"the weights of {path}", set(names.values())
    if model.has_blocks and model.tie_embeddings:
        _check_tied(model.decoder, found, own)
    further = tuple(name.removesuffix(_FURTHER) for name in found if name.endswith(f".{_FURTHER}"))
    given = {name: one for name, one in found.items() if name in own or not _BUFFERS.fullmatch(name)}
    given = {name: one for name, one in given.items() if name in own or not name.startswith(further)}
    if (unread := _BESIDE if model.is_masked else _COPIES if model.is_second else None) is not None:
        given = {name: one for name, one in given.items() if not unread.fullmatch(name)}
    wanted = {names[name]: shape for name, shape in shapes.items()}
    try:
        check_names(given, wanted, whose)
    except InputError as error:
        said = f"{error}{_untied(model, wanted.keys() - given)}{_looks_like(model, found)}{_beside(path, model)}"
        raise InputError(said) from None
    try:
        check_shapes({name: one.shape for name, one in given.items()}, wanted, whose)
    except InputError as error:
        raise InputError(f"{error}{_beside(path, model)}") from None
    for one in given.values():
        one.check_float()
    grouped = grouped_names(model)

    def read(name: str) -> Any:
        values = found[names[name]].read()
        return from_groups(values, model) if name in grouped else values

    return {name: partial(read, name) for name in shapes}


def stored_names(model: ModelConfig, own: Collection[str], found: Collection[str] = ()) -> dict[str, str]:
    """Return the name in files of each of a model's names: with the prefix that the files' own names have; without
    files with transformers'."""
    if not model.has_blocks:
        return {name: name for name in own}
    row = model.decoder
    prefix = _prefix(row, found)
    outer = prefix.removesuffix(row.prefix) if prefix != row.prefix and prefix.endswith(f".{row.prefix}") else ""

    def stored(name: str) -> str:
        if name.startswith("lm_head."):
            return f"{outer if row.prefix else ''}{row.head}.{name.removeprefix('lm_head.')}"
        return prefix + name.removeprefix(row.prefix)

    return {name: stored(name) for name in own}


def _prefix(row: Decoder, found: Collection[str]) -> str:
    """Return the prefix before the token table's name. GPT-2's first files have none, transformers' have one."""
    table, usual = f"{row.table}.weight", row.prefix or ("transformer." if row.second is None else "")
    there = {name.removesuffix(table) for name in found if name == table or name.endswith(f".{table}")}
    return there.pop() if len(there) == 1 else usual


def grouped_names(model: ModelConfig) -> set[str]:
    """Return the names of weights and biases whose outputs are stored group by group."""
    targets = model.targets().values() if model.has_blocks else ()
    weights = {one.weight for one in targets if one.map.stored}
    return weights | {f"{name.removesuffix('.weight')}.bias" for name in weights}


def from_groups(values: Any, model: ModelConfig) -> Any:
    """Return q|k|v side by side, of groups that are one after the other, each the queries that share a key, this key
    and its value. With as many keys as queries a group is a head. Shapes: ((H + 2K) E, ...) both."""
    import numpy as np

    share, rest = model.heads // model.kv_heads, values.shape[1:]
    groups = values.reshape(model.kv_heads, share + 2, model.head_dim, *rest)
    parts = groups[:, :share], groups[:, share], groups[:, share + 1]
    return np.concatenate([part.reshape(-1, *rest) for part in parts])


def to_groups(values: Any, model: ModelConfig) -> Any:
    """Undo `from_groups`."""
    import numpy as np

    rest, first, keys = values.shape[1:], model.width("heads"), model.width("kv_heads")
    parts = values[:first], values[first : first + keys], values[first + keys :]
    groups = [part.reshape(model.kv_heads, -1, model.head_dim, *rest) for part in parts]
    return np.concatenate(groups, axis=1).reshape(values.shape)


def _check_tied(row: Decoder, found: dict[str, Stored], own: set[str]) -> None:
    """Take a head out of `found` that equals the table it is tied to. Raises: InputError if it differs."""
    own_head = f"{row.head}.weight" if row.masked is None else f"{row.head}.decoder.weight"
    heads = [name for name in found if name == own_head or name.endswith(f".{own_head}")]
    table = next((found[name] for name in own if name.endswith(f"{row.table}.weight") and name in found), None)
    if not heads or table is None:
        return
    import numpy as np

    head = found.pop(heads[0])
    head.check_float()
    table.check_float()
    at, same = 0, head.shape == table.shape
    while same and at < head.numel:
        ours, theirs = (one.read(at, at + _COMPARED) for one in (head, table))
        at, same = at + _COMPARED, bool(np.array_equal(ours, theirs, equal_nan=True))
    if not same:
        hint = "" if row.masked else ": set --no-tie-embeddings"
        raise head.fail(f"differs from {table.name}, and the model's head is tied to it{hint}")


def _looks_like(model: ModelConfig, found: Collection[str]) -> str:
    """Return a remark on the families whose names a file has, '' if none or the model's own."""
    like = [family for family, row in DECODERS.items() if _of_block(row, found) == _block_names(row.block)]
    if not like or (model.has_blocks and _of_block(model.decoder, found) == _block_names(model.decoder.block)):
        return ""
    return f"; its names are those of {few(['gpt2' if family == 'gpt' else family for family in like])}"


def _of_block(row: Decoder, found: Collection[str]) -> set[str]:
    """Return the names in the first block of a file, if its family were the row's."""
    at = f"{_prefix(row, found)}{row.blocks}.0."
    return {name.removeprefix(at) for name in found if name.startswith(at) and not _BUFFERS.fullmatch(name)}


def _block_names(block: Block) -> set[str]:
    """Return the names of a block's weights."""
    norms = ["weight", "bias"] if block.norm == "layer" else ["weight"]
    names = {f"{norm}.{one}" for branch in block.branches for norm in (branch.before, branch.after) for one in norms}
    for _, target in block.targets():
        if target.is_bare:
            continue
        names |= {f"{target.weight}.weight", *([f"{target.weight}.bias"] if target.map.bias else [])}
    names |= {block.attention.named("sinks")} if block.sinks else set()
    if block.qk_norm and block.qk_norm != "plain":
        names |= {block.attention.named(f"{one}.weight") for one in block.qk_names}
    return {name for name in names if not name.startswith(".")}
