"""The exercises in which something is to be written: from the bounds of a slice to ZeRO-3 with prefetch.

Owns questions, cases, targets and hints. The skeletons stand in `given/skeletons.py`.
"""

from __future__ import annotations

from zerosim.grading import adapting, checks, traffic
from zerosim.grading.exercise import Exercise
from zerosim.grading.given import skeletons
from zerosim.grading.halves import halves
from zerosim.grading.targets import PLAIN, RUN, SHARDED, case_of, elements

WRITTEN: tuple[Exercise, ...] = (
    Exercise(
        1,
        "bounds",
        "Slice bounds",
        "numel elements are cut into N slices, one per rank. Collectives need slices of one length, and N need not "
        "divide numel. Where does rank's slice start and stop? It is run inside ZeRO-3, which does the rest.",
        skeletons.slice_of,
        3,
        (case_of("3 ranks", 3, ranks=3), case_of("7 ranks, which divide nothing", 3, ranks=7)),
        SHARDED,
        ("3Ψ", elements(3)),
        ("How long must every slice be, so that N of them cover numel?", "Round up: -(-numel // world_size)."),
        adapting.bounds,
        yours=("slice_of", "slice_size"),
        gathered=1,
        examine=adapting.examine_bounds,
    ),
    Exercise(
        2,
        "all_reduce",
        "All-reduce out of two halves",
        "An all_reduce is a reduce_scatter and an all_gather. Write it with those two, in place: no byte of memory "
        "beside the gradient itself.",
        skeletons.all_reduce,
        0,
        (case_of("4 ranks", 0, ranks=4), case_of("2 ranks, tied", 0, ranks=2, tie_embeddings=True)),
        (*RUN, ("halves", halves), ("volume", traffic.volume)),
        ("2Ψ", elements(0)),
        (
            "Which part of grad may hold this rank's slice of the sum?",
            "own = grad[rank * c : (rank + 1) * c] is a window, not a copy: reduce_scatter(grad, out=own).",
        ),
        adapting.reduction,
        decisive=("weights", "halves"),
    ),
    Exercise(
        3,
        "ddp",
        "DDP",
        "Every rank holds everything. What happens after a unit's backward, so that all ranks take the same step? "
        "With accumulation, gradients are summed first and reduced once, at the last micro-batch (self.last).",
        skeletons.MyDDP,
        0,
        (
            case_of("4 ranks", 0, ranks=4),
            case_of("5 ranks, tied", 0, ranks=5, tie_embeddings=True),
            case_of("2 ranks, 3 micro-batches", 0, ranks=2, accumulate=3),
        ),
        PLAIN,
        ("2Ψ", elements(0)),
        (
            "take_grad() hands over this micro-batch's gradient; add_grad_whole keeps it or adds it to the others.",
            "The optimizer reads flat.grad_shard: in DDP the own slice is all of it, flat.whole_grad().",
            "A tied table comes by twice: only the unit whose .reduces is true has the complete gradient.",
        ),
        adapting.strategy,
        yours=("owned", "post_backward"),
    ),
    Exercise(
        4,
        "zero1",
        "ZeRO-1",
        "Every rank updates its slice only, so only the optimizer's states of that slice are there. Which half of the "
        "all_reduce is still needed, and what must follow the update?",
        skeletons.MyZero1,
        1,
        (
            case_of("4 ranks", 1, ranks=4),
            case_of("5 ranks, tied", 1, ranks=5, tie_embeddings=True),
            case_of("2 ranks, 3 micro-batches", 1, ranks=2, accumulate=3),
        ),
        PLAIN,
        ("2Ψ", elements(1)),
        (
            "As in DDP, but reduce_scatter. Its out may be the window of the own slice: flat.own.start, flat.own.stop.",
            "spread: all_gather flat.shard(), out=flat.whole_param(), over the old parameters.",
        ),
        adapting.strategy,
        yours=("post_backward", "spread"),
    ),
    Exercise(
        5,
        "zero2",
        "ZeRO-2",
        "Now a rank keeps only its slice of the gradients. When may the rest of a unit's gradient go?",
        skeletons.MyZero2,
        2,
        (case_of("4 ranks", 2, ranks=4), case_of("5 ranks, tied", 2, ranks=5, tie_embeddings=True)),
        PLAIN,
        ("2Ψ", elements(2)),
        (
            "reduce_scatter without out allocates the slice; the whole goes when no name holds it.",
            "add_grad_shard keeps the slice. Do not call add_grad_whole: that keeps the whole.",
        ),
        adapting.strategy,
        yours=("post_backward", "spread"),
    ),
    Exercise(
        6,
        "zero3",
        "ZeRO-3: gather, use, free",
        "A rank holds only its slice of the parameters. Each unit is gathered before it is used and freed after.",
        skeletons.MyZero3,
        3,
        (
            case_of("4 ranks", 3, ranks=4),
            case_of("5 ranks", 3, ranks=5),
            case_of("2 ranks, a slice half as long as its unit", 3, ranks=2),
        ),
        SHARDED,
        ("3Ψ", elements(3)),
        (
            "unit.flat.unshard(buffer) puts the whole parameters in place, unit.flat.reshard() lets them go.",
            "all_gather(unit.flat.shard()) is the whole: flat.padded_numel elements.",
            "After a unit's backward, free the parameters first: then the reduced slice finds room.",
        ),
        adapting.strategy,
        yours=("pre_forward", "post_forward", "pre_backward", "post_backward"),
        gathered=1,
    ),
    Exercise(
        7,
        "tied",
        "ZeRO-3 with tied embeddings",
        "lm_head is wte's table used again: two units, one flat. It is gathered at each use. How often is its gradient "
        "reduced, and when?",
        skeletons.MyTied,
        3,
        (
            case_of("4 ranks, tied", 3, ranks=4, tie_embeddings=True),
            case_of("5 ranks, tied", 3, ranks=5, tie_embeddings=True),
            case_of("2 ranks", 3, ranks=2),
        ),
        SHARDED,
        ("(3Ψ + 2VD)", elements(3)),
        (
            "Backward comes to lm_head first and to wte last: only then is the table's gradient complete.",
            "unit.reduces is False at lm_head. Leave the gradient where it is and do not take it.",
        ),
        adapting.strategy,
        yours=("post_backward", "finish"),
        gathered=1,
    ),
    Exercise(
        8,
        "accumulation",
        "Accumulation in ZeRO-2",
        "A micro-batches a step. Summing whole gradients first would cost ZeRO-1's memory. What does keeping only "
        "slices cost in traffic?",
        skeletons.MyAccumulation,
        2,
        (
            case_of("4 ranks, 3 micro-batches", 2, ranks=4, accumulate=3),
            case_of("5 ranks, tied, 2 micro-batches", 2, ranks=5, accumulate=2, tie_embeddings=True),
            case_of("4 ranks, 1 micro-batch", 2, ranks=4),
        ),
        PLAIN,
        ("(A + 1)Ψ", elements(2)),
        (
            "Reduce at every micro-batch, whatever self.last says.",
            "The first time flat.grad_shard is None: then the reduced slice is the sum so far.",
        ),
        adapting.strategy,
        yours=("post_backward",),
    ),
    Exercise(
        9,
        "clipping",
        "Clipping by the global norm",
        "Gradients are multiplied by clip_norm / norm where the norm is larger. Each rank has the squares of its own "
        "slices. Whose norm is it?",
        skeletons.MyClipping,
        2,
        (
            case_of("4 ranks, clip 0.05", 2, ranks=4, clip_norm=0.05),
            case_of("5 ranks, tied, clip 0.5", 2, ranks=5, clip_norm=0.5, tie_embeddings=True),
        ),
        (("norm", checks.norm), *PLAIN),
        ("2Ψ", elements(2)),
        (
            "A rank that clips by its own norm takes another step than its peers.",
            "Squares add up over ranks, norms do not: all_reduce with op='sum' and purpose='control'.",
        ),
        adapting.strategy,
        yours=("agree",),
    ),
    Exercise(
        10,
        "prefetch",
        "ZeRO-3 with prefetch, under clipping and accumulation",
        "While a unit computes, the next one's parameters can be on their way. self.flats are the units' flats, "
        "in forward's order. wait=False gives a Work; its wait() gives the buffer.",
        skeletons.MyPrefetch,
        3,
        (
            case_of("4 ranks", 3, ranks=4),
            case_of("5 ranks, clip 0.05", 3, ranks=5, clip_norm=0.05),
            case_of("2 ranks, 3 micro-batches, clip 0.05", 3, ranks=2, accumulate=3, clip_norm=0.05),
        ),
        (("overlap", traffic.overlap), *SHARDED),
        ("3AΨ", elements(3)),
        (
            "Keep the Work under way, for instance a dict by flat.name; make it in __init__, after super().__init__.",
            "pre_forward: take this unit's Work, or launch it if it is the first; launch the next one's; then wait.",
            "The last unit of forward is the first of backward: it has no next one in its direction.",
        ),
        adapting.strategy,
        decisive=("weights", "overlap"),
        gathered=2,
        slack=1,
    ),
)
