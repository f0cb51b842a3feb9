"""What a run is: one frozen, validated value of eight parts.

Every field of a part (`parts.py`, `model.py`) is a keyword of `RunConfig(...)`, a flag of `zerosim run` (micro_batch is
--micro-batch) and a key of a scenario file. Imports nothing heavy, so that `--help` and bad input answer at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, get_type_hints

from zerosim.config.launcher import mpirun_size
from zerosim.config.mesh_checks import check_kept_inputs, check_partition, check_pipeline, check_tensor_parallel
from zerosim.config.model import ModelConfig
from zerosim.config.not_modelled import not_modelled
from zerosim.config.option import Option, Part
from zerosim.config.parallel import MeshConfig, ParallelConfig
from zerosim.config.parts import DataConfig, MemoryConfig, OptimConfig, PrecisionConfig, WorldConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.config.presets.recipes import RecipeChoices, find_recipe
from zerosim.errors import InputError, did_you_mean, wrong
from zerosim.placement.mesh import DATA
from zerosim.placement.stages import cut_layers

PLAN_DEFAULTS: Mapping[str, Any] = MappingProxyType({"micro_batch": 1, "bucket_bytes": None, "saves": "megatron"})
"""What a plan assumes where a run does not: Megatron's kernels, one row, one call per unit and collective."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class RunConfig:
    """One training run: `RunConfig(stage=3, ranks=4, model="gpt")`, or parts, `RunConfig(model=ModelConfig(...))`.

    Where a part and a flat keyword have one name (model, data, ...), a value of the part's class is the part.

    Raises: InputError naming the field, its value and what was expected.
    """

    model: ModelConfig
    mesh: MeshConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    optim: OptimConfig
    data: DataConfig
    memory: MemoryConfig
    world: WorldConfig
    given: Mapping[str, Any] = field(init=False, compare=False)
    """What was said, by flat name. The parts are built from it, and `replace` adds to it. Not part of equality."""

    def __init__(self, **values: Any) -> None:
        _fill(self, None, values)

    @property
    def global_batch(self) -> int:
        """Rows of one step over all data-parallel ranks and micro-batches."""
        return self.mesh.axes.size(*DATA) * self.data.accumulate * self.data.micro_batch

    @property
    def recipe_choices(self) -> RecipeChoices:
        """What is sent, kept and cast: as given or, where nothing is, as the recipe has it for the stage."""
        recipe, param_dtype = find_recipe(self.parallel.recipe), self.precision.stored
        choices = recipe.choices(self.parallel.zero_stage, param_dtype)
        own: dict[str, Any] = {"grad_dtype": choices.grad_dtype or param_dtype}
        if OPTIMIZERS[self.optim.optimizer].cut == "matrices":
            own["gather"] = "module"  # owners hold single tensors, which balances better than units
        if self.parallel.prefetch or self.parallel.prefetch_elements:  # one way of looking ahead in the other's place
            own |= {"prefetch": 0, "prefetch_elements": 0}
        names = [each.name for each in fields(choices) if each.name in _HOMES]
        values = {name: getattr(getattr(self, _HOMES[name]), name) for name in names}
        return replace(choices, **own | {name: value for name, value in values.items() if value is not None})

    @property
    def states_stage(self) -> int:
        """The stage whose model states are there when backward ends (`RecipeChoices.states_stage`)."""
        return self.recipe_choices.states_stage(self.parallel.zero_stage)

    @property
    def resolved_partition(self) -> str:
        """'slices' or 'owner': as given or, where nothing is, as the optimizer may be cut."""
        wants_owners = OPTIMIZERS[self.optim.optimizer].cut == "matrices"
        return self.parallel.partition or ("owner" if wants_owners else "slices")

    @property
    def partitions_inputs(self) -> bool:
        """Whether tp's ranks keep parts of blocks' inputs (Pa). Under sequence parallelism they have parts already."""
        return self.memory.partition_activations and not self.parallel.sequence_parallel

    def layers_by_chunk(self, layers: int) -> list[int]:
        """How many of a model's layers are in each chunk of a pipeline, in the model's order. Raises: InputError."""
        parallel, is_flat = self.parallel, self.model.family == "flat"
        return cut_layers(
            layers,
            self.mesh.pp * parallel.num_chunks,
            given=parallel.layers_given,
            balance_ends=parallel.balance_ends,
            has_ends=not is_flat,
            word="units" if is_flat else "layers",
        )

    def replace(self, **changes: Any) -> RunConfig:
        """Build the configuration of `given` with these changes: `RunConfig(**a).replace(**b)` is `RunConfig(**a | b)`.

        Another model or width brings the sizes that were not said. A part replaces all that was said of that part.
        """
        copy = object.__new__(RunConfig)
        _fill(copy, self, changes)
        return copy

    def at_stage(self, stage: int, **changes: Any) -> RunConfig:
        """Build a copy at another ZeRO stage, without the options that this stage does not have (`Option.stages`)."""
        kept = {name: value for name, value in self.given.items() if stage in OPTIONS[name].stages}
        return RunConfig(**{**kept, **changes, "stage": stage})

    def to_dict(self) -> dict[str, Any]:
        """Plain values by flat name, as JSON and TOML hold them."""
        return {flat: value for name in PARTS for flat, value in getattr(self, name).flat().items()}

    @staticmethod
    def from_dict(values: Mapping[str, Any], source: str = "the configuration") -> RunConfig:
        """The run with those flat fields. Raises: InputError for an unknown key, with the nearest known one."""
        _check_known(values, OPTIONS, source)
        betas = values.get("betas")
        return RunConfig(**{**values, "betas": tuple(betas)} if isinstance(betas, list) else values)

    def __repr__(self) -> str:
        changed = {flat: value for name in PARTS for flat, value in getattr(self, name).changed().items()}
        return f"RunConfig({', '.join(f'{flat}={value!r}' for flat, value in changed.items())})"


PARTS: Mapping[str, type[Part]] = MappingProxyType(
    {name: kind for name, kind in get_type_hints(RunConfig).items() if name != "given"}
)
_HOMES = {flat: part for part, kind in PARTS.items() for flat in kind.options()}
OPTIONS: Mapping[str, Option] = MappingProxyType(
    {flat: option for kind in PARTS.values() for flat, option in kind.options().items()}
)
"""Every field of a run by its flat name."""
setattr(  # noqa: B010  # what help() and a notebook show: every flat keyword and its default
    RunConfig,
    "__signature__",
    inspect.Signature(
        [
            inspect.Parameter(flat, inspect.Parameter.KEYWORD_ONLY, default=option.default)
            for flat, option in OPTIONS.items()
        ]
    ),
)


def _fill(config: RunConfig, before: RunConfig | None, values: Mapping[str, Any]) -> None:
    """Set what was said, of `before` and then in `values`, and build the parts that a value changes from it."""
    parts = {name: value for name, value in values.items() if name in PARTS and isinstance(value, PARTS[name])}
    given = {} if before is None else {flat: each for flat, each in before.given.items() if _HOMES[flat] not in parts}
    for part in parts.values():
        given.update(part.given)
    changed = set(parts if before is not None else PARTS)
    for name, value in values.items():
        if name in parts:
            continue
        if name in OPTIONS:
            given[name] = value
            changed.add(_HOMES[name])
        elif name in PARTS:
            raise wrong(name, f" {value!r}: expected a {PARTS[name].__name__}")
        else:
            hint = did_you_mean(name, [*OPTIONS, *PARTS], "see help(RunConfig)")
            raise TypeError(f"RunConfig got an unexpected keyword argument {name!r}: {hint}")
    shares: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    for flat, value in list(given.items()):
        if value is None and OPTIONS[flat].default is None:  # nothing is said; elsewhere None is a value (bucket_bytes)
            del given[flat]
        else:
            shares[_HOMES[flat]][OPTIONS[flat].attribute] = value

    def built(name: str) -> Any:
        return PARTS[name](**shares[name]) if name in changed else getattr(before, name)

    world: WorldConfig = built("world")
    if "ranks" not in given and world.transport == "mpi" and (processes := mpirun_size()) is not None:
        given["ranks"] = shares["mesh"]["ranks"] = processes * world.ranks_per_process  # as many on threads later
        changed.add("mesh")
    for name in PARTS:
        object.__setattr__(config, name, world if name == "world" else built(name))
    object.__setattr__(config, "given", given)
    _check_together(config)


def _check_together(config: RunConfig) -> None:
    """What several parts have to agree on. Raises: InputError."""
    model, mesh, world = config.model, config.mesh, config.world
    for name in config.given:
        option, value = OPTIONS[name], getattr(getattr(config, _HOMES[name]), OPTIONS[name].attribute)
        if config.parallel.zero_stage not in option.stages and value not in (option.default, 0, "none", "unit"):
            right = " or ".join(map(str, option.stages))
            here = f"stage {config.parallel.zero_stage} has none of it"
            raise wrong(name, f" {value!r}: {here}; leave it out, or choose stage {right}")
    for name, plain in (("recompute", "none"), ("attention", "eager")):
        value = getattr(config.memory, name)
        if not model.has_blocks and value != plain:
            raise wrong(name, f" {value!r}: model {model.family} has no blocks; leave it out")
    again = config.memory.again
    if again.every > model.layers and model.has_blocks:
        raise wrong(
            "recompute",
            f" {config.memory.recompute!r}: of {model.layers} layers every K-th runs again; choose at most "
            f"full:{model.layers}",
        )
    if config.parallel.keep_gathered and again.parts & {"layernorm", "fc1"}:
        raise wrong(
            "keep_gathered",
            f": recompute {config.memory.recompute!r} runs norms or linear maps again and drops what was "
            "gathered; leave one out",
        )
    if config.memory.loss == "chunked" and not model.has_blocks:
        raise wrong(
            "loss", f" 'chunked': model {model.family} has no head of its own; choose in-place, or leave it out"
        )
    ahead = config.parallel.prefetch_elements
    if config.parallel.max_live and ahead is None and not config.recipe_choices.prefetch_elements:
        raise wrong(
            "max_live",
            f" {config.parallel.max_live}: holds back what is gathered ahead by elements; pass --prefetch-elements too",
        )
    choices = config.recipe_choices
    if config.parallel.overlap_reduction and choices.reduce_bucket and config.parallel.zero_stage:
        raise wrong(
            "overlap_reduction",
            f": gradients are reduced out of buffers of {choices.reduce_bucket:,} elements; pass "
            "--reduce-buffers 2 in its place, so that one is filled while the other is reduced",
        )
    _check_pure(config)
    check_tensor_parallel(model, mesh, config.parallel)
    check_kept_inputs(mesh, config.memory)
    check_pipeline(model, mesh, config.parallel, config.data, config.resolved_partition)
    check_partition(mesh, config.parallel, config.optim, config.resolved_partition)
    if world.transport == "mpi" and mesh.ranks % world.ranks_per_process:
        raise wrong(
            "ranks",
            f" {mesh.ranks}: {world.ranks_per_process} in each process do not make as many; choose a multiple "
            f"of {world.ranks_per_process}, or leave ranks out",
        )
    if (text := config.data.sample) is not None and max(text.encode()) >= model.vocab:
        raise wrong("sample", f" {text!r} holds byte {max(text.encode())}: vocab {model.vocab} is too small, use 256")


def _check_pure(config: RunConfig) -> None:
    """What wants fp32 masters that are not there. Raises: InputError."""
    name = config.precision.param_dtype
    if config.precision.resolved_rounding is None:
        return
    if OPTIMIZERS[config.optim.optimizer].cut != "elements":
        raise wrong("precision", f" {name!r}: of element-wise optimizers; {config.optim.optimizer} wants fp32 masters")
    if config.recipe_choices.wants_masters:
        raise wrong(
            "precision",
            f" {name!r}: recipe {config.parallel.recipe} works on fp32 masters, and here are none; choose "
            "recipe paper, or precision bf16",
        )


def _check_known(names: Iterable[str], known: Collection[str], source: str) -> None:
    for name in names:
        if name not in known:
            if lacking := not_modelled(name):
                raise InputError(f"{source}: {name!r}: {lacking}")
            hint = did_you_mean(name, known, f"known keys: {', '.join(sorted(known))}")
            raise InputError(f"{source}: unknown key {name!r}; {hint}")


def plan_config(**fields: Any) -> RunConfig:
    """The RunConfig of a plan: `PLAN_DEFAULTS`, and the given fields and parts over them."""
    _check_known(fields, {**OPTIONS, **PARTS}, "the configuration")
    assumed = {name: value for name, value in PLAN_DEFAULTS.items() if not isinstance(fields.get(_HOMES[name]), Part)}
    return RunConfig(**{**assumed, **fields})
