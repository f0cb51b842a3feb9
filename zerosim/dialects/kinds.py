"""The kinds of files that are written: who reads each back, its suffix, and the command that starts it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Dialect(NamedTuple):
    """A kind of file that is written: its reader ('' for code that nobody here reads), suffix and launch command."""

    reader: str
    suffix: str
    command: str


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "deepspeed": Dialect("deepspeed", ".json", "deepspeed {nodes}--num_gpus {each} train.py --deepspeed {path}"),
        "accelerate": Dialect("accelerate", ".yaml", "accelerate launch --config_file {path} train.py"),
        "torchtitan": Dialect("", ".py", "torchrun {torch} -m torchtitan.train --module {stem} --config planned"),
        "torchtitan-toml": Dialect(
            "torchtitan", ".toml", "torchrun {torch} -m torchtitan.train --job.config_file {path}"
        ),
        "megatron": Dialect("megatron", ".sh", "bash {path}"),
        "fsdp2": Dialect("", ".py", "torchrun {torch} {path}"),
    }
)
