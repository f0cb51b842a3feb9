"""The arrangement of the ranks: the axes of the mesh, and nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from zerosim.config.option import Part, option
from zerosim.errors import wrong
from zerosim.placement.mesh import Mesh

RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig(Part):
    """The arrangement of the ranks."""

    group = "ranks and stage"

    ranks: int = option(
        RANKS, "number of virtual ranks, one device each", low=1, high=65536, metavar="N",
        shown="4; with --world mpi what mpirun started", also=("--world-size", "--num-gpus", "--nproc-per-node"),
        words="num_processes gpus n_gpus",
    )  # fmt: skip
    dp_replicate: int = option(
        1, "replicas of the model states (HSDP). Each replica is sharded over N/R ranks. Gradients are averaged over "
        "the R ranks that hold the same shard", low=1, high=65536, metavar="R",
        also=("--dp-replicas",), stages=(1, 2, 3),
        words="dp_replicate_size data_parallel_replicate_degree parallelism.data_parallel_replicate_degree",
    )  # fmt: skip

    secondary_shard: int = option(
        0, "hpZ: after forward each rank keeps a secondary shard, 1/G of the parameters. Backward gathers it among G "
        "neighbouring ranks, those of one node (in FSDP2 a whole number for reshard_after_forward, in DeepSpeed "
        "zero_hpz_partition_size); 0: none", low=0, high=65536, metavar="G", stages=(3,), group="ZeRO++ and MiCS",
    )  # fmt: skip
    ranks_per_node: int = option(
        0, "ranks on one node, those of tp and cp included. Traffic between nodes is then counted. "
        "--quantized-gradients and --hierarchical-gather communicate within a node and across nodes separately. 0: as "
        "--secondary-shard says, else unknown", low=0, high=65536, metavar="R", also=("--local-world-size",),
        words="gpus_per_node",
    )  # fmt: skip

    tp: int = option(
        1, "tensor parallelism: number of ranks that share each linear map and the attention heads", low=1, high=65536,
        metavar="T", also=("--tensor-parallel", "--tensor-model-parallel-size"),
        words="tensor_parallel_size tp_size tensor_parallel_degree model_parallel_size",
    )  # fmt: skip

    cp: int = option(
        1, "context parallelism: number of ranks that share every row's tokens", low=1, high=65536, metavar="C",
        also=("--context-parallel",), after="tp",
        words="cp_size context_parallel_size context_parallel_degree parallelism.context_parallel_degree",
    )  # fmt: skip

    ep: int = option(
        1, "expert parallelism: number of ranks that share a layer's experts, of those along dp_shard, cp and tp",
        low=1, high=65536, metavar="E", also=("--expert-parallel", "--expert-model-parallel-size"), after="cp",
        words="ep_size expert_parallel_size expert_parallel_degree parallelism.expert_parallel_degree",
    )  # fmt: skip
    etp: int | None = option(
        None, "number of ranks that share each expert's maps, with --ep or --tp", low=1, high=65536, metavar="T",
        shown="tp", also=("--expert-tensor-parallel-size",), after="ep",
        words="expert_tensor_parallel_degree parallelism.expert_tensor_parallel_degree",
    )  # fmt: skip

    pp: int = option(
        1, "pipeline parallelism: number of pipeline stages that the layers are divided into. The microbatches of "
        "--accumulate pass through them", low=1, high=4096, metavar="P",
        also=("--pipeline-parallel", "--pipeline-model-parallel-size"), group="pipeline",
        words="pipeline_parallel_size pp_size pipeline_parallel_degree parallelism.pipeline_parallel_degree",
    )  # fmt: skip

    def _check(self) -> None:
        each = self.others.world_size
        if self.ranks % each:
            sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp_replicate": self.dp_replicate}
            product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            field = next(name for name, size in sizes.items() if size > 1)
            product = product.removeprefix(field)
            most = int(type(self).options()["ranks"].high or each)
            if each > most:
                raise wrong(
                    field, f"{product} is {each:,} ranks or more, but a world has at most {most:,}; choose smaller ones"
                )
            raise wrong(
                field,
                f"{product} does not divide ranks {self.ranks}: choose {right_sizes(self.ranks, sizes, most)} (a world "
                "is pp x dp_replicate x dp_shard x cp x tp ranks)",
            )
        check_node(self.ranks // each, self.tp, self.secondary_shard, self.ranks_per_node, self.cp)
        inner, experts = self.ranks // (self.pp * self.dp_replicate), self.ep * (self.etp or self.tp)
        if inner % experts:
            field = "ep" if self.ep > 1 else "etp"
            beside = f" x etp {self.etp or self.tp}" if field == "ep" and experts > self.ep else ""
            fitting = [size for size in range(1, inner + 1) if inner % (size * experts // getattr(self, field)) == 0]
            near = sorted(fitting, key=lambda size: abs(size - getattr(self, field)))[:2]
            right = f"choose {field} {' or '.join(map(str, sorted(near)))}" if near else "choose etp 1"
            of = "dp_shard x cp x tp" if self.others.world_size > self.pp * self.dp_replicate else "dp_shard"
            raise wrong(field, f" {getattr(self, field)}{beside} does not divide {of}, {inner}: {right}")

    @property
    def others(self) -> Mesh:
        """The axes that are given; dp_shard, which is 1 here, takes the remaining ranks."""
        return Mesh(pp=self.pp, dp_replicate=self.dp_replicate, cp=self.cp, tp=self.tp)

    @property
    def axes(self) -> Mesh:
        """The number of ranks along each axis."""
        return _axes_of(self)

    @property
    def shards(self) -> int:
        """The number of ranks that divide the model states: the formulas' N."""
        return self.axes.shards

    def local(self, rank: int) -> int:
        """Return a rank's number on its node; without a number of ranks per node there is one."""
        return rank % (self.ranks_per_node or self.ranks)


@lru_cache(maxsize=1024)
def _axes_of(mesh: MeshConfig) -> Mesh:
    given = mesh.others
    node = mesh.secondary_shard or node_of(mesh.ranks_per_node, mesh.cp * mesh.tp)
    shards = mesh.ranks // given.world_size
    return replace(given, dp_shard=shards, node=node, ep=mesh.ep, etp=mesh.etp or mesh.tp)


def right_sizes(ranks: int, sizes: Mapping[str, int], most: int) -> str:
    """Return 'tp 2 or 4, or ranks 3 or 6': the sizes that would divide, next to those whose product does not divide
    `ranks`.

    One size is changed while the others stay the same; at most `most` ranks.
    """
    each = math.prod(sizes.values())
    found = []
    for name, size in sizes.items():
        room, left = divmod(ranks, each // size)
        fitting = [] if left else [other for other in range(1, room + 1) if room % other == 0]
        near = {max((other for other in fitting if other < size), default=0)}
        near |= {min((other for other in fitting if other > size), default=0)}
        if size > 1 and (words := " or ".join(str(other) for other in sorted(near) if other)):
            found.append(f"{name} {words}")
    below = ranks // each * each
    found.append("ranks " + " or ".join(str(other) for other in (below, below + each) if 0 < other <= most))
    return ", or ".join(found)


def node_of(ranks_per_node: int, block: int) -> int:
    """Return the members of dp_shard that share a node with so many ranks, where a block is on `block` of them."""
    return max(1, ranks_per_node // block)


def between(shards: int) -> list[int]:
    """Return the sizes of groups that divide `shards` ranks, without 1 and all of them."""
    return [size for size in range(2, shards) if shards % size == 0]


def choices(shards: int, otherwise: str, *, times: int = 1) -> str:
    """Return 'choose 2 or 4': the sizes that divide so many ranks; `otherwise` if there are none."""
    sizes = [str(times * size) for size in between(shards)]
    return f"choose {' or '.join(sizes)}" if sizes else otherwise


def check_node(shards: int, tp: int, secondary: int, ranks_per_node: int, cp: int = 1) -> None:
    """Check how many of dp_shard's ranks share a node. Raises: InputError."""
    block, word = cp * tp, "tp" if cp == 1 else "cp x tp"
    right = choices(shards, f"dp_shard {shards} has no divisor between 1 and {shards}; choose more ranks")
    if secondary == 1:
        raise wrong(
            "secondary_shard", f" 1: every rank would keep whole parameters, as in stage 2; {right}, or stage 2"
        )
    if secondary and secondary == shards:
        raise wrong(
            "secondary_shard",
            f" {secondary}: the secondary shard would equal the first one, cut over dp_shard; {right}",
        )
    if secondary and shards % secondary:
        raise wrong("secondary_shard", f" {secondary} does not divide dp_shard {shards}; {right}")
    if not ranks_per_node:
        return
    for size, name in ((tp, "tp"), (block, word)):
        if max(ranks_per_node, size) % min(ranks_per_node, size):
            parts = (size for size in range(min(ranks_per_node, block - 1), 1, -1) if block % size == 0)
            part = next((f", or {size}" for size in parts if max(size, tp) % min(size, tp) == 0), "")
            of = f"{name} {size} does not divide it; choose a multiple of {block}{part}"
            raise wrong("ranks_per_node", f" {ranks_per_node}: {of}")
    node = node_of(ranks_per_node, block)
    if shards % node:
        fitting = choices(shards, f"choose {shards * block}", times=block)
        raise wrong("ranks_per_node", f" {ranks_per_node}: {node} does not divide dp_shard {shards}; {fitting}")
    if secondary not in (0, node):
        raise wrong(
            "secondary_shard",
            f" {secondary}: must be the ranks of dp_shard on a node, {node} with ranks_per_node {ranks_per_node}; "
            f"choose {node}, or leave one of them out",
            beside="ranks_per_node",
        )


WORDS = (
    ("nnodes num_nodes num_machines devices", "--ranks N, the GPUs of all nodes, with --ranks-per-node R"),
    (
        "parallelism.data_parallel_shard_degree data_parallel_shard_degree dp_shard* data_parallel_size",
        "--ranks N. The ranks that --dp-replicate, --tp and --pp leave divide the model states",
    ),
    ("num_distributed_optimizer_instances", "--dp-replicate R with --stage 1"),
    ("mics_shard_size", "--dp-replicate R, for groups of N / R ranks"),
)
