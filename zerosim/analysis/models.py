"""Find the largest named model that fits: plan each on shapes alone, from the largest down."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zerosim.analysis.candidate import accepted, candidate
from zerosim.analysis.search import Trial
from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.config.known import known_models
from zerosim.device.device import Device
from zerosim.errors import InputError, OutOfMemory
from zerosim.train.build_model import build_model

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "positions", "vocab", "params", "units",
         "experts", "top_k", "expert_ffn", "shared_experts")  # fmt: skip
"""The sizes of a named model."""
MOST = 3
"""The search ends after this number of models that fit."""


class TriedModel(NamedTuple):
    """A planned model: its parameters (without adapters), the bytes of a rank, and whether they fit. `too_small`: see
    `search.Tried`."""

    name: str
    num_parameters: int
    peak_bytes: int
    reserve_bytes: int
    fits: bool
    too_small: str = ""


def largest_models(
    config: RunConfig, capacity: int, trial: Trial, reserve: Callable[[RunConfig], int]
) -> list[TriedModel]:
    """Return the planned models, largest first: those that do not fit, and the first few that do. Models that other
    options exclude are left out. Raises: InputError if all are."""
    device, named = Device(0, make_backend("meta")), list[tuple[int, str, RunConfig]]()
    for name in known_models():
        for asked in accepted([candidate(config, model=name)]):
            for alone in accepted([candidate(RunConfig(), model=name)]):
                named.append((build_model(alone, device).num_parameters, name, asked))
    tried, refusal = list[TriedModel](), None
    for numel, name, asked in sorted(named, key=lambda one: (-one[0], one[1])):
        kept = reserve(asked)
        try:
            nbytes = trial(asked)
            tried.append(TriedModel(name, numel, nbytes, kept, nbytes + kept <= capacity))
        except InputError as error:  # its names, for one
            refusal = refusal or error
        except OutOfMemory as error:
            tried.append(TriedModel(name, numel, 0, kept, False, error.memory))
        if sum(one.fits for one in tried) == MOST:
            break
    if refusal is not None and not tried:
        raise refusal
    return tried
