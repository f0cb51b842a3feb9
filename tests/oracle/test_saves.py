"""What a block keeps with saves 'eager', beside what autograd keeps of transformers' own block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import zerosim

H, KV, F, T, HEADS = 64, 32, 160, 32, 4


def theirs(config: type[Any], layers: int, trained: bool) -> int:
    """Return the bytes of storages, parameters left out, that the layers' forward saves."""
    sizes = {"hidden_size": H, "num_attention_heads": HEADS, "num_key_value_heads": 2, "intermediate_size": F}
    made = config(**sizes, num_hidden_layers=layers, vocab_size=128, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(made).to(torch.bfloat16).requires_grad_(trained)
    model.enable_input_require_grads()
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = model.model(input_ids=torch.zeros((1, T), dtype=torch.long))
    assert out is not None
    return sum(one.untyped_storage().nbytes() for at, one in kept.items() if at not in weights)


@pytest.mark.parametrize(("family", "config"), [("llama", LlamaConfig), ("qwen2", Qwen2Config)])
def test_a_block_keeps_what_transformers_block_keeps(family: str, config: type[Any]) -> None:
    """Byte for byte, the log-sum-exp and the norms' statistics among them."""
    size: dict[str, Any] = {"hidden": H, "heads": HEADS, "kv_heads": 2, "ffn": F, "layers": 3, "seq": T, "vocab": 128}
    run: dict[str, Any] = {"precision": "bf16", "attention": "flash", "saves": "eager", "micro_batch": 1, "ranks": 1}
    rows = zerosim.plan(zerosim.RunConfig(model=family, **size, **run)).saved["layers.1"]
    counted = sum(row.nbytes for row in rows)
    assert counted - 4 * HEADS * T - 2 * 4 * T == T * (20 * H + 4 * KV + 8 * F)
    assert counted == theirs(config, 3, True) - theirs(config, 2, True)
    assert theirs(config, 3, False) - theirs(config, 2, False) == T * (12 * H + 4 * KV + 6 * F) + 4 * T * (HEADS + 2)
