"""Exercise 22: every depth is played through, and the fewest units that wait no longer than all of them win."""


def my_depth(compute: list[int], gather: list[int]) -> int:
    def waited(ahead: int) -> int:
        now = free = total = 0
        ends: list[int] = []
        for unit, seconds in enumerate(compute):
            for stop in (unit + 1, unit + 1 + ahead):
                for next_one in gather[len(ends) : stop]:
                    free = max(free, now) + next_one
                    ends.append(free)
                total += max(0, ends[unit] - now)
                now = max(now, ends[unit])
            now += seconds
        return total

    waits = [waited(ahead) for ahead in range(len(compute))]
    return waits.index(waits[-1])
