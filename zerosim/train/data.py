"""Text as token ids, and the rows of each rank.

A step's global batch is (rows, T + 1) token ids. Row order does not depend on N: rank r takes rows
r*B/N to (r+1)*B/N and cuts them, in order, into its microbatches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import resources
from typing import Any

import numpy as np

from zerosim.config import RunConfig
from zerosim.config.inputs import read_file
from zerosim.config.npz import open_npz
from zerosim.config.parts.tuning import is_adapter
from zerosim.config.released import is_released, stored_tensors
from zerosim.errors import InputError
from zerosim.models import peft
from zerosim.models.model import Shapes, check_names, check_shapes
from zerosim.models.released import OnDemand, read_released
from zerosim.models.stacks import names_here
from zerosim.placement.block import BALANCE
from zerosim.tensor.rng import generator
from zerosim.train.tokens import BYTES, Tokens, check_ids
from zerosim.units import format_bytes

LARGEST_DATA = 4 * 10**9
"""The most bytes of a text or of token ids that a run reads: enwik9 has 1 GB."""


_DOOR = re.compile(rb"<!--.*?-->\n.*?<!--.*?-->\n", re.DOTALL)


def primer() -> bytes:
    """Return the packaged text, a primer on ZeRO, without its pictures and commands, which no model trains on."""
    return _DOOR.sub(b"", resources.files("zerosim").joinpath("primer.md").read_bytes(), count=1)


def read_text(path: str | None, seq: int, vocab: int, tokens: Tokens = BYTES, needs: str = "seq + 1") -> Any:
    """Return the token ids of a file's text, or of the primer's: its bytes (uint8), or others.

    Raises: InputError for a file that cannot be read, is shorter than one row, or has ids >= vocab.
    """
    name = f"data file {path or 'the packaged primer'}"
    ids = tokens.encode(read_file(path, "data file", LARGEST_DATA) if path else primer(), name)
    if len(ids) < seq + 1:
        each = f"{tokens.unit}s{tokens.source}"
        raise InputError(f"{name} has {len(ids)} {each}: one row needs {needs} = {seq + 1} {tokens.unit}s")
    check_ids(ids, vocab, name, tokens)
    return ids


def sample_batch(tokens: Any, seed: int, step: int, rows: int, seq: int) -> Any:
    """Return a global batch (rows, seq + 1), int64: windows of the text at positions drawn from (seed, step)."""
    starts = generator("batch", seed, step).integers(0, len(tokens) - seq, size=rows)
    return tokens[starts[:, None] + np.arange(seq + 1)].astype(np.int64)


def shift_right(batch: Any, seq: int, start: int) -> Any:
    """Return rows for an encoder and its decoder, of rows of text: the encoder reads the first `seq` tokens, and the
    decoder predicts each of the others from those before it, behind `start` (prefix language modelling, 1910.10683)."""
    first = np.full((len(batch), 1), start, batch.dtype)
    return np.concatenate([batch[:, :seq], first, batch[:, seq:-1], batch[:, seq:]], axis=1)


def read_tokens(path: str, rows: int, seq: int, vocab: int, steps: int | None, needs: str = "seq + 1") -> Any:
    """Read the array `tokens` (steps, rows, seq + 1) of an .npz file, cut to the first `steps`.

    Raises: InputError that names the mismatch, before reading the data.
    """
    with open_npz(path) as file:
        if "tokens" not in file.names:
            raise InputError(f"{path} has no array named 'tokens'")
        header = file.header("tokens")
        if header.dtype != np.int64 or len(header.shape) != 3:
            raise InputError(
                f"{path}: tokens is {header.words} of shape {header.shape}, expected int64 (steps, {rows}, {seq + 1})"
            )
        there = header.shape
        if there[1] != rows:
            raise InputError(
                f"{path}: the global batch is {there[1]} rows, expected ranks x accumulate x micro-batch = {rows}"
            )
        if there[2] != seq + 1:
            raise InputError(f"{path}: rows have {there[2]} ids, expected {needs} = {seq + 1}: set --seq")
        if there[0] < (steps or 1):
            raise InputError(f"{path} holds {there[0]} steps, expected at least {steps or 1}")
        wanted = there[0] if header.fortran_order or steps is None else steps
        if wanted * rows * (seq + 1) * 8 > LARGEST_DATA:
            raise InputError(
                f"{path}: {wanted} steps of tokens exceed the limit of {format_bytes(LARGEST_DATA)}: "
                f"{'set fewer --steps' if not header.fortran_order else 'save them in C order'}"
            )
        tokens = file.read("tokens", steps)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        raise InputError(
            f"{path}: ids run from {tokens.min()} to {tokens.max()}, expected 0 to vocab - 1 = {vocab - 1}"
        )
    return tokens


def read_start(config: RunConfig, shapes: Shapes) -> Mapping[str, Any]:
    """Read the given start of a model with those `shapes`: its weights, with or without adapters, and its adapters.
    Released weights are read one by one, when a rank asks for one.

    Raises: InputError as `read_weights` and `read_released`.
    """
    weights, found = config.data.weights, dict[str, Any]()
    if weights is not None and any(name.endswith(BALANCE) for name in shapes):
        there = names_here(_names(weights), config.model)  # biases that are not in a file are 0
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(BALANCE) or name in there}
    base = {name: shape for name, shape in shapes.items() if not is_adapter(name)}
    released = dict[str, Callable[[], Any]]()
    if weights is not None and is_released(weights):
        released = read_released(weights, config.model, base)
    elif weights is not None:
        with open_npz(weights) as file:
            has_adapters = any(map(is_adapter, file.names))
        found |= read_weights(weights, shapes if has_adapters else base)
    found |= peft.read_start(config, {name: shape for name, shape in shapes.items() if name not in base}, read_weights)
    return OnDemand(released | {name: partial(found.__getitem__, name) for name in found}) if released else found


def _names(path: str) -> Collection[str]:
    if is_released(path):
        return stored_tensors(path)
    with open_npz(path) as file:
        return file.names


def read_weights(path: str, shapes: Shapes) -> dict[str, Any]:
    """Read full weights by name, for the model with those `shapes`.

    Raises: InputError for names and shapes that are not the model's, and for arrays that are not floating-point, before
    reading the data.
    """
    with open_npz(path) as file:
        if file.others:
            raise InputError(f"{path}: member {file.others[0]!r} is not an array: expected a file from np.savez")
        check_names(file.names, shapes, f"the weights of {path}")
        headers = {name: file.header(name) for name in file.names}
        check_shapes({name: header.shape for name, header in headers.items()}, shapes, f"the weights of {path}")
        for name, header in headers.items():
            if header.dtype not in (np.float16, np.float32, np.float64):
                raise InputError(f"{path}: {name} is {header.words}, expected float32 (or float16, float64)")
        return {name: file.read(name) for name in file.names}


def micro_batches(batch: Any, rank: int, ranks: int, accumulate: int) -> list[Any]:
    """Return the rank's rows of a global batch, cut in order into its microbatches."""
    rows = batch.shape[0] // ranks
    own = batch[rank * rows : (rank + 1) * rows]
    return list(own.reshape(accumulate, rows // accumulate, -1))
