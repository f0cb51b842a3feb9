"""Exercise 21: from the lowest address up, each goes to the end of those that are in place."""


def my_compaction(live: dict[int, int]) -> list[tuple[int, int, int]]:
    moves, end = [], 0
    for address in sorted(live):
        if address != end:
            moves.append((address, end, live[address]))
        end += live[address]
    return moves
