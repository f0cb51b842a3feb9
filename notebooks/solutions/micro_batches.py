"""Exercise 23: (p-1)/(v m) is at most the share, rounded up."""

from fractions import Fraction


def my_micro_batches(
    num_stages: int,
    chunks: int,
    share: Fraction,
) -> int:
    pace = num_stages if chunks > 1 else 1
    return pace * max(1, -(-(num_stages - 1) // (chunks * share * pace)))
