"""Random valid configurations, drawn from all options together, as flat values and as the words of a command line.

`drawn(seed)` is always the same values for the same seed. A draw that is refused loses one of the options that the
refusal names, until nothing refuses it: so options that go together only with others are drawn often. What a plan
refuses before it starts counts, too.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from zerosim.comm.runtime import make_backend
from zerosim.config import OPTIONS, PLAN_DEFAULTS, RunConfig
from zerosim.config.recompute import PARTS
from zerosim.device.device import Device
from zerosim.errors import InputError
from zerosim.train.build import build_model
from zerosim.train.check_quantized import check_quantized
from zerosim.train.check_trained import check_trained
from zerosim.train.plan import check_plan_of

Draw = random.Random
MOST_RANKS = 16
LONG = 96
"""The most ranks x layers x microbatches."""

OFTEN: Mapping[str, tuple[Any, ...]] = {
    "micro_batch": (1, 1, 2, 4),
    "optimizer": (
        *("adam", "adam", "adam", "adamw", "sgd", "lion", "adagrad", "rmsprop", "radam", "sophia", "adafactor"),
        *("adafactor-hf", "adam8bit", "adam-sage", "muon"),
    ),
    "precision": ("bf16", "bf16", "fp16", "fp32", "fp64", "bf16-pure"),
    "recipe": ("paper", "paper", "ddp", "deepspeed", "fsdp2", "megatron", "usual"),
    "recompute": (
        *("none", "none", "full", "full:2", "selective", "selective:mlp,layernorm"),
        *(f"selective:{part}" for part in PARTS),
    ),
    "allocator": ("exact", "exact", "exact", "caching"),
}
"""Options that every draw has."""

SELDOM: Mapping[str, tuple[Any, ...]] = {
    # ranks and stage
    "secondary_shard": (2, 4), "ranks_per_node": (2, 4), "sequence_parallel": (True,), "keep_gathered": (True,),
    "pad_vocab": (True,), "replica_reduction": ("micro_batch",), "partition": ("owner",),
    "collective": ("ring", "pairs"), "bucket_bytes": (64, 1000, None), "reshard_after_forward": (False,),
    "keep_last_unit": (True,),
    "keep_last_inputs": (True,), "balance_ends": (True,), "allocator_conf": ("expandable_segments:True",
    "max_split_size_mb:64", "garbage_collection_threshold:0.8", "roundup_power2_divisions:8"),
    # activations
    "partition_activations": (True,), "cpu_checkpointing": (True,), "offload_activations": (True,),
    "stash_window": (1, 2), "saves": ("lean", "megatron"), "attention": ("flash", "eager"), "fp32_softmax": (True,),
    "loss": ("in-place", "lean", "megatron", "megatron-fused", "torch", "torch-kept", "torch-fp32-kept", "chunked"),
    # reductions, gathers, gradients
    "transformer_engine": (True, False), "gradient_accumulation_fusion": (True, False),
    "overlap": ("none", "reduce", "gather", "all"), "grad_reduction": ("all_reduce", "reduce_scatter"),
    "compress": ("fp16", "bf16", "int8", "int4", "top-k", "random-k", "dgc", "powersgd", "onebit-adam"),
    "compress_block": (4, 64), "compress_ratio": (0.1,), "compress_rank": (2,), "compress_warmup": (1,),
    "reduce_bucket": (0, 50, 3000), "reduce_buffers": (1, 2), "overlap_reduction": (True, False),
    "allgather_bucket": (40, 2000), "overlap_param_gather": (True,), "grad_buckets": ("none", "copies", "views"),
    "persistent_grads": (True, False), "param_dtype_grads": (True, False), "own_grads_only": (True, False),
    "grad_sync": (False,), "upcast_grads": (True, False), "keep_upcast": (True,), "sub_group": (0, 100),
    "foreach": (True, False), "keep_root_units": (True, False), "gather": ("unit", "module"), "tiles": (2,),
    "persistent_numel": (0, 8, 100), "cast_shards": (True, False), "prefetch": (0, 1, 2),
    "prefetch_elements": (10, 300), "max_live": (100, 700), "overlap_comm": (True,), "tp_comm_overlap": (True,),
    # ZeRO++
    "quantized_weights": (True,), "quantized_gradients": (True,), "hierarchical_gather": (True,),
    # offload
    "offload": ("optimizer=host", "optimizer=host,params=host", "params=host", "optimizer=nvme", "params=nvme",
    "optimizer=nvme,params=nvme", "optimizer=host,grads=nvme", "optimizer=host,params=nvme"),
    "delayed_update": (1, 2), "host_memory": (10**12,),
    # training
    "momentum": (0.5,), "nesterov": (True,), "momentum_form": ("ema",), "scale_parameter": (False,),
    "weight_decay": (0.1,), "decay": ("matrices",), "schedule": ("cosine",), "clip_norm": (0.5,),
    "lazy_states": (True,), "dropout": (0.1,), "tie_embeddings": (True, False),
    # what is trained
    "freeze": ("h.0", "wte", "wpe,wte", "c_attn", "*.bias", "layers.0", "*,!lm_head", "*,!norm", "mlp", "lm_head"),
    "lora_rank": (1, 2), "lora_alpha": (4.0,), "lora_target": ("all-linear", "q,v", "o", "up,down", "fc"),
    "lora_dropout": (0.1,), "base": ("nf4",),
    # precision
    "rounding": ("stochastic", "kahan"), "grad_dtype": ("fp32", "bf16"), "master_init": ("exact",),
    "loss_scale": ("dynamic", 8.0), "skip_nonfinite": (True,),
}  # fmt: skip
"""Options that a draw may have, each in one of a few, by the values to choose from."""

GROUPS: tuple[tuple[str, ...], ...] = (
    ("prefetch_elements", "max_live"),
    ("sequence_parallel", "keep_gathered"),
    ("lora_rank", "lora_target", "base"),
    ("lora_rank", "base"),
    ("reduce_bucket", "reduce_buffers"),
    ("upcast_grads", "keep_upcast"),
    ("offload", "delayed_update"),
    ("offload_activations", "stash_window"),
    ("compress", "compress_warmup"),
    ("gather", "tiles"),
    ("persistent_grads", "transformer_engine", "gradient_accumulation_fusion"),
    ("offload",),
    ("freeze",),
    ("grad_sync",),
)
"""Options that are of little use alone; each group is drawn whole, in one draw of a few."""

KEPT = ("tp", "pp", "stage", "dp_replicate", "accumulate", "layers", "hidden", "heads", "optimizer", "precision")
"""Options that a refused draw loses only if it has no other one to lose."""


def drawn(seed: object, **fixed: Any) -> dict[str, Any]:
    """The values of a valid plan's configuration, by flat name, over a plan's defaults. `fixed` are kept."""
    rng = random.Random(f"configuration {seed}")
    while True:
        values = _mesh(rng)
        values |= _model(rng, values.get("tp", 1))
        values |= {name: rng.choice(of) for name, of in OFTEN.items()}
        share = rng.choice((0.02, 0.05, 0.1))
        for group in GROUPS:
            if rng.random() < 2 * share:
                values |= {name: rng.choice(SELDOM[name]) for name in group}
        values |= {name: rng.choice(of) for name, of in SELDOM.items() if rng.random() < share}
        values |= _of_few(rng, values)
        size = values.get("units", values.get("layers", 1))
        if values["ranks"] > MOST_RANKS or values["ranks"] * size * values["accumulate"] > LONG:
            continue
        values = {name: value for name, value in values.items() if value is not None or name == "bucket_bytes"}
        if _repaired(rng, values, fixed):
            return {**values, **fixed}


def config_of(values: Mapping[str, Any]) -> RunConfig:
    """The configuration of `zerosim plan` with these values. Raises: InputError as a plan does before it starts."""
    config = RunConfig(**{**PLAN_DEFAULTS, **values})
    model = build_model(config, Device(0, make_backend("meta")))
    check_trained(config, model)
    check_quantized(config, model)
    check_plan_of(config)
    return config


def words(values: Mapping[str, Any]) -> list[str]:
    """The flags of these values."""
    found = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return ["none" if word == "None" else word for word in found]


def _repaired(rng: Draw, values: dict[str, Any], fixed: Mapping[str, Any]) -> bool:
    """Take options out of `values` until nothing refuses them. Return whether that was possible."""
    needed = {"ranks", "model", *fixed}
    for _ in range(40):
        try:
            config_of({**values, **fixed})
            return True
        except InputError as error:
            if "\n" in str(error):
                raise
            named = {error.field, error.beside, *re.findall(r"[a-z_]+", str(error))}
            wrong = sorted(named & values.keys() - needed)
            if not (choices := [name for name in wrong if name not in KEPT] or wrong):
                return False
            del values[error.field if error.field in choices and rng.random() < 0.5 else rng.choice(choices)]
    return False


def _mesh(rng: Draw) -> dict[str, Any]:
    pp, tp, stage = rng.choice((1, 1, 1, 2, 2, 3)), rng.choice((1, 1, 1, 2)), rng.randrange(4)
    shards, replicas = rng.choice((1, 2, 2, 3, 4)), rng.choice((1, 1, 1, 2)) if stage else 1
    mesh: dict[str, Any] = dict(ranks=pp * tp * shards * replicas, stage=stage, accumulate=rng.choice((1, 1, 2, 3, 4)))
    mesh |= {name: size for name, size in (("pp", pp), ("tp", tp), ("dp_replicate", replicas)) if size > 1}
    if pp > 1:
        schedules: tuple[Callable[[], dict[str, Any]], ...] = (
            dict,
            lambda: dict(pipeline="gpipe"),
            lambda: dict(pipeline="1f1b"),
            lambda: dict(pipeline="interleaved", virtual_stages=2, accumulate=pp * rng.choice((1, 2))),
            lambda: dict(pipeline="interleaved", micro_batch_group=pp + 1, accumulate=2 * pp + rng.choice((1, 2))),
            lambda: dict(pipeline="zb-h1", accumulate=pp + rng.choice((0, 1, 2))),
            lambda: dict(pipeline="zb-v", accumulate=2 * pp + rng.choice((0, 1))),
        )
        mesh |= rng.choice(schedules)()
    return mesh


def _of_few(rng: Draw, values: Mapping[str, Any]) -> dict[str, Any]:
    """Options that only few of the other values leave possible."""
    found: dict[str, Any] = {}
    shards = values["ranks"] // (values.get("pp", 1) * values.get("tp", 1) * values.get("dp_replicate", 1))
    if values.get("tp", 1) > 1 and rng.random() < 0.4:
        found |= dict(sequence_parallel=True, keep_gathered=rng.random() < 0.5)
    if values["recompute"].startswith("full"):
        found |= dict(cpu_checkpointing=True) if rng.random() < 0.2 else {}
        found |= dict(partition_activations=True) if values.get("tp", 1) > 1 and rng.random() < 0.5 else {}
    if values["stage"] == 3 and shards == 4 and rng.random() < 0.4:
        ways: tuple[dict[str, Any], ...] = (dict(secondary_shard=2), dict(quantized_weights=True))
        ways += (dict(quantized_gradients=True, ranks_per_node=2), dict(hierarchical_gather=True, ranks_per_node=2))
        found |= dict(hidden=16, vocab=64, seq=4, freeze=None, lora_rank=0) | rng.choice(ways)
    if values["stage"] and rng.random() < 0.15:
        found |= dict(offload=rng.choice(SELDOM["offload"]), optimizer=rng.choice(("adam", "adamw", "lion")))
        found |= dict(precision=rng.choice(("bf16", "bf16", "fp16", "fp32")))
    if values["optimizer"] == "sgd" and rng.random() < 0.5:
        found["momentum"] = 0.5
        found |= rng.choice((dict(nesterov=True), dict(compress="dgc"), dict(momentum_form="ema"), {}))
    if values["stage"] == 0 and values["optimizer"] == "adam" and rng.random() < 0.1:
        found |= dict(compress="onebit-adam", compress_warmup=1, grad_dtype="fp32")
    return found


def _model(rng: Draw, tp: int) -> dict[str, Any]:
    family, layers = rng.choice(("gpt", "gpt", "llama", "llama", "flat", "mlp")), rng.choice((1, 2, 2, 3, 4, 6))
    if family == "flat":
        return dict(model=family, params=rng.choice((64, 840, 1001)), units=layers)
    hidden, heads = rng.choice(((4, 1), (8, 2), (8, 4), (16, 4), (12, 2))[tp > 1 :])
    sizes: dict[str, Any] = dict(model=family, layers=layers, hidden=hidden, seq=rng.choice((1, 3, 4, 8)))
    sizes |= dict(vocab=rng.choice((7, 16, 64)[tp > 1 and rng.random() < 0.9 :]))
    if family == "mlp":
        return sizes
    sizes |= dict(heads=heads, **(dict(ffn=2 * hidden) if rng.random() < 0.3 else {}))
    return sizes | (dict(kv_heads=rng.choice((1, heads))) if family == "llama" else {})


assert {*OFTEN, *SELDOM} <= OPTIONS.keys()
