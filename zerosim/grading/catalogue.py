"""The exercises, and one of them by its name or number.

The question, the hints, the runs and the other plain values of an exercise are its row in `given/exercises.toml`. Its
code is here: the skeleton, the checks, and the adapter that makes a run of an answer. Most exercises ask for code:
their skeletons are in `given/skeletons.py`. The others ask for a bug: strategies with one are in `given/bugs.py`.
Defaults of an entry are in `entry.py`.
"""

from __future__ import annotations

import difflib
from fractions import Fraction
from typing import Any

from zerosim.analysis.formulas.form import symbol
from zerosim.analysis.formulas.parallel import bubble, live_micro_batches
from zerosim.errors import InputError
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
from zerosim.grading.entry import PLAIN, RUN, SENT, SHARDED, exercise
from zerosim.grading.exercise import Exercise, Judge
from zerosim.grading.given import bugs, skeletons


def _schedule(name: str, given: Any, live: Judge, waits: Judge) -> Exercise:
    """Make an exercise whose answer is a pipeline's schedule."""
    judges = (("losses", pipelines.losses), ("live", live), ("bubble", waits))
    return exercise(name, given, judges=judges, adapt=adapting.schedule)


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
    exercise(
        "best_fit",
        skeletons.MyArena,
        judges=(("weights", checks.weights),),
        adapt=best_fit.arena,
        examine=best_fit.EXAMINATION,
    ),
    exercise(
        "compaction",
        skeletons.my_compaction,
        judges=(("weights", checks.weights),),
        adapt=compaction.region,
        examine=compaction.EXAMINATION,
    ),
    exercise("depth", skeletons.my_depth, examine=waiting.DEPTH),
    exercise("micro_batches", skeletons.my_micro_batches, examine=waiting.MICRO_BATCHES),
    exercise(
        "adagrad",
        skeletons.MyAdaGrad,
        judges=(("weights", optimizers.near),),
        adapt=optimizers.rule,
        examine=optimizers.rule_examination(
            optimizers.adagrad,
            ("sum",),
            "follow one weight by hand: what sum is under the root after each step? eps is added outside the root",
        ),
    ),
    exercise(
        "radam",
        skeletons.MyRAdam,
        judges=(("weights", optimizers.near),),
        adapt=optimizers.rule,
        examine=optimizers.rule_examination(
            optimizers.radam,
            ("exp_avg", "exp_avg_sq"),
            "at rho <= 5 step along m / (1 - beta1**t) only; above, multiply by r and apply v's correction sqrt(1 - "
            "beta2**t)",
        ),
    ),
    exercise("quantiser", skeletons.my_quantiser, examine=optimizers.QUANTISER),
    exercise("rounding", skeletons.my_rounding, examine=optimizers.ROUNDING),
    _schedule(
        "zb_h1",
        skeletons.my_zb_h1,
        pipelines.live(symbol("p"), pipelines.PENDING),
        pipelines.bubble(bubble("zb-h1")),
    ),
    exercise("adapter", skeletons.my_adapter, examine=tuning.ADAPTER),
    exercise("nf4", skeletons.my_nf4, examine=tuning.NEAREST),
    exercise("top_k", skeletons.my_top_k, examine=tuning.FEEDBACK),
    exercise("powersgd", skeletons.my_powersgd, examine=tuning.POWERSGD),
    exercise(
        "second_shard",
        skeletons.MySecondShard,
        judges=(
            ("weights", checks.weights),
            ("held", second_shard.held),
            ("node", second_shard.node),
            ("copied", second_shard.copied),
        ),
    ),
    exercise(
        "cpu_adam",
        skeletons.MyCpuAdam,
        judges=(
            ("pcie", offloading.pcie),
            ("weights", checks.weights),
            ("cpu", offloading.cpu),
            ("tiles", offloading.tiles),
            ("held", offloading.held),
            ("waits", offloading.waits),
            *SENT,
        ),
    ),
    exercise("offload", skeletons.my_offload, examine=placing.OFFLOAD),
    exercise("merge", skeletons.my_merge, examine=context.MERGE),
    exercise("balance", skeletons.my_pieces, examine=context.BALANCE),
    exercise("ulysses", skeletons.my_exchange, examine=context.ULYSSES),
    exercise("router", skeletons.my_router, examine=experts.ROUTER),
    exercise("bias", skeletons.my_bias, examine=experts.BIAS),
    exercise("dispatch", skeletons.my_dispatch, examine=experts.DISPATCH),
    exercise("divisor", skeletons.my_average, examine=experts.AVERAGE),
    exercise("auto", skeletons.my_auto, examine=filling.AUTO),
    exercise("hole", skeletons.my_hole, examine=saving.HOLE),
    exercise("recut", skeletons.my_recut, examine=saving.RECUT),
    exercise("scale", skeletons.my_scale, examine=scaling.SCALES),
)


def find_exercise(wanted: Exercise | str | int) -> Exercise:
    """Return an exercise by name or number. Raises: InputError for an unknown one, with the nearest."""
    if isinstance(wanted, Exercise):
        return wanted
    for one in EXERCISES:
        if str(wanted) in (one.name, str(one.number)):
            return one
    names = [one.name for one in EXERCISES]
    near = difflib.get_close_matches(str(wanted), names, 2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected 1 to {len(names)} or one of {', '.join(names)}"
    raise InputError(f"no exercise {wanted!r}: {hint}")
