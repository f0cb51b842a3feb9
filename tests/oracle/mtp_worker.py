"""One process that trains a small model of Megatron-Core's with two further tokens for one backward, on a CPU.

    torchrun -m oracle.mtp_worker FOLDER

Leaves FOLDER/weights.npz, gradients.npz and tokens.npz, by the names of transformers' Llama, and FOLDER/loss.npy.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig

LAYERS, WIDTH, HEADS, GROUPS, FFN, VOCAB, TOKENS, DEPTHS, FACTOR = 2, 32, 4, 2, 56, 48, 16, 2, 0.3
NAMES = {
    "self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj",
    "pre_mlp_layernorm": "post_attention_layernorm", "final_layernorm": "shared_head.norm",
    **{name: name for name in ("enorm", "hnorm", "eh_proj", "input_layernorm")},
}  # fmt: skip
AROUND = {
    "embedding.word_embeddings": "model.embed_tokens", "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}  # fmt: skip


def renamed(found: dict[str, Any]) -> dict[str, Any]:
    """Return arrays by transformers' names. A group's queries lie before its key and its value; gate before up."""
    ours, each = dict[str, Any](), WIDTH // HEADS
    for name, values in found.items():
        stem = name.removesuffix(".weight")
        if stem in AROUND:
            ours[f"{AROUND[stem]}.weight"] = values
            continue
        kind, _, number, rest = stem.split(".", 3)
        at, rest = f"model.layers.{int(number) + LAYERS * (kind == 'mtp')}", rest.removeprefix("transformer_layer.")
        if rest == "self_attention.linear_qkv":
            heads = values.reshape(GROUPS, HEADS // GROUPS + 2, each, WIDTH)
            for part, of in (("q", heads[:, :-2]), ("k", heads[:, -2]), ("v", heads[:, -1])):
                ours[f"{at}.self_attn.{part}_proj.weight"] = of.reshape(-1, WIDTH)
        elif rest == "mlp.linear_fc1":
            ours[f"{at}.mlp.gate_proj.weight"], ours[f"{at}.mlp.up_proj.weight"] = np.split(values, 2)
        else:
            ours[f"{at}.{NAMES[rest]}.weight"] = values
    return ours


def main(folder: Path) -> None:
    torch.cuda.current_device = lambda: "cpu"  # the library asks for a GPU where none is needed
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, num_query_groups=GROUPS, ffn_hidden_size=FFN,
        normalization="RMSNorm", layernorm_epsilon=1e-5, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0, mtp_num_layers=DEPTHS,
        mtp_loss_scaling_factor=FACTOR, use_cpu_initialization=True, params_dtype=torch.float64,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, attention_softmax_in_fp32=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=TOKENS, position_embedding_type="rope", rotary_base=10000,
        share_embeddings_and_output_weights=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    ).double()  # fmt: skip
    random = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        values = 0.15 * random.standard_normal(tuple(parameter.shape)) + ("norm" in name)
        parameter.data = torch.from_numpy(values.astype(np.float32)).double()
    tokens = torch.from_numpy(random.integers(0, VOCAB, (3, TOKENS + 1)))
    future = torch.triu(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool), 1)
    loss = model(tokens[:, :-1], torch.arange(TOKENS).expand(3, TOKENS), future, labels=tokens[:, 1:]).mean()
    loss.backward()
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    np.savez(folder / "weights.npz", **{n: v.astype(np.float32) for n, v in renamed(weights).items()})
    np.savez(folder / "gradients.npz", **renamed(gradients))
    np.savez(folder / "tokens.npz", tokens=tokens.numpy()[None])
    np.save(folder / "loss.npy", loss.detach().numpy())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
