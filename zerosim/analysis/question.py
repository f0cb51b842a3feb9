"""A question to the closed forms: a stage, Psi parameters and N ranks under a recipe.

What a recipe's fields mean for the formulas: bytes per parameter, and elements per step. Nothing is run, and values
are taken as they come: `cli/explain.py` checks them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.formulas import BytesPerParameter, Volume
from zerosim.config.parts import PURE
from zerosim.config.presets.recipes import Recipe, RecipeChoices
from zerosim.config.recompute import read_recompute
from zerosim.dtypes import dtype


@dataclass(frozen=True, slots=True)
class Shape:
    """What activations depend on."""

    hidden: int
    layers: int
    heads: int
    seq: int
    micro_batch: int
    recompute: str = "none"
    partition_activations: bool = False
    cpu_checkpointing: bool = False

    @property
    def runs_modules_again(self) -> bool:
        """Whether backward runs linear maps or norms a second time."""
        again = read_recompute(self.recompute)
        return again.every > 0 or bool(again.parts & {"layernorm", "attn_proj", "fc1"})


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked; every value is in its bounds."""

    stage: int
    num_parameters: int
    ranks: int
    recipe: Recipe
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    precision: str = "bf16"
    rounding: str | None = None
    optimizer: str = "adam"
    momentum: float = 0.0
    micro_batches: int = 1
    gather: str | None = None
    shape: Shape | None = None

    @property
    def shards(self) -> int:
        """Ranks that model states are divided among: the formulas' N."""
        return self.ranks // (self.replicas * self.tp * self.pp)

    @property
    def partitions_inputs(self) -> bool:
        """Pa. Under sequence parallelism inputs are parts already."""
        return self.shape is not None and self.shape.partition_activations and not self.sequence_parallel

    @property
    def held(self) -> Fraction:
        """Parameters of a rank, where tensor parallelism and the pipeline divide every one: the formulas' Psi_r."""
        return Fraction(self.num_parameters, self.tp * self.pp)

    @property
    def choices(self) -> RecipeChoices:
        choices = self.recipe.choices(self.stage, self.stored)
        return choices if self.gather is None else replace(choices, gather=self.gather)

    @property
    def states_stage(self) -> int:
        """The stage whose model states are there when backward ends."""
        return self.choices.states_stage(self.stage)

    @property
    def stored(self) -> str:
        """The format that parameters are stored in."""
        return "bf16" if self.is_pure else self.precision

    @property
    def is_pure(self) -> bool:
        """Without fp32 masters."""
        return self.precision == PURE

    @property
    def param_bytes(self) -> int:
        return dtype(self.stored).itemsize

    @property
    def grad_bytes(self) -> int:
        return dtype(self.choices.grad_dtype or self.stored).itemsize

    @property
    def moments(self) -> int:
        return formulas.num_moments(self.optimizer, self.momentum)

    @property
    def cost(self) -> BytesPerParameter:
        """Bytes per parameter under the recipe."""
        cast, masters = self.choices.cast_shards, not self.is_pure
        sizes = self.param_bytes, self.grad_bytes, self.moments + (self.rounding == "kahan")
        return formulas.bytes_per_parameter(*sizes, cast_shards=cast, masters=masters)

    @property
    def volume(self) -> Volume:
        """Elements per step under the recipe."""
        return formulas.volume(
            self.stage,
            micro_batches=self.micro_batches,
            grad_reduction=self.choices.grad_reduction,
            keep_root_units=self.choices.keep_root_units,
            persistent=self.choices.persistent_numel > 0,
            again=self.choices.gather == "module" and self.shape is not None and self.shape.runs_modules_again,
        )
