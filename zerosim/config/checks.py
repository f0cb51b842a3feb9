"""What a RunConfig refuses: each an InputError that names the field, its value and what was expected.

Owns types, choices, ranges, and which fields go together. Takes the config as it comes (its sizes
resolved, except in `types`), so that nothing here imports it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from zerosim.config.presets.recipes import find_recipe
from zerosim.errors import InputError
from zerosim.units import LONGEST_NUMBER, MOST_BYTES

if TYPE_CHECKING:
    from zerosim.config.run import RunConfig

CHOICES = {
    "precision": ("fp32", "bf16", "fp16", "fp64"),
    "grad_dtype": ("fp32", "bf16", "fp16", "fp64"),
    "master_init": ("rounded", "exact"),
    "optimizer": ("adam", "adamw", "sgd"),
    "decay": ("all", "matrices"),
    "schedule": ("constant", "cosine"),
    "partition": ("slices", "owner"),
    "replica_reduction": ("step", "micro_batch"),
    "backend": ("numpy", "cuda"),
    "world": ("threads", "mpi"),
    "collective": ("direct", "ring", "native"),
    "recompute": ("none", "selective", "full"),
    "saves": ("lean", "megatron"),
    "attention": ("eager", "flash"),
    "grad_reduction": ("reduce_scatter", "all_reduce"),
}
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
}


def types(config: RunConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None and field.default is None:  # what a model's name, or a default, fills
            continue
        for part in value if isinstance(value, tuple) else [value]:
            if isinstance(part, int) and abs(part) >= 10**LONGEST_NUMBER:
                raise InputError(f"{field.name}: a whole number of more than {LONGEST_NUMBER} digits is too large")
        if field.name == "betas":
            if not (isinstance(value, tuple) and len(value) == 2 and all(isinstance(b, float | int) for b in value)):
                raise InputError(f"betas {value!r}: expected two numbers")
            continue
        names = str(field.type).split(" | ")
        allowed = tuple(kind for name in names for kind in _KINDS[name])
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise InputError(f"{field.name} {value!r}: expected {' or '.join(n for n in names if n != 'None')}")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{field.name} {value}: expected a finite number")


def choices(config: RunConfig) -> None:
    for name, known in CHOICES.items():
        value = getattr(config, name)
        if value is not None and value not in known:
            raise InputError(f"{name} {value!r}: expected one of {', '.join(known)}")


# name: (lowest, highest or None, whether the bounds themselves are allowed)
_RANGES: dict[str, tuple[float, float | None, bool]] = {
    "stage": (0, 3, True),
    "ranks": (1, 65536, True),
    "dp_replicate": (1, 65536, True),
    "ranks_per_process": (1, 65536, True),
    "steps": (1, 10**8, True),
    "layers": (1, 100_000, True),
    "hidden": (1, 10**7, True),
    "heads": (1, 10**7, True),
    "kv_heads": (1, 10**7, True),
    "ffn": (1, 10**8, True),
    "seq": (1, 10**8, True),
    "positions": (1, 10**8, True),
    "vocab": (2, 10**8, True),
    "norm_eps": (0, 1, True),
    "rope_base": (1, None, True),
    "params": (1, 10**15, True),
    "units": (1, 100_000, True),
    "persistent_numel": (0, None, True),
    "micro_batch": (1, 10**7, True),
    "accumulate": (1, 10**7, True),
    "eps": (0, None, False),
    "lr": (0, None, False),
    "weight_decay": (0, None, True),
    "warmup": (0, None, True),
    "min_lr": (0, None, True),
    "clip_norm": (0, None, False),
    "initial_scale_power": (0, 126, True),
    "loss_scale_window": (1, None, True),
    "hysteresis": (1, None, True),
    "min_loss_scale": (0, None, False),
    "bucket_bytes": (1, None, True),
    "capacity": (1, MOST_BYTES, True),
    "parallel": (1, None, True),
    "sample_tokens": (1, None, True),
    "seed": (0, 2**63 - 1, True),
}


def in_range(name: str, value: float) -> None:
    low, high, closed = _RANGES.get(name, (-math.inf, None, True))
    if value < low or (value == low and not closed) or (high is not None and value > high):
        bounds = f"{'at least' if closed else 'more than'} {low}" + (f" and at most {high}" if high else "")
        raise InputError(f"{name} {value}: expected {bounds}")


def ranges(config: RunConfig) -> None:
    for name in _RANGES:
        value = getattr(config, name)
        if value is not None:
            in_range(name, value)
    for name, value in (("beta1", config.betas[0]), ("beta2", config.betas[1])):
        if not 0.0 <= value < 1.0:
            raise InputError(f"betas: {name} {value}: expected a number in [0, 1)")
    for name in ("dropout", "momentum"):
        if not 0.0 <= getattr(config, name) < 1.0:
            raise InputError(f"{name} {getattr(config, name)}: expected a number in [0, 1)")
    _check_model(config)
    _check_world(config)
    find_recipe(config.recipe)
    if config.momentum and config.optimizer != "sgd":
        raise InputError(f"momentum {config.momentum}: {config.optimizer} has none, it has betas; choose sgd")
    if config.grad_reduction == "all_reduce" and config.partition == "owner" and config.stage in (1, 2):
        raise InputError("grad_reduction 'all_reduce': under partition owner gradients are reduced to owners; drop one")
    if config.min_lr > config.lr:
        raise InputError(f"min_lr {config.min_lr}: expected at most lr = {config.lr}")
    _check_loss_scale(config.loss_scale)
    _check_sample(config.sample, config.vocab)


def _check_model(config: RunConfig) -> None:
    family = config.family
    if family in ("gpt", "llama") and config.hidden % config.heads:
        raise InputError(f"heads {config.heads} do not divide hidden {config.hidden}: choose heads that do")
    if family in ("gpt", "llama") and config.heads % config.kv_heads:
        raise InputError(f"kv_heads {config.kv_heads} do not divide heads {config.heads}: choose kv_heads that do")
    if family == "gpt" and config.kv_heads != config.heads:
        raise InputError(f"kv_heads {config.kv_heads}: a gpt has as many as heads, {config.heads}; choose model llama")
    if family == "llama" and config.hidden // config.heads % 2:
        raise InputError(
            f"heads {config.heads}: {config.hidden // config.heads} columns a head cannot be rotated in pairs"
        )
    if family == "gpt" and config.seq > config.positions:
        raise InputError(
            f"seq {config.seq} is longer than the model's {config.positions} positions: "
            f"shorten it, or pass --positions {config.seq} for a longer table"
        )
    if family != "gpt" and config.dropout:
        raise InputError(f"dropout {config.dropout}: the {family} has none; leave it 0, or choose model gpt")
    has_blocks = family in ("gpt", "llama")
    for name, plain in (("recompute", "none"), ("attention", "eager")):
        if not has_blocks and getattr(config, name) != plain:
            raise InputError(f"{name} {getattr(config, name)!r}: model {family} has no blocks; leave it out")
    if family == "flat" and config.units is not None and config.params is not None and config.units > config.params:
        raise InputError(f"units {config.units}: more than params = {config.params}; a unit holds one at least")


def _check_world(config: RunConfig) -> None:
    if config.dp_replicate > 1 and config.stage == 0:
        raise InputError(
            f"dp_replicate {config.dp_replicate}: at stage 0 every rank is a replica already (plain data parallelism); "
            "leave it out, or choose stage 1, 2 or 3"
        )
    if config.ranks % config.dp_replicate:
        raise InputError(
            f"dp_replicate {config.dp_replicate} does not divide ranks {config.ranks}: a world is dp_replicate x "
            "dp_shard ranks"
        )
    if config.collective == "native" and config.world == "threads" and config.backend == "numpy":
        raise InputError(
            "collective 'native': threads on NumPy have no collectives of their own; choose direct or ring, or start "
            "it with --world mpi, or on several GPUs with --backend cuda"
        )
    if config.ranks_per_process > 1 and config.world != "mpi":
        raise InputError(f"ranks_per_process {config.ranks_per_process}: of --world mpi alone; give --ranks instead")
    if config.collective == "native" and config.ranks_per_process > 1:
        raise InputError(
            f"ranks_per_process {config.ranks_per_process}: native collectives want one rank per process; "
            "choose --collective direct or ring"
        )
    if config.world == "mpi" and config.ranks % config.ranks_per_process:
        raise InputError(
            f"ranks {config.ranks}: {config.ranks_per_process} in each process do not make as many; choose a multiple "
            f"of {config.ranks_per_process}, or leave ranks out"
        )


def _check_loss_scale(value: str | float | None) -> None:
    if value is None or value == "dynamic":
        return
    if isinstance(value, str) or not value > 0:
        raise InputError(f"loss_scale {value!r}: expected 'dynamic' or a number more than 0")


def _check_sample(text: str | None, vocab: int) -> None:
    if text is None:
        return
    try:
        prompt = text.encode()
    except UnicodeEncodeError:
        raise InputError(f"sample {text!r}: expected text in UTF-8") from None
    if not prompt:
        raise InputError("sample '': expected at least one character to continue")
    if max(prompt) >= vocab:
        raise InputError(f"sample {text!r} holds byte {max(prompt)}: vocab {vocab} is too small, use 256")
