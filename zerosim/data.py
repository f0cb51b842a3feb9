"""Text as bytes, and which rank sees which rows of it.

A step's global batch is (rows, T + 1) token ids. Row order does not depend on N: rank r takes rows
r*B/N to (r+1)*B/N and cuts them, in order, into its micro-batches.
"""

from __future__ import annotations

import zipfile
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.errors import InputError
from zerosim.rng import generator


def primer() -> bytes:
    """The packaged text: a primer on ZeRO, which is also worth reading."""
    return resources.files("zerosim").joinpath("primer.md").read_bytes()


def read_text(path: str | None, seq: int, vocab: int) -> Any:
    """Token ids (uint8) of a file's bytes, or of the primer.

    Raises: InputError for a file that is missing, empty, shorter than one row, or has ids >= vocab.
    """
    name = path or "the packaged primer"
    try:
        text = Path(path).read_bytes() if path else primer()
    except OSError as error:
        raise InputError(f"cannot read data file {path}: {error.strerror or error}") from None
    if len(text) < seq + 1:
        what = "is empty" if not text else f"has {len(text)} bytes"
        raise InputError(f"data file {name} {what}: one row needs seq + 1 = {seq + 1} bytes")
    tokens = np.frombuffer(text, np.uint8)
    if int(tokens.max()) >= vocab:
        raise InputError(f"data file {name} holds byte {int(tokens.max())}: vocab {vocab} is too small, use 256")
    return tokens


def sample_batch(tokens: Any, seed: int, step: int, rows: int, seq: int) -> Any:
    """A global batch (rows, seq + 1), int64: windows of the text at places drawn for (seed, step)."""
    starts = generator("batch", seed, step).integers(0, len(tokens) - seq, size=rows)
    return tokens[starts[:, None] + np.arange(seq + 1)].astype(np.int64)


def read_tokens(path: str, rows: int, seq: int, vocab: int, steps: int | None) -> Any:
    """The array `tokens` (steps, rows, seq + 1) of an .npz file, cut to the first `steps`.

    Raises: InputError naming what does not fit.
    """
    tokens = read_arrays(path).get("tokens")
    if tokens is None:
        raise InputError(f"{path} has no array named 'tokens'")
    if tokens.dtype != np.int64 or tokens.ndim != 3:
        raise InputError(
            f"{path}: tokens is {tokens.dtype} of shape {tokens.shape}, expected int64 (steps, {rows}, {seq + 1})"
        )
    if tokens.shape[1] != rows:
        raise InputError(
            f"{path}: the global batch is {tokens.shape[1]} rows, expected ranks x accumulate x micro-batch = {rows}"
        )
    if tokens.shape[2] != seq + 1:
        raise InputError(f"{path}: rows have {tokens.shape[2]} ids, expected seq + 1 = {seq + 1}: set --seq")
    if tokens.shape[0] < (steps or 1):
        raise InputError(f"{path} holds {tokens.shape[0]} steps, expected at least {steps or 1}")
    tokens = tokens[:steps]
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        raise InputError(
            f"{path}: ids run from {tokens.min()} to {tokens.max()}, expected 0 to vocab - 1 = {vocab - 1}"
        )
    return tokens


def read_weights(path: str) -> dict[str, Any]:
    """Full weights by name. Raises: InputError for anything but floating-point arrays."""
    weights = read_arrays(path)
    for name, array in weights.items():
        if array.dtype not in (np.float16, np.float32, np.float64):
            raise InputError(f"{path}: {name} is {array.dtype}, expected float32 (or float16, float64)")
    return weights


def read_arrays(path: str) -> dict[str, Any]:
    """Every array of an .npz file. Raises: InputError when it is not one."""
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is not a readable .npz file: {error}") from None


def micro_batches(batch: Any, rank: int, ranks: int, accumulate: int) -> list[Any]:
    """Rank's rows of a global batch, cut in order into its micro-batches."""
    rows = batch.shape[0] // ranks
    own = batch[rank * rows : (rank + 1) * rows]
    return list(own.reshape(accumulate, rows // accumulate, -1))
