"""Random configurations that Megatron-LM's arguments can say, and what of them must return."""

from __future__ import annotations

import random
from typing import Any

from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.errors import InputError

SAID = """
stage ranks dp_replicate tp cp ep sequence_parallel pp balance_ends micro_batch accumulate
precision grad_dtype overlap_reduction overlap_param_gather bucket_bytes offload recompute
attention fp32_softmax loss tp_comm_overlap cuda_graphs optimizer lr weight_decay clip_norm schedule
warmup min_lr loss_scale layers hidden heads kv_heads head_dim ffn experts top_k expert_ffn seq vocab
tie_embeddings dropout norm_eps pad_vocab transformer_engine gradient_accumulation_fusion aux_loss aux_loss_over
z_loss bias_rate mtp_layers mtp_loss capacity_factor pad_to_capacity dispatcher shared_expert_overlap
allocator allocator_conf recipe
"""


def said(config: RunConfig) -> dict[str, Any]:
    """Return the values of all that Megatron's arguments say."""
    values = {name: config.value(name) for name in SAID.split()}
    values["family"] = {"mixtral": "llama", "mistral": "llama"}.get(config.model.family, config.model.family)
    values["stages"] = config.layers_by_chunk(config.model.layers) if config.mesh.pp > 1 else None
    values["group"] = config.micro_batch_group
    values["etp"] = config.mesh.axes.size("etp") if config.model.has_experts else 1
    values["shared"] = config.model.width("shared") if config.model.has_shared_experts else 0
    values["router"] = "fp32" if config.value("router_dtype") == "fp32" else "model"
    values["chunks"] = config.parallel.num_chunks if config.mesh.pp > 1 else 1
    values["parts of inputs"] = config.partitions_inputs
    values["context"] = config.context.how if config.mesh.cp > 1 else ""
    values["drops"] = config.experts.capacity
    if config.optim.optimizer == "adamw":
        values |= {name: config.value(name) for name in ("betas", "eps")}
    if config.value("loss_scale") == "dynamic":
        scale = "initial_scale_power loss_scale_window hysteresis min_loss_scale"
        values |= {name: config.value(name) for name in scale.split()}
    if config.memory.attention == "flash" and config.parallel.transformer_engine:
        values["kernel"] = config.clock.flash_kernel
    if config.model.has_position_table:
        values["positions"] = config.model.positions
    else:
        values["rope_base"] = config.model.rope_base
    values["node"] = config.mesh.ranks_per_node % config.mesh.ranks
    return values


def drawn(rng: random.Random) -> RunConfig:
    """Draw a configuration of Megatron's that zerosim takes."""
    while True:
        try:
            return RunConfig(**{**PLAN_DEFAULTS, **_values(rng)})
        except InputError:
            continue


def _values(rng: random.Random) -> dict[str, Any]:
    pick = rng.choice
    family = pick(("gpt", "gpt", "llama", "llama", "qwen2", "qwen3", "starcoder2", "gpt_bigcode", "mixed", "mixed"))
    tp, pp, cp, shards = pick((1, 2, 4)), pick((1, 2, 4)), pick((1, 1, 2)), pick((1, 2, 4, 8))
    stage, heads = pick((0, 1, 1, 2, 3)), pick((4, 8))
    values: dict[str, Any] = dict(
        recipe="megatron", tp=tp, pp=pp, cp=cp, stage=stage, ranks=tp * pp * cp * shards, heads=heads,
        model="llama" if family == "mixed" else family, layers=pick((4, 8)), hidden=heads * pick((8, 16)),
        seq=pick((32, 64)), vocab=pick((256, 257, 50257, 128256)), micro_batch=pick((1, 2)),
        accumulate=pick((4, 6, 8)), lr=pick((3e-4, 1e-3)), weight_decay=pick((0.0, 0.1)), clip_norm=pick((0.0, 1.0)),
        precision=pick(("bf16", "bf16", "fp16", "fp32")), optimizer=pick(("adamw", "adamw", "sgd", "lion")),
        attention=pick(("flash", "eager")), recompute=pick(("none", "full", "selective", "selective:layernorm,mlp")),
        tie_embeddings=pick((True, False)),
    )  # fmt: skip
    maybe: dict[str, Any] = dict(
        ffn=pick((64, 96)), head_dim=32, sequence_parallel=tp > 1, overlap_reduction=True,
        pad_vocab=tp > 1, betas=(0.9, 0.95), schedule="cosine", min_lr=1e-5, warmup=20, eps=1e-6, norm_eps=1e-6,
        flash_kernel=pick(("fa2", "cudnn")), loss="megatron-fused", cuda_graphs=values["recompute"] != "full",
        transformer_engine=False, gradient_accumulation_fusion=False, fp32_softmax=values["attention"] == "eager",
        partition_activations=tp > 1 and values["recompute"] == "full", tp_comm_overlap=tp > 1,
    )  # fmt: skip
    if family in ("gpt", "gpt_bigcode"):
        maybe |= dict(dropout=0.1, positions=128)
    if family not in ("gpt",):
        maybe |= dict(kv_heads=heads // 2, rope_base=5e5)
    if family not in ("gpt", "gpt_bigcode"):
        maybe |= dict(mtp_layers=pick((1, 2)), mtp_loss=0.3)
    if family == "mixed":
        values["precision"] = "bf16"
    if values["precision"] == "fp16":
        maybe |= dict(loss_scale=pick((1024.0, "dynamic")), initial_scale_power=20, hysteresis=3, loss_scale_window=50)
        maybe |= dict(min_loss_scale=2.0)
    if values["precision"] != "fp32":
        maybe |= dict(grad_dtype=pick(("fp32", values["precision"])))
    if stage in (1, 2):
        maybe |= dict(offload="optimizer=host", overlap_param_gather=True)
    if stage and shards > 1:
        maybe |= dict(dp_replicate=2)
    if pp > 1:
        maybe |= dict(balance_ends=True, stage_layers=pick(("1,3", "3,2,2,1", "2,2,1,3")))
        maybe |= {"virtual_stages": 2}
    if cp > 1:
        maybe |= dict(context=pick(("ring", "ulysses", "allgather")))
    if rng.random() < 0.3:
        maybe |= dict(ranks_per_node=8, bucket_bytes=4096, allocator_conf="expandable_segments:True")
    if family == "mixed":
        values |= dict(experts=8, top_k=2, ep=pick((1, 2)), sequence_parallel=tp > 1)
        maybe |= dict(expert_ffn=32, shared_experts=1, shared_ffn=64, aux_loss=0.01, z_loss=0.001, bias_rate=0.001)
        maybe |= dict(shared_expert_overlap=True) if values["ep"] > 1 else {}
        maybe |= dict(capacity_factor=1.25, router_dtype="fp32", dispatcher="deepep", etp=1)
    found = {**values, **{name: value for name, value in maybe.items() if rng.random() < 0.4}}
    if found.get("allocator_conf"):
        found |= {"allocator": "caching", "cuda_graphs": False}
    if "virtual_stages" in found:
        found["pipeline"] = "interleaved"
    if "aux_loss" in found and rng.random() < 0.3:
        found["aux_loss_over"] = "sequence"
    if "capacity_factor" in found and rng.random() < 0.5:
        found |= {"token_drop": pick(("position", "weight")), "pad_to_capacity": "dispatcher" not in found}
    if found.get("overlap_param_gather") or found.get("bucket_bytes"):
        found["overlap_reduction"] = True  # Megatron's assertion, and one bucket without overlap
    return found
