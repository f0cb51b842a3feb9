"""ZeRO++ (arXiv 2306.10209) and MiCS (arXiv 2205.00119): what stage 3 sends within a node and across nodes.

N = n d ranks that model states are divided among, d in each of n nodes. Volumes are in elements of a parameter or a
gradient, of w and g bytes: int8 codes of 2-byte weights are half of an element each, int4 codes of 2-byte gradients a
quarter. Every group of codes has a scale, 4 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from zerosim.analysis.formulas.form import Form, ring, symbols
from zerosim.analysis.formulas.states import PSI, N
from zerosim.analysis.formulas.traffic import Schedule

_VD, _U, _R, _P, _M, _O, _w, _g, _d, _n = symbols("VD U R P M O w g d n")
_SF, _SB, _SG = symbols("σ_f σ_b σ_g")
SCALE_BYTES = 4
ZEROPP = "ZeRO++ (arXiv 2306.10209), sections 3.1 to 3.3"
MICS = "MiCS (arXiv 2205.00119), section 3.3"

Operation = tuple[str, str]
"""An operation, and what its group is for."""


class Gathers(NamedTuple):
    """Elements that stage 3 gathers in a step, in whole buffers: for forwards, for backwards, and, of parameters that
    stay gathered for good, after the optimizer step."""

    forward: Form
    backward: Form
    after: Form


def gathers(schedule: Schedule) -> Gathers:
    """Return the parts of `traffic.gathered`, with its letters. Source: derived."""
    m, last = schedule.micro_batches, schedule.keep_last_unit
    stays = schedule.persistent * m * _P
    if not schedule.reshard_after_forward:
        return Gathers(m * PSI - stays, Form(), schedule.persistent * _P)
    forward, backward = m * PSI - stays, m * PSI + schedule.again * m * _M - stays - schedule.kept * _U
    if schedule.keep_root_units:
        backward = backward - m * _R - last * m * _U
    elif schedule.tied:
        forward, backward = forward + m * _VD, backward + (0 if last else m) * _VD
    else:
        backward = backward - last * m * _U
    return Gathers(forward, backward, schedule.persistent * _P)


def params_sent(
    moved: Gathers, *, param_bytes: int, secondary: bool = False, quantized: bool = False, hierarchical: bool = False
) -> Iterator[tuple[Operation, Form]]:
    """Yield the bytes of parameters that a rank sends per step: gathers among all N ranks, across n nodes, within a
    node.

    `secondary` (hpZ): backward's gathers are within a node. `quantized` (qwZ): a byte for each element, and scales.
    `hierarchical` (MiCS): a gather among N goes across nodes first, with 1/d of it, and then within a node.
    """
    source = MICS if hierarchical else ZEROPP

    def sent(elements: Form, scales: Form) -> Form:
        return _w * (elements / param_bytes + Fraction(SCALE_BYTES, param_bytes) * scales if quantized else elements)

    wide = sent(moved.forward, _SF) + (Form() if secondary else sent(moved.backward, _SB))
    if hierarchical:
        yield ("all_gather", "states"), ring(N) * _w * moved.after
        yield ("all_gather", "nodes"), (ring(_n) * wide / _d).by(source)
        yield ("all_gather", "node"), (ring(_d) * wide).by(source)
    else:
        yield ("all_gather", "states"), (ring(N) * (wide + _w * moved.after)).by(source)
    if secondary:
        yield ("all_gather", "node"), (ring(_d) * sent(moved.backward, _SB)).by(source)


def grads_sent(*, reductions: int, grad_bytes: int) -> Iterator[tuple[Operation, Form]]:
    """Yield qgZ's bytes of gradients that a rank sends per step. O elements, of tensors of one dimension, go exactly;
    int4 codes of the others, half a byte each, within the node, and 1/d as many across nodes."""
    codes = reductions * _g * ((PSI - _O) / (2 * grad_bytes) + Fraction(SCALE_BYTES, grad_bytes) * _SG)
    yield ("reduce_scatter", "states"), ring(N) * reductions * _g * _O
    yield ("all_to_all", "node"), (ring(_d) * codes).by(ZEROPP)
    yield ("all_to_all", "nodes"), (ring(_n) * codes / _d).by(ZEROPP)


def secondary_states(param_bytes: int, *, keep_root_units: bool = False, persistent: bool = False) -> Form:
    """Return the bytes of hpZ's second shard on a rank: + 2 Psi / d in half types, for parameters that are gathered
    twice."""
    return (param_bytes * (PSI - keep_root_units * _R - persistent * _P) / _d).by(ZEROPP)


def leaves_a_node(sent: Form, *, ring_of_all: bool) -> Form:
    """Return the bytes that leave a node of d ranks, out of those that each of N ranks sends to the others.

    A ring over all ranks leaves a node once: as much as one member sends. Otherwise each of d members sends as much to
    each other rank, N - d of which are on other nodes: (N-1)/N of a payload becomes d (n-1)/n. Source: derived.
    """
    return sent if ring_of_all else ring(_n) * _d * _without_ring(sent)


def _without_ring(sent: Form) -> Form:
    whole = Form((), sent.source)
    for powers, number in sent.terms:
        rest = tuple((atom, power) for atom, power in powers if getattr(atom, "kind", "") != "ring")
        whole = whole + Form(((rest, number),))
    return whole


# -- groups of codes ------------------------------------------------------------------------------
def weight_scales(numel: int) -> int:
    """Return the groups of a shard of `numel` weights: ceil(numel / 8000) or the next number with numel % (8 groups) =
    0, doubled while that holds and groups have more than 8,000 elements. Source: DeepSpeed, CUDAQuantizer.quantize."""
    found = next(k for k in range(-(-numel // 8000), numel + 1) if numel % (8 * k) == 0)
    while numel % (16 * found) == 0 and numel > 8000 * found:
        found *= 2
    return found


def grad_scales(shapes: Sequence[Sequence[int]], numel: int, ranks: int) -> int:
    """Return the groups of a gradient of so many elements with padding, 0 if it is reduced exactly: as many as the rows
    or columns of its largest tensor, at least one per rank, and more until a slice is groups of an even size; two
    elements are the smallest. Source: DeepSpeed, all_to_all_quant_reduce; for several tensors derived."""
    sides = [side for shape in shapes if len(shape) > 1 for side in shape[:2]]
    if not sides or numel % (2 * ranks):
        return 0
    own = numel // ranks
    least = min(-(-max(*sides, ranks) // ranks), own // 2)
    return ranks * next(k for k in range(least, own + 1) if own % k == 0 and own // k % 2 == 0)
