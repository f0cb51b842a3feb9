"""Optimizer states whose bytes depend on the shape of a tensor.

Element-wise optimizers keep `num_moments` numbers per parameter (`states.py`). Master weights are not counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from zerosim.analysis.formulas.states import num_moments

UNIFORM = ("adam", "adamw", "radam", "adam-sage", "lion", "sophia", "adagrad", "rmsprop", "sgd")
"""The other optimizers keep the same number of bytes for each parameter of any tensor."""

FACTORED = ("adafactor", "adafactor-hf")
"""Of a matrix (r, c), and of each in a stack, they keep r + c numbers, which each rank with a part has all of
(1804.04235, section 3)."""

CODED = ("adam8bit", "adam8bit-torchao")
"""Their states are codes of 8 bits, but for small tensors."""


def state_bytes(
    optimizer: str,
    shape: Sequence[int],
    held: int | None = None,
    each: int = 4,
    momentum: float = 0.0,
    *,
    in_block: bool = True,
    embedding: bool = False,
) -> int:
    """Return the bytes of states on a rank that holds `held` elements of a tensor (None: all); numbers take `each`
    bytes.

    8-bit Adam has two codes of a byte and, for each 256 of them, two fp32 numbers, 2.03125 bytes a parameter; Adam's
    fp32 numbers for tensors of fewer than 4096 elements, and for embeddings (bitsandbytes 0.50, optimizer.py,
    init_state). torchao's keeps numbers for those few, and where 256 do not divide a tensor (0.18, optim/adam.py).
    Muon: one number for the matrices in blocks and stacks of them, AdamW's two for tables, the head and vectors.
    transformers' Adafactor has fp32 numbers beside bf16 weights too (optimization.py).
    """
    held = prod(shape) if held is None else held
    if optimizer in FACTORED:
        each = max(each, 4) if optimizer == "adafactor-hf" else each
        averages = _averages(shape) if len(shape) > 1 and held else held
        return (averages + int(momentum != 0) * held) * each
    if optimizer == "muon" and len(shape) > 1 and in_block:
        return each * held
    if optimizer in CODED:
        theirs = optimizer == "adam8bit-torchao"
        if prod(shape) >= 4096 and not (prod(shape) % 256 if theirs else embedding):
            return 2 * held + 2 * 4 * -(-held // 256)
        return 2 * held * (each if theirs else max(each, 4))
    return num_moments(optimizer, momentum) * each * held


def padding_bytes(optimizer: str, padding: int, each: int = 4, momentum: float = 0.0) -> int:
    """Return the bytes of states of `padding` elements at the end of a rank's slice."""
    if optimizer in CODED:
        return 0  # codes and numbers are those of weights alone
    if optimizer in FACTORED:  # transformers' alone has a momentum
        return int(momentum != 0) * max(each, 4) * padding
    return num_moments(optimizer, momentum) * each * padding


def exchanged(optimizer: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return how many numbers each all-reduce has in which ranks with slices of a flat buffer of these tensors complete
    their sums: k + sum of (r + c), then k, for k tensors. Source: derived, r + c + 2 for a matrix and 2 for another.
    Each matrix of a stack counts."""
    if optimizer not in FACTORED:
        return ()
    matrices = sum(prod(shape[:-2]) for shape in shapes)
    return matrices + sum(_averages(shape) for shape in shapes if len(shape) > 1), matrices


def _averages(shape: Sequence[int]) -> int:
    """Return the numbers of rows and columns of a matrix, or of all matrices of a stack."""
    return prod(shape[:-2]) * sum(shape[-2:])
