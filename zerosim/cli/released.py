"""Weights that a run leaves: an .npz file, a .safetensors file, or a folder as transformers and PEFT read it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerosim.cli.folders import Folder
from zerosim.cli.outputs import Output, output
from zerosim.cli.parser import flag_of
from zerosim.config import RunConfig
from zerosim.errors import InputError


def released_output(
    args: argparse.Namespace, flag: str, config: RunConfig, apart: Iterable[Output | None]
) -> Output | None:
    """Return the output of a flag for weights, checked: a folder if the path is none of a file.

    Raises: InputError as `output`, and for a model that transformers does not have.
    """
    from zerosim.config.released import PICKLES  # not for --help

    path = getattr(args, flag)
    if path is not None and path.endswith(PICKLES):
        raise InputError(f"{flag_of(flag)} {path}: zerosim writes no pickles; choose OUT.npz, or a folder")
    is_folder = path is not None and _is_folder(path)
    if is_folder or (path or "").endswith(".safetensors"):
        _check(flag_of(flag), config, adapters=flag == "save_adapters", is_folder=is_folder)
    return output(args, flag, config, apart=apart, kind=Folder if is_folder else None)


def _is_folder(path: str) -> bool:
    """Return whether a path means a folder. A file, a link or a device that exists stays what it is."""
    there = Path(path)
    try:
        is_file = (there.exists() or there.is_symlink()) and not there.is_dir()
    except (OSError, ValueError):
        return False
    return bool(path) and not is_file and not path.endswith((".npz", ".safetensors"))


def _check(flag: str, config: RunConfig, *, adapters: bool, is_folder: bool) -> None:
    model = config.model
    if not model.has_blocks:
        raise InputError(f"{flag}: transformers has no model {model.family}; choose a file, OUT.npz")
    if flag == "--save-weights" and config.tuning.lora_rank:
        raise InputError(f"{flag}: transformers keeps adapters apart; pass --save-adapters, --save-merged, or OUT.npz")
    if adapters:
        from zerosim.models.peft import check_peft
        from zerosim.train.build import declare

        if not is_folder:
            raise InputError(f"{flag}: PEFT reads a folder; choose a folder, or OUT.npz")
        check_peft(model, declare(config)[0].shapes(), flag)


def write_weights(out: Any, weights: Mapping[str, Any], config: RunConfig, to: Output | None) -> None:
    """Write weights by name to an open file, or into a folder."""
    import numpy as np

    from zerosim.config.safetensors import write_tensors
    from zerosim.models.peft import save_adapters
    from zerosim.models.save import planned, save_folder

    if not isinstance(out, Path):
        if to is not None and str(to.path).endswith(".safetensors"):
            write_tensors(out, planned(config.model, weights))
        else:
            np.savez(out, **weights)
    elif to is not None and to.name.startswith("--save-adapters"):
        save_adapters(out, config, weights)
    else:
        save_folder(out, config.model, weights)
