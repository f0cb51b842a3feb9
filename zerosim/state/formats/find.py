"""Tell which framework wrote a checkpoint, and read it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial

from zerosim.config.inputs import open_file
from zerosim.config.released import INDEX, PEFT, SINGLE
from zerosim.errors import InputError, printable
from zerosim.state.formats.accelerate import is_accelerate, read_accelerate
from zerosim.state.formats.dcp import METADATA, read_dcp
from zerosim.state.formats.deepspeed import MODEL_FILES, OPTIM_FILES, read_deepspeed
from zerosim.state.formats.megatron import is_megatron, read_megatron
from zerosim.state.formats.shards import read_safetensors, read_sharded
from zerosim.state.formats.torch_file import read_torch
from zerosim.state.formats.universal import read_universal
from zerosim.state.formats.whole import WholeState

_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
_STEP = re.compile(r"(?:step|checkpoint|checkpoint-step|epoch_\d+_step|iter)[-_](\d+)")
KNOWN = (
    "DeepSpeed's (latest), Megatron's (latest_checkpointed_iteration.txt), PyTorch's distributed (.metadata), "
    "accelerate's, the Trainer's, .safetensors, or a file of torch.save"
)


def format_of(path: str) -> str:
    """Return the format of a checkpoint, by names of files and by how a file begins, without reading it.

    'deepspeed', 'deepspeed universal', 'megatron', 'dcp', 'dcp safetensors', 'accelerate', 'safetensors' or 'torch'.

    Raises: InputError for a path that is none of them, and for a folder of checkpoints, with the last one's name.
    """
    if not os.path.isdir(path):
        return _format_of_file(path)
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    if "latest" in names or any(MODEL_FILES.fullmatch(n) or OPTIM_FILES.fullmatch(n) for n in names) > (
        "zero" in names
    ):
        return "deepspeed"
    if "latest_universal" in names or os.path.isfile(os.path.join(path, "zero", "optimizer_state.pt")):
        return "deepspeed universal"
    if is_megatron(path, names):
        return "megatron"
    if METADATA in names:
        return "dcp"
    if is_accelerate(names):
        return "accelerate"
    if {SINGLE, INDEX, PEFT} & set(names):
        return "safetensors"
    if any(_SHARD.fullmatch(name) for name in names):
        return "dcp safetensors"
    steps = [(int(match[1]), name) for name in names if (match := _STEP.fullmatch(name))]
    if steps:
        raise InputError(
            f"{path} is a folder of checkpoints: pass one of them, such as {os.path.join(path, max(steps)[1])}"
        )
    raise InputError(f"{path} is no checkpoint that is known: expected {KNOWN}")


def _format_of_file(path: str) -> str:
    if path.endswith(INDEX):
        return "safetensors"
    with open_file(path) as file:
        head = file.read(9)
    if head[:2] == b"PK" or head[:1] == b"\x80":
        return "torch"
    if head[8:] == b"{" or path.endswith(".safetensors"):
        return "safetensors"
    raise InputError(f"{path} is no checkpoint that is known: expected {KNOWN}")


def read_whole(path: str, order: Sequence[str] | None = None) -> WholeState:
    """Return a checkpoint of any known framework: headers and indices are read, tensors when they are asked for.

    `order`: the trained weights' names in the model's order. An optimizer's numbered states need it where the weights
    are in .safetensors files, whose order is not the model's.

    Raises: InputError, in one line, as `format_of`, and for whatever is damaged, missing or not read.
    """
    kind = format_of(path)
    readers: dict[str, Callable[[str], WholeState]] = {
        "accelerate": partial(read_accelerate, order=order),
        "deepspeed": read_deepspeed,
        "deepspeed universal": read_universal,
        "megatron": read_megatron,
        "dcp": read_dcp,
        "dcp safetensors": read_sharded,
        "safetensors": read_safetensors,
        "torch": read_torch,
    }
    try:
        return readers[kind](path)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {error.filename or path}: {error.strerror or error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {printable(str(error)[:100])}"
        raise InputError(f"{path}: its files are not as the framework writes them ({kind}; {why})") from None
