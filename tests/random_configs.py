"""Random configurations, drawn from all options together, as flat values and as the words of a command line.

Any option may be drawn, on a tiny mesh and model. Where a draw is refused, it loses an option that the refusal names,
until nothing refuses it: so options that go together only with others are drawn often.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from zerosim.cli.parser import flag_of
from zerosim.config import RunConfig
from zerosim.config.parts.experts import ExpertsConfig
from zerosim.config.parts.fp8 import Fp8Config
from zerosim.config.parts.memory import LOSSES
from zerosim.config.parts.model import EXPERT_SIZES
from zerosim.config.parts.mtp import MtpConfig
from zerosim.errors import InputError

Made = TypeVar("Made")
MOST_RANKS = 8
MOST_WORK = 64  # ranks x layers x microbatches x steps
SIZES = (
    *(
        "ranks",
        "pp",
        "tp",
        "cp",
        "dp_replicate",
        "stage",
        "steps",
        "micro_batch",
        "seed",
        "accumulate",
        "model",
        "layers",
    ),
    *("hidden", "heads", "kv_heads", "ffn", "seq", "vocab", "params", "units"),
)
"""Drawn in `_sizes`, and never left out."""
NOT_DRAWN = (
    *(
        "backend",
        "batched_flash",
        "capture_graphs",
        "world",
        "ranks_per_process",
        "data",
        "tokens",
        "tokenizer",
        "weights",
        "adapters",
        "sample",
        "sample_tokens",
        "save_state",
        "save_every",
        "save_as",
        "save_keep",
        "resume",
        "mtbf",
    ),
    *(
        "decoder_seq_length",
        "head_dim",
        "nvme",
        "lr",
        "aux_lr",
        "betas",
        "eps",
        "norm_eps",
        "rope_base",
        "loss_scale_window",
        "min_loss_scale",
        "paged_states",
    ),
    *("ep", "etp", *EXPERT_SIZES, *ExpertsConfig.options()),
    *Fp8Config.options(),
    *MtpConfig.options(),
    *("lora_by_rows", "frozen_fp32"),
)
"""Other machines, files, checkpoints (`state/test_resume.py`), text, what `crosses.of_family` gives, numbers on which
no byte depends, an option for larger models (`optim/test_paging.py`), experts, which
`parallel/test_expert_parallel.py` draws, products in 8 bits, for larger widths (`train/test_fp8_runs.py`), and blocks
that predict further tokens, of few families (`parallel/test_mtp.py`), and adapters of stacks of experts and frozen
shards in fp32 (`parallel/test_expert_parallel.py`, `parallel/test_lora.py`)."""

CHOICES: Mapping[str, Sequence[Any]] = {
    "ranks_per_node": (1, 2, 4),
    "secondary_shard": (2,),
    "context": ("ring", "ulysses", "allgather", "ulysses+ring"),
    "context_order": ("zigzag", "contiguous"),
    "sequence_parallel": (True,),
    "keep_gathered": (True,),
    "pad_vocab": (True,),
    "replica_reduction": ("micro_batch",),
    "partition": ("owner",),
    "collective": ("ring", "pairs"),
    "bucket_bytes": (None, 64, 512),
    "parallel": (3,),
    "pipeline": ("gpipe", "interleaved", "zb-h1", "zb-h1", "zb-v", "zb-v"),
    "virtual_stages": (2, 3),
    "micro_batch_group": (2, 3),
    "stage_layers": ("1,1", "0,2", "2,1", "1,1,0", "0,1,1,0", "1,0,0,1"),
    "balance_ends": (True,),
    "keep_last_inputs": (True, False),
    "recipe": ("ddp", "deepspeed", "hf-deepspeed", "fsdp1", "fsdp2", "megatron", "usual"),
    "transformer_engine": (True, False),
    "overlap": ("none", "reduce", "gather", "all"),
    "overlap_comm": (True,),
    "tp_comm_overlap": (True,),
    "kernels": ("eager", "compiled"),
    "flash_kernel": ("fa3",),
    "cuda_graphs": (True,),
    "grad_reduction": ("all_reduce",),
    "compress": ("fp16", "bf16", "int8", "int4", "top-k", "random-k", "dgc", "powersgd", "onebit-adam"),
    "compress_block": (4, 16),
    "compress_ratio": (0.1, 0.5),
    "compress_rank": (2,),
    "compress_warmup": (1,),
    "quantized_gradients": (True,),
    "reduce_bucket": (30, 100, 700, 3000),
    "reduce_buffers": (1, 2),
    "overlap_reduction": (True, False),
    "allgather_bucket": (50, 300),
    "overlap_param_gather": (True, False),
    "grad_buckets": ("none", "copies", "views"),
    "persistent_grads": (True, False),
    "param_dtype_grads": (True, False),
    "own_grads_only": (True, False),
    "grad_sync": (False,),
    "gradient_accumulation_fusion": (True,),
    "upcast_grads": (True, False),
    "flatten_grads": (True,),
    "grads_in_partition": (True,),
    "host_buffers": (True,),
    "pin_memory": (True,),
    "host_load": ("every", "first"),
    "keep_upcast": (True,),
    "keep_grads": (True,),
    "sum_computed_grads": (True,),
    "delayed_update": (1, 2),
    "optimizer_in_backward": (True,),
    "reshard_after_forward": (False,),
    "quantized_weights": (True,),
    "hierarchical_gather": (True,),
    "keep_last_unit": (True,),
    "keep_root_units": (True, False),
    "keep_last_output": (True,),
    "gather": ("module", "unit"),
    "tiles": (2,),
    "persistent_numel": (10, 100, 4000),
    "cast_shards": (True, False),
    "prefetch": (1, 2, 5),
    "forward_prefetch": (False,),
    "prefetch_elements": (20, 300),
    "max_live": (100, 700),
    "sub_group": (50, 500),
    "foreach": (True, False),
    "for_loop": (True,),
    "lazy_states": (True,),
    "freeze": (
        *("h.0", "h.1", "wte,wpe,h.0", "*,!norm", "*,!ln_f", "*,!bias", "*,!h.0", "*,!h.1", "*,!wte", "*,!head"),
        *("*,!weight", "*.bias", "*,!c_attn", "mlp", "attn", "wte", "h.0.mlp,h.1.attn", "ln_f", "layers.0", "norm"),
    ),
    "lora_rank": (1, 2),
    "lora_alpha": (3.0,),
    "lora_target": ("q,k,v,o", "all-linear", "fc", "up,down"),
    "lora_dropout": (0.2,),
    "adapter_dtype": ("fp32", "bf16"),
    "autocast": ("bf16", "fp16"),
    "fused_lora": (True,),
    "adapter_shards": ("tensor", "rows", "whole"),
    "base": ("nf4", "gptq"),
    "whole_scales": (True,),
    "prepare_kbit": (True,),
    "bnb_saves_input": (True,),
    "precision": ("fp32", "fp16", "fp64", "bf16-pure"),
    "grad_dtype": ("fp32", "bf16"),
    "master_init": ("exact",),
    "rounding": ("stochastic", "kahan"),
    "loss_scale": ("dynamic", 8.0),
    "initial_scale_power": (30,),
    "hysteresis": (1,),
    "skip_nonfinite": (True,),
    "optimizer": (
        *("adamw", "adam8bit", "radam", "adam-sage", "lion", "sophia", "adagrad", "rmsprop", "adafactor"),
        *("adafactor-hf", "muon", "sgd", "sgd"),
    ),
    "momentum": (0.9,),
    "nesterov": (True,),
    "momentum_form": ("ema",),
    "relative_step": (True,),
    "scale_parameter": (False,),
    "weight_decay": (0.1,),
    "decay": ("matrices",),
    "schedule": ("cosine",),
    "warmup": (1,),
    "min_lr": (1e-5,),
    "clip_norm": (0.5,),
    "recompute": (
        *("full", "full", "full:2", "selective", "selective:op", "selective:layernorm", "selective:mlp"),
        *("selective:attn_proj,layernorm,mlp_act", "selective:dropout,mlp", "selective:core_attn,attn_proj"),
    ),
    "use_reentrant": (True,),
    "partition_activations": (True,),
    "cpu_checkpointing": (True,),
    "offload_activations": (True,),
    "stash_window": (1, 2),
    "saves": ("megatron", "eager", "liger", "foak", "litgpt"),
    "attention": ("flash",),
    "repeat_kv": (True,),
    "use_cache": (True,),
    "fp32_softmax": (True, False),
    "loss": tuple(name for name in LOSSES if name != "lean"),
    "allocator": ("caching", "arena"),
    "allocator_conf": ("expandable_segments:True", "fit:first"),
    "capacity": (10**11,),
    "host_memory": (10**11,),
    "offload": (
        *("optimizer=host", "optimizer=nvme", "params=host", "params=nvme", "optimizer=host,params=host"),
        *("optimizer=nvme,params=nvme", "optimizer=host,grads=nvme", "optimizer=nvme,params=host,grads=host"),
    ),
    "offload_policy": ("fsdp2",),
    "tie_embeddings": (False, True),
    "dropout": (0.1,),
    "documents": ("2", "3"),
    "loss_tile": (3,),
    "mlp_tile": (1, 5),
    "positions": (9,),
}
"""Values of each option beside its default."""

OFTEN = (
    *("pipeline", "recipe", "recompute", "offload", "gather", "prefetch", "freeze", "lora_rank", "collective"),
    *("partition", "sequence_parallel", "optimizer", "precision", "context"),
)
"""Options that others need, or that change much."""

NODES = {"stage": 3, "ranks": 4, "ranks_per_node": 2, "dp_replicate": 1, "tp": 1, "pp": 1}
CAST = {"lora_rank": 1, "adapter_dtype": "fp32", "autocast": "bf16", "tp": 1}
FP32 = {"grad_dtype": "fp32", "tp": 1}
TOGETHER: Sequence[Mapping[str, Any]] = (
    *({"compress": name, **FP32} for name in ("int8", "int4", "top-k", "random-k", "fp16")),
    {"compress": "int4", "compress_block": 4, "stage": 1, **FP32},
    {"compress": "top-k", "compress_ratio": 0.5, "precision": "fp32", "stage": 2, **FP32},
    {"compress": "dgc", "compress_warmup": 1, "optimizer": "sgd", "momentum": 0.9, "stage": 1, **FP32},
    {"compress": "powersgd", "compress_rank": 2, "compress_warmup": 1, "stage": 0, **FP32},
    {"compress": "onebit-adam", "compress_warmup": 1, "stage": 0, "optimizer": "adam", **FP32},
    {"offload": "optimizer=host", "delayed_update": 1, "steps": 3},
    {"offload": "optimizer=nvme", "delayed_update": 2, "steps": 3},
    {"offload": "optimizer=nvme,params=nvme", "stage": 3, "prefetch": 2},
    {"offload": "params=host", "stage": 3, "gather": "module", "prefetch": 2},
    {"offload": "optimizer=host,params=host", "stage": 3, "delayed_update": 1, "steps": 2},
    {"offload": "optimizer=host", "stage": 3, "reduce_bucket": 700, "overlap_comm": True},
    {"offload": "optimizer=host,params=host", "stage": 3, "offload_policy": "fsdp2", "prefetch": 2},
    {"optimizer_in_backward": True, "accumulate": 1, "tp": 1, "pp": 1, "dp_replicate": 1},
    {"stage": 3, "prefetch_elements": 300, "max_live": 700},
    {"stage": 3, "prefetch_elements": 20, "gather": "module"},
    {"stage": 3, "gather": "module", "tiles": 2},
    {"quantized_gradients": True, **NODES},
    {"hierarchical_gather": True, **NODES},
    {"secondary_shard": 2, **NODES},
    {"stage": 3, "quantized_weights": True, "persistent_numel": 4000, "tp": 1},
    {"offload_activations": True, "stash_window": 1},
    {"recompute": "full", "cpu_checkpointing": True, "stash_window": 2},
    {"recompute": "full", "cpu_checkpointing": True, "partition_activations": True, "tp": 2},
    {"mlp_tile": 3, "recompute": "full", "loss": "chunked", "loss_tile": 2},
    {"documents": "3", "attention": "flash"},
    {"tp": 2, "sequence_parallel": True, "keep_gathered": True},
    {"tp": 2, "sequence_parallel": True, "tp_comm_overlap": True},
    {"stage": 1, "persistent_grads": True, "gradient_accumulation_fusion": True, "transformer_engine": True},
    {"upcast_grads": True, "keep_upcast": True},
    {"pp": 2, "pipeline": "zb-h1", "recompute": "selective:layernorm,mlp"},
    {"pp": 2, "pipeline": "zb-v", "recompute": "selective:op"},
    {"pp": 2, "pipeline": "zb-v", "stage": 3, "freeze": "h.1"},
    {"pp": 2, "pipeline": "interleaved", "virtual_stages": 2, "micro_batch_group": 3, "accumulate": 4},
    {"lora_rank": 1, "base": "nf4", "hidden": 8, "heads": 2},
    {"lora_rank": 1, "adapter_dtype": "fp32", "lora_dropout": 0.2, "tp": 1},
    {**CAST, "lora_dropout": 0.2, "recompute": "full"},
    {"lora_rank": 1, "adapter_dtype": "bf16", "fused_lora": True, "lora_dropout": 0.2, "tp": 1},
    {
        "lora_rank": 1,
        "adapter_dtype": "fp32",
        "autocast": "bf16",
        "base": "nf4",
        "prepare_kbit": True,
        "tp": 1,
        "pp": 1,
    },
    {"optimizer": "sgd", "momentum": 0.9, "nesterov": True},
    {"optimizer": "sgd", "momentum": 0.9, "momentum_form": "ema"},
    {"precision": "bf16-pure", "rounding": "kahan"},
    {"precision": "fp16", "initial_scale_power": 30, "hysteresis": 1, "steps": 3},
)
"""Options that need one another."""


def drawn(
    rng: random.Random,
    make: Callable[[Mapping[str, Any]], Made],
    refused: list[Mapping[str, Any]] | None = None,
    **fixed: Any,
) -> tuple[dict[str, Any], Made]:
    """Draw values that `make` does not refuse, and return them with what it made. `fixed` are kept; `refused` gets the
    values of each draw that was.

    Raises: any other error of `make`, with the values as a note.
    """
    while True:
        fields = _sizes(rng)
        names = rng.sample(sorted(CHOICES), rng.choice((2, 6, 12, 20, 30)))
        names += [name for name in OFTEN if rng.random() < 0.3]
        fields |= {name: rng.choice(CHOICES[name]) for name in names}
        for some in rng.sample(TOGETHER, rng.choice((0, 1, 1, 2))):
            fields |= some
        fields |= fixed
        while fields:
            try:
                if _work(RunConfig(**fields)) > MOST_WORK:
                    break
                return fields, make(fields)
            except InputError as error:
                if refused is not None:
                    refused.append(dict(fields))
                fields = _without(fields, error, rng, fixed)
            except Exception as error:
                error.add_note(f"{fields!r}")
                raise


def _sizes(rng: random.Random) -> dict[str, Any]:
    """Draw a mesh, a ZeRO stage, a model and its sizes."""
    while True:
        pp, tp = rng.choice((1, 1, 2, 2, 3)), rng.choice((1, 1, 2))
        shards, replicas = rng.choice((1, 2, 2, 3, 4, 5, 8)), rng.choice((1, 1, 2))
        if (ranks := pp * tp * shards * replicas) <= MOST_RANKS:
            break
    fields: dict[str, Any] = dict(ranks=ranks, pp=pp, tp=tp, dp_replicate=replicas)
    fields |= dict(stage=rng.choice((0, 1, 1, 2, 2, 3, 3, 3)), steps=rng.choice((1, 1, 2, 3)), seed=rng.randrange(99))
    fields |= dict(micro_batch=rng.choice((1, 1, 2)))
    fields |= dict(accumulate=rng.choice((1, 2, 3, 4) if pp == 1 else (1, pp, 2 * pp, 2 * pp + 1)))
    model = rng.choice(("gpt", "gpt", "gpt", "llama", "llama", "flat", "mlp"))
    cp = rng.choice((1, 1, 1, 2, 2, 3, 4)) if model in ("gpt", "llama") else 1
    if cp > 1:
        fields |= dict(cp=cp, ranks=ranks * cp)
    seq = rng.choice((1, 2, 4)) * (1 if cp == 1 else 2 * cp)
    fields |= dict(model=model, seq=seq, vocab=rng.choice((256, 256, 257)))
    if model == "flat":
        return fields | dict(params=rng.choice((210, 1001)), units=rng.choice((1, 3, 4)), vocab=256)
    fields |= dict(layers=rng.choice((1, 2, 2, 3, 4)))
    if model == "mlp":
        return fields | dict(hidden=rng.choice((2, 5)))
    hidden, heads = rng.choice(((2, 1), (4, 2), (4, 1), (8, 4), (6, 3)))
    fields |= dict(hidden=hidden, heads=heads)
    if model == "llama" and heads > 1:
        fields |= rng.choice(({}, dict(kv_heads=1)))
    return fields | rng.choice(({}, {}, dict(ffn=rng.choice((2, 6, 10)))))


def _without(
    fields: Mapping[str, Any], error: InputError, rng: random.Random, fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """Leave out an option that the error names; nothing is left if it names none that can be left out."""
    assert "\n" not in str(error), error
    may_go = [name for name in fields if name in CHOICES and name not in fixed]
    named = [name for name in (error.field, error.beside) if name in may_go]
    named = named or [name for name in may_go if name in str(error)]
    left_out = rng.choice(named) if named else None
    return {name: value for name, value in fields.items() if name != left_out} if named else {}


def _work(config: RunConfig) -> int:
    layers = config.model.units if config.model.family == "flat" else config.model.layers
    return config.mesh.ranks * config.data.accumulate * (layers or 1) * (config.optim.steps or 1)


def words_of(fields: Mapping[str, Any]) -> list[str]:
    """Return the flags of these fields."""
    words: list[str] = []
    for name, value in fields.items():
        if isinstance(value, bool):
            words.append(flag_of(name) if value else flag_of(name).replace("--", "--no-", 1))
        else:
            words += [flag_of(name), "none" if value is None else str(value)]
    return words
