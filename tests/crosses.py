"""Draws from all options of a run together. `python tests/crosses.py COUNT [FIRST]` checks as many cases as one likes.

A case is drawn by its number. Any option may be given, on a tiny mesh and model. What is then refused, in one line, is
left out again, until the rest is a run. Then the run on NumPy, the plan that simulates each block of each rank, and the
plan that users get must leave the same record, and the commands must end with the right code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zerosim.cli.main import main
from zerosim.cli.parser import flag_of
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.device.events import Event, Launch, Message
from zerosim.errors import InputError, LossScaleExhausted, NonFiniteGradient
from zerosim.report.plan import formulas_agree
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

SEED = 45
SECONDS = 120  # of one case, on a machine that has much else to do
MOST_RANKS = 8
MOST_WORK = 48  # ranks x layers x microbatches x steps
GPU = "a100-80"
CLUSTER = cluster_of(find_hardware(GPU)).without_limits()
SIZES = (
    *("ranks", "pp", "tp", "dp_replicate", "stage", "steps", "micro_batch", "seed", "accumulate", "model", "layers"),
    *("hidden", "heads", "kv_heads", "ffn", "seq", "vocab", "params", "units"),
)
"""Drawn in `_sizes`, and never left out."""
NOT_DRAWN = (
    *("backend", "world", "ranks_per_process", "data", "tokens", "weights", "adapters", "sample", "sample_tokens"),
    *("nvme", "lr", "aux_lr", "betas", "eps", "norm_eps", "rope_base", "loss_scale_window", "min_loss_scale"),
)
"""Other machines, files, text, and numbers on which no byte depends."""

CHOICES: Mapping[str, Sequence[Any]] = {
    "ranks_per_node": (1, 2, 4),
    "secondary_shard": (2,),
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
    "recipe": ("ddp", "deepspeed", "fsdp2", "megatron", "usual"),
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
    "keep_upcast": (True,),
    "delayed_update": (1, 2),
    "reshard_after_forward": (False,),
    "quantized_weights": (True,),
    "hierarchical_gather": (True,),
    "keep_last_unit": (True,),
    "keep_root_units": (True, False),
    "gather": ("module", "unit"),
    "tiles": (2,),
    "persistent_numel": (10, 100, 4000),
    "cast_shards": (True, False),
    "prefetch": (1, 2, 5),
    "prefetch_elements": (20, 300),
    "max_live": (100, 700),
    "sub_group": (50, 500),
    "foreach": (True, False),
    "lazy_states": (True,),
    "freeze": (
        *("h.0", "h.1", "wte,wpe,h.0", "*,!norm", "*,!ln_f", "*,!bias", "*,!h.0", "*,!h.1", "*,!wte", "*,!head"),
        *("*,!weight", "*.bias", "*,!c_attn", "mlp", "attn", "wte", "h.0.mlp,h.1.attn", "ln_f", "layers.0", "norm"),
    ),
    "lora_rank": (1, 2),
    "lora_alpha": (3.0,),
    "lora_target": ("q,k,v,o", "all-linear", "fc", "up,down"),
    "lora_dropout": (0.2,),
    "base": ("nf4",),
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
    "partition_activations": (True,),
    "cpu_checkpointing": (True,),
    "offload_activations": (True,),
    "stash_window": (1, 2),
    "saves": ("megatron",),
    "attention": ("flash",),
    "fp32_softmax": (True, False),
    "loss": ("in-place", "megatron", "megatron-fused", "torch", "torch-kept", "torch-fp32-kept", "chunked"),
    "allocator": ("caching", "arena"),
    "allocator_conf": ("expandable_segments:True", "fit:first"),
    "capacity": (10**11,),
    "host_memory": (10**11,),
    "offload": (
        *("optimizer=host", "optimizer=nvme", "params=host", "params=nvme", "optimizer=host,params=host"),
        *("optimizer=nvme,params=nvme", "optimizer=host,grads=nvme", "optimizer=nvme,params=host,grads=host"),
    ),
    "tie_embeddings": (False, True),
    "dropout": (0.1,),
    "positions": (9,),
}
"""Values of each option beside its default."""

OFTEN = (
    *("pipeline", "recipe", "recompute", "offload", "gather", "prefetch", "freeze", "lora_rank", "collective"),
    *("partition", "sequence_parallel", "optimizer", "precision"),
)
"""Options that others need, or that change much."""

NODES = {"stage": 3, "ranks": 4, "ranks_per_node": 2, "dp_replicate": 1, "tp": 1, "pp": 1}
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
    {"tp": 2, "sequence_parallel": True, "keep_gathered": True},
    {"tp": 2, "sequence_parallel": True, "tp_comm_overlap": True},
    {"stage": 1, "persistent_grads": True, "gradient_accumulation_fusion": True, "transformer_engine": True},
    {"upcast_grads": True, "keep_upcast": True},
    {"pp": 2, "pipeline": "zb-h1", "recompute": "selective:layernorm,mlp"},
    {"pp": 2, "pipeline": "zb-v", "recompute": "selective:op"},
    {"pp": 2, "pipeline": "zb-v", "stage": 3, "freeze": "h.1"},
    {"pp": 2, "pipeline": "interleaved", "virtual_stages": 2, "micro_batch_group": 3, "accumulate": 4},
    {"lora_rank": 1, "base": "nf4", "hidden": 8, "heads": 2},
    {"optimizer": "sgd", "momentum": 0.9, "nesterov": True},
    {"optimizer": "sgd", "momentum": 0.9, "momentum_form": "ema"},
    {"precision": "bf16-pure", "rounding": "kahan"},
    {"precision": "fp16", "initial_scale_power": 30, "hysteresis": 1, "steps": 3},
)
"""Options that need one another."""


class Drawn(NamedTuple):
    """A run, its plan, and the fields that were refused on the way."""

    config: RunConfig
    plan: RunResult
    refused: Sequence[Mapping[str, Any]]


def drawn(case: int) -> Drawn:
    rng, refused = random.Random(f"{SEED} {case}"), list[Mapping[str, Any]]()
    while True:
        fields = _sizes(rng)
        names = rng.sample(sorted(CHOICES), rng.choice((2, 6, 12, 20, 30)))
        names += [name for name in OFTEN if rng.random() < 0.3]
        fields |= {name: rng.choice(CHOICES[name]) for name in names}
        for some in rng.sample(TOGETHER, rng.choice((0, 1, 1, 2))):
            fields |= some
        while fields:
            try:
                config = RunConfig(**fields)
                if _work(config) > MOST_WORK:
                    break
                return Drawn(config, plan(config, cluster=CLUSTER), refused)
            except InputError as error:
                refused.append(dict(fields))
                fields = _without(fields, error, rng)
            except Exception as error:
                error.add_note(f"{config!r}")
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
    fields |= dict(model=model, seq=rng.choice((1, 2, 4)), vocab=rng.choice((256, 256, 257)))
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


def _without(fields: Mapping[str, Any], error: InputError, rng: random.Random) -> dict[str, Any]:
    """Leave out an option that the error names; nothing is left if it names none that can be left out."""
    assert "\n" not in str(error), error
    named = [name for name in (error.field, error.beside) if name in fields and name in CHOICES]
    named = named or [name for name in fields if name in CHOICES and name in str(error)]
    left_out = rng.choice(named) if named else None
    return {name: value for name, value in fields.items() if name != left_out} if named else {}


def _work(config: RunConfig) -> int:
    layers = config.model.units if config.model.family == "flat" else config.model.layers
    return config.mesh.ranks * config.data.accumulate * (layers or 1) * (config.optim.steps or 1)


def check(config: RunConfig, few: RunResult) -> str:
    """Compare a run with its plans, and return how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            real = run(config.replace(nvme=folder) if config.offload.uses_nvme else config, keep_events=True)
        except (NonFiniteGradient, LossScaleExhausted) as error:
            return type(error).__name__
    skipped = [step for step, report in enumerate(real.steps) if report.skipped]
    how: dict[str, Any] = dict(skipped=skipped, keep_events=True)
    every, kept = plan(config, every_rank=True, every_block=True, **how), plan(config, cluster=CLUSTER, **how)
    if skipped:
        few = plan(config, skipped=skipped, cluster=CLUSTER)
    ranks = range(config.mesh.ranks)
    assert real.live_bytes_after == [0 for _ in ranks]
    for rank in ranks:
        assert_same_events(real.events[rank], every.events[rank], f"rank {rank}, run and plan")
        assert every.memory[rank] == real.memory[rank], f"memory of rank {rank}"
        assert every.traffic[rank] == real.traffic[rank], f"traffic of rank {rank}"
    for rank in kept.ran:
        assert_same_events(every.events[rank], kept.events[rank], f"rank {rank}, every block and repeated ones")
    for shapes, what in ((kept, "by its class"), (few, "in short")):
        for rank in ranks:  # of many microbatches few are planned, which do not say in which one the peak is
            assert shapes.memory[rank].to_dict() == real.memory[rank].to_dict(), f"memory of rank {rank}, {what}"
            assert shapes.traffic[rank] == real.traffic[rank], f"traffic of rank {rank}, {what}"
        assert shapes.live_bytes_after == real.live_bytes_after
        told, seen = ([(report.skipped, report.estimated) for report in one.steps] for one in (shapes, real))
        assert told == seen
    assert formulas_agree(few)
    assert few.time is not None
    assert kept.time is not None
    assert math.isclose(few.time.seconds, kept.time.seconds, rel_tol=1e-9)
    check_classes(every, kept.stands_for)
    return "well"


def check_classes(every: RunResult, stands_for: Sequence[int]) -> None:
    """Ranks of a pipeline stage with equal records share a class. Unlike tensors may have equal states by chance."""
    first, mesh = dict[Any, int](), every.config.mesh.axes
    by_tensor = OPTIMIZERS[every.config.optim.optimizer].cut in ("blocks", "sums")
    for rank in () if by_tensor else range(mesh.world_size):
        like = first.setdefault((mesh.index(rank, "pp"), *map(_plain, every.events[rank])), rank)
        assert stands_for[rank] == stands_for[like], f"rank {rank} is like rank {like}: {stands_for}"


def _plain(event: Event) -> Event:
    """Return an event without the numbers of other ranks."""
    if isinstance(event, Launch):
        return event._replace(group=(len(event.group),))
    return event._replace(peer=0) if isinstance(event, Message) else event


def assert_same_events(expected: Sequence[Event], found: Sequence[Event], what: str) -> None:
    for at, (one, other) in enumerate(zip(expected, found, strict=False)):
        assert one == other, f"{what}: event {at}"
    assert len(expected) == len(found), what


def check_commands(config: RunConfig, few: RunResult, refused: Sequence[Mapping[str, Any]]) -> None:
    """A plan ends with 0 and has the same peak; what was refused ends with 2, in one line."""
    left_out = {"parallel", "capacity"}
    asked = {name: config.value(name) for name in ("recipe", "attention", "saves", "bucket_bytes")} | dict(config.given)
    words = words_of({name: value for name, value in asked.items() if name not in left_out})
    code, out, err = ended(["plan", *words, "--gpu", GPU, "--json", "-"])
    assert code == 0, (err, words)
    if config.memory.allocator == "exact":
        assert json.loads(out)["peak_bytes"] == max(memory.reserved_bytes for memory in few.memory), words
    for verb, fields in zip(("run", "plan"), refused[:2], strict=False):
        words = words_of({name: value for name, value in fields.items() if verb == "run" or name not in left_out})
        code, out, err = ended([verb, *words])
        assert (code, out, err.count("\n")) == (2, "", 1), (code, err, words)


def words_of(fields: Mapping[str, Any]) -> list[str]:
    """Return the flags of these fields."""
    words: list[str] = []
    for name, value in fields.items():
        if isinstance(value, bool):
            words.append(flag_of(name) if value else flag_of(name).replace("--", "--no-", 1))
        else:
            words += [flag_of(name), "none" if value is None else str(value)]
    return words


def ended(words: Sequence[str]) -> tuple[int, str, str]:
    """Return a command's exit code and its outputs."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def check_case(case: int) -> tuple[RunConfig, str]:
    """Check a case; its configuration is a note of any error."""
    config, few, refused = drawn(case)
    try:
        how = check(config, few)
        check_commands(config, few, refused)
    except Exception as error:
        error.add_note(f"{config!r}")
        raise
    return config, how


def run_cases(count: int, first: int) -> int:
    """Check many cases, and print those that fail and how often each option was given."""
    seen, num_failed, began = Counter[str](), 0, time.monotonic()
    for case in range(first, first + count):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            config, how = check_case(case)
            seen.update([how, *config.given])
        except Exception as error:
            num_failed += 1
            at, text = error.__traceback__, str(error).partition("\n")[0]
            while at is not None and at.tb_next is not None:
                at = at.tb_next
            where = "" if at is None else f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}"
            print(f"case {case}: {type(error).__name__}: {text[:300]} ({where})", *error.__notes__, flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(dict(sorted(seen.items()))))
    print(f"{num_failed} of {count} failed, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(run_cases(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
