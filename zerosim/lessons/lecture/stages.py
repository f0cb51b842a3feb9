"""The first half of the lecture: the states of mixed precision, the copies of DDP, and ZeRO-1, 2 and 3."""

from __future__ import annotations

from zerosim.lessons.lecture.counted import held, sent, sent_by, states
from zerosim.lessons.lecture.pieces import Bar, bars, count, of_kinds, options, picture, said, size
from zerosim.lessons.lecture.slide import Show, Slide, claimed

RANKS = 64
PAPER = f"--model flat --params 7.5B --precision fp16 --ranks {RANKS}"
"""The run of the ZeRO paper's Figure 1."""
STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def paper(stage: int, ranks: int = RANKS) -> str:
    return f"{PAPER.replace(f'--ranks {RANKS}', f'--ranks {ranks}')} --stage {stage}"


def opening(show: Show) -> list[Slide]:
    """Make the slides on what training holds, and what DDP wastes."""
    ddp = show.plans(paper(0))
    by_kind, psi = states(ddp), ddp.num_parameters
    whole = held(ddp)
    ring = {ranks: sent(show.plans(paper(0, ranks))) for ranks in (4, 16, 64, 1024)}
    two_psi = 2 * by_kind["grad"]
    return [
        Slide(
            claimed(f"{RANKS} GPUs hold {RANKS} copies of the model. ZeRO keeps one.",
                    held(show.plans(paper(3))) * RANKS - whole < 1e-6 * whole),
            bars([Bar("DDP, all GPUs", [(kind, RANKS * nbytes) for kind, nbytes in of_kinds(by_kind)]),
                  Bar("ZeRO-3, all GPUs", [(kind, RANKS * n) for kind, n in of_kinds(states(show.plans(paper(3))))])])
            + said(f"A model of {psi / 1e9:g} billion parameters, fp16 with Adam."),
            ("Every number on these slides was counted as they were written. The notes name the command.",
             "By default every slide is about the run of the ZeRO paper's Figure 1 (arXiv 1910.02054)."),
            (paper(0), paper(3)),
        ),
        Slide(
            f"{psi / 1e9:g} billion parameters in fp16, with Adam. How many GB does a GPU hold before any activation?",
            count("GB", whole, f"Counted: {size(whole)} of parameters, gradients and optimizer states."),
            (f"Take a few guesses and type one. {size(by_kind['param'])}, the file on disk, is the usual answer.",
             "Let the room say what else must be there before you show the answer."),
            (paper(0),), kind="guess",
        ),
        Slide(
            claimed(f"A parameter costs {whole // psi} bytes, {by_kind['optim'] // psi} of them the optimizer's",
                    [by_kind[kind] // psi for kind in by_kind] == [2, 2, 12]),
            bars([Bar("parameters", [("param", by_kind["param"])], f"{by_kind['param'] // psi} B each, fp16"),
                  Bar("gradients", [("grad", by_kind["grad"])], f"{by_kind['grad'] // psi} B each, fp16"),
                  Bar("optimizer", [("optim", by_kind["optim"])], f"{by_kind['optim'] // psi} B each, fp32")], key=()),
            ("The optimizer's 12 bytes are fp32: a master copy of the weight and Adam's two moments, 4 bytes each.",
             "The master copy is there because an update is often too small for fp16's digits."),
            (paper(0),),
        ),
        Slide(
            claimed(f"DDP: {RANKS - 1} of every {RANKS} bytes are copies",
                    all(sum(one.model_states().values()) == whole for one in ddp.memory)),
            bars([Bar("one GPU", of_kinds(by_kind)),
                  Bar(f"{RANKS} GPUs", [(kind, RANKS * nbytes) for kind, nbytes in of_kinds(by_kind)])])
            + said("Every GPU takes the same step on the same weights. DDP shares the work, not the memory."),
            ("DDP averages gradients, so all GPUs take the same step and stay bit-identical.",
             f"One copy would be enough: {size(whole)} of {size(RANKS * whole)}."),
            (paper(0),),
        ),
        Slide(
            f"The mean of {RANKS} GPUs' gradients must reach all of them. How much does each GPU send?",
            options(
                [f"{size(by_kind['grad'])}: its gradients, once", f"{size(sent(ddp))}: nearly twice its gradients",
                 f"{size((RANKS - 1) * by_kind['grad'])}: its gradients, to every other GPU"], 2,
                f"Counted: {size(sent(ddp))}, 2Ψ elements times (N-1)/N."),
            ("Ask who would build it with one GPU that adds up everything: that GPU is the bottleneck.",),
            (paper(0),), kind="guess",
        ),
        Slide(
            claimed("An all-reduce sends less than 2Ψ, whatever N is", max(ring.values()) < two_psi),
            picture(show.svg_of, "ring")
            + said(f"Each of 4 GPUs sends {size(ring[4])}, of 16 {size(ring[16])}, of 64 {size(ring[64])}. "
                   f"2Ψ is {size(two_psi)}."),
            ("The first half of the ring is a reduce-scatter: each GPU ends with one finished chunk. The second half "
             "is an all-gather: the finished chunks go round. Each half sends Ψ(N-1)/N.",
             "Keep the two halves in mind: ZeRO-1 pulls them apart."),
            tuple(paper(0, ranks) for ranks in ring), ("all_reduce",),
        ),
    ]  # fmt: skip


def zero(show: Show) -> list[Slide]:
    """Make the slides on the three ZeRO stages."""
    results = [show.plans(paper(stage)) for stage in range(4)]
    ddp, one, two, three = results
    sends = [sent(result) for result in results]
    pad = sends[1] - sends[0]
    saved = f"{size(held(ddp))} become {size(held(one))}"
    return [
        Slide(
            f"ZeRO-1 gives each of {RANKS} GPUs 1/{RANKS} of the optimizer states. "
            "What does it send, compared with DDP?",
            options(["the same", "half as much again", "twice as much", f"{RANKS} times as much"], 1,
                    f"Counted: DDP {size(sends[0])}, ZeRO-1 {size(sends[1])}."),
            ("Hint for the room: which half of the all-reduce is still needed, and what must follow the update?",),
            (paper(0), paper(1)), kind="guess",
        ),
        Slide(
            claimed("ZeRO-1 costs nothing in traffic", 0 <= pad < 1e-6 * sends[0]),
            bars([Bar(STAGES[stage], of_kinds(states(results[stage])), f"sends {size(sends[stage])}")
                  for stage in (0, 1)])
            + said("The all-reduce's two halves, pulled apart: reduce-scatter the gradients, update your shard, "
                   "all-gather the new parameters."),
            (f"{saved}. The traffic differs by {pad:,} B of padding: {RANKS} does not divide a layer's parameters.",
             "This is the paper's recipe. What people run may all-reduce in place of the reduce-scatter: try "
             "<code>--recipe usual</code>."),
            (paper(0), paper(1)), ("reduce_scatter", "publish"),
        ),
        Slide(
            "With ZeRO-1 a GPU updates only the shard that it owns",
            picture(show.svg_of, "ownership --stage 1"),
            ("Follow one unit down the four GPUs: the green pieces are disjoint and cover the unit.",
             "Parameters and gradients are still whole everywhere: the next two stages take those."),
            ("plot ownership --stage 1 -o who.svg",),
        ),
        Slide(
            claimed("ZeRO-2 shards the gradients too, and sends no more", sends[2] == sends[1]),
            bars([Bar(STAGES[stage], of_kinds(states(results[stage])), f"sends {size(sends[stage])}")
                  for stage in (0, 1, 2)])
            + said("After a unit's backward: reduce-scatter its gradient, keep your shard, free the rest."),
            ("The optimizer reads only its own shard of the gradients, so nothing else must be kept.",
             "With several microbatches ZeRO-2 reduces in each of them, and then sends more than DDP."),
            (paper(0), paper(1), paper(2)),
        ),
        Slide(
            f"ZeRO-3 divides the parameters too. How many GB of states are left on each of {RANKS} GPUs?",
            count("GB", held(three), f"Counted: {size(held(three))}, {size(held(ddp))} / {RANKS}."),
            (f"ZeRO-2 leaves {size(held(two))}. Divide everything by {RANKS}.",),
            (paper(3),), kind="guess",
        ),
        Slide(
            claimed(f"ZeRO-3 leaves 1/{RANKS} of the states on each of {RANKS} GPUs",
                    abs(held(three) * RANKS - held(ddp)) < 1e-6 * held(ddp)),
            bars([Bar(STAGES[stage], of_kinds(states(result))) for stage, result in enumerate(results)],
                 limit=("V100", 32 * 10**9)),
            ("This is the paper's Figure 1, with the line of the GPU it was measured on.",
             "No GPU holds the model any more. So how can each of them run all of it?"),
            (*map(paper, range(4)), f"plot memory {PAPER} --gpu v100-32 -o figure1.svg"),
        ),
        Slide(
            "ZeRO-3 gathers a unit, uses it, and frees it",
            picture(show.svg_of, "ownership --stage 3"),
            ("Read it from left to right: before, during and after backward of one block. Light blue and brown are "
             "there only while the block computes.",
             "Then open the player at the moments below, and press n for the next moment."),
            ("plot ownership --stage 3 -o who.svg", "step --html step.html --stages 0,1,2,3"),
            ("gather", "use", "free", "again", "reduce"),
        ),
        Slide(
            "One unit at a time is whole, in forward and in backward",
            picture(show.svg_of, "staircase"),
            ("The model's memory is a shard of everything, and one unit at a time.",
             "Prefetching gathers the next unit while this one computes. That hides time and costs one unit's memory."),
            ("plot staircase -o staircase.svg",), ("gather", "again"),
        ),
        Slide(
            "ZeRO-3 gathers the parameters in forward, and again in backward. What does it send, compared with DDP?",
            options(["the same", "half as much again", "twice as much", f"{RANKS} times as much"], 2,
                    f"Counted: DDP {size(sends[0])}, ZeRO-3 {size(sends[3])}."),
            ("Count the collectives: how many times does Ψ go round?",), (paper(0), paper(3)), kind="guess",
        ),
        Slide(
            claimed("ZeRO-3 sends 3Ψ where DDP sends 2Ψ", abs(2 * sends[3] - 3 * sends[0]) < 1e-6 * sends[0]),
            bars([Bar(STAGES[stage], sent_by(results[stage]))
                  for stage in range(4)], key=("all_reduce", "reduce_scatter", "all_gather"))
            + said("Each Ψ is one trip round the ring: parameters for forward, parameters for backward, gradients."),
            ("All-gather in forward, all-gather in backward, reduce-scatter: three times Ψ(N-1)/N.",
             f"An all-reduce is two of them. Bytes are those of a GPU, in a step, N = {RANKS}."),
            tuple(map(paper, range(4))),
        ),
        Slide(
            "ZeRO-3's three trips, counted on 4 GPUs",
            picture(show.svg_of, "flow --stage 3 --collective ring"),
            ("The head uses the token table again. The table is gathered for each use and reduced once, so each "
             "all-gather has one call more than the reduce-scatter.",),
            ("plot flow --stage 3 --collective ring -o flow.svg",),
        ),
    ]  # fmt: skip
