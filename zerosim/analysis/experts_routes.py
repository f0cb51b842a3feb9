"""How tokens spread over experts: of a run that noted it, or as a plan assumes; by block, by expert, by the rank along
ep that has the expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.config import RunConfig
from zerosim.config.parts.experts import own_tokens


@dataclass(frozen=True, slots=True)
class Routes:
    """Rows by block and expert. Each of `ep` ranks has as many of the experts, in their order."""

    rows: Mapping[str, tuple[int, ...]]
    ep: int

    def by_rank(self, block: str) -> tuple[int, ...]:
        """Return the rows of each rank's experts."""
        rows, local = self.rows[block], len(self.rows[block]) // self.ep
        return tuple(sum(rows[first : first + local]) for first in range(0, len(rows), local))

    def imbalance(self, block: str, *, ranks: bool = False) -> float:
        """Return the rows of the fullest expert, or rank, over the mean."""
        rows = self.by_rank(block) if ranks else self.rows[block]
        return max(rows) * len(rows) / (sum(rows) or 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "ep": self.ep,
            "blocks": [
                {
                    "block": block,
                    "experts": list(rows),
                    "ranks": list(self.by_rank(block)),
                    "fullest_expert": self.imbalance(block),
                    "fullest_rank": self.imbalance(block, ranks=True),
                }
                for block, rows in self.rows.items()
            ],
        }


def routes_of(config: RunConfig, chosen: Mapping[str, tuple[int, ...]]) -> Routes:
    """Return what a run's tokens chose, in the order of blocks."""
    numbers = sorted((int(block.rpartition(".")[2]), block) for block in chosen)
    return Routes({_name(config, number): chosen[block] for number, block in numbers}, config.mesh.ep)


def assumed_routes(config: RunConfig) -> Routes:
    """Return the rows of a step as a plan assumes them."""
    model, tokens = config.model, own_tokens(config.mesh, config.model, config.data)
    times = config.tokens // tokens
    found = {}
    for number in model.blocks_with_experts:
        rows = config.experts.rows_of(model, number, tokens)
        found[_name(config, number)] = tuple(times * count for count in rows)
    return Routes(found, config.mesh.ep)


def _name(config: RunConfig, number: int) -> str:
    return f"{config.model.decoder.blocks}.{number}"
