"""Blocks as litgpt's: q, k and v in one map with one adapter, whose buffers live longer, and the same values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.train.plan import plan
from zerosim.train.run import run

H, F, T, ROWS, HEADS, R = 64, 96, 16, 2, 4, 8
SIZES: dict[str, Any] = dict(
    model="llama", layers=3, hidden=H, heads=HEADS, kv_heads=HEADS, ffn=F, seq=T, vocab=128, micro_batch=ROWS,
    attention="flash", tie_embeddings=False, recipe="ddp", stage=0, ranks=2, precision="bf16",
    adapter_dtype="bf16", lora_rank=R,
)  # fmt: skip


def kept(config: RunConfig) -> int:
    """Return the bytes that a block saves, without its norms' and its attention's statistics."""
    return sum(row.nbytes for row in plan(config).saved["layers.1"]) - ROWS * T * 4 * (2 + HEADS)


@pytest.mark.parametrize("chance", [0.0, 0.05])
def test_a_block_keeps_litgpts_bytes(chance: float) -> None:
    """Norms 8h, the map's result 6h, q and k rotated 4h, attention's result 2h, the adapter's results of q and v 4h,
    the feed-forward 6f; its input dropped once, and the mask, 3h, or the norm's result 2h."""
    config = RunConfig(**SIZES, saves="litgpt", lora_dropout=chance)
    assert kept(config) == ROWS * T * ((24 + (3 if chance else 2)) * H + 6 * F + 2 * 2 * R)


def test_shared_heads_are_copied_for_each_query_so_that_the_maps_result_dies() -> None:
    config = RunConfig(**SIZES | dict(kv_heads=2), saves="litgpt", lora_dropout=0.05)
    assert kept(config) == ROWS * T * ((8 + 6 + 2 + 3 + 3) * H + 6 * F + 2 * 2 * R)


def test_a_4_bit_map_back_to_the_width_saves_a_copy_of_attentions_result() -> None:
    """bitsandbytes to 0.41 saves its maps' inputs: of q, k and v, of the last map, of gate and up, of down."""
    config = RunConfig(**SIZES, saves="litgpt", lora_dropout=0.05, base="nf4")
    assert kept(config.replace(bnb_saves_input=True)) - kept(config) == ROWS * T * (2 * H + 2 * H + 2 * H + 2 * F)


@pytest.mark.parametrize("more", [{}, {"base": "nf4", "bnb_saves_input": True}, {"recompute": "full"}], ids=str)
def test_weights_are_those_of_other_kernels(more: dict[str, Any]) -> None:
    """Bit for bit: only lifetimes differ, as long as nothing is dropped."""
    config = RunConfig(**SIZES, steps=2, saves="eager", **more)
    one, other = run(config).weights, run(config.replace(saves="litgpt")).weights
    assert all(np.array_equal(other[name], one[name]) for name in one)
    assert (
        plan(config.replace(saves="litgpt")).memory[0].to_dict()
        == run(config.replace(saves="litgpt")).memory[0].to_dict()
    )
