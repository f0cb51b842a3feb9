"""Exercise 35: what each memory holds, what each link carries in each phase, and the shortest of what fits."""

from itertools import product


def my_offload(
    psi: int,
    room: dict[str, int],
    links: dict[str, int],
    compute: int,
    update: dict[str, int],
) -> tuple[str, str, str]:
    def step(optim, grad, param):
        held = {memory: 12 * (optim == memory) + 2 * (grad == memory) + 2 * (param == memory) for memory in room}
        if any(psi * held[memory] > room[memory] for memory in room):
            return float("inf")
        cpu, away, far = optim != "device", param != "device", param == "nvme"
        into = 4 * away / links["pcie"], 4 * far / links["nvme"], 2 * (grad == "host") / links["pcie"]
        out = 2 * (away and not cpu) + 2 * (cpu and grad == "device")
        states = 12 * (optim == "nvme")
        passes = out / links["pcie"], 2 * (cpu and not away) / links["pcie"], (2 * far + states) / links["nvme"]
        return max(compute, *(psi * each for each in into)) + max(
            update["host" if cpu else "device"], *(psi * each for each in passes)
        )

    places = product(room, ("device", "host"), room)
    return min((where for where in places if where[:2] != ("device", "host")), key=lambda where: step(*where))
