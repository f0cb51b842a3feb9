"""What a run is: one frozen, validated dataclass, and its reading from a TOML file.

Every field is a flag of `zerosim run` (micro_batch is --micro-batch) and a key of a scenario file.
Imports nothing heavy, so that `--help` and bad input answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerosim.errors import InputError
from zerosim.units import parse_bytes

CHOICES = {
    "model": ("gpt", "mlp"),
    "precision": ("fp32", "bf16", "fp16", "fp64"),
    "grad_dtype": ("fp32", "bf16", "fp16", "fp64"),
    "master_init": ("rounded", "exact"),
    "optimizer": ("adam", "adamw", "sgd"),
    "decay": ("all", "matrices"),
    "schedule": ("constant", "cosine"),
    "partition": ("slices", "owner"),
    "collective": ("direct", "ring"),
}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One training run. Sizes in elements, `capacity` and `bucket_bytes` in bytes.

    Raises: InputError naming the field, its value and what was expected.
    """

    stage: int = 3
    ranks: int = 4
    steps: int | None = None  # default: 60, or all that `tokens` holds
    model: str = "gpt"
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    seq: int = 64
    vocab: int = 256
    tie_embeddings: bool = True
    dropout: float = 0.0
    micro_batch: int = 4
    accumulate: int = 1
    precision: str = "bf16"
    grad_dtype: str | None = None  # default: the parameters'
    master_init: str = "rounded"
    optimizer: str = "adam"
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float | None = None  # default: 0.01 for adamw, else 0
    decay: str = "all"
    schedule: str = "constant"
    warmup: int = 0
    min_lr: float = 0.0
    clip_norm: float | None = None
    loss_scale: str | float | None = None  # default: dynamic for fp16, else none
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1.0
    skip_nonfinite: bool = False
    seed: int = 0
    data: str | None = None  # default: the packaged primer
    tokens: str | None = None
    weights: str | None = None
    partition: str = "slices"
    collective: str = "direct"
    bucket_bytes: int | None = 25 * 2**20
    capacity: int | None = None
    parallel: int = 1
    keep_last_unit: bool = False
    reshard_after_forward: bool = True
    sample: str | None = None
    sample_tokens: int = 200

    def __post_init__(self) -> None:
        for name in ("capacity", "bucket_bytes"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, _parse_size(name, value))
        _check_types(self)
        _check_choices(self)
        _check_ranges(self)

    @property
    def global_batch(self) -> int:
        """Rows of one step over all ranks and micro-batches."""
        return self.ranks * self.accumulate * self.micro_batch

    @property
    def resolved_weight_decay(self) -> float:
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.01 if self.optimizer == "adamw" else 0.0

    @property
    def resolved_loss_scale(self) -> str | float | None:
        if self.loss_scale is None and self.precision == "fp16":
            return "dynamic"
        return self.loss_scale

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, as JSON and TOML hold them."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "betas": list(self.betas)}

    @staticmethod
    def from_dict(values: Mapping[str, Any], source: str = "the configuration") -> RunConfig:
        """The run with those fields. Raises: InputError for an unknown key, with the nearest known one."""
        known = {f.name for f in dataclasses.fields(RunConfig)}
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
                raise InputError(f"{source}: unknown key {key!r}; {hint}")
        if isinstance(values.get("betas"), list):
            values = {**values, "betas": tuple(values["betas"])}
        return RunConfig(**values)


def read_scenario(path: str) -> dict[str, Any]:
    """The keys of a TOML scenario; dashes in keys are read as underscores.

    Raises: InputError for a file that cannot be read or is not TOML.
    """
    try:
        text = Path(path).read_bytes().decode()
        values = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"cannot read scenario {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"scenario {path} is not valid TOML: {error}") from None
    return {key.replace("-", "_"): value for key, value in values.items()}


def _parse_size(name: str, value: str) -> int:
    try:
        return parse_bytes(value)
    except InputError as error:
        raise InputError(f"{name} {error}") from None


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
}


def _check_types(config: RunConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
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


def _check_choices(config: RunConfig) -> None:
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if value is not None and value not in choices:
            raise InputError(f"{name} {value!r}: expected one of {', '.join(choices)}")


# name: (lowest, highest or None, whether the bounds themselves are allowed)
_RANGES: dict[str, tuple[float, float | None, bool]] = {
    "stage": (0, 3, True),
    "ranks": (1, 65536, True),
    "steps": (1, None, True),
    "layers": (1, None, True),
    "hidden": (1, None, True),
    "heads": (1, None, True),
    "seq": (1, None, True),
    "vocab": (2, None, True),
    "micro_batch": (1, None, True),
    "accumulate": (1, None, True),
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
    "capacity": (1, None, True),
    "parallel": (1, None, True),
    "sample_tokens": (1, None, True),
    "seed": (0, 2**63 - 1, True),
}


def _check_ranges(config: RunConfig) -> None:
    for name, (low, high, closed) in _RANGES.items():
        value = getattr(config, name)
        if value is None:
            continue
        if value < low or (value == low and not closed) or (high is not None and value > high):
            bounds = f"{'at least' if closed else 'more than'} {low}" + (f" and at most {high}" if high else "")
            raise InputError(f"{name} {value}: expected {bounds}")
    for name, value in (("beta1", config.betas[0]), ("beta2", config.betas[1])):
        if not 0.0 <= value < 1.0:
            raise InputError(f"betas: {name} {value}: expected a number in [0, 1)")
    for name in ("dropout", "momentum"):
        if not 0.0 <= getattr(config, name) < 1.0:
            raise InputError(f"{name} {getattr(config, name)}: expected a number in [0, 1)")
    if config.model == "gpt" and config.hidden % config.heads:
        raise InputError(f"heads {config.heads} do not divide hidden {config.hidden}: choose heads that do")
    if config.model == "mlp" and config.dropout:
        raise InputError(f"dropout {config.dropout}: the mlp has none; leave it 0, or choose model gpt")
    if config.momentum and config.optimizer != "sgd":
        raise InputError(f"momentum {config.momentum}: {config.optimizer} has none, it has betas; choose sgd")
    if config.min_lr > config.lr:
        raise InputError(f"min_lr {config.min_lr}: expected at most lr = {config.lr}")
    _check_loss_scale(config.loss_scale)
    _check_sample(config.sample, config.vocab)


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
