"""Exercise 20: the smallest hole is split; what is released takes in the holes behind and before it."""


class MyArena:
    """A region of `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self.holes = {0: capacity}  # size by address
        self.live: dict[int, int] = {}  # the same, of reserved parts

    def reserve(self, nbytes: int) -> int | None:
        """Return the address of nbytes (1 at least); None: no hole."""
        enough = [(size, address) for address, size in self.holes.items() if size >= nbytes]
        if not enough:
            return None
        size, address = min(enough)
        del self.holes[address]
        if size > nbytes:
            self.holes[address + nbytes] = size - nbytes
        self.live[address] = nbytes
        return address

    def release(self, address: int) -> None:
        """Free the bytes reserved there."""
        size = self.live.pop(address)
        size += self.holes.pop(address + size, 0)  # behind
        for start in [start for start in self.holes if start + self.holes[start] == address]:
            size, address = size + self.holes.pop(start), start  # before
        self.holes[address] = size
