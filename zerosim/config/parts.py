"""The parts of a configuration: every field once, with its default, range, choices and help (`option.py`).

A part checks itself; `checks.py` checks across parts. Four parts are here; `PARTS` has them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_type_hints

from zerosim.config.allocator import NAMES as ALLOCATORS
from zerosim.config.allocator import check_knobs
from zerosim.config.clock import ClockConfig
from zerosim.config.model import ModelConfig
from zerosim.config.offload import OffloadConfig
from zerosim.config.optim import OptimConfig
from zerosim.config.option import OF_RECIPE, Option, Part, option
from zerosim.config.parallel import MeshConfig, ParallelConfig
from zerosim.config.recompute import FORMS, Recomputed, read_recompute
from zerosim.config.recompute import PARTS as PARTS_OF_BLOCK
from zerosim.config.tuning import TuningConfig
from zerosim.config.zero import Gathering, GradMemory, Reduction
from zerosim.errors import wrong
from zerosim.units import MOST_BYTES, parse_bytes

FLOATS = ("fp32", "bf16", "fp16", "fp64")
PURE = "bf16-pure"
ROUNDINGS = ("nearest", "stochastic", "kahan")
LOSSES = (
    *("in-place", "lean", "megatron", "megatron-fused", "megatron-compiled"),
    *("torch", "torch-kept", "torch-fp32-kept", "chunked"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig(Part):
    """Number formats, and the loss scale for half types."""

    param_dtype: str = option(
        "bf16", "dtype of the parameters. Half types have fp32 masters; bf16-pure has none", flat="precision",
        choices=(*FLOATS, PURE), also=("--dtype",),
    )  # fmt: skip
    grad_dtype: str = option(
        "bf16",
        "dtype in which gradients are stored and sent",
        choices=FLOATS,
        follows="the recipe's, or the parameters'",
    )
    master_init: str = option(
        "rounded", "fp32 masters start from rounded or exact weights", choices=("rounded", "exact")
    )
    rounding: str | None = option(
        None, "bf16-pure: how updated weights are rounded. kahan stores the rounding error in 2 more bytes",
        choices=ROUNDINGS, follows="nearest",
    )  # fmt: skip
    loss_scale: str | float | None = option(
        None, "factor that the loss is multiplied by", metavar="dynamic|NUMBER", follows="dynamic for fp16, else none"
    )
    initial_scale_power: int = option(16, "the dynamic scale starts at 2^P", low=0, high=126, metavar="P")
    loss_scale_window: int = option(1000, "steps without an overflow until the scale doubles", low=1, metavar="STEPS")
    hysteresis: int = option(2, "the scale halves at the H-th overflow", low=1, metavar="H")
    min_loss_scale: float = option(1.0, "an overflow at this scale is an error", above=0, metavar="SCALE")
    skip_nonfinite: bool = option(False, "skip a step whose gradients are not finite instead of stopping")

    def _check(self) -> None:
        scale = self.loss_scale
        if scale is not None and scale != "dynamic" and (isinstance(scale, str) or not scale > 0):
            raise wrong("loss_scale", f" {scale!r}: expected 'dynamic' or a number more than 0")
        if self.param_dtype != PURE:
            if self.rounding is not None:
                raise wrong(
                    "rounding", f" {self.rounding!r}: only a pure half type is rounded; choose precision {PURE}"
                )
        elif scale is not None:
            raise wrong("loss_scale", f" {scale!r}: {PURE} has the range of fp32 and needs no loss scale; leave it out")
        elif self.master_init == "exact":
            raise wrong("master_init", f" 'exact': {PURE} has no masters; leave it out, or choose precision bf16")

    @property
    def is_pure(self) -> bool:
        """Whether 2-byte parameters have no fp32 masters."""
        return self.param_dtype == PURE

    @property
    def stored(self) -> str:
        """The format in which parameters are stored."""
        return "bf16" if self.is_pure else self.param_dtype

    @property
    def has_masters(self) -> bool:
        """Whether parameters have fp32 masters."""
        return self.param_dtype in ("bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Part):
    """The data: files, how a batch is made of them, the seed; and the text that the model continues at the end."""

    micro_batch: int = option(4, "rows per rank and microbatch", low=1, high=10**7, metavar="B", also=("--mbs",))
    accumulate: int = option(
        1, "microbatches per step; the global batch is N*A*B rows", low=1, high=10**7, metavar="A",
        also=("--grad-acc-steps", "--gradient-accumulation-steps"),
    )  # fmt: skip
    seed: int = option(0, "seed of weights, batches and dropout", low=0, high=2**63 - 1, metavar="SEED")
    file: str | None = option(
        None,
        "text to train on: any file, read as bytes",
        flat="data",
        metavar="FILE",
        shown="the packaged primer on ZeRO",
    )
    tokens: str | None = option(
        None,
        "tokens to train on: an int64 array 'tokens' of shape (steps, global batch, seq + 1)",
        metavar="IN.npz",
        shown="from --data",
    )
    weights: str | None = option(
        None, "full parameters to start from, by name; or a released model's: a folder with its safetensors, or such a "
        "file", metavar="IN.npz|DIR", shown="drawn from --seed",
    )  # fmt: skip
    tokenizer: str | None = option(
        None, "tokenizer.json that turns --data and --sample into tokens", metavar="FILE", shown="bytes"
    )
    sample: str | None = option(None, "let the trained model continue this text", metavar="TEXT", shown="no sample")
    sample_tokens: int = option(200, "number of tokens that continue --sample", low=1, high=100_000, metavar="COUNT")

    def _check(self) -> None:
        if self.tokenizer is not None and self.tokens is not None and self.sample is None:
            why = "tokens are numbers already; leave it out, or pass data or a sample"
            raise wrong("tokenizer", f" {self.tokenizer!r}: {why}")
        if self.sample == "":
            raise wrong("sample", " '': expected at least one character to continue")
        try:
            (self.sample or "").encode()
        except UnicodeEncodeError:
            raise wrong("sample", f" {self.sample!r}: expected text in UTF-8") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig(Part):
    """What is saved for backward, and how much a device holds."""

    recompute: str = option(
        "none", "activations that backward recomputes instead of saving: the attention core, a list of parts of every "
        f"block ({', '.join(PARTS_OF_BLOCK)}), every block or every K-th block", metavar=FORMS, parse=str.lower,
    )  # fmt: skip
    partition_activations: bool = option(
        False, "with --tp and --recompute full: divide the checkpointed input of a block among the ranks of tp "
        "(ZeRO-R's Pa)",
        also=("--distribute-saved-activations",),
    )  # fmt: skip
    cpu_checkpointing: bool = option(
        False,
        "with --recompute full: checkpointed inputs of blocks wait in host memory (with "
        "--partition-activations: Pa+cpu)",
    )
    offload_activations: bool = option(
        False, "copy the buffers that blocks save for backward to host memory, and back before their backward "
        "(torchtune's activation offloading, PyTorch's save_on_cpu)", also=("--enable-activation-offloading",),
    )  # fmt: skip
    stash_window: int = option(
        0, "with --cpu-checkpointing or --offload-activations: copy in streams beside compute, with at most N in "
        "flight to the host (torchtune's max_fwd_stash_size, 5 there); 0: compute waits for each copy", low=0,
        high=4096, metavar="N", also=("--max-fwd-stash-size",),
    )  # fmt: skip
    saves: str = option(
        "lean", "tensors saved for backward: those that zerosim's own kernels need, or those that Megatron's save",
        choices=("lean", "megatron"),
    )  # fmt: skip
    attention: str = option(
        "eager",
        "eager attention stores the scores (B, H, T, T); flash attention never does",
        choices=("eager", "flash"),
    )
    fp32_softmax: bool = option(
        False, "eager attention keeps its softmax in fp32, beside the half-type copy that the product reads, as "
        "Megatron's does without a fused kernel", also=("--attention-softmax-in-fp32",), follows=OF_RECIPE,
    )  # fmt: skip
    loss: str = option(
        "lean", "copies that the loss makes of its logits: none (in-place), as in zerosim (lean), Megatron or PyTorch, "
        "or logits for some tokens at a time (chunked)", choices=LOSSES, follows=OF_RECIPE,
    )  # fmt: skip
    capacity: int | None = option(
        None, "memory of each device, such as 32GB or 512MiB; exceeding it ends the run", low=1, high=MOST_BYTES,
        metavar="SIZE", shown="no limit", parse=parse_bytes,
    )  # fmt: skip
    allocator: str = option(
        "exact", "how a device hands out memory: exactly the bytes requested, like PyTorch's caching allocator, or "
        "from one contiguous region",
        choices=ALLOCATORS,
    )  # fmt: skip
    allocator_conf: str | None = option(
        None, "the allocator's settings, as in PYTORCH_CUDA_ALLOC_CONF. For arena: fit:best|first, "
        "defragment:True|False",
        metavar="KNOB:VALUE,...", shown="PyTorch's; fit:best,defragment:True", also=("--pytorch-cuda-alloc-conf",),
    )  # fmt: skip

    def _check(self) -> None:
        check_knobs(self.allocator, self.allocator_conf)
        read_recompute(self.recompute)

    @property
    def again(self) -> Recomputed:
        """The value of `recompute`, parsed."""
        return read_recompute(self.recompute, self.attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig(Part):
    """The ranks' machine, and how they exchange."""

    backend: str = option(
        "numpy", "numpy runs on the CPU; cuda runs the same program on GPUs, through CuPy", choices=("numpy", "cuda")
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
        flat="collective", choices=("direct", "ring", "pairs", "native"),
    )  # fmt: skip
    max_running: int = option(
        1, "ranks that run at the same time; 1: ranks take turns", flat="parallel", low=1, metavar="K"
    )

    def _check(self) -> None:
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


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run, by their names in `RunConfig`."""

    model: ModelConfig
    mesh: MeshConfig
    parallel: ParallelConfig
    reduction: Reduction
    gathering: Gathering
    grads: GradMemory
    tuning: TuningConfig
    precision: PrecisionConfig
    optim: OptimConfig
    data: DataConfig
    memory: MemoryConfig
    offload: OffloadConfig
    world: WorldConfig
    clock: ClockConfig


PARTS: Mapping[str, type[Part]] = MappingProxyType(get_type_hints(Parts))
OPTIONS: Mapping[str, Option] = MappingProxyType(
    {flat: option for kind in PARTS.values() for flat, option in kind.options().items()}
)
"""Every field of a run by its flat name."""
