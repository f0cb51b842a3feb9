"""Flats take turns in a rank's record, so that ranks which own different flats can be spliced (`train/owners.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from zerosim.tensor.accumulation import GradAccumulator

OneFlat = TypeVar("OneFlat", bound="GradAccumulator")


def in_turn(flats: Iterable[OneFlat]) -> Iterator[OneFlat]:
    """Yield flats one by one, each with its turn in the record (`Device.turn`)."""
    for flat in flats:
        flat.device.turn(flat.name)
        yield flat
