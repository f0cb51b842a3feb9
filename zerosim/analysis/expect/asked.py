"""A question about a run, the cache of runs for such questions, and the form of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from zerosim.analysis.advice import run
from zerosim.analysis.expect.largest import fits
from zerosim.analysis.shares import is_mesh, share_of
from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.config.parts.allocators import feels_limit
from zerosim.config.presets.cluster import Cluster, cluster_of
from zerosim.config.presets.hardware import Hardware, find_hardware
from zerosim.config.presets.nodes import nodes
from zerosim.device.device import Device
from zerosim.errors import InputError
from zerosim.ledger.clock import StepTime
from zerosim.models.model import Model
from zerosim.train.build_model import build_model
from zerosim.train.memory import RankMemory
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

SHAPES, TRAINING = "shapes", "training"
T = TypeVar("T")

WHOLE: Mapping[str, Any] = MappingProxyType(
    dict(recompute="none", sequence_parallel=False, partition_activations=False, cpu_checkpointing=False)
)
"""The fields of a run that saves all of its activations, cut by tensor parallelism alone."""


class Runs:
    """A cache of runs, so that tables with the same run share it."""

    def __init__(self) -> None:
        self._made: dict[tuple[RunConfig, str], RunResult] = {}
        self._answers: dict[tuple[object, ...], Any] = {}

    def once(self, make: Callable[..., T], *question: object) -> T:
        """Return `make`'s answer to a question, which is computed once."""
        if (make, *question) not in self._answers:
            self._answers[make, *question] = make(*question)
        answer: T = self._answers[make, *question]
        return answer

    def result(self, config: RunConfig, counted_on: str) -> RunResult:
        """Return a step on shapes alone, or a training run for real numbers. Raises: the errors of either."""
        if (config, counted_on) not in self._made:
            self._made[config, counted_on] = run(config) if counted_on == TRAINING else plan(config)
        return self._made[config, counted_on]

    def fits(self, config: RunConfig, memory: int) -> bool:
        """Return whether a step needs at most that many bytes."""
        made = self._made.get((config, SHAPES)) if not feels_limit(config.memory) else None
        if made is not None:
            return max(rank.peak.total_bytes for rank in made.memory) <= memory
        return self.once(fits, config, memory)

    def time(self, config: RunConfig, gpu: str, nic: int | None) -> StepTime:
        """Time a step by the clock, on GPUs or nodes of that name, in nodes whose NICs carry `nic` bytes per second
        (None: the usual NICs of such nodes)."""
        result = self.once(_timed, config, gpu, nic)
        assert result.time is not None  # a plan on a cluster has a time
        self._made.setdefault((config, SHAPES), result)
        return result.time


def model_of(config: RunConfig) -> Model:
    """Build the model; nothing has to run for that."""
    return build_model(config, Device(0, make_backend("meta")))


def cluster_named(name: str, nic: int | None) -> Cluster:
    """Return nodes of that name or, if the name is a GPU's, nodes of that GPU; only a node's host has known speeds."""
    node = next((one for one in nodes() if one.name == name), None)
    return cluster_of(find_hardware(name if node is None else node.gpu), node=node, nic_bytes_per_s=nic)


def outside_bytes(device: Hardware, config: RunConfig) -> int:
    """Return what a device holds beside the program."""
    is_tied = config.model.has_blocks and config.model.tie_embeddings
    return sum(one.nbytes for one in device.outside(config.mesh.axes, is_tied=is_tied))


def _timed(config: RunConfig, gpu: str, nic: int | None) -> RunResult:
    return plan(config, cluster=cluster_named(gpu, nic))


@dataclass(frozen=True, slots=True)
class Asked:
    """One cell's question: a run, and the other inputs of a quantity. `pipeline_stage` None means all ranks."""

    config: RunConfig
    runs: Runs
    counted_on: str = SHAPES
    mp: int = 1
    pipeline_stage: int | None = None
    at: str = "end_of_backward"
    memory: int = 0
    calculator: str = ""
    gpu: str = ""
    bandwidth: int | None = None

    @property
    def result(self) -> RunResult:
        return self.runs.result(self.config, self.counted_on)

    @property
    def memory_of_ranks(self) -> list[RankMemory]:
        """Return the memory of the ranks in question."""
        if self.pipeline_stage is None:
            return self.result.memory
        return [self.result.memory[rank] for rank in share_of(self.result, self.pipeline_stage).ranks]

    @property
    def time(self) -> StepTime:
        """Time the run by the clock."""
        return self.runs.time(self.config, self.gpu, self.bandwidth)

    def moment(self) -> str:
        """Return the moment `at`. Raises: InputError if the run has no such moment."""
        marks = self.result.memory[0].marks
        if self.at not in marks:
            raise InputError(f"at {self.at!r}: this run has no such moment; choose one of {', '.join(marks)}")
        return self.at


Read = Callable[[Asked], Fraction | int | None]


class Quantity(NamedTuple):
    """A quantity: its reader, its dimension, its description, and the keys of [expect] that it needs or accepts."""

    read: Read
    dimension: str
    what: str
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()

    def __call__(self, asked: Asked) -> Any:
        return self.read(asked)


def quantity(
    dimension: str, what: str, *, needs: tuple[str, ...] = (), takes: tuple[str, ...] = ()
) -> Callable[[Read], Quantity]:
    """Make the function below a quantity."""
    return lambda read: Quantity(read, dimension, what, needs, takes)


def table(*quantities: Quantity) -> Mapping[str, Quantity]:
    """Return the quantities by the names of their functions."""
    return MappingProxyType({one.read.__name__: one for one in quantities})


def ring_share(config: RunConfig) -> Fraction:
    """Return (N-1)/N, the share of a volume that a rank of a ring sends. Raises: InputError if a volume is divided
    otherwise."""
    if config.mesh.ranks == 1:
        raise InputError("ranks 1: one rank sends nothing, so its volume has no factor (N-1)/N; choose 2 ranks or more")
    if config.mesh.dp_replicate > 1:
        raise InputError(
            f"dp_replicate {config.mesh.dp_replicate}: with replicas a volume has two factors, within and across "
            "them; use quantity sent_bytes"
        )
    if is_mesh(config):
        raise InputError(
            f"tp {config.mesh.tp}, pp {config.mesh.pp}: ranks hold parts of Ψ, so a volume is not a multiple of it; "
            "use quantity sent_bytes"
        )
    return Fraction(config.mesh.ranks - 1, config.mesh.ranks)
