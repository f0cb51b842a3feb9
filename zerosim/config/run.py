"""What a run is: one frozen, validated dataclass.

Every field is a flag of `zerosim run` (micro_batch is --micro-batch) and a key of a scenario file.
Imports nothing heavy, so that `--help` and bad input answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.config import checks
from zerosim.config.huggingface import read_config_json
from zerosim.config.launcher import mpirun_size
from zerosim.config.presets.models import FAMILIES, ModelPreset, Size, family_sizes, find_model
from zerosim.config.presets.recipes import find_recipe
from zerosim.errors import InputError
from zerosim.placement.mesh import DATA, Mesh
from zerosim.units import parse_bytes, parse_count

SIZES = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "seq",
    "positions",
    "vocab",
    "tie_embeddings",
    "dropout",
    "norm_eps",
    "rope_base",
    "params",
    "units",
)
"""The fields that a model's name fills where they are not given."""

PLAN_DEFAULTS: dict[str, Any] = {"micro_batch": 1, "bucket_bytes": None, "saves": "megatron"}
"""What a plan assumes where a run does not: Megatron's kernels, one row, one call per unit and collective."""

_FROM_MODEL: Any = None  # of a size: what the model's name says
_FROM_WORLD: Any = None  # of ranks: as many as mpirun started, with world mpi; else RANKS
RANKS = 4


@dataclass(frozen=True, slots=True)
class ScheduleChoices:
    """Where published implementations differ from the paper (`config/presets/recipes.py`).

    grad_dtype         that gradients are kept and sent in
    grad_reduction     stages 1 and 2: 'reduce_scatter', or 'all_reduce' of which a rank keeps its slice
    upcast_grads       the optimizer step first copies the own slice of the gradients to fp32
    keep_root_units    stage 3: units outside the blocks stay gathered from forward to backward
    persistent_numel   stage 3: units with fewer elements stay gathered for good
    cast_shards        stage 3: no 2-byte shard is stored, the master's is cast at each gather
    """

    grad_dtype: str
    grad_reduction: str
    upcast_grads: bool
    keep_root_units: bool
    persistent_numel: int
    cast_shards: bool


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One training run. Sizes in elements, `capacity` and `bucket_bytes` in bytes.

    Raises: InputError naming the field, its value and what was expected.
    """

    stage: int = 3
    ranks: int = _FROM_WORLD  # of the whole world
    dp_replicate: int = 1  # copies of what dp_shard = ranks / dp_replicate ranks share (HSDP)
    replica_reduction: str = "step"  # when gradients are averaged over those copies
    steps: int | None = None  # default: 60, or all that `tokens` holds
    recipe: str = "paper"
    model: str = "gpt"  # a family, a preset's name, or a Hugging Face config.json
    layers: int = _FROM_MODEL
    hidden: int = _FROM_MODEL
    heads: int = _FROM_MODEL
    kv_heads: int = _FROM_MODEL
    ffn: int = _FROM_MODEL
    seq: int = _FROM_MODEL
    positions: int = _FROM_MODEL
    vocab: int = _FROM_MODEL
    tie_embeddings: bool = _FROM_MODEL
    dropout: float = _FROM_MODEL
    norm_eps: float = _FROM_MODEL
    rope_base: float = _FROM_MODEL
    params: int | None = None  # of model flat: Psi
    units: int | None = None  # of model flat: into how many it is cut
    recompute: str = "none"
    saves: str = "lean"
    attention: str = "eager"
    micro_batch: int = 4
    accumulate: int = 1
    precision: str = "bf16"
    grad_dtype: str | None = None  # default: the recipe's, or the parameters'
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
    backend: str = "numpy"
    world: str = "threads"
    ranks_per_process: int = 1  # of world mpi
    collective: str = "direct"
    bucket_bytes: int | None = 25 * 2**20
    capacity: int | None = None
    parallel: int = 1
    keep_last_unit: bool = False
    reshard_after_forward: bool = True
    grad_reduction: str | None = None  # this and the next four: default is the recipe's
    upcast_grads: bool | None = None
    keep_root_units: bool | None = None
    persistent_numel: int | None = None
    cast_shards: bool | None = None
    sample: str | None = None
    sample_tokens: int = 200
    family: str = dataclasses.field(init=False, default="")  # gpt, llama, mlp or flat: what `model` is

    def __post_init__(self) -> None:
        for name, parse in (("capacity", parse_bytes), ("bucket_bytes", parse_bytes), ("params", parse_count)):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, _parsed(name, value, parse))
        if self.ranks is None:
            object.__setattr__(self, "ranks", _started_ranks(self))
        checks.types(self)
        _resolve_model(self)
        checks.choices(self)
        try:
            checks.ranges(self)
        except InputError as error:  # of a file's sizes: name the file
            raise InputError(f"{self.model}: {error}" if self.model.endswith(".json") else str(error)) from None

    @property
    def mesh(self) -> Mesh:
        """How the ranks are arranged: `dp_shard` is what the other axes leave."""
        return Mesh(dp_replicate=self.dp_replicate, dp_shard=self.ranks // self.dp_replicate)

    @property
    def dp_shard(self) -> int:
        """Ranks that model states are divided among: the formulas' N."""
        return self.mesh.dp_shard

    @property
    def global_batch(self) -> int:
        """Rows of one step over all data-parallel ranks and micro-batches."""
        return self.mesh.size(*DATA) * self.accumulate * self.micro_batch

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

    @property
    def schedule_choices(self) -> ScheduleChoices:
        """What is sent, kept and cast: as given or, where nothing is, as the recipe has it for the stage."""
        values = find_recipe(self.recipe).resolved(self.stage)
        for name in values:
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        values["grad_dtype"] = values["grad_dtype"] or self.precision
        return ScheduleChoices(**values)  # type: ignore[arg-type]  # checked by name in checks.py

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with some fields changed, validated again. Another model brings its own sizes."""
        if changes.get("model", self.model) != self.model:
            changes = {**dict.fromkeys(SIZES), **changes}
        return dataclasses.replace(self, **changes)

    def at_stage(self, stage: int) -> RunConfig:
        """A copy at another ZeRO stage. At stage 0 every rank is a replica, so it has no `dp_replicate`."""
        return self.replace(stage=stage, dp_replicate=self.dp_replicate if stage else 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, as JSON and TOML hold them."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return {**values, "betas": list(self.betas)}

    @staticmethod
    def from_dict(values: Mapping[str, Any], source: str = "the configuration") -> RunConfig:
        """The run with those fields. Raises: InputError for an unknown key, with the nearest known one."""
        known = {f.name for f in dataclasses.fields(RunConfig) if f.init}
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
                raise InputError(f"{source}: unknown key {key!r}; {hint}")
        if isinstance(values.get("betas"), list):
            values = {**values, "betas": tuple(values["betas"])}
        return RunConfig(**values)


def _started_ranks(config: RunConfig) -> int:
    """How many ranks a run has that does not say: in a world of processes, what they hold."""
    processes = mpirun_size() if config.world == "mpi" else None
    if processes is None or not isinstance(config.ranks_per_process, int) or config.ranks_per_process < 1:
        return RANKS
    return processes * config.ranks_per_process


def _parsed(name: str, value: str, parse: Callable[[str], int]) -> int:
    try:
        return parse(value)
    except InputError as error:
        raise InputError(f"{name} {error}") from None


def plan_config(**fields: Any) -> RunConfig:
    """The RunConfig of a plan: `PLAN_DEFAULTS`, and the given fields over them."""
    return RunConfig.from_dict({**PLAN_DEFAULTS, **fields})


def model_notes(config: RunConfig) -> tuple[str, ...]:
    """What a named model's source leaves open, and what of it is not modelled."""
    return () if config.model in FAMILIES else _preset(config.model).notes


def _preset(model: str) -> ModelPreset:
    if not model.strip():
        raise InputError(f"model {model!r}: expected a name, such as gpt2, or a config.json")
    return (
        read_config_json(model)
        if model.endswith(".json") or "/" in model or model in (".", "..")
        else find_model(model)
    )


def _resolve_model(config: RunConfig) -> None:
    """Fill in the family and every size that was not given."""
    given: dict[str, Size] = {name: value for name in SIZES if (value := getattr(config, name)) is not None}
    family, base = config.model, {}
    if config.model not in FAMILIES:
        preset = _preset(config.model)
        family, base = preset.family, dict(preset.sizes)
        if "hidden" in given:
            base.pop("ffn", None)  # follows from hidden
    for name in ("params", "units"):
        if name in given and family != "flat":
            raise InputError(f"{name} {given[name]}: a size of model flat only; choose --model flat")
    object.__setattr__(config, "family", family)
    for name, value in given.items():
        if not isinstance(value, bool):
            checks.in_range(name, value)
    for name, value in family_sizes(family, {**base, **given}).items():
        object.__setattr__(config, name, value)
