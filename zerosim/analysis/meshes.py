"""Which meshes fit: every way to arrange a number of ranks, the fewest ranks first. Found by running on shapes alone.

A mesh is tried with as many micro-batches per data rank as the configuration has; a vocabulary that it does not divide
is padded. What it costs is compared by the bytes
that all ranks send for a token, of model states and of activations. ZeRO-2 and 3 are not tried in a pipeline, where
they reduce and gather once per micro-batch (DeepSpeed refuses them there). Ranks and sizes of axes are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zerosim.analysis.search import ever_more_recompute
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.ledger.clock import StepTime
from zerosim.placement.mesh import Mesh
from zerosim.train.plan import Figures

MOST_TENSOR = 8
"""The largest tensor-parallel group that is tried: the GPUs of one node."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """A mesh that fits: its configuration, the most that a rank takes from its device, what all its ranks send for a
    token, and a step's time."""

    config: RunConfig
    peak_bytes: int
    sent_per_token: Fraction
    time: StepTime | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        sent = {"sent_bytes_per_token": float(self.sent_per_token)}
        return {**mesh_values(self.config), "peak_bytes": self.peak_bytes, **sent}


def mesh_values(config: RunConfig) -> dict[str, Any]:
    """The JSON form of what a search chooses."""
    mesh, parallel = config.mesh.axes, config.parallel
    return {
        "ranks": mesh.world_size,
        "pp": mesh.pp,
        "dp": mesh.shards,
        "tp": mesh.tp,
        "stage": parallel.zero_stage,
        "sequence_parallel": parallel.sequence_parallel,
        "recompute": config.memory.recompute,
    }


MeshTrial = Callable[[RunConfig, int], Figures | None]
"""What a step of a configuration takes on devices of so many bytes; None: too small."""


def cheapest_meshes(
    config: RunConfig,
    capacity: int,
    most_ranks: int,
    trial: MeshTrial,
    say: Callable[[int, RunConfig, bool], None] = lambda ranks, config, fits: None,
) -> tuple[list[Fitting], int]:
    """The meshes that fit on the fewest ranks, least traffic first; and how many configurations were run."""
    tried, ranks = 0, 1
    while ranks <= most_ranks:
        found = []
        for choices in candidates(config, ranks):
            for asked in choices:
                tried += 1
                figures = trial(asked, capacity)
                say(ranks, asked, figures is not None)
                if figures is not None:
                    tokens = asked.global_batch * asked.model.seq
                    sent = Fraction(figures.sent_bytes, tokens)
                    found.append(Fitting(asked, figures.peak_bytes, sent, figures.time))
                    break  # more recompute costs arithmetic and saves nothing that is needed
        if found:
            return sorted(found, key=lambda one: (one.sent_per_token, one.peak_bytes)), tried
        ranks *= 2
    return [], tried


def candidates(config: RunConfig, ranks: int) -> Iterator[Sequence[RunConfig]]:
    """For every mesh of so many ranks and ZeRO stage that the model can be cut for: with ever more recompute."""
    for tp, pp, stage in cuts(ranks):
        asked = arranged(config, ranks, tp, pp, stage)
        if asked is not None:
            yield [asked.replace(recompute=recompute) for recompute in ever_more_recompute(config)]


def cuts(ranks: int) -> Iterator[tuple[int, int, int]]:
    """Every tp, pp and ZeRO stage that so many ranks are arranged in."""
    for tp in powers(min(ranks, MOST_TENSOR)):
        for pp in powers(ranks // tp):
            dp = ranks // Mesh(tp=tp, pp=pp).world_size
            for stage in range(4) if dp > 1 and pp == 1 else range(2) if dp > 1 else (0,):
                yield tp, pp, stage


def arranged(config: RunConfig, ranks: int, tp: int, pp: int, stage: int, **more: Any) -> RunConfig | None:
    """The configuration on such a mesh, with `more` changes; None where the model cannot be cut so."""
    rows = tp > 1 and more.get("sequence_parallel", config.parallel.sequence_parallel)
    inside: dict[str, Any] = {
        **more,
        "sequence_parallel": rows,
        "keep_gathered": rows and config.parallel.keep_gathered,
    }
    uneven = config.model.has_blocks and config.model.vocab % tp > 0
    inside["pad_vocab"] = tp > 1 and (config.parallel.pad_vocab or uneven)
    if pp == 1:
        inside |= {"pipeline": None, "virtual_stages": None, "balance_ends": False}
    try:
        return config.at_stage(stage, ranks=ranks, dp_replicate=1, tp=tp, pp=pp, stage_layers=None, **inside)
    except InputError:
        return None


def powers(most: int) -> Iterator[int]:
    """1, 2, 4 ... up to so many."""
    value = 1
    while value <= most:
        yield value
        value *= 2
