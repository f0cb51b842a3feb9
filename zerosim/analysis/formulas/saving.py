"""Saved states: what each rank writes, receives and holds on its host, and the interval between saves.

Bytes: derived from the states' own (ZeRO paper, sections 3.1 and 5). What is written is what a run needs to go on: the
fp32 master, or the parameters where there is none, and the optimizer's states. So it is 12 bytes a parameter for Adam
in mixed precision and in fp32. Of frozen weights only the weights are written, as they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from zerosim.analysis.formulas.form import Form, ring, symbols
from zerosim.analysis.formulas.states import PSI, QUANTIZED, QUANTIZED_BYTES, SCALES, TRAINED, Frozen, N

YOUNG = "Young 1974, doi 10.1145/361147.361115"
"""A first order approximation to the optimum checkpoint interval, Communications of the ACM 17 (9)."""
LLAMA3 = "arXiv 2407.21783, section 3.3.4"
GPU_HOURS = Fraction(54 * 24 * 16384, 419)
"""GPU hours between interruptions of Llama 3's training: 419 unexpected ones in 54 days on 16,384 GPUs (`LLAMA3`)."""
WRITTEN_ONCE, WRITERS = symbols("Ψ_w W")
DERIVED = "derived from the ZeRO paper (arXiv 1910.02054), sections 3.1 and 5"


def saved_states(each: int | Fraction, frozen: Frozen | None, *, on_mesh: bool) -> Form:
    """Return the bytes of a pipeline stage's whole state: `each` of a trained parameter. `on_mesh`: not only the
    ranks that divide a state hold it (replicas, tensor parallelism, a tied table). It is written once."""
    if on_mesh:
        return (each * WRITTEN_ONCE).by(DERIVED)
    if frozen is None:
        return (each * PSI).by(DERIVED)
    weights = frozen.each * PSI + (each - frozen.each) * TRAINED
    if frozen.quantized:
        weights = weights - frozen.each * QUANTIZED + QUANTIZED_BYTES
    if frozen.whole_scales:
        weights = weights + SCALES
    return weights.by(DERIVED)


def saved(how: str, whole: Form, each: int | Fraction, *, on_mesh: bool, divided: bool) -> Iterator[tuple[str, Form]]:
    """Yield the bytes of a save by what they are of, of each rank on average: those on the drives and on the host. In a
    gathered save all of a pipeline stage's are on the drives of its first ranks, and each rank receives the others'
    slices of `each` byte of its parameters, if states are `divided`."""
    if how == "gathered":
        yield "on the drives", whole
        if divided:
            yield "received", (ring(N) * each * PSI).by(DERIVED)
        if not on_mesh:
            yield "on the host", whole
        return
    share = whole / (WRITERS if on_mesh else N)
    yield "on the drives", share.by(DERIVED)
    if how == "async":
        yield "on the host", share.by(DERIVED)


def young(seconds: float, between_failures: float) -> float:
    """Return the interval between saves that loses the least time, in seconds: sqrt(2 C M), where a save takes C and
    failures are M apart (`YOUNG`)."""
    return math.sqrt(2 * seconds * between_failures)


def lost(seconds: float, interval: float, between_failures: float) -> float:
    """Return the share of the time that saves take, and work that a failure undoes: C / T + T / 2M, to first order."""
    return seconds / interval + interval / (2 * between_failures)
