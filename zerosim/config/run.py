"""A run's configuration: one frozen, validated value of nineteen parts, each resolved when it is built (`layers.py`).

Every field of a part (`parts/`) is a keyword of `RunConfig(...)`, a flag of `zerosim run` (micro_batch is
--micro-batch) and a key of a scenario file. Imports nothing heavy, so that `--help` and bad input answer at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from zerosim.config.launcher import mpirun_size
from zerosim.config.layers import resolve
from zerosim.config.other_words import not_modelled
from zerosim.config.parts import CAPABILITIES, OPTIONS, PARTS, Parts, mtp, pipeline
from zerosim.config.parts.grads import stage_of_states
from zerosim.config.parts.kept_inputs import holds_rows, partitions_inputs
from zerosim.errors import InputError, did_you_mean
from zerosim.placement.mesh import DATA
from zerosim.placement.stages import Chunks

PLAN_DEFAULTS: Mapping[str, Any] = MappingProxyType({"micro_batch": 1, "bucket_bytes": None, "saves": "megatron"})
"""A plan's defaults where a run has others: Megatron's kernels, one row, one call per unit and collective."""
WITH_VALUES = (
    "capacity parallel backend world ranks_per_process data tokens weights tokenizer sample sample_tokens save_state "
    "save_every save_as save_keep resume mtbf"
)
"""Flags that a plan leaves out: files, a sample, threads. A plan's --capacity is its device's."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class RunConfig(Parts):
    """One training run, by flat names: `RunConfig(stage=3, ranks=4, model="gpt")`.

    Raises: InputError naming the field, its value and the expected values.
    """

    given: Mapping[str, Any] = field(compare=False)
    """The given values, by flat name. All parts are built from it, and `replace` adds to it. Not part of equality."""
    set_aside: Mapping[str, str] = field(compare=False)
    """The recipe's values that are left out, and why, by flat name: given values exclude them."""

    def __init__(self, **values: Any) -> None:
        _fill(self, None, values)

    @property
    def global_batch(self) -> int:
        """Rows of one step over all data-parallel ranks and microbatches."""
        return self.mesh.axes.size(*DATA) * self.data.accumulate * self.data.micro_batch

    @property
    def tokens(self) -> int:
        """The tokens that a step reads, of both texts of an encoder with a decoder."""
        return self.global_batch * self.model.row_tokens

    @property
    def states_stage(self) -> int:
        """The ZeRO stage whose model states exist when backward ends: stage 1 may have freed all but its slice of the
        gradients, like stage 2."""
        return stage_of_states(self.grads, self.parallel, self.reduction)

    @property
    def partitions_inputs(self) -> bool:
        """Whether tp's ranks store parts of blocks' inputs (Pa). Under sequence parallelism they have parts already."""
        return partitions_inputs(self.memory, self.parallel)

    @property
    def holds_rows(self) -> bool:
        """Whether a frozen table's rows require a gradient, so that its scaled rows do not free them."""
        return holds_rows(self.memory, self.mesh, self.tuning)

    @property
    def chunks(self) -> Chunks:
        """The place of a pipeline's chunks of layers."""
        return pipeline.chunks_of(self.mesh, self.parallel)

    @property
    def micro_batch_group(self) -> int:
        """Microbatches that pass through a chunk of a pipeline before the next one's turn: 1, unless interleaved."""
        return pipeline.group_of(self.mesh, self.parallel, self.data)

    def layers_by_chunk(self, layers: int) -> list[int]:
        """Return how many of a model's layers are in each chunk of a pipeline, in the model's order; the
        last one has the blocks that predict further tokens, too. Raises: InputError."""
        return mtp.cut(layers, self.mesh, self.parallel, self.model, self.mtp)

    def replace(self, **changes: Any) -> RunConfig:
        """Build the configuration of `given` with these changes: `RunConfig(**a).replace(**b)` is `RunConfig(**a | b)`.

        Another model or width brings the sizes that were not given. None removes a given value.
        """
        copy = object.__new__(RunConfig)
        _fill(copy, self, changes)
        return copy

    def at_stage(self, stage: int, **changes: Any) -> RunConfig:
        """Build a copy at another ZeRO stage, without the options that this stage does not have (`Option.stages`)."""
        lost = [name for name in self.given if stage not in OPTIONS[name].stages]
        return self.replace(**{**dict.fromkeys(lost), **changes, "stage": stage})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values by flat name, as JSON and TOML hold them; None for derived values that were not given."""
        values = {name: self.given.get(name) if OPTIONS[name].follows else self.value(name) for name in OPTIONS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @staticmethod
    def from_dict(values: Mapping[str, Any], source: str = "the configuration") -> RunConfig:
        """Build the run with those flat fields. Raises: InputError for an unknown key, with the nearest known one."""
        _check_known(values, OPTIONS, source)
        betas = values.get("betas")
        return RunConfig(**{**values, "betas": tuple(betas)} if isinstance(betas, list) else values)

    def value(self, name: str) -> Any:
        """Return the resolved value of a flat field."""
        return getattr(getattr(self, _HOMES[name]), OPTIONS[name].attribute)

    def __repr__(self) -> str:
        """Return code for an equal configuration: plain values that are not the default; of derived values, the given
        ones."""
        shown = dict[str, Any]()
        for name, option in OPTIONS.items():
            value = self.given.get(name) if option.follows else self.value(name)
            if name in self.given if option.follows or _HOMES[name] == "model" else value != option.default:
                shown[name] = value
        return f"RunConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


_HOMES = {flat: part for part, kind in PARTS.items() for flat in kind.options()}
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
    """Set the given values, those of `before` and then `values`, and build the parts from them."""
    given = {} if before is None else dict(before.given)
    for name, value in values.items():
        if name not in OPTIONS:
            hint = did_you_mean(name, OPTIONS, "see help(RunConfig)")
            raise TypeError(f"RunConfig got an unexpected keyword argument {name!r}: {hint}")
        if value is None and not OPTIONS[name].none_is_a_value:
            given.pop(name, None)
        else:
            given[name] = OPTIONS[name].checked(value)
    if "ranks" not in given and given.get("world") == "mpi" and (processes := mpirun_size()) is not None:
        given["ranks"] = processes * given.get("ranks_per_process", 1)  # the other ranks on threads later
    resolved, set_aside = resolve(given)
    for part, kind in PARTS.items():
        options = kind.options()
        share = {options[name].attribute: resolved[name] for name in options if name in resolved}
        is_same = part == "model" and before is not None and not values.keys() & options.keys()
        object.__setattr__(config, part, before.model if is_same and before is not None else kind(**share))
    object.__setattr__(config, "given", given)
    object.__setattr__(config, "set_aside", set_aside)
    for capability in CAPABILITIES:
        for error in capability.rules(config):
            raise error


def _check_known(names: Iterable[str], known: Collection[str], source: str) -> None:
    for name in names:
        if name not in known:
            if lacking := not_modelled(name):
                raise InputError(f"{source}: {name!r}: {lacking}")
            hint = did_you_mean(name, known, f"known keys: {', '.join(sorted(known))}")
            raise InputError(f"{source}: unknown key {name!r}; {hint}")


def plan_config(**fields: Any) -> RunConfig:
    """Return the RunConfig of a plan: `PLAN_DEFAULTS`, and the given fields over them."""
    _check_known(fields, OPTIONS, "the configuration")
    return RunConfig(**{**PLAN_DEFAULTS, **fields})
