"""The runs of `zerosim plot`'s slides and animations, and their numbers; and `--all`, which makes the set.

`report/plots/` draws the slides, and `report/moving/` the animations.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from zerosim.cli.parser import Parser, whole_number
from zerosim.cli.plot_run import Asked, Drawn, stages_asked
from zerosim.config import RunConfig
from zerosim.errors import InputError

if TYPE_CHECKING:
    from zerosim.train.result import RunResult


class One(NamedTuple):
    """A picture of the set: its file name, and the words after `zerosim plot`."""

    name: str
    words: str
    moves: bool = False


FIGURE_1 = "--model flat --params 7.5B --ranks 64 --precision fp16"
SET = (
    One("ownership-stages", f"ownership {FIGURE_1}"),
    *(One(f"ownership-zero{stage}", f"ownership --stage {stage}") for stage in (1, 2, 3)),
    *(One(f"flow-{name}", f"flow --stage {stage} --collective ring")
      for stage, name in enumerate(("ddp", "zero1", "zero2", "zero3"))),
    One("memory", f"memory {FIGURE_1} --gpu v100-32"),
    One("staircase", "staircase", moves=True),
    One("ring", "ring", moves=True),
)  # fmt: skip
"""The pictures of `--all`: each in both themes, as PNG and SVG; animations as SVG only."""


def of_set() -> Iterator[tuple[str, list[str]]]:
    """Return the names of the set's files, and the words that make each."""
    for one in SET:
        for theme in ("light", "dark"):
            for form in ("svg",) if one.moves else ("svg", "png"):
                name = f"{one.name}{'-dark' if theme == 'dark' else ''}.{form}"
                yield name, [*one.words.split(), "--theme", theme]


def _kept(config: RunConfig, *, every_rank: bool = False) -> RunResult:
    """Return the plan of one step, with its events."""
    from zerosim.train.plan import plan

    return plan(config.replace(steps=1), keep_events=True, every_rank=every_rank)


def ownership(args: argparse.Namespace, config: RunConfig, limit: None) -> Drawn:
    """Draw three moments of one ZeRO stage (--stage), or one moment of several."""
    from zerosim.report.plots import stage_figure, stages_figure
    from zerosim.report.plots.holdings import check_one_axis, holdings
    from zerosim.report.plots.words import stage_label

    check_one_axis(config)
    results = {stage_label(stage): _kept(config.at_stage(stage)) for stage in stages_asked(args, config)}
    held = {label: holdings(result) for label, result in results.items()}
    if hasattr(args, "stage"):
        [(label, result)] = results.items()
        name = label.split(" (")[0]
        figure = stage_figure(result, held[label], name)
    else:
        after = {label: of["after"] for label, of in held.items()}
        figure = stages_figure(results, after)
    numbers = {
        label: {moment: [one.to_dict() for one in of] for moment, of in moments.items()}
        for label, moments in held.items()
    }
    return Drawn(figure, {"stages": numbers})


def flow(args: argparse.Namespace, config: RunConfig, limit: None) -> Drawn:
    from zerosim.report.names import STAGES
    from zerosim.report.plots import flow_figure
    from zerosim.report.plots.flow import check_ranks, read_flows

    check_ranks(config.mesh.ranks)
    result = _kept(config, every_rank=True)
    flows = read_flows(result.events)
    stage = STAGES[config.parallel.zero_stage]
    figure = flow_figure(result, flows, stage)
    return Drawn(figure, {"flows": [one.to_dict() for one in flows]})


def staircase(args: argparse.Namespace, config: RunConfig, limit: None) -> Drawn:
    from zerosim.report.moving import moving_staircase
    from zerosim.report.moving.staircase import read_climb
    from zerosim.report.plots.holdings import check_one_axis

    check_one_axis(config)
    result = _kept(config)
    climb = read_climb(result.events[0])
    return Drawn(moving_staircase(result, theme=args.theme), {"stays": [stay._asdict() for stay in climb.stays]})


def ring_of(args: argparse.Namespace) -> Asked:
    """Check the request; this picture runs no model. Raises: InputError for too many ranks to draw."""
    from zerosim.report.moving.ring import check_ranks

    check_ranks(args.ranks)
    return Asked(None)


def ring(args: argparse.Namespace, config: None, limit: None) -> Drawn:
    from zerosim.lessons.rings import record, ring_film, walk_the_ring

    walk = record(walk_the_ring, args.ranks)
    held = [[[round(value) for value in row] for row in own] for own in walk.results]
    return Drawn(ring_film(walk, theme=args.theme), {"held": held, "sent_bytes": walk.sent_bytes})


def add_ranks(parser: Parser) -> None:
    parser.add_argument("--ranks", metavar="N", type=whole_number, default=4, help="number of ranks (default: 4)")


def check_moving(out: str | None, form: str, size: object) -> None:
    """Check an animation's options. Raises: InputError for a PNG, and for a size in inches."""
    if form != "svg":
        raise InputError(f"--out {out}: the picture is animated, which needs SVG; choose a name that ends in .svg")
    if size is not None:
        raise InputError("--size: an animated picture has a fixed size; leave it out")
