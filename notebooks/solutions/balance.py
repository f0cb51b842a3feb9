"""Exercise 37: an early and a late piece each, whose numbers have the same sum."""


def my_pieces(ranks: int) -> list[list[int]]:
    return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
