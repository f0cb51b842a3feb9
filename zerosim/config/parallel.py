"""Two parts of a configuration: how the ranks are arranged, and what ZeRO divides among them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zerosim.config.option import OF_RECIPE, Part, option
from zerosim.config.presets.recipes import NAMES as RECIPES
from zerosim.config.presets.recipes import USUAL
from zerosim.errors import wrong
from zerosim.placement.mesh import Mesh
from zerosim.units import parse_bytes

RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig(Part):
    """How the ranks are arranged."""

    ranks: int = option(
        RANKS, "virtual ranks, each a device of its own", low=1, high=65536, metavar="N",
        shown="4; with --world mpi what mpirun started", also=("--world-size", "--num-gpus", "--nproc-per-node"),
    )  # fmt: skip
    dp_replicate: int = option(
        1, "copies of the model states (HSDP): each is divided among N/R ranks, and gradients are averaged over the R "
        "ranks that hold the same part", low=1, high=65536, metavar="R", also=("--dp-replicas",), stages=(1, 2, 3),
    )  # fmt: skip

    tp: int = option(
        1, "tensor parallelism: ranks that every linear map and the attention heads are cut over", low=1, high=65536,
        metavar="T", also=("--tensor-parallel", "--tensor-model-parallel-size"),
    )  # fmt: skip

    pp: int = option(
        1, "pipeline parallelism: stages that the layers are cut into; micro-batches (--accumulate) pass through them",
        low=1, high=4096, metavar="P", also=("--pipeline-parallel", "--pipeline-model-parallel-size"),
    )  # fmt: skip

    def _check(self) -> None:
        each = self.others.world_size
        if self.ranks % each:
            sizes = {"tp": self.tp, "pp": self.pp, "dp_replicate": self.dp_replicate}
            product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            field = next(name for name, size in sizes.items() if size > 1)
            product = product.removeprefix(field)
            most = int(type(self).options()["ranks"].high or each)
            if each > most:
                raise wrong(
                    field, f"{product} is {each:,} ranks at least: ranks go up to {most:,}; choose smaller ones"
                )
            raise wrong(
                field,
                f"{product} does not divide ranks {self.ranks}: choose {right_sizes(self.ranks, sizes, most)} (a world "
                "is pp x dp_replicate x dp_shard x tp ranks)",
            )

    @property
    def others(self) -> Mesh:
        """The axes that are given; dp_shard, which is 1 here, takes the ranks that they leave."""
        return Mesh(pp=self.pp, dp_replicate=self.dp_replicate, tp=self.tp)

    @property
    def axes(self) -> Mesh:
        """The ranks along each axis."""
        return replace(self.others, dp_shard=self.ranks // self.others.world_size)

    @property
    def shards(self) -> int:
        """Ranks that model states are divided among: the formulas' N."""
        return self.axes.shards


def right_sizes(ranks: int, sizes: Mapping[str, int], most: int) -> str:
    """'tp 2 or 4, or ranks 3 or 6': next to sizes whose product does not divide `ranks`, those that do.

    One size is changed while the others stay as they are; of ranks there are at most `most`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(Part):
    """What ZeRO and a pipeline divide among the ranks, and whose ZeRO it is."""

    zero_stage: int = option(
        3, "ZeRO stage: 0 is DDP, 1 divides the optimizer states by N, 2 also the gradients, 3 also the parameters",
        flat="stage", low=0, high=3, metavar="0..3", also=("--zero-stage", "-z"),
    )  # fmt: skip
    replica_reduction: str = option(
        "step", "with --dp-replicate: when they are; once a step, or in each micro-batch",
        choices=("step", "micro_batch"),
    )  # fmt: skip
    partition: str = option(
        "slices", "what a rank owns: equal slices of every unit, or whole units", choices=("slices", "owner"),
        follows="owner for an optimizer that wants whole matrices, else slices",
    )  # fmt: skip
    bucket_bytes: int | None = option(
        25 * 2**20, "the most that one collective moves per call; none: one call per unit", low=1, metavar="SIZE",
        shown="25MiB", parse=parse_bytes,
    )  # fmt: skip
    sequence_parallel: bool = option(
        False, "with --tp: norms, dropout and residuals are cut by rows over the same ranks", also=("--sp",)
    )
    keep_gathered: bool = option(
        False, "with --sequence-parallel: gathered inputs are kept for backward, not gathered again"
    )
    pipeline: str | None = option(
        None, "with --pp: the order of forwards and backwards",
        choices=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"), shown="1f1b",
    )  # fmt: skip
    virtual_stages: int | None = option(
        None, "with --pipeline interleaved: chunks of layers on each rank", low=1, high=4096, metavar="V", shown="2"
    )
    micro_batch_group: int | None = option(
        None, "with --pipeline interleaved: micro-batches that pass through a chunk before the next chunk's turn; no "
        "group has fewer than --pp", low=1, metavar="N", shown="pp, or the next larger that leaves no smaller group",
        also=("--microbatch-group-size-per-virtual-pipeline-stage",),
    )  # fmt: skip
    stage_layers: str | None = option(
        None, "with --pp: layers of each stage (with several chunks: of each, in the model's order), such as 3,4,4,3",
        metavar="L,L,...", shown="as many on each",
    )  # fmt: skip
    balance_ends: bool = option(False, "with --pp: the table and the head count as a layer each where layers are cut")
    keep_last_inputs: bool = option(
        False, "with --pp: a stage keeps each chunk's last input and its gradient from one step to the next",
        follows=OF_RECIPE,
    )  # fmt: skip
    pad_vocab: bool = option(False, "with --tp: the token table gets rows up to a multiple of 128 T, as Megatron's")
    recipe: str = option(
        "paper",
        "whose ZeRO: sets the flags below that are not given; usual: what people run at this stage",
        metavar="|".join((*RECIPES, USUAL)),
        parse=str.lower,
    )
    transformer_engine: bool = option(
        False, "blocks are Transformer Engine's: a dummy gradient stays for each shape of weight (with "
        "--gradient-accumulation-fusion). Recipe megatron without it keeps eager attention's softmax in fp32",
        also=("--te",), follows=OF_RECIPE,
    )  # fmt: skip
    overlap: str = option(
        "none", "collectives that overlap with compute: reduce (late reductions, or two buffers where there is a "
        "bucket), gather (stage 3: a unit ahead; stages 1 and 2: new parameters in the next forward), both, or none; "
        "the flags below win where they are given",
        choices=("none", "reduce", "gather", "all"), follows=OF_RECIPE,
    )  # fmt: skip

    def _check(self) -> None:
        for name in ("virtual_stages", "micro_batch_group"):
            if (value := getattr(self, name)) is not None and self.pipeline != "interleaved":
                raise wrong(name, f" {value}: of the interleaved schedule; pass --pipeline interleaved too")

    @property
    def pipeline_schedule(self) -> str:
        """As given, or 1f1b."""
        return self.pipeline or "1f1b"

    def fewest_micro_batches(self, stages: int) -> int:
        """The fewest that the schedule takes."""
        return {"interleaved": stages, "zb-h1": stages, "zb-v": 2 * stages}.get(self.pipeline_schedule, 1)

    @property
    def num_chunks(self) -> int:
        """Chunks of layers on each pipeline rank."""
        return {"interleaved": self.virtual_stages or 2, "zb-v": 2}.get(self.pipeline_schedule, 1)

    @property
    def layers_given(self) -> list[int] | None:
        """`stage_layers` as numbers. Raises: InputError for anything else."""
        if self.stage_layers is None:
            return None
        words = self.stage_layers.split(",")
        if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
            raise wrong("stage_layers", f" {self.stage_layers!r}: expected numbers with commas, such as 3,4,4,3")
        return [int(word) for word in words]
