"""The flags of a run, and the RunConfig that they and a scenario file make.

Every flag is a field of `RunConfig`; only flags that were given override the scenario. Values are
judged by `RunConfig` itself: what is said here is only where a bad one came from.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from zerosim.cli.parser import Parser, count, dynamic_or_number, number, or_none, size, utf8, whole_number
from zerosim.config import CHOICES, PLAN_DEFAULTS, RunConfig, read_scenario
from zerosim.config.launcher import is_launched, mpirun_size, size_name
from zerosim.errors import InputError

_FIELDS = {field.name: field.default for field in dataclasses.fields(RunConfig) if field.init}


class _Group:
    """A titled group of flags. `value` and `switch` each add one, named after its field."""

    def __init__(self, parser: Parser, title: str, defaults: Mapping[str, Any]) -> None:
        self._group = parser.add_argument_group(title)
        self._defaults = defaults

    def value(
        self,
        field: str,
        metavar: str | tuple[str, ...],
        help: str,
        *,
        convert: Callable[[str], Any] = str,
        also: tuple[str, ...] = (),
        default: str | None = None,
        nargs: int | None = None,
    ) -> None:
        """A flag with a value. `also` are other names that people type for it."""
        if field in CHOICES:
            metavar = "|".join(CHOICES[field])
        shown = self._defaults.get(field, default if default is not None else _FIELDS[field])
        self._group.add_argument(
            _flag(field),
            *also,
            dest=field,
            metavar=metavar,
            help=f"{help} (default: {shown})".replace("%", "%%"),
            type=convert,
            default=argparse.SUPPRESS,
            nargs=nargs,
        )

    def switch(self, field: str, help: str) -> None:
        """--field and --no-field."""
        default = _FIELDS[field]
        state = "the model's or the recipe's" if default is None else "on" if default else "off"
        self._group.add_argument(
            _flag(field),
            dest=field,
            help=f"{help} (default: {state})",
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
        )


def add_run_flags(parser: Parser, *, stage: bool = True, planning: bool = False) -> None:
    """Every field of RunConfig as a flag; `stage` apart, for a verb that runs several stages.

    With `planning`, a plan's defaults, and without what needs values (files, a sample) or threads.
    """
    defaults = {**PLAN_DEFAULTS, "steps": 1, "bucket_bytes": "none"} if planning else {}

    def titled(title: str) -> _Group:
        return _Group(parser, title, defaults)

    parser.add_argument("scenario", nargs="?", metavar="SCENARIO.toml", help="a run's values; flags override them")

    group = titled("ranks and stage")
    if stage:
        group.value(
            "stage", "0..3", "ZeRO stage: 0 is DDP, 1 divides the optimizer states by N, 2 also the gradients, "
            "3 also the parameters", convert=whole_number, also=("--zero-stage", "-z"),
        )  # fmt: skip
    group.value(
        "ranks", "N", "virtual ranks, each a device of its own", convert=whole_number,
        default="4; with --world mpi what mpirun started",
        also=("--world-size", "--num-gpus", "--nproc-per-node"),
    )  # fmt: skip
    group.value(
        "dp_replicate", "R", "copies of the model states (HSDP): each is divided among N/R ranks, and gradients are "
        "averaged over the R ranks that hold the same part", convert=whole_number, also=("--dp-replicas",),
    )  # fmt: skip
    group.value("replica_reduction", "", "with --dp-replicate: when they are; once a step, or in each micro-batch")
    group.value("partition", "", "what a rank owns: equal slices of every unit, or whole units")
    group.value(
        "collective",
        "",
        "direct: one round, sums in rank order; ring: N-1 rounds, rounded at each hop; native: MPI's or NCCL's own",
    )
    group.value(
        "bucket_bytes", "SIZE", "the most that one collective moves per call; none: one call per unit",
        convert=or_none(size), default="25MiB",
    )  # fmt: skip
    group.switch(
        "reshard_after_forward", "stage 3: free a unit after forward; without, it stays gathered (FSDP's 2Psi)"
    )
    group.switch("keep_last_unit", "stage 3: the last unit stays gathered from forward to backward")
    if not planning:
        group.value(
            "capacity", "SIZE", "memory of each device, such as 32GB or 512MiB; exceeding it ends the run",
            convert=or_none(size), default="no limit",
        )  # fmt: skip
        group.value("parallel", "K", "ranks that run side by side; 1: they take turns", convert=whole_number)
        group.value("backend", "", "numpy, or cuda: the same program on GPUs, through CuPy")
        group.value("world", "", "ranks as threads, or in the processes that mpirun started")
        group.value(
            "ranks_per_process", "R", "with --world mpi: ranks in each process, as threads", convert=whole_number
        )

    group = titled("model")
    group.value(
        "model", "NAME", "gpt, llama, mlp, flat; a preset such as gpt2-xl, gpt3-175b, 1t, llama3-8b (zerosim zoo lists "
        "them); or a Hugging Face config.json",
    )  # fmt: skip
    of_model = "the model's"
    group.value("layers", "L", "blocks", convert=whole_number, default=of_model)
    group.value("hidden", "D", "width", convert=whole_number, default=of_model)
    group.value("heads", "H", "attention heads; they divide the width", convert=whole_number, default=of_model)
    group.value("kv_heads", "KV", "llama: heads of keys and values", convert=whole_number, default=of_model)
    group.value("ffn", "F", "width of the feed-forward", convert=whole_number, default=of_model)
    group.value("seq", "T", "tokens per row: the context", convert=whole_number, also=("--seq-len",), default=of_model)
    group.value("positions", "T", "gpt: rows of the position table", convert=whole_number, default=of_model)
    group.value("vocab", "V", "token ids; 256 for bytes", convert=whole_number, default=of_model)
    group.switch("tie_embeddings", "the head is the token table")
    group.value("dropout", "P", "chance that an activation is dropped", convert=number, default=of_model)
    group.value("norm_eps", "EPS", "added to a norm's variance", convert=number, default=of_model)
    group.value("rope_base", "BASE", "llama: base of the rotary angles", convert=number, default=of_model)
    group.value("params", "COUNT", "flat: parameters, such as 7.5B", convert=count, default=of_model)
    group.value("units", "U", "flat: units that they are cut into", convert=whole_number, default=of_model)

    group = titled("activations")
    group.value("recompute", "", "what backward runs again instead of keeping: the attention core, or whole blocks")
    group.value("saves", "", "what is kept for backward: as zerosim's own kernels need it, or as Megatron's")
    group.value("attention", "", "eager holds the scores (B, H, T, T); flash never does")

    group = titled("recipe")
    group.value("recipe", "paper|deepspeed|fsdp2|megatron", "whose ZeRO: sets the flags below that are not given")
    of_recipe = "the recipe's"
    group.value("grad_reduction", "", "stages 1 and 2: how gradients are reduced", default=of_recipe)
    group.switch("upcast_grads", "the optimizer step copies its gradients to fp32 first")
    group.switch("keep_root_units", "stage 3: units outside the blocks stay gathered from forward to backward")
    group.value(
        "persistent_numel", "COUNT", "stage 3: units with fewer elements stay gathered", convert=whole_number,
        default=of_recipe,
    )  # fmt: skip
    group.switch("cast_shards", "stage 3: 2-byte shards are cast from the masters at each gather, not stored")

    group = titled("training")
    group.value("steps", "S", "optimizer steps", convert=whole_number, default="60, or all that --tokens holds")
    group.value("micro_batch", "B", "rows per rank and micro-batch", convert=whole_number, also=("--mbs",))
    group.value(
        "accumulate", "A", "micro-batches per step; the global batch is N*A*B rows", convert=whole_number,
        also=("--grad-acc-steps", "--gradient-accumulation-steps"),
    )  # fmt: skip
    group.value("optimizer", "", "which optimizer")
    group.value("lr", "LR", "learning rate", convert=number)
    group.value("betas", ("B1", "B2"), "Adam's two averages", convert=number, nargs=2, default="0.9 0.999")
    group.value("eps", "EPS", "Adam's epsilon, outside the root", convert=number)
    group.value("momentum", "M", "SGD's momentum", convert=number)
    group.value("weight_decay", "W", "weight decay", convert=number, default="0.01 for adamw, else 0")
    group.value("decay", "", "which parameters decay")
    group.value("schedule", "", "learning rate over the steps")
    group.value("warmup", "STEPS", "steps of linear warm-up", convert=whole_number)
    group.value("min_lr", "LR", "where cosine ends", convert=number)
    group.value(
        "clip_norm", "NORM", "clip gradients to this global norm", convert=or_none(number), default="no clipping"
    )
    group.value("seed", "SEED", "of weights, batches and dropout", convert=whole_number)

    group = titled("precision")
    group.value("precision", "", "of parameters; half types have fp32 masters", also=("--dtype",))
    group.value("grad_dtype", "", "that gradients are kept and sent in", default="the recipe's, or the parameters'")
    group.value("master_init", "", "fp32 masters start from rounded or exact weights")
    group.value(
        "loss_scale", "dynamic|NUMBER", "what the loss is multiplied by", convert=or_none(dynamic_or_number),
        default="dynamic for fp16, else none",
    )  # fmt: skip
    group.value("initial_scale_power", "P", "the dynamic scale starts at 2^P", convert=whole_number)
    group.value("loss_scale_window", "STEPS", "clean steps until the scale doubles", convert=whole_number)
    group.value("hysteresis", "H", "the scale halves at the H-th overflow", convert=whole_number)
    group.value("min_loss_scale", "SCALE", "an overflow there is an error", convert=number)
    group.switch("skip_nonfinite", "skip a step whose gradients are not finite instead of stopping")

    if planning:
        return
    group = titled("data and weights")
    group.value("data", "FILE", "any file, read as bytes", default="the packaged primer on ZeRO")
    group.value("tokens", "IN.npz", "int64 array 'tokens' (steps, global batch, seq + 1)", default="from --data")
    group.value("weights", "IN.npz", "full parameters by name to start from", default="drawn from --seed")
    group.value("sample", "TEXT", "let the trained model continue this text", convert=utf8, default="no sample")
    group.value("sample_tokens", "COUNT", "tokens to continue it with", convert=whole_number)


def run_config(args: argparse.Namespace, defaults: Mapping[str, Any] | None = None) -> RunConfig:
    """`defaults` (a verb's own), the scenario's values over them, and the given flags over both.

    Raises: InputError that names the flag or the scenario with the bad value.
    """
    given = {name: value for name, value in vars(args).items() if name in _FIELDS}
    path = args.scenario
    values = {} if path is None else read_scenario(path)
    try:
        return RunConfig.from_dict({**(defaults or {}), **values, **given}, source=f"scenario {path}")
    except InputError as error:
        match = re.match(r"\w+", str(error))
        field = match[0] if match else ""
        if field in given:
            raise InputError(_flag(field) + str(error)[len(field) :]) from None
        raise InputError(f"scenario {path}: {error}" if field in values else str(error)) from None


def training_config(args: argparse.Namespace) -> RunConfig:
    """`run_config` for a verb that trains: not as many times over as mpirun started processes.

    Raises: InputError as `run_config` does.
    """
    config = run_config(args)
    processes = mpirun_size() or 1
    if config.world == "threads" and processes > 1 and is_launched():
        raise InputError(
            f"mpirun started {processes} processes, and each would train all {config.ranks} ranks: add --world mpi, or "
            f"start one process; where no mpirun did, unset {size_name()}"
        )
    return config


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
