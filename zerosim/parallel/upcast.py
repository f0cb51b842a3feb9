"""Gradients in fp32 for the optimizer step (DeepSpeed's and Megatron's way)."""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType, compute_dtype
from zerosim.tensor.flat import Flat, in_turn


def upcast(flats: Sequence[Flat], kept: dict[str, Buffer], is_first: bool, *, flatten: bool = False) -> None:
    """Cast these flats' local slices to fp32, beside the half-type ones; then free those (DeepSpeed's order). The
    copies in `kept` outlive the step.

    With `flatten` all are copied side by side before the first is cast, and these copies are freed after the last:
    2 bytes more for each element (0.19.8, stage_1_and_2.py and stage3.py: flatten(...).to(fp32)).
    """
    flattened = [_copy(flat, flat.grad_dtype) for flat in in_turn(flats)] if flatten else []
    copies = [upcast_grad_shard(flat) for flat in in_turn(flats)]
    for _ in in_turn(flats if flatten else ()):
        del flattened[0]
    if is_first:  # of several groups, this is the first
        flats[0].device.mark("gradients_upcast")
    for flat, shard in zip(in_turn(flats), copies, strict=True):
        if shard is not None:
            flat.drop_grads()
            flat.grad_shard = shard
            kept[flat.name] = shard


def upcast_grad_shard(flat: Flat) -> Buffer | None:
    """Return an fp32 copy of the local slice of half-type gradients, which stay; None if there is nothing to cast."""
    return _copy(flat, compute_dtype(flat.grad_dtype))


def _copy(flat: Flat, dtype: DType) -> Buffer | None:
    half = flat.grad_shard
    if half is None or not half.dtype.is_half:
        return None
    copy = flat.device.alloc(half.shape, dtype, Kind.GRAD, padding=flat.own_padding)
    flat.device.kernel(0, flat.device.backend.copy, half.array, copy.array)
    return copy
