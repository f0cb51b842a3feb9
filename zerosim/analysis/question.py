"""A question to the closed forms: a stage, Psi parameters and N ranks under a recipe.

What a recipe's fields mean for the formulas: bytes per parameter, and elements per step. Nothing is run, and values
are taken as they come: `cli/explain.py` checks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.formulas import BytesPerParameter, Volume
from zerosim.config import RunConfig
from zerosim.config.parallel import ParallelConfig
from zerosim.config.recompute import read_recompute
from zerosim.dtypes import dtype
from zerosim.placement.mesh import Mesh


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
    """What is asked; every value is in its bounds. Stage, recipe, precision and optimizer are the configuration's."""

    config: RunConfig
    num_parameters: int
    ranks: int
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    pipeline: ParallelConfig = ParallelConfig()  # noqa: RUF009  frozen; its schedule and chunks
    sequence_parallel: bool = False
    micro_batches: int = 1
    shape: Shape | None = None

    @property
    def stage(self) -> int:
        return self.config.parallel.zero_stage

    @property
    def states_stage(self) -> int:
        return self.config.states_stage

    @property
    def shards(self) -> int:
        """Ranks that model states are divided among: the formulas' N."""
        return self.ranks // Mesh(pp=self.pp, dp_replicate=self.replicas, tp=self.tp).world_size

    @property
    def parts_of_model(self) -> int:
        """Ranks that have one copy of the model among them."""
        return Mesh(pp=self.pp, tp=self.tp).world_size

    @property
    def partitions_inputs(self) -> bool:
        """Pa. Under sequence parallelism inputs are parts already."""
        return self.shape is not None and self.shape.partition_activations and not self.sequence_parallel

    @property
    def held(self) -> Fraction:
        """Parameters of a rank, where tensor parallelism and the pipeline divide every one: the formulas' Psi_r."""
        return Fraction(self.num_parameters, self.parts_of_model)

    @property
    def param_bytes(self) -> int:
        return dtype(self.config.precision.stored).itemsize

    @property
    def grad_bytes(self) -> int:
        return dtype(self.config.precision.grad_dtype).itemsize

    @property
    def moments(self) -> int:
        return formulas.num_moments(self.config.optim.optimizer, self.config.optim.momentum)

    @property
    def cost(self) -> BytesPerParameter:
        """Bytes per parameter under the recipe."""
        precision = self.config.precision
        cast, masters = self.config.gathering.cast_shards, not precision.is_pure
        sizes = self.param_bytes, self.grad_bytes, self.moments + (precision.rounding == "kahan")
        return formulas.bytes_per_parameter(*sizes, cast_shards=cast, masters=masters)

    @property
    def volume(self) -> Volume:
        """Elements per step under the recipe."""
        gathering = self.config.gathering
        return formulas.volume(
            self.stage,
            micro_batches=self.micro_batches,
            grad_reduction=self.config.reduction.grad_reduction,
            keep_root_units=gathering.keep_root_units,
            persistent=gathering.persistent_numel > 0,
            again=gathering.by_module and self.shape is not None and self.shape.runs_modules_again,
        )
