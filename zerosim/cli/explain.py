"""`zerosim explain`: the closed forms with one's own numbers put in. Nothing is run and nothing is counted."""

from __future__ import annotations

import argparse
import math

from zerosim.analysis.question import Question, Shape
from zerosim.cli.outputs import as_json, output, show, written
from zerosim.cli.parser import Parser, count, flag_of, number, whole_number
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.option import known_word
from zerosim.config.parallel import ParallelConfig, right_sizes
from zerosim.config.parts import PURE
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.config.presets.recipes import NAMES
from zerosim.config.recompute import read_recompute
from zerosim.errors import InputError, did_you_mean

PRECISIONS = ("bf16", "fp16", "fp32", PURE)
OF_RUN = ("stage", "recipe", "gather", "precision", "rounding", "optimizer", "momentum")
SHAPE = ("hidden", "layers", "heads", "seq", "micro_batch")
MOST_PARAMETERS = 10**15
MOST_RANKS = 1_000_000
MOST_SIZE = 10**9


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument_group("the question").add_argument
    stage = OPTIONS["stage"].help
    add("--stage", "--zero-stage", "-z", metavar="0..3", type=whole_number, required=True, help=stage)
    add("--params", metavar="COUNT", type=count, required=True, help="parameters, such as 7.5B, 350M or 124439808")
    ranks = "data-parallel ranks"
    add("--ranks", "--world-size", "--num-gpus", metavar="N", type=whole_number, required=True, help=ranks)
    copies = "copies of the model states (HSDP): each is divided among N/R ranks (default: 1)"
    add("--dp-replicate", metavar="R", type=whole_number, default=1, help=copies)
    add("--tp", "--tensor-parallel", metavar="T", type=whole_number, default=1, help="tensor parallelism (default: 1)")
    add("--pp", "--pipeline-parallel", metavar="P", type=whole_number, default=1, help="pipeline stages (default: 1)")
    orders = OPTIONS["pipeline"]
    add("--pipeline", metavar="|".join(orders.choices), help=f"{orders.help} (default: 1f1b)")
    add("--sequence-parallel", "--sp", action="store_true", help="with --tp: activations are cut by rows as well")
    add("--recipe", metavar="|".join(NAMES), help="whose ZeRO (default: paper)")
    add("--gather", metavar="unit|module", help="stage 3: what is gathered at a time (default: the recipe's)")
    precision = f"of parameters; 2-byte types have fp32 masters, {PURE} has none (default: bf16)"
    add("--precision", "--dtype", metavar="|".join(PRECISIONS), help=precision)
    roundings = "|".join(OPTIONS["rounding"].choices)
    add("--rounding", metavar=roundings, help=f"of {PURE}; kahan takes 2 bytes more (default: nearest)")
    add("--optimizer", metavar="|".join(OPTIMIZERS), help="which (default: adam)")
    add("--momentum", metavar="M", type=number, help="SGD's momentum (default: 0)")
    batches = "micro-batches per step, for the volume (default: 1)"
    add("--accumulate", "--grad-acc-steps", metavar="A", type=whole_number, default=1, help=batches)
    add = parser.add_argument_group("activations: all five sizes, or none of them").add_argument
    add("--hidden", metavar="H", type=whole_number, help="width")
    add("--layers", metavar="L", type=whole_number, help="blocks")
    add("--heads", metavar="A", type=whole_number, help="attention heads")
    add("--seq", "--seq-len", metavar="S", type=whole_number, help="tokens per row")
    add("--micro-batch", "--mbs", metavar="B", type=whole_number, help="rows per rank")
    add(
        "--recompute",
        metavar="none|selective[:PART,...]|full",
        help="what backward computes again, of every block (default: none)",
    )
    parts = "with --tp and --recompute full: ranks of tp keep parts of blocks' inputs (ZeRO-R's Pa)"
    add("--partition-activations", action="store_true", help=parts)
    waits = "with --recompute full: blocks' inputs wait in the host's memory (with parts: Pa+cpu)"
    add("--cpu-checkpointing", action="store_true", help=waits)
    add = parser.add_argument_group("what it leaves").add_argument
    add("--json", metavar="OUT.json", help="every term; - for stdout")


def main(args: argparse.Namespace) -> int:
    asked = question(args)
    figures = output(args, "json")
    from zerosim.report.explain import Explanation

    explanation = Explanation(asked)
    with written((figures, as_json(explanation.to_dict))):
        show(args, explanation)
    return 0


def question(args: argparse.Namespace) -> Question:
    """What was asked, with every value in its bounds. Raises: InputError naming the flag."""
    _within("--params", args.params, 1, MOST_PARAMETERS)
    _within("--ranks", args.ranks, 1, MOST_RANKS)
    _check_mesh(args)
    _within("--accumulate", args.accumulate, 1, MOST_SIZE)
    if args.precision is not None:
        args.precision = _one_of("--precision", args.precision, PRECISIONS)
    try:
        config = RunConfig(model="flat", **{name: getattr(args, name) for name in OF_RUN})
    except InputError as error:
        raise error.called(flag_of(error.field)) from None
    if args.dp_replicate > 1 and args.stage == 0:
        raise InputError(f"--dp-replicate {args.dp_replicate}: stage 0 has none of it; leave it out")
    preset = OPTIMIZERS[config.optim.optimizer]
    if preset.cut != "elements":
        raise InputError(
            f"--optimizer {args.optimizer}: what it keeps of a parameter depends on the tensor that it is in; "
            "zerosim plan counts it"
        )
    if preset.estimates_every and args.tp > 1:
        raise InputError(f"--tp {args.tp}: {args.optimizer} draws labels from whole logits; choose --tp 1")
    return Question(
        config,
        num_parameters=args.params,
        ranks=args.ranks,
        replicas=args.dp_replicate,
        tp=args.tp,
        pp=args.pp,
        pipeline=_pipeline(args),
        sequence_parallel=args.sequence_parallel,
        micro_batches=args.accumulate,
        shape=_shape(args),
    )


def _check_mesh(args: argparse.Namespace) -> None:
    """Sizes whose product divides the ranks. Raises: InputError."""
    sizes = {"--dp-replicate": args.dp_replicate, "--tp": args.tp, "--pp": args.pp}
    for flag, size in sizes.items():
        _within(flag, size, 1, args.ranks)
    if args.ranks % math.prod(sizes.values()):
        given = " ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
        right = right_sizes(args.ranks, sizes, MOST_RANKS).replace("ranks", "--ranks")
        raise InputError(f"{given} does not divide --ranks {args.ranks}: choose {right}")
    if args.sequence_parallel and args.tp == 1:
        raise InputError("--sequence-parallel: cut over tensor-parallel ranks, of which there is one; pass --tp too")


def _pipeline(args: argparse.Namespace) -> ParallelConfig:
    """The schedule of as many micro-batches as it takes. Raises: InputError."""
    if args.pipeline is None:
        return ParallelConfig()
    if args.pp == 1:
        raise InputError("--pipeline: without pp there are no stages; pass --pp 2 or more, or leave it out")
    found = ParallelConfig(pipeline=_one_of("--pipeline", args.pipeline, OPTIONS["pipeline"].choices))
    fewest, step = found.micro_batches(args.pp)
    if args.accumulate < fewest or args.accumulate % step:
        right = f"a multiple of {step}" if step > 1 else f"at least {fewest}"
        raise InputError(f"--accumulate {args.accumulate}: {found.pipeline} takes {right} micro-batches")
    return found


def _shape(args: argparse.Namespace) -> Shape | None:
    """All sizes that activations depend on, or none of them."""
    kept = {name: getattr(args, name) for name in ("partition_activations", "cpu_checkpointing")}
    for name, given in kept.items():
        if given and args.recompute != "full":
            raise InputError(f"{flag_of(name)}: every block's input is kept with --recompute full alone; pass it too")
    if args.partition_activations and args.tp == 1:
        raise InputError("--partition-activations: tensor-parallel ranks keep parts, and there is one; pass --tp too")
    values = {name: getattr(args, name) for name in SHAPE}
    missing = [flag_of(name) for name, value in values.items() if value is None]
    if len(missing) == len(SHAPE) and args.recompute is None:
        return None
    if missing:
        needed = ", ".join(map(flag_of, SHAPE))
        raise InputError(f"{', '.join(missing)} missing: activations need all of {needed}; or leave all of them out")
    if args.recompute is not None:
        args.recompute = _one_block(args.recompute.lower())
    for name, value in values.items():
        _within(flag_of(name), value, 1, MOST_SIZE)
    if args.hidden % args.heads:
        raise InputError(f"--heads {args.heads} do not divide --hidden {args.hidden}: choose heads that do")
    return Shape(**values, recompute=args.recompute or "none", **kept)


def _one_block(text: str) -> str:
    """`--recompute` where every block runs the same again. Raises: InputError."""
    try:
        again = read_recompute(text)
    except InputError as error:
        raise error.called("--recompute") from None
    if again.every > 1:
        raise InputError(f"--recompute {text!r}: the formulas are of one block; choose full, or ask zerosim plan")
    return "full" if again.every else text


def _within(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        shown = str(value) if abs(value) < 10**20 else f"{value:.3g}"
        raise InputError(f"{flag} {shown}: expected at least {low:,} and at most {high:,}")


def _one_of(flag: str, value: str, choices: tuple[str, ...]) -> str:
    """The choice that was meant. Raises: InputError, with the nearest."""
    meant = known_word(value, choices)
    if meant is None:
        near = did_you_mean(value, choices, "")
        raise InputError(f"{flag} {value!r}: expected one of {', '.join(choices)}{near and '; '}{near}")
    return meant
