"""A candidate of a search: a configuration with other values or, if these are refused, the reason.

Every search makes its candidates here, and only here. The values that a person gave stay, so another value may be
refused beside them. The search then skips the candidate: the refusal is about a value that nobody typed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from zerosim.analysis.capabilities.pipeline import fewest_micro_batches
from zerosim.config import OPTIONS, RunConfig
from zerosim.errors import InputError

REACH = 256
"""How many neighbours of a refused number are tried in its place."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration, or None and why it is refused. `field` and `beside` are the refusal's (`errors.InputError`)."""

    config: RunConfig | None
    why_not: str = ""
    field: str = ""
    beside: str = ""

    def sure(self) -> RunConfig:
        """Return the configuration, where no other value excludes the changed ones."""
        assert self.config is not None, self.why_not
        return self.config


def candidate(config: RunConfig, **changes: Any) -> Candidate:
    """Change values, or say why the configuration refuses them. None takes a given value back."""
    return _made(lambda: config.replace(**changes))


def candidate_at(config: RunConfig, stage: int, **changes: Any) -> Candidate:
    """Change the ZeRO stage and other values, without the given options that this stage does not have."""
    return _made(lambda: config.at_stage(stage, **changes))


def accepted(candidates: Iterable[Candidate]) -> Iterator[RunConfig]:
    """Yield the configurations of those that are not refused."""
    for one in candidates:
        if one.config is not None:
            yield one.config


def with_micro_batches(config: RunConfig, at_least: int = 1, **changes: Any) -> Candidate:
    """Return the candidate with the fewest microbatches, `at_least` so many, that its pipeline takes and can group."""
    fewest = max(fewest_micro_batches(config), at_least)
    for count in range(fewest, fewest + REACH):
        found = candidate(config, accumulate=count, **changes)
        if found.config is not None or found.field != "micro_batch_group":
            break
    return found


def taken_back(names: Iterable[str]) -> dict[str, Any]:
    """Return the changes after which none of these options is given."""
    return {name: OPTIONS[name].default if OPTIONS[name].none_is_a_value else None for name in names}


def _made(make: Callable[[], RunConfig]) -> Candidate:
    try:
        return Candidate(make())
    except InputError as error:
        return Candidate(None, str(error), error.field, error.beside)
