"""The exercises in which a bug is to be found, by what the grader reports, and repaired.

Owns questions, cases, targets and hints. The strategies stand in `given/bugs.py`.
"""

from __future__ import annotations

from fractions import Fraction

from zerosim.grading import adapting, checks, traffic
from zerosim.grading.exercise import Exercise
from zerosim.grading.given import bugs
from zerosim.grading.targets import GATHERED, PLAIN, SHARDED, case_of, elements

_ZERO3 = ("pre_forward", "post_forward", "pre_backward", "post_backward", "finish")

SEEDED: tuple[Exercise, ...] = (
    Exercise(
        11,
        "bug_thrifty",
        "Find the bug: it frees, and frees nothing",
        "This ZeRO-3 trains to the right weights. Why does it hold two units at a time?",
        bugs.Thrifty,
        3,
        (case_of("4 ranks", 3, ranks=4), case_of("5 ranks", 3, ranks=5)),
        SHARDED,
        ("3Ψ", elements(3)),
        ("Bytes live as long as any name holds the buffer.", "Who still holds the buffer after reshard()?"),
        adapting.strategy,
        yours=_ZERO3,
        decisive=("weights", "bytes", "gathered"),
        gathered=1,
    ),
    Exercise(
        12,
        "bug_mean",
        "Find the bug: the loss falls, the weights are wrong",
        "This DDP trains, and Adam hides almost all of its error. What is wrong with its gradients?",
        bugs.Mean,
        0,
        (case_of("4 ranks", 0, ranks=4), case_of("3 ranks, tied", 0, ranks=3, tie_embeddings=True)),
        PLAIN,
        ("2Ψ", elements(0)),
        ("By what factor is the gradient off?", "What is the op of all_reduce, when none is given?"),
        adapting.strategy,
        yours=("post_backward",),
    ),
    Exercise(
        13,
        "bug_shared",
        "Find the bug: too much traffic, and the last bits",
        "This ZeRO-3 is right on a model whose head is its own. On a tied one it sends too much.",
        bugs.Shared,
        3,
        (case_of("4 ranks, tied", 3, ranks=4, tie_embeddings=True), case_of("2 ranks", 3, ranks=2)),
        SHARDED,
        ("(3Ψ + 2VD)", elements(3)),
        ("How often is the table reduced per step?", "What does unit.reduces say?"),
        adapting.strategy,
        yours=_ZERO3,
        decisive=("weights", "volume", "calls"),
        gathered=1,
    ),
    Exercise(
        14,
        "bug_hasty",
        "Find the bug: used after it was freed",
        "This ZeRO-3 keeps the tied table gathered from wte to lm_head, which saves a gather, and then fails. Repair "
        "it; two buffers may be gathered at a time.",
        bugs.Hasty,
        3,
        (
            case_of("4 ranks, tied", 3, ranks=4, tie_embeddings=True),
            case_of("3 ranks, tied", 3, ranks=3, tie_embeddings=True),
        ),
        (("weights", checks.weights), ("bytes", checks.states), *GATHERED, ("volume", traffic.volume)),
        ("(3Ψ + VD)", lambda config, psi, tied: Fraction(3 * psi + tied)),
        ("Which point let go of the table, and which should have brought it back?", "Look at lm_head in backward."),
        adapting.strategy,
        yours=_ZERO3,
        gathered=2,
    ),
    Exercise(
        15,
        "bug_patient",
        "Find the bug: right with one micro-batch",
        "This ZeRO-1 is right without accumulation. What does it forget with it?",
        bugs.Patient,
        1,
        (case_of("4 ranks", 1, ranks=4), case_of("4 ranks, 3 micro-batches", 1, ranks=4, accumulate=3)),
        PLAIN,
        ("2Ψ", elements(1)),
        ("How many micro-batches are in the sum?", "What happens to the last one when grad_whole is there already?"),
        adapting.strategy,
        yours=("post_backward", "spread"),
    ),
    Exercise(
        16,
        "bug_sparing",
        "Find the bug: fine on four ranks, dead on six",
        "This ZeRO-2 works on 4 ranks. On 6 ranks of a narrower model it ends at once. Which rank did what?",
        bugs.Sparing,
        2,
        (
            case_of("4 ranks", 2, ranks=4),
            case_of("6 ranks, a unit of 20 elements", 2, ranks=6, hidden=10, layers=1),
        ),
        PLAIN,
        ("2Ψ", elements(2)),
        ("What does a rank own of 20 elements cut into 6 slices?", "A collective needs every rank of its group."),
        adapting.strategy,
        yours=("post_backward", "spread"),
    ),
)
