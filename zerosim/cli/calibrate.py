"""`zerosim calibrate`: measure this machine for the clock, and print how well the clock then predicts measured
steps."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerosim.cli.outputs import as_json, human_stream, output, show, written
from zerosim.cli.parser import Parser, whole_number
from zerosim.cli.streams import one_voice, stopwatch
from zerosim.config.parts.precision import FLOATS
from zerosim.errors import InputError, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zerosim.bench.predict import Compared
    from zerosim.config.presets.hardware import Hardware
    from zerosim.config.presets.machine_file import Machine

WORDS = ("none", "small", "all")


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--out",
        "-o",
        metavar="FILE.toml",
        help="file for the measured machine, to pass as --gpu to plan, plot and export",
    )
    add("--precision", choices=FLOATS, default="fp32", help="what kernels compute in (default: fp32)")
    add("--ranks", metavar="N", type=whole_number, default=2, help="ranks at work at the same time (default: 2)")
    add("--world", "--transport", choices=("threads", "mpi"), default="threads",
        help="ranks as threads, or in the processes that mpirun started (default: threads)")  # fmt: skip
    add("--steps", choices=WORDS, default="all",
        help="models whose steps are predicted and measured: none, the smallest, or three (default: all)")  # fmt: skip
    add("--passes", metavar="P", type=whole_number, default=3,
        help="number of passes over the steps; more passes find a quieter moment (default: 3)")  # fmt: skip
    add("--quick", action="store_true", help="few sizes, each measured twice: seconds instead of minutes")
    add("--json", metavar="OUT.json", help="all of it; - for stdout")
    add("--quiet", "-q", action="store_true", help="no progress and no tables")


def main(args: argparse.Namespace) -> int:
    """Measure and print. Return 0 for any error of the clock: it is a figure, not a check.

    Raises: InputError for files that cannot be written and for less than two ranks, before anything is measured.
    """
    if args.ranks < 2:
        raise InputError(f"--ranks {args.ranks}: expected at least 2, a collective needs two ranks")
    if args.passes < 1:
        raise InputError(f"--passes {args.passes}: expected at least 1")
    if not hasattr(os, "sysconf"):
        raise InputError("calibrate: this platform does not say how much memory it has; calibrate on Linux or macOS")
    with one_voice(args.world) as is_first:
        file = output(args, "out") if is_first else None
        figures = output(args, "json", apart=[file]) if is_first else None
        from zerosim.bench.calibrate import FULL, QUICK, measure_machine
        from zerosim.bench.machine import OtherLoad
        from zerosim.bench.predict import MODELS, compare, said_error
        from zerosim.config.presets.cluster import cluster_of
        from zerosim.config.presets.machine_file import machine_text

        progress, gather = stopwatch(quiet=args.quiet), None
        if args.world == "mpi":
            from zerosim.comm.transports.mpi.session import mpi_session

            mpi_session().check_world(args.ranks, 1)
            gather = mpi_session().exchange

        load = OtherLoad()
        device = measure_machine(
            QUICK if args.quick else FULL, args.precision, args.ranks, progress, transport=args.world, gather=gather
        )
        machine = device.machine
        assert machine is not None
        compared: list[Compared] = []
        if args.steps != "none":
            models = dict(list(MODELS.items())[: 1 if args.steps == "small" else None])
            passes = 1 if args.quick else args.passes
            compared = compare(models, cluster_of(device), progress, passes=passes, gather=gather)
            machine = replace(machine, known_error=said_error(compared))
        others = load.share() if args.world == "threads" else None
        text = machine_text(machine, _keys(device))
        values = {"schema": 1, "device": _keys(device), **_values(machine), "others": others}
        values["steps"] = [one.to_dict() for one in compared]
        with written((file, lambda out: out.write(text.encode())), (figures, as_json(lambda: values))):
            if not args.quiet:
                show(args, _report(device, machine, compared, others))
                if args.out is not None:
                    name = printable(args.out)
                    reads = f"zerosim plan --gpu {name} --precision {machine.precision} reads it"
                    print(f"\nwrote {name}: {reads}", file=human_stream(args))
    return 0


def _keys(device: Hardware) -> dict[str, Any]:
    from zerosim.config.presets.hardware import NEEDED

    return {key: getattr(device, key) for key in (*NEEDED, "link_bytes_per_s", "cpu_bytes_per_s")}


def _values(machine: Machine) -> dict[str, Any]:
    named = ("precision", "transport", "ranks", "cores", "kernel_s", "known_error")
    return {"machine": {
        **{key: getattr(machine, key) for key in named},
        **{key: getattr(machine, key).points for key in ("product", "memory")},
        **{key: {name: curve.points for name, curve in getattr(machine, key).items()}
           for key in ("kernels", "collectives")},
    }}  # fmt: skip


def _report(device: Hardware, machine: Machine, compared: list[Compared], others: float | None) -> RenderableType:
    from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled

    links = Grid("collective", right("latency"), right("best bandwidth"))
    for verb, curve in machine.collectives.items():
        links.add(verb, f"{1e6 * curve.points[0][1]:.0f} µs", f"{curve.best / 1e9:.2f} GB/s")
    sentence = (
        f"A rank multiplies at up to {device.peak_flops / 1e9:.1f} GFLOP/s and copies at up to "
        f"{device.hbm_bytes_per_s / 1e9:.1f} GB/s, read and written; its host takes "
        f"{1e6 * machine.kernel_s:.0f} µs for each kernel. {len(machine.kernels)} kernels have curves of their own. "
        f"Adam of {machine.ranks} ranks on the host reads and writes {device.cpu_bytes_per_s / 1e9:.2f} GB/s."
    )
    parts = [titled(f"{device.name}, {machine.source}", Adaptive(links), sentence)]
    if compared:
        steps = Grid(
            "model", right("stage"), right("modelled"), right("measured"), right("error"), right("steps"),
            right("CPU, modelled"), right("measured"), right("error"),
        )  # fmt: skip
        for one in compared:
            step = _beside(one.modelled_s, one.measured_s, one.error)
            cpu = _beside(one.modelled_cpu_s, one.cpu_s, one.cpu_error)
            steps.add(one.model, str(one.stage), *step, f"{one.counted} of {one.steps}", *cpu)
        parts.append(titled(f"Steps of {machine.ranks} ranks", Adaptive(steps), _note(compared)))
    said = []
    if machine.ranks > machine.cores:
        said.append(
            f"{machine.ranks} ranks share {machine.cores} cores: the clock assumes a separate core for each rank, so "
            "a real step takes longer than predicted."
        )
    if others is not None:
        said.append(f"Other processes took {100 * others:.0f} % of the cores' time meanwhile.")
    return Stack(*parts, prose(" ".join(said)) if said else None)


def _beside(modelled_s: float | None, measured_s: float | None, error: float | None) -> tuple[str, str, str]:
    """Return three cells, empty where something was not measured."""
    if modelled_s is None or measured_s is None or error is None:
        return "", "", ""
    return f"{modelled_s:.3f} s", f"{measured_s:.3f} s", f"{100 * error:+.1f} %"


def _note(compared: list[Compared]) -> str:
    loads = [one.others for one in compared if one.others is not None]
    text = "Measured: the median of the steps without load from other processes, or of the quietest steps."
    if loads:
        text += f" In those, other processes took up to {100 * max(loads):.0f} % of the cores."
    if compared[0].cpu_s is not None:
        text += " CPU: a rank's CPU time, which does not grow while the rank waits for a core."
    return text
