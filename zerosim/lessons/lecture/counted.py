"""The lecture's numbers: plans by the words of their commands, and moments of the player's runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from zerosim.config import RunConfig
from zerosim.config.presets.hardware import find_hardware
from zerosim.playback import encode, record
from zerosim.playback.encode import EVENTS, Data
from zerosim.report.verdict import Limit, fits
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

ConfigOf = Callable[[str], RunConfig]
PLAYED = (0, 1, 2, 3)
"""The ZeRO stages of the lecture's player, in the order of its runs."""


class Plans:
    """Plans by the words after `zerosim plan`, each counted once."""

    def __init__(self, config_of: ConfigOf) -> None:
        self._config_of = config_of
        self._found: dict[str, RunResult] = {}

    def __call__(self, words: str) -> RunResult:
        if words not in self._found:
            self._found[words] = plan(self._config_of(words))
        return self._found[words]

    def fits(self, words: str) -> bool:
        """Return whether a plan fits on the device that its words name."""
        device = find_hardware(words.split("--gpu ")[1].split()[0])
        return fits(self(words), Limit(device.name, device.memory_bytes, device))


def states(result: RunResult) -> dict[str, int]:
    """Return a GPU's bytes of parameters, gradients and optimizer states when backward ends."""
    return result.memory[0].model_states()


def held(result: RunResult) -> int:
    return sum(states(result).values())


def sent(result: RunResult) -> int:
    """Return the bytes of model states that a GPU sends in a step."""
    return result.sent_bytes(0, 0)


def sent_by(result: RunResult) -> list[tuple[str, int]]:
    """Return the collectives of model states and the bytes that each sends, in order."""
    return [(row.op, row.wire_bytes) for row in result.traffic[0] if row.purpose == "states"]


def activations(result: RunResult) -> int:
    """Return a GPU's bytes of activations when forward ends, the inputs that recompute keeps included."""
    by_kind = result.memory[0].marks["end_of_forward"].by_kind
    return by_kind.get("activation", 0) + by_kind.get("kept", 0)


def on_host(result: RunResult) -> int:
    return result.memory[0].host_peak_bytes


def over_pcie(result: RunResult) -> int:
    """Return the bytes that a GPU copies to the host and back in a step for offload."""
    return sum(row.payload_bytes for row in result.traffic[0] if row.purpose == "offload")


# -- the player --------------------------------------------------------------------------------------
def played() -> Data:
    """Record one step of a small GPT on 4 ranks at each ZeRO stage, as the player's data."""
    configs = [
        RunConfig(stage=stage, ranks=4, steps=1, layers=2, seq=16, micro_batch=1, collective="ring") for stage in PLAYED
    ]
    return encode(*map(record, configs))


def moments(data: Data) -> dict[str, tuple[str, str]]:
    """Return the words and the address of each moment that slides link to, by name."""
    ddp, zero1, _, zero3 = data["runs"]
    found = {
        "all_reduce": ("gradients are all-reduced", 0, _in_flight(ddp, "all_reduce", "backward")),
        "reduce_scatter": ("gradients are reduce-scattered", 1, _in_flight(zero1, "reduce_scatter", "backward")),
        "publish": ("new parameters are gathered", 1, _in_flight(zero1, "all_gather", "optimizer")),
        "gather": ("h.0 is gathered", 3, _in_flight(zero3, "all_gather", "forward", "h.0")),
        "use": ("used", 3, _used(zero3, "h.0")),
        "free": ("freed", 3, _freed(zero3, "h.0")),
        "again": ("gathered again", 3, _in_flight(zero3, "all_gather", "backward", "h.0")),
        "reduce": ("its gradient reduced", 3, _in_flight(zero3, "reduce_scatter", "backward", "h.0")),
    }
    return {name: (words, f"lecture&run={run}&at={at}") for name, (words, run, at) in found.items()}


def _events(run: Data, kind: str) -> Iterator[tuple[int, int, str, str, list[Any]]]:
    """Return the events of a kind: the moment after each, its rank, phase and unit, and its other values."""
    for at, (code, rank, scope, *values) in enumerate(run["events"]):
        if EVENTS[code] == kind:
            _, phase, unit, _ = run["scopes"][scope]
            yield at + 1, rank, phase, unit, values


def _in_flight(run: Data, verb: str, phase: str, unit: str = "") -> int:
    """Return the moment at which every rank has joined the first such collective of states and has sent its pieces."""
    first = next(
        values[1]
        for _, _, in_phase, in_unit, values in _events(run, "launch")
        if run["calls"][values[1]][0] == verb
        and run["calls"][values[1]][2] == "states"
        and in_phase == phase
        and unit in ("", in_unit)
    )
    joined = [(at, rank, values[0]) for at, rank, _, _, values in _events(run, "launch") if values[1] == first]
    works = {(rank, work) for _, rank, work in joined}
    ended = min(at for at, rank, _, _, values in _events(run, "wait") if (rank, values[0]) in works)
    sent = [at for at, rank, _, _, values in _events(run, "message") if (rank, values[0]) in works and at < ended]
    return max(*sent, *(at for at, _, _ in joined))


def _used(run: Data, unit: str) -> int:
    """Return the moment after the first kernel of a unit's forward."""
    return next(at for at, _, phase, in_unit, _ in _events(run, "kernel") if (phase, in_unit) == ("forward", unit))


def _freed(run: Data, unit: str) -> int:
    """Return the moment after every rank has freed a unit's parameters that it gathered for forward."""
    gathered = {
        (rank, values[0])
        for _, rank, phase, in_unit, values in _events(run, "alloc")
        if (phase, in_unit, run["words"][values[2]]) == ("forward", unit, "unsharded_param")
    }
    return max(at for at, rank, _, _, values in _events(run, "free") if (rank, values[0]) in gathered)
