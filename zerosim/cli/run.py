"""`zerosim run`: train once, write the requested files, then show the results.

Files are written before the summary, so that a closed pipe loses none of them.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TextIO

from zerosim.cli.files import add_write_flag, files_of
from zerosim.cli.options import add_run_flags, training_config
from zerosim.cli.outputs import Output, as_json, human_stream, output, show, written
from zerosim.cli.parser import Parser, flag_of
from zerosim.cli.released import released_output, write_weights
from zerosim.cli.streams import one_voice
from zerosim.config import RunConfig
from zerosim.errors import DIFFERENCE, InputError

if TYPE_CHECKING:
    from zerosim.train.result import RunResult


def add_arguments(parser: Parser) -> None:
    add_run_flags(parser)
    add = parser.add_argument_group("output").add_argument
    folder = "or a folder as transformers"
    add("--save-weights", metavar="OUT.npz|DIR", help=f"the trained parameters, whole, by name; {folder} reads it")
    add("--save-adapters", metavar="OUT.npz|DIR", help=f"with --lora-rank: the adapters alone; {folder}' PEFT reads it")
    merged = "with --lora-rank: the weights with their adapters added to them"
    add("--save-merged", metavar="OUT.npz|DIR", help=f"{merged}; {folder} reads it")
    add("--json", metavar="OUT.json", help="every figure of the run; - for stdout")
    beside = "with --backend cuda: the ledger beside CuPy's memory pool, at every mark; 1 where they disagree"
    add("--verify-memory", action="store_true", help=beside)
    add_write_flag(add)
    add("--quiet", "-q", action="store_true", help="no progress and no summary")


def main(args: argparse.Namespace) -> int:
    config = training_config(args)
    with one_voice(config.world.transport) as is_first:
        outputs = list[Output | None]()  # rank 0's process writes for all
        for flag in ("save_weights", "save_adapters", "save_merged"):
            if flag != "save_weights" and getattr(args, flag) is not None and not config.tuning.lora_rank:
                raise InputError(
                    f"{flag_of(flag)}: no adapters are trained; pass --lora-rank, or --save-weights instead"
                )
            outputs.append(released_output(args, flag, config, outputs) if is_first else None)
        weights, adapters, whole = outputs
        figures = output(args, "json", config, apart=outputs) if is_first else None
        files = files_of(args, config) if is_first else None
        if args.verify_memory and config.world.backend != "cuda":
            why = "NumPy has no memory pool to compare with; pass --backend cuda"
            raise InputError(f"--verify-memory: {why}")
        stream = human_stream(args)
        if not args.quiet and is_first:
            _tell_start(args, config)
        result = train(config, stream, quiet=args.quiet)
        from zerosim.models.adapters import adapters_of, merged
        from zerosim.report.pools import pools_agree, pools_table
        from zerosim.report.tables import sample_text, summary

        with written(
            (weights, lambda out: write_weights(out, result.weights, config, weights)),
            (adapters, lambda out: write_weights(out, adapters_of(result.weights), config, adapters)),
            (whole, lambda out: write_weights(out, merged(result.weights, config), config, whole)),
            (figures, as_json(result.to_dict)),
            *([] if files is None else files.fills()),
        ):
            if not args.quiet:
                print(file=stream)
                show(args, summary(result))
                if files is not None:
                    print(f"\n{files.text()}", file=stream)
            elif result.sample is not None and args.json != "-":
                show(args, sample_text(result))
        if not args.verify_memory:
            return 0
        print(file=stream)
        show(args, pools_table(result))
        return 0 if pools_agree(result) else DIFFERENCE


def _tell_start(args: argparse.Namespace, config: RunConfig) -> None:
    """Say which saved step a run goes on from, and what is not the same there."""
    from zerosim.report.saving_start import start_text

    if (text := start_text(config)) is not None:
        show(args, text)


def train(config: RunConfig, stream: TextIO, *, quiet: bool) -> RunResult:
    """Train with progress on `stream`."""
    from zerosim.analysis.advice import run
    from zerosim.comm.rank_status import ranks_text
    from zerosim.report.names import STAGES
    from zerosim.report.progress import progress_on
    from zerosim.train.run import DEFAULT_STEPS

    steps = config.optim.steps or (None if config.data.tokens else DEFAULT_STEPS)
    here = config.mesh.ranks if config.world.transport == "threads" else config.world.ranks_per_process
    title = f"{STAGES[config.parallel.zero_stage]:6}"
    if here < config.mesh.ranks:  # a process receives only its own ranks' losses until the run is over
        title += f" {ranks_text(range(here))}"
    each, last = config.mesh.ranks // config.mesh.pp, config.chunks.last_stage
    reporting = min(max(0, here - last * each), each)  # losses arise on the pipeline stage of the last chunk
    with progress_on(stream, reporting, steps, title, quiet=quiet) as progress:
        return run(config, progress=progress)
