"""The ranks' machine, and how they exchange."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.config.option import Part, option
from zerosim.config.parts.mesh import MeshConfig
from zerosim.errors import InputError, wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig(Part):
    """The ranks' machine, and how they exchange."""

    group = "ranks and stage"

    backend: str = option(
        "numpy", "numpy runs on the CPU; cuda runs the same program on GPUs, through CuPy", choices=("numpy", "cuda")
    )
    capture_graphs: bool = option(
        False, "with --backend cuda: capture kernels that repeat as CUDA graphs; no GPU has run it yet", after="backend"
    )
    transport: str = option(
        "threads", "run ranks as threads, or in the processes that mpirun started", flat="world",
        choices=("threads", "mpi"),
    )  # fmt: skip
    ranks_per_process: int = option(
        1, "with --world mpi: ranks in each process, as threads", low=1, high=65536, metavar="R"
    )
    algorithm: str = option(
        "direct",
        "direct: one round, sums in rank order; ring: N-1 rounds, rounded at each hop; pairs: an all-reduce sends the "
        "whole buffer to every other rank; native: MPI's or NCCL's own",
        flat="collective", choices=("direct", "ring", "pairs", "native"), after="partition",
    )  # fmt: skip
    max_running: int = option(
        1, "ranks that run at the same time; 1: ranks take turns", flat="parallel", low=1, metavar="K",
        after="allocator_conf",
    )  # fmt: skip

    def _check(self) -> None:
        if self.capture_graphs and self.backend != "cuda":
            raise wrong(
                "capture_graphs",
                f": backend {self.backend} has none; choose --backend cuda, or leave --capture-graphs out",
            )
        if self.algorithm == "native" and self.transport == "threads" and self.backend == "numpy":
            raise wrong(
                "collective",
                " 'native': NumPy threads have no native collectives; choose direct, ring or pairs, "
                "or start it with --world mpi, or on several GPUs with --backend cuda",
            )
        if self.ranks_per_process > 1 and self.transport != "mpi":
            raise wrong(
                "ranks_per_process", f" {self.ranks_per_process}: works only with --world mpi; pass --ranks instead"
            )
        if self.algorithm == "native" and self.ranks_per_process > 1:
            raise wrong(
                "ranks_per_process",
                f" {self.ranks_per_process}: native collectives need one rank per process; "
                "choose --collective direct, ring or pairs",
            )


def rules(world: WorldConfig, mesh: MeshConfig) -> Iterator[InputError]:
    """Yield a number of ranks that processes do not share equally."""
    if world.transport == "mpi" and mesh.ranks % world.ranks_per_process:
        yield wrong(
            "ranks",
            f" {mesh.ranks}: {world.ranks_per_process} ranks run in each process; choose a multiple "
            f"of {world.ranks_per_process}, or leave ranks out",
        )
