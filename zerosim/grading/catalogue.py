"""The exercises, and one of them by its name or number.

The question, the hints, the runs and the other plain values of an exercise are its row in `given/exercises.toml`. Its
code is here: the skeleton, the checks, and the adapter that makes a run of an answer. Most exercises ask for code:
their skeletons are in `given/skeletons.py`. The others ask for a bug: strategies with one are in `given/bugs.py`.
Defaults of an entry are in `entry.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from zerosim.analysis.formulas.form import symbol
from zerosim.analysis.formulas.parallel import bubble, live_micro_batches
from zerosim.errors import InputError, did_you_mean
from zerosim.grading import (
    adapting,
    best_fit,
    borders,
    bounds,
    checks,
    compaction,
    context,
    experts,
    filling,
    hooks,
    offloading,
    optimizers,
    pipelines,
    placing,
    saving,
    scaling,
    second_shard,
    traffic,
    tuning,
    waiting,
)
from zerosim.grading.asking import Examination, by_calls
from zerosim.grading.entry import PLAIN, RUN, SENT, SHARDED, asked, exercise
from zerosim.grading.exercise import Exercise, Judge
from zerosim.grading.given import bugs, skeletons
from zerosim.grading.trial import Own


def _schedule(name: str, given: Any, live: Judge, waits: Judge) -> Exercise:
    """Make an exercise whose answer is a pipeline's schedule."""
    judges = (("losses", pipelines.losses), ("live", live), ("bubble", waits))
    return exercise(name, given, judges=judges, adapt=adapting.schedule)


def _rule(name: str, given: Any, asked: Examination) -> Exercise:
    """Make an exercise whose answer is an optimizer's rule."""
    return exercise(name, given, judges=(("weights", optimizers.near),), adapt=optimizers.rule, examine=asked)


def _memory(name: str, given: Any, adapt: Callable[[Any], Own], asked: Examination) -> Exercise:
    """Make an exercise whose answer hands out a device's memory."""
    return exercise(name, given, judges=RUN[:1], adapt=adapt, examine=asked)


EXERCISES: tuple[Exercise, ...] = (
    exercise("bounds", skeletons.slice_of, adapt=adapting.bounds, examine=bounds.EXAMINATION),
    exercise(
        "all_reduce",
        skeletons.all_reduce,
        judges=(*RUN, ("halves", traffic.halves), ("volume", traffic.volume)),
        refer=hooks.in_halves,
        adapt=adapting.reduction,
    ),
    exercise("ddp", skeletons.MyDDP),
    exercise("zero1", skeletons.MyZero1),
    exercise("zero2", skeletons.MyZero2),
    exercise("zero3", skeletons.MyZero3),
    exercise("tied", skeletons.MyTied),
    exercise("accumulation", skeletons.MyAccumulation),
    exercise("clipping", skeletons.MyClipping, judges=(("norm", checks.norm), *PLAIN)),
    exercise("prefetch", skeletons.MyPrefetch, judges=(("overlap", traffic.overlap), *SHARDED)),
    exercise("bug_thrifty", bugs.Thrifty),
    exercise("bug_mean", bugs.Mean),
    exercise("bug_shared", bugs.Shared),
    exercise(
        "bug_hasty",
        bugs.Hasty,
        judges=tuple(pair for pair in SHARDED if pair[0] not in ("peak", "calls")),
        volume=("(3Ψ + VD)", lambda config, psi, tied: Fraction(3 * psi + tied)),
        refer=hooks.with_table_kept,
    ),
    exercise("bug_patient", bugs.Patient),
    exercise("bug_sparing", bugs.Sparing),
    exercise(
        "borders",
        skeletons.MyBorders,
        judges=(("losses", borders.losses), ("gradients", borders.gradients), ("exchanged", borders.exchanged)),
        volume=(borders.VOLUME, borders.elements),
        adapt=adapting.borders,
    ),
    _schedule(
        "one_f_one_b",
        skeletons.my_1f1b,
        pipelines.live(live_micro_batches("1f1b")),
        pipelines.bubble(bubble("1f1b")),
    ),
    _schedule(
        "bug_rounds",
        bugs.rounds,
        pipelines.live(live_micro_batches("1f1b").where(i=0)),
        pipelines.bubble(bubble("1f1b") * symbol("r")),
    ),
    _memory("best_fit", skeletons.MyArena, best_fit.arena, best_fit.EXAMINATION),
    _memory("compaction", skeletons.my_compaction, compaction.region, by_calls(compaction.regions, compaction.wrong)),
    asked("depth", skeletons.my_depth, waiting.rows, waiting.wrong_depth),
    asked("micro_batches", skeletons.my_micro_batches, waiting.pipelines, waiting.wrong_micro_batches),
    _rule("adagrad", skeletons.MyAdaGrad, optimizers.steps(optimizers.adagrad, ("sum",), optimizers.ROOT)),
    _rule("radam", skeletons.MyRAdam, optimizers.steps(optimizers.radam, ("exp_avg", "exp_avg_sq"), optimizers.RHO)),
    asked("quantiser", skeletons.my_quantiser, optimizers.blocks, optimizers.wrong_block),
    asked("rounding", skeletons.my_rounding, optimizers.rows, optimizers.wrong_row),
    _schedule(
        "zb_h1",
        skeletons.my_zb_h1,
        pipelines.live(symbol("p"), pipelines.PENDING),
        pipelines.bubble(bubble("zb-h1")),
    ),
    asked("adapter", skeletons.my_adapter, tuning.adapters, tuning.wrong_adapter),
    asked("nf4", skeletons.my_nf4, tuning.nf4_blocks, tuning.wrong_nf4),
    asked("top_k", skeletons.my_top_k, tuning.gradients, tuning.wrong_top_k),
    asked("powersgd", skeletons.my_powersgd, tuning.matrices, tuning.wrong_powersgd),
    exercise(
        "second_shard",
        skeletons.MySecondShard,
        judges=(RUN[0], ("held", second_shard.held), ("node", second_shard.node), ("copied", second_shard.copied)),
    ),
    exercise(
        "cpu_adam",
        skeletons.MyCpuAdam,
        judges=(
            ("pcie", offloading.pcie),
            RUN[0],
            ("cpu", offloading.cpu),
            ("tiles", offloading.tiles),
            ("held", offloading.held),
            ("waits", offloading.waits),
            *SENT,
        ),
    ),
    asked("offload", skeletons.my_offload, placing.questions, placing.wrong),
    asked("merge", skeletons.my_merge, context.blocks, context.wrong_merge),
    asked("balance", skeletons.my_pieces, context.rings, context.wrong_pieces),
    asked("ulysses", skeletons.my_exchange, context.rows, context.wrong_exchange),
    asked("router", skeletons.my_router, experts.routers, experts.wrong_router),
    asked("bias", skeletons.my_bias, experts.loads, experts.wrong_bias),
    asked("dispatch", skeletons.my_dispatch, experts.counts, experts.wrong_dispatch),
    asked("divisor", skeletons.my_average, experts.gradients, experts.wrong_average),
    asked("auto", skeletons.my_auto, filling.files, filling.wrong_file),
    asked("hole", skeletons.my_hole, saving.folders, saving.wrong_hole),
    asked("recut", skeletons.my_recut, saving.states, saving.wrong_pieces),
    asked("scale", skeletons.my_scale, scaling.matrices, scaling.wrong_scales),
)


def find_exercise(wanted: Exercise | str | int) -> Exercise:
    """Return an exercise by name or number. Raises: InputError for an unknown one, with the nearest."""
    if isinstance(wanted, Exercise):
        return wanted
    for one in EXERCISES:
        if str(wanted) in (one.name, str(one.number)):
            return one
    names = [one.name for one in EXERCISES]
    otherwise = f"expected 1 to {len(names)} or one of {', '.join(names)}"
    raise InputError(f"no exercise {wanted!r}: {did_you_mean(wanted, names, otherwise, most=2, quote=str)}")
