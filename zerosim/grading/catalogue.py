"""The exercises, and one of them by its name or number.

In most something is to be written: skeletons are in `given/skeletons.py`. In the others a bug is to be found: what has
it is in `given/bugs.py`. What is usual of an entry is in `entry.py`.
"""

from __future__ import annotations

import difflib
from fractions import Fraction

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
    optimizers,
    pipelines,
    traffic,
    waiting,
)
from zerosim.grading.entry import PLAIN, RUN, SHARDED, exercise, stages_of
from zerosim.grading.exercise import Exercise
from zerosim.grading.given import bugs, skeletons

_REDUCES = ("post_backward", "reduce")
_ZERO3 = ("pre_forward", "post_forward", "pre_backward", *_REDUCES, "unshard", "reshard", "reshard_after_forward")


EXERCISES: tuple[Exercise, ...] = (
    exercise(
        (1, "bounds", skeletons.slice_of, 3, "Slice bounds"),
        "numel elements are cut into N slices, one per rank. Collectives need slices of one length, and N need not "
        "divide numel. Where does rank's slice start and stop? It is run inside ZeRO-3, which does the rest.",
        ("How long must every slice be, so that N of them cover numel?", "Round up: -(-numel // world_size)."),
        (dict(ranks=3), dict(ranks=7, note="which divide nothing")),
        adapt=adapting.bounds,
        yours=("slice_of", "slice_size"),
        examine=bounds.EXAMINATION,
    ),
    exercise(
        (2, "all_reduce", skeletons.all_reduce, 0, "All-reduce out of two halves"),
        "An all_reduce is a reduce_scatter and an all_gather. Write it with those two, in place: no byte of memory "
        "beside the gradient itself.",
        (
            "Which part of grad may hold this rank's slice of the sum?",
            "own = grad[rank * c : (rank + 1) * c] is a window, not a copy: reduce_scatter(grad, out=own).",
        ),
        (dict(ranks=4), dict(ranks=2, tied=True)),
        judges=(*RUN, ("halves", traffic.halves), ("volume", traffic.volume)),
        adapt=adapting.reduction,
        decisive=("weights", "halves"),
    ),
    exercise(
        (3, "ddp", skeletons.MyDDP, 0, "DDP"),
        "Every rank holds everything. What happens after a unit's backward, so that all ranks take the same step? "
        "With accumulation, gradients are summed first and reduced once, at the last micro-batch (self.last).",
        (
            "take_grad() hands over this micro-batch's gradient; add_grad_whole keeps it or adds it to the others.",
            "The optimizer reads flat.grad_shard: in DDP the own slice is all of it, flat.whole_grad().",
            "A tied table comes by twice: only the unit whose .reduces is true has the complete gradient.",
        ),
        (dict(ranks=4), dict(ranks=5, tied=True), dict(ranks=2, accumulate=3)),
        yours=("owned", "post_backward"),
    ),
    exercise(
        (4, "zero1", skeletons.MyZero1, 1, "ZeRO-1"),
        "Every rank updates its slice only, so only the optimizer's states of that slice are there. Which half of the "
        "all_reduce is still needed, and what must follow the update?",
        (
            "As in DDP, but reduce_scatter. Its out may be the window of the own slice: flat.own.start, flat.own.stop.",
            "publish_params: all_gather flat.shard(), out=flat.whole_param(), over the old parameters.",
        ),
        (dict(ranks=4), dict(ranks=5, tied=True), dict(ranks=2, accumulate=3)),
        yours=(*_REDUCES, "publish_params", "publish"),
    ),
    exercise(
        (5, "zero2", skeletons.MyZero2, 2, "ZeRO-2"),
        "Now a rank keeps only its slice of the gradients. When may the rest of a unit's gradient go?",
        (
            "reduce_scatter without out allocates the slice; the whole goes when no name holds it.",
            "add_grad_shard keeps the slice. Do not call add_grad_whole: that keeps the whole.",
        ),
        (dict(ranks=4), dict(ranks=5, tied=True)),
        yours=(*_REDUCES, "publish_params", "publish"),
    ),
    exercise(
        (6, "zero3", skeletons.MyZero3, 3, "ZeRO-3: gather, use, free"),
        "A rank holds only its slice of the parameters. Each unit is gathered before it is used and freed after.",
        (
            "unit.flat.unshard(buffer) puts the whole parameters in place, unit.flat.reshard() lets them go.",
            "all_gather(unit.flat.shard()) is the whole: flat.padded_numel elements.",
            "After a unit's backward, free the parameters first: then the reduced slice finds room.",
        ),
        (dict(ranks=4), dict(ranks=5), dict(ranks=2, note="a slice half as long as its unit")),
        yours=_ZERO3,
    ),
    exercise(
        (7, "tied", skeletons.MyTied, 3, "ZeRO-3 with tied embeddings"),
        "lm_head is wte's table used again: two units, one flat. It is gathered at each use. How often is its gradient "
        "reduced, and when?",
        (
            "Backward comes to lm_head first and to wte last: only then is the table's gradient complete.",
            "unit.reduces is False at lm_head. Leave the gradient where it is and do not take it.",
        ),
        (dict(ranks=4, tied=True), dict(ranks=5, tied=True), dict(ranks=2)),
        sent="(3Ψ + 2VD)",
        yours=("post_backward",),
    ),
    exercise(
        (8, "accumulation", skeletons.MyAccumulation, 2, "Accumulation in ZeRO-2"),
        "A micro-batches a step. Summing whole gradients first would cost ZeRO-1's memory. What does keeping only "
        "slices cost in traffic?",
        (
            "Reduce at every micro-batch, whatever self.last says.",
            "The first time flat.grad_shard is None: then the reduced slice is the sum so far.",
        ),
        (
            dict(ranks=4, accumulate=3),
            dict(ranks=5, tied=True, accumulate=2),
            dict(ranks=4, note="1 micro-batch"),
        ),
        sent="(A + 1)Ψ",
        yours=_REDUCES,
    ),
    exercise(
        (9, "clipping", skeletons.MyClipping, 2, "Clipping by the global norm"),
        "Gradients are multiplied by clip_norm / norm where the norm is larger. Each rank has the squares of its own "
        "slices. Whose norm is it?",
        (
            "A rank that clips by its own norm takes another step than its peers.",
            "Squares add up over ranks, norms do not: all_reduce with op='sum' and purpose='control'.",
        ),
        (dict(ranks=4, clip_norm=0.05), dict(ranks=5, tied=True, clip_norm=0.5)),
        judges=(("norm", checks.norm), *PLAIN),
        yours=("reduce_grad_norm",),
    ),
    exercise(
        (10, "prefetch", skeletons.MyPrefetch, 3, "ZeRO-3 with prefetch, under clipping and accumulation"),
        "While a unit computes, the next one's parameters can be on their way. self.flats are the units' flats, "
        "in forward's order. launch_all_gather gives a Work; its wait() gives the buffer.",
        (
            "Keep the Work under way, for instance a dict by flat.name; make it in __init__, after super().__init__.",
            "pre_forward: take this unit's Work, or launch it if it is the first; launch the next one's; then wait.",
            "The last unit of forward is the first of backward: it has no next one in its direction.",
        ),
        (dict(ranks=4), dict(ranks=5, clip_norm=0.05), dict(ranks=2, accumulate=3, clip_norm=0.05)),
        sent="3AΨ",
        judges=(("overlap", traffic.overlap), *SHARDED),
        decisive=("weights", "overlap"),
        gathered=2,
        slack=1,
    ),
    exercise(
        (11, "bug_thrifty", bugs.Thrifty, 3, "Find the bug: it frees, and frees nothing"),
        "This ZeRO-3 trains to the right weights. Why does it hold two units at a time?",
        ("Bytes live as long as any name holds the buffer.", "Who still holds the buffer after reshard()?"),
        (dict(ranks=4), dict(ranks=5)),
        yours=_ZERO3,
        decisive=("weights", "bytes", "gathered"),
    ),
    exercise(
        (12, "bug_mean", bugs.Mean, 0, "Find the bug: the loss falls, the weights are wrong"),
        "This DDP trains, and Adam hides almost all of its error. What is wrong with its gradients?",
        ("By what factor is the gradient off?", "What is the op of all_reduce, when none is given?"),
        (dict(ranks=4), dict(ranks=3, tied=True)),
        yours=_REDUCES,
    ),
    exercise(
        (13, "bug_shared", bugs.Shared, 3, "Find the bug: too much traffic, and the last bits"),
        "This ZeRO-3 is right on a model whose head is its own. On a tied one it sends too much.",
        ("How often is the table reduced per step?", "What does unit.reduces say?"),
        (dict(ranks=4, tied=True), dict(ranks=2)),
        sent="(3Ψ + 2VD)",
        yours=_ZERO3,
        decisive=("weights", "volume", "calls"),
    ),
    exercise(
        (14, "bug_hasty", bugs.Hasty, 3, "Find the bug: used after it was freed"),
        "This ZeRO-3 keeps the tied table gathered from wte to lm_head, which saves a gather, and then fails. Repair "
        "it; two buffers may be gathered at a time.",
        ("Which point let go of the table, and which should have brought it back?", "Look at lm_head in backward."),
        (dict(ranks=4, tied=True), dict(ranks=3, tied=True)),
        judges=tuple(pair for pair in SHARDED if pair[0] not in ("peak", "calls")),
        volume=("(3Ψ + VD)", lambda config, psi, tied: Fraction(3 * psi + tied)),
        yours=_ZERO3,
        gathered=2,
    ),
    exercise(
        (15, "bug_patient", bugs.Patient, 1, "Find the bug: right with one micro-batch"),
        "This ZeRO-1 is right without accumulation. What does it forget with it?",
        ("How many micro-batches are in the sum?", "What happens to the last one when grad_whole is there already?"),
        (dict(ranks=4), dict(ranks=4, accumulate=3)),
        yours=(*_REDUCES, "publish_params", "publish"),
    ),
    exercise(
        (16, "bug_sparing", bugs.Sparing, 2, "Find the bug: fine on four ranks, dead on six"),
        "This ZeRO-2 works on 4 ranks. On 6 ranks of a narrower model it ends at once. Which rank did what?",
        ("What does a rank own of 20 elements cut into 6 slices?", "A collective needs every rank of its group."),
        (dict(ranks=4), dict(ranks=6, hidden=10, layers=1, note="a unit of 20 elements")),
        yours=(*_REDUCES, "publish_params", "publish"),
    ),
    exercise(
        (17, "borders", skeletons.MyBorders, 0, "f and g of tensor parallelism"),
        "Linear maps are cut over t ranks, by columns, then by rows. f stands before the columns, g behind the rows. "
        "What does each do in forward, and what in backward, so that t ranks train as one would?",
        (
            "Write down which ranks hold x and which hold y, whole or a share of a sum. Then the same of dx and dy.",
            "A share becomes the whole by comm.all_reduce(buffer, op='sum', purpose='activations'), in place.",
            "f and g are mirror images: what one does in forward, the other does in backward.",
        ),
        (
            dict(ranks=2, tp=2, precision="fp32"),
            dict(ranks=4, tp=4, heads=4, note="4 heads", precision="fp32"),
        ),
        judges=(("losses", borders.losses), ("gradients", borders.gradients), ("exchanged", borders.exchanged)),
        volume=(borders.VOLUME, borders.elements),
        adapt=adapting.borders,
        yours=("f_forward", "f_backward", "g_forward", "g_backward"),
        decisive=("losses", "gradients"),
    ),
    exercise(
        (18, "one_f_one_b", skeletons.my_1f1b, 0, "1F1B"),
        "A pipeline's schedule is one stage's list of Forward(slot) and Backward(slot), a slot for each micro-batch. "
        "GPipe keeps all of them. How soon can stage i go back, and what does it do from then on?",
        (
            "The last stage goes forward and back at once. How many forwards ahead of it must the stage before be?",
            "num_stages - stage - 1 forwards, or all if there are fewer; then a forward and a backward in turns; then "
            "the backwards that are left.",
        ),
        (stages_of(4, 8), stages_of(3, 2)),
        judges=(
            ("losses", pipelines.losses),
            ("live", pipelines.live(live_micro_batches("1f1b"))),
            ("bubble", pipelines.bubble(bubble("1f1b"))),
        ),
        adapt=adapting.schedule,
        yours=("_one_by_one",),
        decisive=("losses", "live", "bubble"),
    ),
    exercise(
        (19, "bug_rounds", bugs.rounds, 0, "Find the bug: fine on two stages, dead on three"),
        "GPipe keeps all m micro-batches. This schedule takes them in rounds, so that few are live. On two stages it "
        "works. On three, two of the stages wait for each other. At most p micro-batches may be live.",
        (
            "Write down the lists of stages 0 and 1 on three stages. Which micro-batch does each wait for?",
            "Stage 1 ends a round that stage 0 has not begun: what must be the same on all stages?",
        ),
        (stages_of(2, 4), stages_of(3, 6)),
        judges=(
            ("losses", pipelines.losses),
            ("live", pipelines.live(live_micro_batches("1f1b").where(i=0))),
            ("bubble", pipelines.bubble(bubble("1f1b").where(m=symbol("p")))),
        ),
        adapt=adapting.schedule,
        yours=("_one_by_one",),
        decisive=("losses", "live", "bubble"),
    ),
    exercise(
        (20, "best_fit", skeletons.MyArena, 2, "An allocator: best fit, splitting, merging"),
        "A region of capacity bytes is handed out in pieces. A request gets the start of the smallest hole that is "
        "large enough, and of holes that are alike the lowest. What is left of the hole stays one. What is released "
        "becomes a hole, and holes that touch are one hole.",
        (
            "reserve: min over (size, address) of the holes that are large enough. Put back what is left of it.",
            "release: a hole behind begins where yours ends, a hole before ends where yours begins. Look for both.",
        ),
        (dict(ranks=2, note="each with a region of twice its peak"),),
        judges=(("weights", checks.weights),),
        adapt=best_fit.arena,
        examine=best_fit.EXAMINATION,
        yours=("reserve", "release"),
    ),
    exercise(
        (21, "compaction", skeletons.my_compaction, 2, "Defragmentation: what is live is put together"),
        "There are free bytes enough, but no hole that is large enough. Which moves put all that is live at the start "
        "of the region, so that the holes become one? A move may overwrite what has been moved, and what was free, but "
        "nothing that is still to be moved.",
        (
            "Go through what is live from the lowest address up: live is in no order.",
            "Keep the end of what is in place. What begins there already needs no move.",
        ),
        (dict(ranks=2, note="each with a region that is its peak"),),
        judges=(("weights", checks.weights),),
        adapt=compaction.region,
        examine=compaction.EXAMINATION,
        yours=("compacted",),
    ),
    exercise(
        (22, "depth", skeletons.my_depth, 3, "Prefetch that is deep enough"),
        "At a unit's turn its own gather is waited for, then those of the next units are launched that are not under "
        "way, then it computes. Gathers follow one another in a stream. How many units must be gathered ahead, at "
        "least, so that no longer is waited than with all of them ahead?",
        (
            "Play it through for one depth: when the stream is free, when each gather ends, when each unit begins.",
            "max(now, end of its own gather) is when a unit begins. Add up what was waited, and try every depth.",
        ),
        (),
        judges=(),
        adapt=waiting.depth,
        examine=waiting.DEPTH,
        yours=("simulate",),
        decisive=("depth",),
    ),
    exercise(
        (23, "micro_batches", skeletons.my_micro_batches, 0, "Micro-batches against the bubble"),
        "A pipeline waits for (p-1)/(vm) of its work: p stages, v chunks on each, m micro-batches. What is the "
        "smallest m with which that is no more than a given share? One chunk is 1F1B; several are interleaved, which "
        "takes multiples of p.",
        (
            "m is at least (p-1)/(v share), a whole number, and 1 at least.",
            "share is a Fraction: -(-a // b) rounds a/b up without losing anything.",
        ),
        (),
        judges=(),
        adapt=waiting.micro_batches,
        examine=waiting.MICRO_BATCHES,
        yours=("counted_bubble",),
        decisive=("bubble",),
    ),
    exercise(
        (24, "adagrad", skeletons.MyAdaGrad, 2, "AdaGrad"),
        "Each weight's step is divided by the root of the sum of its squared gradients: steps get shorter where "
        "gradients were large. How is a step taken, in place, so that every rank may do its own slice?",
        (
            "Weight decay is added to the gradient first. Then total += g * g, before the root is taken.",
            "eps stands outside of the root: w -= now.lr * g / (xp.sqrt(total) + self.eps).",
        ),
        (dict(ranks=3, precision="fp32", optimizer="adagrad", eps=1e-8),),
        judges=(("weights", optimizers.near),),
        adapt=optimizers.rule,
        examine=optimizers.rule_examination(optimizers.adagrad, ("sum",), "eps stands outside of the root of the sum"),
        yours=("rule",),
        decisive=("steps",),
    ),
    exercise(
        (25, "radam", skeletons.MyRAdam, 2, "RAdam: warm-up that is worked out"),
        "Adam divides by the root of v, which at first is the mean of few squares. RAdam asks how many they are worth, "
        "rho, and steps along m alone until rho is more than 5. From then on the step is Adam's times r.",
        (
            "m and v are Adam's, and so are their corrections 1 - beta**t. rho_inf is 2 / (1 - beta2) - 1, rho is "
            "rho_inf - 2 t beta2**t / (1 - beta2**t).",
            "r is the root of (rho-4)(rho-2) rho_inf / ((rho_inf-4)(rho_inf-2) rho). eps is added to the root of v "
            "before its correction.",
        ),
        (dict(ranks=3, precision="fp32", optimizer="radam"),),
        judges=(("weights", optimizers.near),),
        adapt=optimizers.rule,
        examine=optimizers.rule_examination(
            optimizers.radam,
            ("exp_avg", "exp_avg_sq"),
            "below rho = 5 along m / (1 - beta1**t) alone; with it r, and v's correction sqrt(1 - beta2**t)",
        ),
        yours=("rule", "rectification"),
        decisive=("steps",),
    ),
    exercise(
        (26, "quantiser", skeletons.my_quantiser, 2, "Eight bits a value: a block's quantiser"),
        "A block of 256 states becomes a byte for each, and one scale: its largest magnitude. A value over the scale "
        "lies in [-1, 1]. Its code is the number of the nearest of the table's 256 entries.",
        (
            "np.searchsorted(table, x) is the first entry that is not less than x. The nearest is that one or the one "
            "before.",
            "Search among the middles between neighbouring entries. A block of zeros has nothing to divide by.",
        ),
        (),
        judges=(),
        adapt=optimizers.quantiser,
        examine=optimizers.QUANTISER,
        yours=("quantize", "nearest"),
        decisive=("codes",),
    ),
    exercise(
        (27, "rounding", skeletons.my_rounding, 2, "Stochastic rounding"),
        "bf16 is the upper half of a float32. To the nearest, a weight of 1 never feels an update of 0.001. So round "
        "up as often as the value is near to the upper neighbour: where 16 drawn bits are less than the 16 that are "
        "cut off.",
        (
            "values.view(np.uint32) are the bits; & 0xFFFF is what is cut off, & 0xFFFF0000 what stays.",
            "One more in the last place that stays is + 0x10000. Back with .view(np.float32).",
        ),
        (),
        judges=(),
        adapt=optimizers.rounding,
        examine=optimizers.ROUNDING,
        yours=("stochastic",),
        decisive=("bits",),
    ),
    exercise(
        (28, "zb_h1", skeletons.my_zb_h1, 0, "Weight gradients fill the bubble"),
        "The stage before waits for gradients of inputs, and nobody for those of weights. This list is 1F1B, with "
        "each backward cut in two: InputGrad(slot) and WeightGrad(slot), one slot each. WeightGrad is missing. Where "
        "does it fill the bubble, while no stage holds more than the p micro-batches that 1F1B's first stage holds?",
        (
            "1F1B's stage i holds p-i micro-batches. How many may wait for their weight gradients there?",
            "After InputGrad(slot) comes WeightGrad(slot - stage), from slot = stage on. The rest comes at the end.",
        ),
        (stages_of(4, 8) | dict(layers=8), stages_of(3, 3) | dict(layers=6)),
        judges=(
            ("losses", pipelines.losses),
            ("live", pipelines.live(symbol("p"), pipelines.PENDING)),
            ("bubble", pipelines.bubble(bubble("zb-h1"))),
        ),
        adapt=adapting.schedule,
        yours=("_one_by_one",),
        decisive=("losses", "live", "bubble"),
    ),
)


def find_exercise(wanted: Exercise | str | int) -> Exercise:
    """By name or number. Raises: InputError for an unknown one, with the nearest."""
    if isinstance(wanted, Exercise):
        return wanted
    for one in EXERCISES:
        if wanted in (one.name, one.number):
            return one
    names = [one.name for one in EXERCISES]
    near = difflib.get_close_matches(str(wanted), names, 2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected 1 to {len(names)} or one of {', '.join(names)}"
    raise InputError(f"no exercise {wanted!r}: {hint}")
