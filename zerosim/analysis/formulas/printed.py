"""The ZeRO paper's printed figures, and its rounding: Figure 1 and Tables 1 and 2 (arXiv 1910.02054).

GB is 1e9 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from zerosim.analysis.formulas.states import BytesPerParameter, bytes_per_parameter_at

MIXED_ADAM = BytesPerParameter(2, 2, 12)
"""The paper's case: 2-byte parameters and gradients, K = 12 (section 3.1)."""

FIGURE_1 = ("120", "31.4", "16.6", "1.9")
"""GB per device by stage: 7.5B parameters, 64 ranks."""

VOLUME = ("2Ψ", "2Ψ", "2Ψ", "3Ψ")
"""Elements per rank and step, by stage (section 7): without the factor (N-1)/N, one microbatch."""

TABLE_1 = {
    7_500_000_000: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128_000_000_000: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1_000_000_000_000: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}
"""GB per device of stages 1, 2 and 3, by parameters and ranks."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A figure as the paper prints it, in GB, and where."""

    where: str
    gigabytes: str


def printed_states(stage: int, num_parameters: int, ranks: int) -> list[Printed]:
    """Return where the paper prints the model states per device of this question, in mixed precision with Adam."""
    found = []
    if (num_parameters, ranks) == (7_500_000_000, 64):
        found.append(Printed("Figure 1", FIGURE_1[stage]))
    row = TABLE_1.get(num_parameters, {}).get(ranks)
    if row and stage >= 1:
        found.append(Printed("Table 1", row[stage - 1]))
    return found


def printed(value: Fraction, like: str, *, cut_from: int | None = 100) -> str:
    """Return an exact value with as many digits as the printed one: rounded half up, cut off from `cut_from` on (None:
    never).

    That is how Table 1 rounds: 41.25 is printed 41.3, 513.5 is printed 513. Recomputed from all its cells.
    """
    decimals = len(like.partition(".")[2])
    scaled = value * 10**decimals
    is_cut = cut_from is not None and value >= cut_from
    whole, part = divmod(math.floor(scaled if is_cut else scaled + Fraction(1, 2)), 10**decimals)
    return f"{whole}.{part:0{decimals}d}" if decimals else str(whole)


def largest_model(memory_bytes: int, stage: int, ranks: int, cost: BytesPerParameter, mp: int = 1) -> Fraction:
    """Return how many parameters' model states fill `mp` devices' memory (Table 2): memory * mp / bytes per parameter.

    The paper's rows of mp > 1 are multiples of its rounded first row, so that they lie a little lower.
    """
    return memory_bytes * mp / bytes_per_parameter_at(stage, ranks, cost)
