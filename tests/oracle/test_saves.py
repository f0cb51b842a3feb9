"""What a block keeps with saves 'eager', beside what autograd keeps of transformers' own block."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2PreTrainedModel,
    LlamaConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

import zerosim
from zerosim.device.events import Alloc, Free

H, KV, F, T, HEADS = 64, 32, 160, 32, 4


def theirs(config: type[Any], layers: int, trained: bool, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of storages, parameters left out, that the layers' forward saves; fp32 weights have autocast."""
    sizes = {"hidden_size": H, "num_attention_heads": HEADS, "num_key_value_heads": 2, "intermediate_size": F}
    sizes |= {"head_dim": H // HEADS, "num_hidden_layers": layers, "vocab_size": 128}
    made = config(**sizes, attn_implementation="sdpa", attn_logit_softcapping=None)
    model = AutoModelForCausalLM.from_config(made).to(dtype).requires_grad_(trained)
    model.enable_input_require_grads()
    ids = torch.zeros((1, T), dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
        return kept_by(lambda: model.model(input_ids=ids), list(model.parameters()))


def kept_by(forward: Callable[[], Any], weights: Sequence[torch.Tensor]) -> int:
    """Return the bytes of storages, those of `weights` left out, that a forward saves."""
    without, kept = {one.untyped_storage().data_ptr() for one in weights}, dict[int, torch.Tensor]()

    def pack(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = forward()
    assert out is not None
    return sum(one.untyped_storage().nbytes() for at, one in kept.items() if at not in without)


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


@pytest.mark.parametrize(("family", "config", "norms"), [("qwen3", Qwen3Config, HEADS + 2), ("olmo2", Olmo2Config, 2)])
def test_norms_of_queries_and_keys_keep_them_in_fp32(family: str, config: type[Any], norms: int) -> None:
    """4 bytes an element, and 2 of what a trained weight multiplies. OLMo 2's norms round last: there it is 4, and 2h
    more for each of a block's norms. `norms` are the statistics of a token beside the block's."""
    size: dict[str, Any] = {"hidden": H, "heads": HEADS, "kv_heads": 2, "ffn": F, "layers": 3, "seq": T, "vocab": 128}
    run: dict[str, Any] = {"attention": "flash", "saves": "eager", "micro_batch": 1, "ranks": 1, "model": family}
    rows = zerosim.plan(zerosim.RunConfig(**size, **run, precision="bf16")).saved["layers.1"]
    counted, more = sum(row.nbytes for row in rows), 2 * (family == "olmo2")
    of_block = 20 * H + 4 * KV + 8 * F + 2 * more * H + 4 * (HEADS + 2)
    assert counted == T * (of_block + (6 + more) * (H + KV) + 4 * norms)
    assert counted == theirs(config, 3, True) - theirs(config, 2, True)
    rows = zerosim.plan(zerosim.RunConfig(**size, **run, precision="fp32", autocast="bf16")).saved["layers.1"]
    kept = [theirs(config, layers, True, torch.float32) for layers in (4, 2)]
    assert 2 * sum(row.nbytes for row in rows) == kept[0] - kept[1]
    frozen = T * (12 * H + 4 * KV + 6 * F + 4 * (H + KV) + 4 * (HEADS + 2 + norms))
    assert theirs(config, 3, False) - theirs(config, 2, False) == frozen


def test_gemma_2s_four_norms_keep_40h() -> None:
    """Bytes a token and block, all trained: input and normalised of each norm in fp32."""
    size: dict[str, Any] = {"hidden": H, "heads": HEADS, "kv_heads": 2, "ffn": F, "layers": 3, "seq": T, "vocab": 128}
    run: dict[str, Any] = {"precision": "bf16", "attention": "flash", "saves": "eager", "micro_batch": 1, "ranks": 1}
    rows = zerosim.plan(zerosim.RunConfig(model="gemma2", **size, **run)).saved["layers.1"]
    assert sum(row.nbytes for row in rows) - 4 * HEADS * T - 4 * 4 * T == T * (40 * H + 4 * KV + 8 * F)


@pytest.mark.parametrize(
    ("family", "config", "norms", "each"),
    [("llama", LlamaConfig, 2, 30), ("qwen2", Qwen2Config, 2, 30), ("gemma2", Gemma2Config, 4, 46)],
)
def test_a_block_under_autocast_keeps_what_transformers_block_keeps(
    family: str, config: type[Any], norms: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 weights, all trained: 30h + 4kv + 8f bytes a token, and casts of the maps' weights. Gemma 2's norms after a
    branch keep an fp32 copy of its result too."""
    size: dict[str, Any] = {"hidden": H, "heads": HEADS, "kv_heads": 2, "ffn": F, "layers": 3, "seq": T, "vocab": 128}
    run: dict[str, Any] = {"precision": "fp32", "attention": "flash", "saves": "eager", "micro_batch": 1, "ranks": 1}
    rows = zerosim.plan(zerosim.RunConfig(model=family, **size, **run, autocast="bf16")).saved["layers.1"]
    casts = sum(row.nbytes for row in rows if row.what == "weight cast")
    biases = 2 * (H + 2 * KV) if family == "qwen2" else 0  # which autograd does not keep
    assert casts - biases == 2 * (2 * H * H + 2 * H * KV + 3 * H * F)
    counted = sum(row.nbytes for row in rows)
    assert counted - casts - 4 * HEADS * T - norms * 4 * T == T * (each * H + 4 * KV + 8 * F)
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # without a cap it can run
    kept = [theirs(config, layers, True, torch.float32) for layers in (4, 2)]
    sums = 4 * 4 * H if family == "gemma2" else 0  # 1 + w of each norm, whatever the tokens
    assert 2 * (counted + sums - biases) == kept[0] - kept[1]


class Live(TorchDispatchMode):
    """The most bytes live during the last block's backward, of storages of at least `least` bytes."""

    def __init__(self, least: int, without: set[int]) -> None:
        self.least, self.without = least, without
        self.live: dict[int, Any] = {}
        self.runs, self.most = 0, 0
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                kept, at = one.untyped_storage(), one.untyped_storage()._cdata
                if at not in self.live and kept.nbytes() >= self.least and kept.data_ptr() not in self.without:
                    self.live[at] = (weakref.ref(kept, lambda _, at=at: self.live.pop(at)), kept.nbytes())
        if self.runs == 2:
            self.most = max(self.most, sum(nbytes for _, nbytes in self.live.values()))
        return out


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("autocast", [False, True])
def test_the_working_set_of_a_recomputed_block_is_transformers(autocast: bool) -> None:
    """With PEFT's adapters on q, k, v and o, under reentrant checkpoints: the most live bytes in the last block's
    backward, beside buffers smaller than its keys."""
    peft, wide, layers = pytest.importorskip("peft"), 224, 3
    sizes = {"hidden_size": H, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": wide}
    made = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=11, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(made).to(torch.bfloat16)
    lora = peft.LoraConfig(r=1, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(model, lora)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # as on a GPU, with a mask of bytes
            module.forward = lambda x, p=module.p: torch.native_dropout(x, p, True)[0]
    model.train().gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    least, kv = 2 * T * 16, 16
    live = Live(least, {one.untyped_storage().data_ptr() for one in model.parameters()})

    def entered(*_: Any) -> None:
        live.runs += 1

    model.base_model.model.model.layers[-1].input_layernorm.register_forward_pre_hook(entered)
    model.base_model.model.model.layers[-2].input_layernorm.register_forward_pre_hook(
        lambda *_: entered() if live.runs == 2 else None
    )
    ids = torch.zeros((1, T), dtype=torch.long)
    with live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    sizes_here: dict[str, Any] = dict(hidden=H, heads=8, kv_heads=2, ffn=wide, layers=layers, seq=T, vocab=11)
    config = zerosim.RunConfig(
        model="llama", **sizes_here, micro_batch=1, ranks=1, attention="flash", saves="eager", recompute="full",
        recipe="ddp", stage=0, lora_rank=1, lora_target="q,k,v,o", lora_dropout=0.1, adapter_dtype="fp32",
        autocast="bf16" if autocast else None, loss="hf-5",
    )  # fmt: skip
    held, most = dict[int, int](), 0
    for event in zerosim.plan(config, keep_events=True).events[0]:
        if isinstance(event, Alloc) and event.scope.phase != "init" and event.nbytes >= least:
            held[event.id] = event.nbytes
            if event.scope.unit == "layers.2" and event.scope.phase == "backward":
                most = max(most, sum(held.values()))
        elif isinstance(event, Free):
            held.pop(event.id, None)
    assert most == live.most
    adapters = 12 * H if autocast else 20 * H
    lse = 4 * 8
    assert most == T * (2 * layers * H + 12 * wide + 8 * H + adapters + 4 * H + 4 * kv + 4 * H + lse)


def litgpts_attention(x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return attention's result, from litgpt's map of q, k and v with one adapter of q and v, as its modules do it."""
    places = torch.cat([torch.arange(H), torch.arange(2 * H, 3 * H)])
    down = torch.nn.functional.linear(x, a).transpose(1, 2)
    share = torch.nn.functional.conv1d(down, b.unsqueeze(-1), groups=2).transpose(1, 2)
    padded = x.new_zeros((T, 3 * H)).index_copy(1, places, share.reshape(-1, 2 * H)).view(1, T, 3 * H)
    qkv = (torch.nn.functional.linear(x, weight) + padded * 2).view(1, T, 3, HEADS, H // HEADS)
    q, k, v = (one.squeeze(2).transpose(1, 2) for one in qkv.split(1, 2))
    q, k = ((one * torch.ones(T, H // HEADS)).to(x.dtype) for one in (q, k))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_litgpts_attention_keeps_its_maps_result_and_the_adapters() -> None:
    """v is a view of the map's result, which lives as long; copying an adapter's results into the map's width saves
    them. So 18h with the input and what attention saves, beside the log-sum-exp and down's 4r."""
    x = torch.zeros(1, T, H, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.zeros(one, dtype=torch.bfloat16) for one in ((3 * H, H), (16, H), (2 * H, 8))]
    for one in weights[1:]:
        one.requires_grad_()
    factors = 4 * T * (H // HEADS) * 2 + 8 * 2 * H
    assert kept_by(lambda: litgpts_attention(x, *weights), weights) - factors == T * (18 * H + 4 * 8 + 4 * HEADS)
    size: dict[str, Any] = {
        "hidden": H,
        "heads": HEADS,
        "kv_heads": HEADS,
        "ffn": F,
        "layers": 3,
        "seq": T,
        "vocab": 128,
    }
    run: dict[str, Any] = {"precision": "bf16", "attention": "flash", "saves": "litgpt", "micro_batch": 1, "ranks": 1}
    config = zerosim.RunConfig(model="llama", **size, **run, lora_rank=8, adapter_dtype="bf16")
    rows = zerosim.plan(config).saved["layers.1"]
    assert sum(row.nbytes for row in rows) == T * (26 * H + 6 * F + 4 * 8 + 4 * (HEADS + 2))
