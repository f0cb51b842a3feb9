"""The parts of a configuration: every field once, with its default, range, choices and help (`option.py`).

A part checks itself. What several parts have to agree on is checked by `RunConfig` (`run.py`), which holds one of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerosim.config.allocator import NAMES as ALLOCATORS
from zerosim.config.allocator import check_knobs
from zerosim.config.option import Part, option
from zerosim.config.presets.recipes import NAMES as RECIPES
from zerosim.config.presets.recipes import find_recipe
from zerosim.config.recompute import FORMS, PARTS, Again, read_recompute
from zerosim.errors import InputError
from zerosim.placement.mesh import Mesh
from zerosim.units import MOST_BYTES, parse_bytes, parse_count

RANKS = 4
FLOATS = ("fp32", "bf16", "fp16", "fp64")
LOSSES = ("in-place", "lean", "megatron", "megatron-fused", "torch", "torch-kept", "chunked")
OF_RECIPE = "the recipe's"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MeshConfig(Part):
    """How the ranks are arranged."""

    ranks: int = option(
        None, "virtual ranks, each a device of its own", low=1, high=65536, metavar="N",
        shown="4; with --world mpi what mpirun started", also=("--world-size", "--num-gpus", "--nproc-per-node"),
    )  # fmt: skip
    dp_replicate: int = option(
        1, "copies of the model states (HSDP): each is divided among N/R ranks, and gradients are averaged over the R "
        "ranks that hold the same part", low=1, high=65536, metavar="R", also=("--dp-replicas",),
    )  # fmt: skip

    tp: int = option(
        1, "tensor parallelism: ranks that every linear map and the attention heads are cut over", low=1, high=65536,
        metavar="T", also=("--tensor-parallel", "--tensor-model-parallel-size"),
    )  # fmt: skip

    pp: int = option(
        1, "pipeline parallelism: stages that the layers are cut into; micro-batches (--accumulate) pass through them",
        low=1, high=4096, metavar="P", also=("--pipeline-parallel", "--pipeline-model-parallel-size"),
    )  # fmt: skip

    def _resolve(self) -> None:
        if self.ranks is None:
            object.__setattr__(self, "ranks", RANKS)

    def _check(self) -> None:
        each = self.dp_replicate * self.tp * self.pp
        if self.ranks % each:
            sizes = {"tp": self.tp, "pp": self.pp, "dp_replicate": self.dp_replicate}
            product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            most = int(type(self).options()["ranks"].high or each)
            if each > most:
                raise InputError(f"{product} is {each:,} ranks at least: ranks go up to {most:,}; choose smaller ones")
            raise InputError(
                f"{product} does not divide ranks {self.ranks}: a world is pp x dp_replicate x dp_shard x tp ranks; "
                f"choose ranks {min(max(1, round(self.ranks / each)), most // each) * each}"
            )

    def _default(self, of: Any) -> Any:
        return RANKS if of.attribute == "ranks" else of.default

    @property
    def axes(self) -> Mesh:
        """The ranks along each axis: `dp_shard` is what the other axes leave."""
        shards = self.ranks // (self.dp_replicate * self.tp * self.pp)
        return Mesh(pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=shards, tp=self.tp)

    @property
    def dp_shard(self) -> int:
        """Ranks that model states are divided among: the formulas' N."""
        return self.axes.dp_shard


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ParallelConfig(Part):
    """What ZeRO divides among the ranks, and when it gathers, reduces and frees. `recipe` sets what is None."""

    zero_stage: int = option(
        3, "ZeRO stage: 0 is DDP, 1 divides the optimizer states by N, 2 also the gradients, 3 also the parameters",
        flat="stage", low=0, high=3, metavar="0..3", also=("--zero-stage", "-z"),
    )  # fmt: skip
    replica_reduction: str = option(
        "step", "with --dp-replicate: when they are; once a step, or in each micro-batch",
        choices=("step", "micro_batch"),
    )  # fmt: skip
    partition: str = option(
        "slices", "what a rank owns: equal slices of every unit, or whole units", choices=("slices", "owner")
    )
    bucket_bytes: int | None = option(
        25 * 2**20, "the most that one collective moves per call; none: one call per unit", low=1, metavar="SIZE",
        shown="25MiB", parse=parse_bytes,
    )  # fmt: skip
    reshard_after_forward: bool = option(
        True, "stage 3: free a unit after forward; without, it stays gathered (FSDP's 2Psi)"
    )
    keep_last_unit: bool = option(False, "stage 3: the last unit stays gathered from forward to backward")
    sequence_parallel: bool = option(
        False, "with --tp: norms, dropout and residuals are cut by rows over the same ranks", also=("--sp",)
    )
    keep_gathered: bool = option(
        False, "with --sequence-parallel: gathered inputs are kept for backward, not gathered again"
    )
    pipeline: str | None = option(
        None, "with --pp: the order of forwards and backwards", choices=("gpipe", "1f1b", "interleaved"),
        shown="1f1b",
    )  # fmt: skip
    virtual_stages: int | None = option(
        None, "with --pipeline interleaved: chunks of layers on each rank", low=1, high=4096, metavar="V", shown="2"
    )
    stage_layers: str | None = option(
        None, "with --pp: layers of each stage (interleaved: of each chunk, in the model's order), such as 3,4,4,3",
        metavar="L,L,...", shown="as many on each",
    )  # fmt: skip
    balance_ends: bool = option(False, "with --pp: the table and the head count as a layer each where layers are cut")
    pad_vocab: bool = option(False, "with --tp: the token table gets rows up to a multiple of 128 T, as Megatron's")
    recipe: str = option("paper", "whose ZeRO: sets the flags below that are not given", metavar="|".join(RECIPES))
    grad_reduction: str | None = option(
        None, "stages 1 and 2: how gradients are reduced", choices=("reduce_scatter", "all_reduce"), shown=OF_RECIPE
    )
    reduce_bucket: int | None = option(
        None, "stages 1 to 3: elements of a buffer of constant size (CB) out of which gradients are reduced; 0: none",
        low=0, high=10**12, metavar="COUNT", shown=OF_RECIPE, parse=parse_count, also=("--reduce-bucket-size",),
    )  # fmt: skip
    reduce_buffers: int | None = option(
        None, "how many such buffers; 2: one is filled while the other is reduced", low=1, high=2, shown=OF_RECIPE
    )
    upcast_grads: bool | None = option(None, "the optimizer step copies its gradients to fp32 first")
    keep_root_units: bool | None = option(
        None, "stage 3: units outside the blocks stay gathered from forward to backward"
    )
    persistent_numel: int | None = option(
        None, "stage 3: units with fewer elements stay gathered", low=0, metavar="COUNT", shown=OF_RECIPE
    )
    cast_shards: bool | None = option(
        None, "stage 3: 2-byte shards are cast from the masters at each gather, not stored"
    )
    prefetch: int | None = option(
        None, "stage 3: units that are gathered ahead, while the one before them computes", low=0, high=4096,
        metavar="UNITS", shown=OF_RECIPE,
    )  # fmt: skip

    def _check(self) -> None:
        find_recipe(self.recipe)
        if self.reduce_bucket and self.zero_stage == 0:
            raise InputError(f"reduce_bucket {self.reduce_bucket}: of stages 1 to 3; leave it out, or choose one")
        if self.reduce_bucket and self.partition == "owner":
            raise InputError(f"reduce_bucket {self.reduce_bucket}: of partition slices; drop one of them")
        if self.prefetch and self.zero_stage != 3:
            raise InputError(
                f"prefetch {self.prefetch}: stage {self.zero_stage} keeps every parameter; leave it out, or choose "
                "stage 3"
            )
        if self.virtual_stages is not None and self.pipeline != "interleaved":
            raise InputError(
                f"virtual_stages {self.virtual_stages}: of the interleaved schedule; pass --pipeline interleaved too"
            )
        if self.layers_given and self.balance_ends:
            raise InputError("balance_ends: stage_layers says how the layers are cut; leave one of them out")
        if self.grad_reduction == "all_reduce" and self.partition == "owner" and self.zero_stage in (1, 2):
            raise InputError(
                "grad_reduction 'all_reduce': under partition owner gradients are reduced to owners; drop one"
            )

    @property
    def pipeline_schedule(self) -> str:
        """As given, or 1f1b."""
        return self.pipeline or "1f1b"

    @property
    def num_chunks(self) -> int:
        """Chunks of layers on each pipeline rank."""
        return (self.virtual_stages or 2) if self.pipeline == "interleaved" else 1

    @property
    def layers_given(self) -> list[int] | None:
        """`stage_layers` as numbers. Raises: InputError for anything else."""
        if self.stage_layers is None:
            return None
        words = self.stage_layers.split(",")
        if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
            raise InputError(f"stage_layers {self.stage_layers!r}: expected numbers with commas, such as 3,4,4,3")
        return [int(word) for word in words]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PrecisionConfig(Part):
    """Number formats, and the loss scale that half types want."""

    param_dtype: str = option(
        "bf16", "of parameters; half types have fp32 masters", flat="precision", choices=FLOATS, also=("--dtype",)
    )
    grad_dtype: str | None = option(
        None, "that gradients are kept and sent in", choices=FLOATS, shown="the recipe's, or the parameters'"
    )
    master_init: str = option(
        "rounded", "fp32 masters start from rounded or exact weights", choices=("rounded", "exact")
    )
    loss_scale: str | float | None = option(
        None, "what the loss is multiplied by", metavar="dynamic|NUMBER", shown="dynamic for fp16, else none"
    )
    initial_scale_power: int = option(16, "the dynamic scale starts at 2^P", low=0, high=126, metavar="P")
    loss_scale_window: int = option(1000, "clean steps until the scale doubles", low=1, metavar="STEPS")
    hysteresis: int = option(2, "the scale halves at the H-th overflow", low=1, metavar="H")
    min_loss_scale: float = option(1.0, "an overflow there is an error", above=0, metavar="SCALE")
    skip_nonfinite: bool = option(False, "skip a step whose gradients are not finite instead of stopping")

    def _check(self) -> None:
        scale = self.loss_scale
        if scale is not None and scale != "dynamic" and (isinstance(scale, str) or not scale > 0):
            raise InputError(f"loss_scale {scale!r}: expected 'dynamic' or a number more than 0")

    @property
    def resolved_loss_scale(self) -> str | float | None:
        """'dynamic', a number, or None for none."""
        return "dynamic" if self.loss_scale is None and self.param_dtype == "fp16" else self.loss_scale


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OptimConfig(Part):
    """The optimizer, the learning rate over the steps, and clipping."""

    steps: int | None = option(
        None, "optimizer steps", low=1, high=10**8, metavar="S", shown="60, or all that --tokens holds"
    )
    optimizer: str = option("adam", "which optimizer", choices=("adam", "adamw", "sgd"))
    lr: float = option(3e-3, "learning rate", above=0, metavar="LR")
    betas: tuple[float, float] = option(
        (0.9, 0.999), "Adam's two averages", below=1, metavar=("B1", "B2"), shown="0.9 0.999"
    )
    eps: float = option(1e-8, "Adam's epsilon, outside the root", above=0, metavar="EPS")
    momentum: float = option(0.0, "SGD's momentum", below=1, metavar="M")
    weight_decay: float | None = option(None, "weight decay", low=0, metavar="W", shown="0.01 for adamw, else 0")
    decay: str = option("all", "which parameters decay", choices=("all", "matrices"))
    lr_schedule: str = option(
        "constant", "learning rate over the steps", flat="schedule", choices=("constant", "cosine")
    )
    warmup: int = option(0, "steps of linear warm-up", low=0, metavar="STEPS")
    min_lr: float = option(0.0, "where cosine ends", low=0, metavar="LR")
    clip_norm: float | None = option(
        None, "clip gradients to this global norm", above=0, metavar="NORM", shown="no clipping"
    )

    def _check(self) -> None:
        if self.momentum and self.optimizer != "sgd":
            raise InputError(f"momentum {self.momentum}: {self.optimizer} has none, it has betas; choose sgd")
        if self.min_lr > self.lr:
            raise InputError(f"min_lr {self.min_lr}: expected at most lr = {self.lr}")

    @property
    def resolved_weight_decay(self) -> float:
        """As given, or the optimizer's own."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.01 if self.optimizer == "adamw" else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DataConfig(Part):
    """What is trained on: files, how a batch is made of them, the seed; and what the model continues at the end."""

    micro_batch: int = option(4, "rows per rank and micro-batch", low=1, high=10**7, metavar="B", also=("--mbs",))
    accumulate: int = option(
        1, "micro-batches per step; the global batch is N*A*B rows", low=1, high=10**7, metavar="A",
        also=("--grad-acc-steps", "--gradient-accumulation-steps"),
    )  # fmt: skip
    seed: int = option(0, "of weights, batches and dropout", low=0, high=2**63 - 1, metavar="SEED")
    file: str | None = option(
        None, "any file, read as bytes", flat="data", metavar="FILE", shown="the packaged primer on ZeRO"
    )
    tokens: str | None = option(
        None, "int64 array 'tokens' (steps, global batch, seq + 1)", metavar="IN.npz", shown="from --data"
    )
    weights: str | None = option(
        None, "full parameters by name to start from", metavar="IN.npz", shown="drawn from --seed"
    )
    sample: str | None = option(None, "let the trained model continue this text", metavar="TEXT", shown="no sample")
    sample_tokens: int = option(200, "tokens to continue it with", low=1, metavar="COUNT")

    def _check(self) -> None:
        if self.sample == "":
            raise InputError("sample '': expected at least one character to continue")
        try:
            (self.sample or "").encode()
        except UnicodeEncodeError:
            raise InputError(f"sample {self.sample!r}: expected text in UTF-8") from None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryConfig(Part):
    """What is kept for backward, and how much a device holds."""

    recompute: str = option(
        "none", "what backward runs again instead of keeping: the attention core, a list of parts of every block "
        f"({', '.join(PARTS)}), every block or every K-th", metavar=FORMS,
    )  # fmt: skip
    partition_activations: bool = option(
        False, "with --tp and --recompute full: a block's input is kept in parts, one on each rank of tp (ZeRO-R's Pa)",
        also=("--distribute-saved-activations",),
    )  # fmt: skip
    cpu_checkpointing: bool = option(
        False, "with --recompute full: what is kept of blocks' inputs waits in the host's memory (with parts: Pa+cpu)"
    )
    saves: str = option(
        "lean", "what is kept for backward: as zerosim's own kernels need it, or as Megatron's",
        choices=("lean", "megatron"),
    )  # fmt: skip
    attention: str = option(
        "eager", "eager holds the scores (B, H, T, T); flash never does", choices=("eager", "flash")
    )
    loss: str | None = option(
        None, "what a step holds of its logits: none beside them, zerosim's own, Megatron's, PyTorch's, or a part of "
        "the tokens at a time", choices=LOSSES, shown=OF_RECIPE,
    )  # fmt: skip
    capacity: int | None = option(
        None, "memory of each device, such as 32GB or 512MiB; exceeding it ends the run", low=1, high=MOST_BYTES,
        metavar="SIZE", shown="no limit", parse=parse_bytes,
    )  # fmt: skip
    allocator: str = option(
        "exact", "how a device hands out its memory: byte for byte, as PyTorch's caching allocator, or from one region",
        choices=ALLOCATORS,
    )  # fmt: skip
    allocator_conf: str | None = option(
        None, "its knobs, as in PYTORCH_CUDA_ALLOC_CONF; of arena: fit:best|first, defragment:True|False",
        metavar="KNOB:VALUE,...", shown="PyTorch's; fit:best,defragment:True", also=("--pytorch-cuda-alloc-conf",),
    )  # fmt: skip

    def _check(self) -> None:
        check_knobs(self.allocator, self.allocator_conf)
        read_recompute(self.recompute)

    @property
    def again(self) -> Again:
        """What `recompute` says, read."""
        return read_recompute(self.recompute, self.attention)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WorldConfig(Part):
    """What the ranks run on, and how they exchange."""

    backend: str = option("numpy", "numpy, or cuda: the same program on GPUs, through CuPy", choices=("numpy", "cuda"))
    transport: str = option(
        "threads", "ranks as threads, or in the processes that mpirun started", flat="world",
        choices=("threads", "mpi"),
    )  # fmt: skip
    ranks_per_process: int = option(
        1, "with --world mpi: ranks in each process, as threads", low=1, high=65536, metavar="R"
    )
    algorithm: str = option(
        "direct",
        "direct: one round, sums in rank order; ring: N-1 rounds, rounded at each hop; native: MPI's or NCCL's own",
        flat="collective", choices=("direct", "ring", "native"),
    )  # fmt: skip
    max_running: int = option(1, "ranks that run side by side; 1: they take turns", flat="parallel", low=1, metavar="K")

    def _check(self) -> None:
        if self.algorithm == "native" and self.transport == "threads" and self.backend == "numpy":
            raise InputError(
                "collective 'native': threads on NumPy have no collectives of their own; choose direct or ring, or "
                "start it with --world mpi, or on several GPUs with --backend cuda"
            )
        if self.ranks_per_process > 1 and self.transport != "mpi":
            raise InputError(f"ranks_per_process {self.ranks_per_process}: of --world mpi alone; give --ranks instead")
        if self.algorithm == "native" and self.ranks_per_process > 1:
            raise InputError(
                f"ranks_per_process {self.ranks_per_process}: native collectives want one rank per process; "
                "choose --collective direct or ring"
            )
