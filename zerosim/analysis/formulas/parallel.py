"""Traffic of tensor, sequence and pipeline parallelism: what a rank sends in a step beside the model states' traffic.

Megatron-LM (arXiv 1909.08053, section 3), sequence parallelism (2205.05198, section 4.2.2), pipelines (2104.04473,
sections 2.2 and 3.2). Not time.

b rows of a micro-batch, s tokens, h width, m micro-batches; t tensor-parallel ranks, p pipeline stages, v chunks of
layers on each. A rank that holds `layers` blocks, with the token table (`first`) or the head and the loss (`last`):

                          in a block                          table    head         loss, of bs numbers
    tensor parallel       4 all-reduces of bsh; recompute 6   1        1            3 all-reduces
    sequence parallel     6 all-gathers; 8                    1        2            3 all-reduces
                          4 reduce-scatters; 6                1        1
      inputs kept whole   4 all-gathers; 6                    1        1            3 all-reduces
    recompute, Pa         1 all-gather more (1910.02054, 8)
    parts that run again  g once for attn_proj and op, f once for the mlp
    pipeline              bsh for each micro-batch, border and direction; bsh/t under sequence parallelism
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from zerosim.analysis.formulas.activations import parts_again
from zerosim.analysis.formulas.traffic import all_reduce_sent

LOSS_CALLS = 3
"""Numbers per token that are all-reduced: maximum, target's logit, sum of exponentials (1909.08053, section 3)."""


class Again(NamedTuple):
    """How often the blocks of a rank run f and g, forward, once more for recompute."""

    f: int = 0
    g: int = 0


KEPT = Again()


def borders_again(recompute: str, layers: int) -> Again:
    """Of so many blocks that all run the same again: both f and both g of `full`, those of the parts of `selective`."""
    parts = parts_again(recompute)
    f, g = (2, 2) if recompute == "full" else (parts.count("mlp"), parts.count("attn_proj") + parts.count("op"))
    return Again(f * layers, g * layers)


def tensor_calls(layers: int, *, first: bool, last: bool, again: Again = KEPT) -> int:
    """All-reduces of bsh per micro-batch: f in backward and g in forward, of attention and of the feed-forward."""
    return 4 * layers + again.g + first + last


def sequence_calls(
    layers: int, *, first: bool, last: bool, again: Again = KEPT, keep_gathered: bool = False
) -> tuple[int, int]:
    """All-gathers and reduce-scatters of bsh per micro-batch (2205.05198, section 4.2.2).

    f gathers in forward and scatters in backward, g the other way round: 4 and 4 in a block. Unless they are kept,
    inputs of column-parallel maps are gathered again for their weights' gradients, 2 in a block and 1 of the head.
    """
    twice = 0 if keep_gathered else 1
    gathers = (4 + 2 * twice) * layers + again.f + first + (1 + twice) * last
    return gathers, 4 * layers + again.g + first + last


def input_gathers(layers: int) -> int:
    """All-gathers of bsh per micro-batch, where t ranks keep parts of what full recompute keeps (Pa): one of each
    block's input, before it runs again (1910.02054, sections 6.1 and 8)."""
    return layers


def partition_share(ranks: int) -> Fraction:
    """What Pa adds to the traffic of a recomputed block, over what tensor parallelism sends there: 1/12, however many
    ranks there are (1910.02054, section 8: under 10 %)."""
    calls = tensor_calls(1, first=False, last=False, again=borders_again("full", 1))
    return gather_sent(input_gathers(1), ranks) / all_reduce_sent(calls, ranks)


def inputs_moved(layers: int, micro_batches: int, numel: int, parts: int = 1) -> Fraction:
    """Elements that a rank copies to the host in a step, and as many back, where inputs of `numel` wait there: all of
    each or, with Pa, one of t `parts` (1910.02054, section 6.1: Pa+cpu)."""
    return Fraction(layers * micro_batches * numel, parts)


def gather_sent(numel: int, ranks: int) -> Fraction:
    """Of an all_gather or a reduce_scatter of `numel` elements: (t-1)/t of them."""
    return Fraction(numel * (ranks - 1), ranks)


def border_sends(stage: int, stages: int, chunks: int = 1, schedule: str = "1f1b") -> int:
    """Messages of bsh that a pipeline rank sends for each micro-batch (2104.04473, section 3.2).

    One forward and one backward for each of its chunks; the first chunk of all sends nothing back, the last nothing on.
    zb-v has both on the first stage, and turns on the last one without a message (2401.10241, section 6).
    """
    fewer = 2 if schedule == "zb-v" else 1
    return 2 * chunks - fewer * ((stage == 0) + (stage == stages - 1))


def live_micro_batches(schedule: str, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """The most micro-batches whose activations a stage holds at once; of several chunks a stage chunks of them.

    GPipe (arXiv 1811.06965) m; 1F1B min(m, p-i); interleaved 2(p-i-1) + (v-1)p + 1, of vm in all (2104.04473, 2.2);
    zb-h1 p-i, beside what the weight gradients of i others read; zb-v 2p, all included (2401.10241, 2.2 and 6).
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule in ("1f1b", "zb-h1"):
        return min(micro_batches, stages - stage)
    if schedule == "zb-v":
        return 2 * stages
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, chunks * micro_batches)


def live_weights(schedule: str, stage: int) -> int:
    """Micro-batches of which a stage keeps beside those what their weight gradients read (2401.10241, section 2.2)."""
    return stage if schedule == "zb-h1" else 0


LIVE = {
    "gpipe": "m micro-batches",
    "1f1b": "min(m, p-i) micro-batches",
    "interleaved": "2(p-i-1) + (v-1)p + 1 chunks",
    "zb-h1": "p-i micro-batches, and what the weight gradients of i more read",
    "zb-v": "2p chunks",
}
"""By schedule what is live, in words of m, p, v and stage i from 0."""
BUBBLES = {
    "gpipe": "(p-1)/m",
    "1f1b": "(p-1)/m",
    "interleaved": "(p-1)/(vm)",
    "zb-h1": "(p-1)/(3m)",
    "zb-v": "(p-1)/(6m)",
}


def bubble(stages: int, micro_batches: int, chunks: int = 1, schedule: str = "1f1b") -> Fraction:
    """Idle time until the last stage is done, over the time that a stage's slots take: the bubble by makespan.

    (p-1)/(vm), where every slot takes as long (2104.04473, 2.2); a third of it where weight gradients, which take one
    slot of three, fill the rest (2401.10241, sections 2.2 and 6).
    """
    return Fraction(stages - 1, chunks * micro_batches * (3 if schedule in ("zb-h1", "zb-v") else 1))


def own_span_bubble(stages: int, micro_batches: int, chunks: int = 1, schedule: str = "1f1b") -> Fraction:
    """The same as the zero-bubble papers count it: of the stage with the most, from its own first action to its own
    last one. None in zb-v (2401.10241, sections 1 and 6)."""
    return Fraction(0) if schedule == "zb-v" else bubble(stages, micro_batches, chunks, schedule)


def shared_sent(shared: Mapping[int, int], parts: int, *, pairs: bool = False) -> Fraction:
    """Elements sent per rank and step to add up gradients of which several ranks hold shares, the mean over ranks.

    `shared` are a rank's elements by the number of ranks k that share their gradient (2205.05198, section 4.2.2, for
    norms and biases: k = t; copied key-value heads: the ranks that hold one), of which it updates one of `parts` parts.
    """
    return sum((all_reduce_sent(numel, ranks, pairs=pairs) / parts for ranks, numel in shared.items()), Fraction(0))


def tied_sent(numel: int, parts: int) -> Fraction:
    """Elements sent by the first and by the last stage to add up a tied table's gradient, of which each updates one of
    `parts` parts: an all_reduce of two ranks, which is the same by all pairs (2104.04473; Megatron-LM's embedding
    group)."""
    return all_reduce_sent(numel, 2) / parts
