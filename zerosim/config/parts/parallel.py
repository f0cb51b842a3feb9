"""How ZeRO and a pipeline divide the model among the ranks, and whose ZeRO it is."""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Part, option
from zerosim.config.presets.recipes import NAMES as RECIPES
from zerosim.config.presets.recipes import USUAL
from zerosim.errors import wrong
from zerosim.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(Part):
    """How ZeRO and a pipeline divide the model among the ranks, and whose ZeRO it is."""

    group = "ranks and stage"

    zero_stage: int = option(
        3, "ZeRO stage: 0 is DDP, 1 divides the optimizer states by N, 2 also the gradients, 3 also the parameters",
        flat="stage", low=0, high=3, metavar="0..3", also=("--zero-stage", "-z"), after="ranks and stage",
    )  # fmt: skip
    replica_reduction: str = option(
        "step", "with --dp-replicate: average gradients across replicas once per step or in every microbatch",
        choices=("step", "micro_batch"), follows=OF_RECIPE,
    )  # fmt: skip
    partition: str = option(
        "slices", "a rank owns an equal slice of every unit (slices), or whole units (owner)",
        choices=("slices", "owner"), follows="owner for an optimizer that needs whole matrices, else slices",
    )  # fmt: skip
    bucket_bytes: int | None = option(
        25 * 2**20, "largest payload of one call of a collective; none: one call per unit", low=1, metavar="SIZE",
        shown="25MiB", parse=parse_bytes,
    )  # fmt: skip
    sequence_parallel: bool = option(
        False, "with --tp: divide the rows of norms, dropout and residuals among the same ranks", also=("--sp",),
        after="tp",
    )  # fmt: skip
    keep_gathered: bool = option(
        False, "with --sequence-parallel: save gathered inputs for backward instead of gathering them again",
        after="sequence_parallel",
    )  # fmt: skip
    pipeline: str | None = option(
        None, "with --pp: the order of forwards and backwards",
        choices=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"), shown="1f1b", group="pipeline",
    )  # fmt: skip
    virtual_stages: int | None = option(
        None, "with --pipeline interleaved: number of layer chunks on each rank", low=1, high=4096, metavar="V",
        shown="2", group="pipeline",
    )  # fmt: skip
    micro_batch_group: int | None = option(
        None, "with --pipeline interleaved: number of microbatches that pass through a chunk before the next chunk's "
        "turn. No group has fewer than --pp", low=1, metavar="N",
        shown="pp, or the next larger that leaves no smaller group",
        also=("--microbatch-group-size-per-virtual-pipeline-stage",), group="pipeline",
    )  # fmt: skip
    stage_layers: str | None = option(
        None, "with --pp: layers of each pipeline stage, such as 3,4,4,3 (with several chunks per stage: layers of "
        "each chunk, in the model's order)", metavar="L,L,...", shown="as many on each", group="pipeline",
    )  # fmt: skip
    balance_ends: bool = option(
        False,
        "with --pp: count the table and the head as one layer each when layers are divided among pipeline stages",
        group="pipeline",
    )
    keep_last_inputs: bool = option(
        False, "with --pp: a pipeline stage keeps each chunk's last input and its gradient from one step to the next",
        follows=OF_RECIPE, group="pipeline",
    )  # fmt: skip
    pad_vocab: bool = option(
        False, "with --tp: pad the rows of the token table to a multiple of 128 T, as Megatron does",
        after="keep_gathered",
    )  # fmt: skip
    recipe: str = option(
        "paper",
        "whose ZeRO: sets those flags below that you leave out. usual: the recipe that people run at this stage",
        metavar="|".join((*RECIPES, USUAL)), parse=str.lower, group="recipe",
    )  # fmt: skip
    transformer_engine: bool = option(
        False, "use Transformer Engine's blocks, which keep a dummy gradient for each shape of weight (with "
        "--gradient-accumulation-fusion). Without them, recipe megatron keeps eager attention's softmax in fp32",
        also=("--te",), follows=OF_RECIPE, group="recipe",
    )  # fmt: skip
    overlap: str = option(
        "none", "which collectives overlap with compute. reduce: late reductions, or two buffers with --reduce-bucket. "
        "gather: prefetch one unit (stage 3), or gather new parameters in the next forward (stages 1 and 2). all: "
        "both. The flags below override this one",
        choices=("none", "reduce", "gather", "all"), follows=OF_RECIPE, group="recipe",
    )  # fmt: skip

    def _check(self) -> None:
        for name in ("virtual_stages", "micro_batch_group"):
            if (value := getattr(self, name)) is not None and self.pipeline != "interleaved":
                raise wrong(
                    name, f" {value}: works only with the interleaved schedule; pass --pipeline interleaved too"
                )

    @property
    def pipeline_schedule(self) -> str:
        """The given schedule, or 1f1b."""
        return self.pipeline or "1f1b"

    def fewest_micro_batches(self, stages: int) -> int:
        """Return the fewest microbatches that the schedule takes."""
        return {"interleaved": stages, "zb-h1": stages, "zb-v": 2 * stages}.get(self.pipeline_schedule, 1)

    @property
    def num_chunks(self) -> int:
        """Chunks of layers on each pipeline rank."""
        return {"interleaved": self.virtual_stages or 2, "zb-v": 2}.get(self.pipeline_schedule, 1)

    @property
    def overlaps_reductions(self) -> bool:
        """Whether gradients are reduced beside backward."""
        return self.overlap in ("reduce", "all")

    @property
    def layers_given(self) -> list[int] | None:
        """`stage_layers` as numbers. Raises: InputError for anything else."""
        if self.stage_layers is None:
            return None
        words = self.stage_layers.split(",")
        if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
            raise wrong("stage_layers", f" {self.stage_layers!r}: expected numbers with commas, such as 3,4,4,3")
        return [int(word) for word in words]


def owns_units(parallel: ParallelConfig) -> bool:
    """Return whether a rank owns whole units where states are divided."""
    return parallel.partition == "owner"


def is_sliced(parallel: ParallelConfig) -> bool:
    """Return whether ranks hold equal slices of states."""
    return parallel.zero_stage > 0 and not owns_units(parallel)


def gathers_params(parallel: ParallelConfig) -> bool:
    """Return whether ranks hold slices of parameters, and gather them for use."""
    return parallel.zero_stage == 3


WORDS = (
    ("*use_distributed_optimizer distributed_optimizer", "--stage 1 --recipe megatron"),
    ("zero3 zero2 zero1 zero", "--stage 3, 2 or 1"),
    (
        "deepspeed deepspeed_config* ds_config",
        "--stage S --recipe deepspeed, with values of its JSON as flags, such as --reduce-bucket-size",
    ),
    ("fsdp use_fsdp fsdp2 fsdp_version use_torch_fsdp2 fsdp_config", "--stage 3 --recipe fsdp2, or fsdp1"),
    (
        "*sharding_strategy use_megatron_fsdp",
        "--stage: 3 is FULL_SHARD or optim_grads_params, 2 SHARD_GRAD_OP or optim_grads, 1 optim, 0 NO_SHARD; "
        "--dp-replicate makes it HYBRID",
    ),
    ("*bucket_cap_mb", "--bucket-bytes SIZE, such as 25MiB"),
    ("ddp_bucket_size ddp_num_buckets", "--bucket-bytes SIZE, in bytes"),
    ("transformer_impl", "--transformer-engine or --no-transformer-engine"),
)
