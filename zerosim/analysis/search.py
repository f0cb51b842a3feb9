"""What every search shares: the devices that configurations are tried on, and what a trial found. And the searches of
one size: the largest value that fits, the fewest ranks, the largest model that has a name.

Searches run configurations and use no formula. Every answer "fits" or "does not fit" comes from a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType
from typing import Any, NamedTuple

from zerosim.analysis.candidate import REACH, Candidate, accepted, candidate
from zerosim.analysis.capabilities import pipeline, tensor
from zerosim.analysis.recompute import period_of
from zerosim.comm.runtime import make_backend
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.known import known_models
from zerosim.config.parts.allocators import feels_limit, is_exact
from zerosim.config.parts.context import cut_of
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.published import best_published
from zerosim.device.device import Device
from zerosim.errors import InputError, OutOfMemory
from zerosim.ledger.clock import StepTime
from zerosim.placement.memories import DEVICE, HOST, NVME
from zerosim.train.build_model import build_model
from zerosim.train.offload import node_has
from zerosim.train.plan import judged, peak_of, plan
from zerosim.train.result import RunResult

NEARLY_FULL = 0.75
"""The part of a device's room from which on an allocator's gaps may be too much."""
MOST_MODELS = 3
"""A search for named models ends after this number that fit."""
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "positions", "vocab", "params", "units",
         "experts", "top_k", "expert_ffn", "shared_experts")  # fmt: skip
"""The sizes of a named model."""
SEARCHES = {
    "micro-batch": "the most rows per rank",
    "layers": "the most blocks of this width: the largest model",
    "params": "the most parameters of a flat model",
    "seq": "the longest rows",
    "ranks": "the fewest ranks",
    "lora-rank": "the highest rank of adapters",
    "model": "the largest model that has a name",
    "offload": "whether to offload, and what: every way of --stage (default 3), by modelled time with --gpu",
    "mesh": "the best meshes, ZeRO stages, microbatches, recompute and schedules of --ranks ranks, or of the fewest "
    "that fit: by modelled tokens/s with --gpu, else by memory",
}


def no_reserve(config: RunConfig) -> int:
    """Reserve no memory for CUDA and its libraries."""
    return 0


class Tried(NamedTuple):
    """A planned configuration: the most bytes that a rank takes from its device, the reserve beside them, the step's
    time, the memories that are too small, and a node's bytes of its other memories. `value` is that of a searched
    size, `result` the whole plan and `cached` that under the caching allocator, if they were kept."""

    config: RunConfig
    peak_bytes: int
    reserve_bytes: int = 0
    time: StepTime | None = None
    too_small: tuple[str, ...] = ()
    node_bytes: Mapping[str, int] = MappingProxyType({})
    value: Any = None
    result: RunResult | None = None
    cached: RunResult | None = None

    @property
    def taken_bytes(self) -> int:
        """The bytes that the device must have."""
        return self.peak_bytes + self.reserve_bytes

    @property
    def fits(self) -> bool:
        return not self.too_small

    @property
    def order(self) -> tuple[float, int]:
        """The rank in a list: by seconds, if there is a clock, then by bytes."""
        return (0.0 if self.time is None else self.time.seconds), self.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without configuration and time."""
        nodes = {f"{memory}_bytes": nbytes for memory, nbytes in self.node_bytes.items()}
        own = {"value": self.value} if self.value is not None else {}
        bytes_of = {name: getattr(self, name) for name in ("peak_bytes", "reserve_bytes")}
        return {**own, "fits": self.fits, **bytes_of, **nodes, "too_small": list(self.too_small)}


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a search: each one's bytes, of which a reserve is kept, in the nodes of a cluster, if one is
    given. `is_strict`: where exact bytes nearly fill the room, PyTorch's caching allocator has to fit too."""

    nbytes: int
    reserve: Callable[[RunConfig], int] = no_reserve
    cluster: Cluster | None = None
    is_strict: bool = False

    def room(self, asked: RunConfig) -> int:
        """Return the device's bytes that the reserve leaves."""
        return self.nbytes - self.reserve(asked)

    def tried(self, asked: RunConfig, *, clock: bool = False) -> Tried:
        """Plan a configuration in nodes without limits, then name the memories that are too small. Raises: InputError
        if it cannot be planned."""
        free, room = self.cluster and self.cluster.without_limits(), self.room(asked)
        config = candidate(asked, host_memory=None).sure()
        try:
            within = judged(config, room if feels_limit(config.memory) else None)
            result = plan(within, cluster=free, clock=clock)
            peak = max(memory.reserved_bytes for memory in result.memory)
        except OutOfMemory:  # an allocator refused: how much it takes is known, and what exact bytes are elsewhere
            exact = candidate(config, allocator="exact", allocator_conf=None).sure()
            result, peak = plan(judged(exact, None), cluster=free, clock=False), peak_of(config, room, free)
        has = node_has(asked, self.cluster)
        most = {memory: max(sum(node.of(memory).values()) for node in result.nodes) for memory in (HOST, NVME)}
        try:
            small = [DEVICE] * (peak > room)
            self._cached(asked, peak)
        except OutOfMemory:  # by the gaps that the caching allocator leaves
            small = [DEVICE]
        small += [one for one, nbytes in has.items() if nbytes is not None and most[one] > nbytes]
        return Tried(asked, peak, self.reserve(asked), result.time, tuple(small), most)

    def within(self, asked: RunConfig) -> Tried | None:
        """Plan a configuration; None as soon as a rank needs more than there is."""
        try:
            result = plan(judged(asked, self.room(asked)), cluster=self.cluster)
            peak = max(memory.reserved_bytes for memory in result.memory)
            cached = self._cached(asked, peak)
        except OutOfMemory:
            return None
        return Tried(asked, peak, self.reserve(asked), result.time, result=result, cached=cached)

    def _cached(self, asked: RunConfig, peak: int) -> RunResult | None:
        """Return the plan under the caching allocator of a configuration that nearly fills the room, if that is asked.
        Raises: OutOfMemory."""
        if not self.is_strict or not is_exact(asked.memory) or not NEARLY_FULL <= peak / self.room(asked) <= 1:
            return None
        config, free = candidate(asked, allocator="caching", host_memory=None).sure(), self.cluster
        return plan(judged(config, self.room(asked)), cluster=free and free.without_limits(), clock=False)

    def without_limit(self) -> Devices:
        """Return devices and nodes that hold everything."""
        return Devices(10**18, no_reserve, self.cluster and self.cluster.without_limits())  # not strict

    def is_implausible(self, tried: Tried) -> bool:
        """Return whether nobody has published as high an MFU on this GPU."""
        return tried.time is not None and tried.time.seconds < self.least_plausible(tried)

    def least_plausible(self, tried: Tried) -> float:
        """Return the seconds that this step would take with the highest MFU that was published for the GPU; 0 if none
        was."""
        cluster, time = self.cluster, tried.time
        best = None
        if cluster is not None and cluster.machine is None:
            best = best_published(cluster.name, tried.config.fp8)
        if cluster is None or time is None or best is None:
            return 0.0
        most = best.mfu * tried.config.mesh.ranks * cluster.peak_flops
        return time.model_flops / most if most else math.inf


Trial = Callable[[RunConfig], Tried]
Say = Callable[[Tried], None]


class Found(NamedTuple):
    """The best value that fits (None: none does), the next one, which does not fit, and all tried values.
    `whole_nodes`: for ranks, the fewest that fill nodes. `refusal`: why no value beyond the best could be tried, if
    other options refuse the larger ones."""

    best: Tried | None
    beyond: Tried | None = None
    tried: tuple[Tried, ...] = ()
    whole_nodes: Tried | None = None
    refusal: str = ""


def _silent(tried: Tried) -> None:
    pass


def most_that_fits(config: RunConfig, field: str, trial: Trial, say: Say = _silent) -> Found:
    """Find the largest value of a field that fits, by doubling and then halving the gap; of `ranks` the smallest.
    `beyond` is the next value, which does not fit.

    Every reported value was run. In between the search assumes that larger values take more memory. In place of a
    refused value its nearest neighbour is tried.
    """
    wanted, tried = field != "ranks", dict[int, Tried | InputError]()  # whether small values fit
    step, less = _steps(config, field)

    def at(steps: int) -> Tried | None:
        if steps not in tried:
            tried[steps] = _tried(config, field, steps * step - less, trial)
            if isinstance(found := tried[steps], Tried):
                say(found)
        return found if isinstance(found := tried[steps], Tried) else None

    def near(steps: int, low: int, high: int) -> int | None:
        """Return the nearest number between `low` and `high`, neither of them, that is not refused."""
        for distance in range(REACH):
            for one in (steps - distance, steps + distance):
                if low < one < high and at(one) is not None:
                    return one
        return None

    def fits(steps: int) -> bool:
        one = at(steps)
        return one is not None and one.fits

    least, most = _least(config, field, step, less), _highest(field) // step
    own = (config.value(field) + less) // step
    low, high = least - 1, near(least, least - 1, most + 1) or own
    if at(high) is None and isinstance(error := tried[high], InputError):
        raise error  # even the given value is refused
    while fits(high) == wanted:
        low = high
        if low == most:
            break
        high = min(2 * low, most)
        doubled = (min(low * 2**power, most) for power in range(1, (most // low).bit_length() + 1))
        if (found := next((steps for steps in doubled if at(steps) is not None), None)) is None:
            break  # the edge lies below the first refused value
        high = found
    while high - low > 1:
        if (middle := near((low + high) // 2, low, high)) is not None and fits(middle) == wanted:
            low = middle
        elif middle is None and at(high) is not None:
            break  # nothing between them can be tried
        else:
            high = (low + high) // 2 if middle is None else middle
    inner, outer = (low, high) if wanted else (high, low)
    best, beyond = (at(steps) if steps in tried else None for steps in (inner, outer))
    ran = tuple(one for one in tried.values() if isinstance(one, Tried))
    refused = [one for steps, one in sorted(tried.items()) if isinstance(one, InputError) and steps > inner]
    refusal = str(refused[0].called(f"--{field.replace('_', '-')}")) if refused else ""
    fitting, too_much = best is not None and best.fits, beyond is not None and not beyond.fits
    return Found(best if fitting else None, beyond if too_much else None, ran, refusal=refusal)


def in_whole_nodes(config: RunConfig, found: Found, node: int, trial: Trial, say: Say = _silent) -> Found:
    """Add the fewest ranks, from the best on, that the mesh divides and that fill nodes of that many GPUs."""
    if found.best is None:
        return found
    step = lcm(node, config.mesh.others.world_size)
    first = -(-found.best.value // step) * step
    if first == found.best.value:
        return found._replace(whole_nodes=found.best)
    for ranks in range(first, min(first + REACH * step, _highest("ranks")) + 1, step):
        if isinstance(tried := _tried(config, "ranks", ranks, trial), Tried):
            say(tried)
            return found._replace(whole_nodes=tried, tried=(*found.tried, tried))
    return found


def largest_models(config: RunConfig, trial: Trial, say: Say = _silent) -> Found:
    """Find the largest named model that fits, from the largest down: those that do not fit, and the first few that do.
    Models that other options exclude are left out. Raises: InputError if all are."""
    device, named = Device(0, make_backend("meta")), list[tuple[int, str, RunConfig]]()
    for name in known_models():
        for asked in accepted([candidate(config, model=name)]):
            for alone in accepted([candidate(RunConfig(), model=name)]):
                named.append((build_model(alone, device).num_parameters, name, asked))
    tried, refusal = list[Tried](), None
    for numel, _, asked in sorted(named, key=lambda one: (-one[0], one[1])):
        try:
            tried.append(trial(asked)._replace(value=numel))
        except InputError as error:  # its names, for one
            refusal = refusal or error
            continue
        say(tried[-1])
        if sum(one.fits for one in tried) == MOST_MODELS:
            break
    if refusal is not None and not tried:
        raise refusal
    fitting = [one for one in tried if one.fits]
    return Found(fitting[0] if fitting else None, tried=tuple(tried))


def _tried(config: RunConfig, field: str, value: int, trial: Trial) -> Tried | InputError:
    """Try a value. Return the refusal if other options do not go with it."""
    if (asked := with_value(config, field, value)).config is None:
        return InputError(asked.why_not, field=asked.field)
    try:
        return trial(asked.config)._replace(value=value)
    except InputError as error:
        return error


def _least(config: RunConfig, field: str, step: int, less: int) -> int:
    """Return the smallest number of steps that may be possible."""
    least = 1 + -(-less // step)  # a chunk holds at least one layer, as
    if field == "layers":
        return max(least, -(-(period_of(config) + less) // step))  # there is a K-th block
    return config.model.units or 1 if field == "params" else least  # a unit holds at least one parameter


def _steps(config: RunConfig, field: str) -> tuple[int, int]:
    """Return two numbers: a field's values are multiples of the first minus the second, so that a mesh divides them."""
    if field == "ranks":
        return config.mesh.others.world_size, 0
    if field == "layers":
        return pipeline.layer_steps(config)
    if field == "seq":
        shares = config.mesh.tp if tensor.divides_rows(config) else 1
        return cut_of(config.mesh, config.context).multiple * shares, 0
    return 1, 0


def _highest(field: str) -> int:
    """Return the largest value that the field accepts."""
    high = OPTIONS[field].high
    assert high is not None  # for every searched field
    return int(high)


def with_value(config: RunConfig, field: str, value: int) -> Candidate:
    """Return the configuration with another value of the searched field."""
    if field == "seq" and config.model.has_position_table:  # the position table grows with the rows
        return candidate(config, seq=value, positions=max(value, config.model.positions))
    return candidate(config, **{field: value})


def check_search(config: RunConfig, what: str) -> str:
    """Return the field to search. Raises: InputError for a size that the model does not have."""
    if what not in SEARCHES:
        raise InputError(f"--find {what!r}: expected one of {', '.join(SEARCHES)}")
    field = what.replace("-", "_")
    if field == "layers":
        pipeline.check_layers(config)
    if field == "params" and config.model.family != "flat":
        raise InputError(f"--find params: {config.model.name} has fixed sizes; choose --model flat, or --find layers")
    if field in ("layers", "seq") and config.model.family == "flat":
        raise InputError(f"--find {what}: a flat model has no such size; choose --find params")
    return field
