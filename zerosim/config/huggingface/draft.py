"""A model while its config.json is read: each rule returns it with more of what the keys say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zerosim.config.huggingface.keys import Keys
from zerosim.config.numbers import NEUTRAL, Numbers
from zerosim.config.presets.models import Size
from zerosim.placement.block import Decoder


class Draft(NamedTuple):
    """The row of its blocks, the sizes by the names of ModelConfig's fields, the numbers, and notes."""

    decoder: Decoder
    sizes: Mapping[str, Size]
    numbers: Numbers = NEUTRAL
    notes: tuple[str, ...] = ()

    def size(self, name: str) -> int:
        return int(self.sizes[name])

    def sized(self, **sizes: Size) -> Draft:
        return self._replace(sizes={**self.sizes, **sizes})

    def noted(self, *notes: str) -> Draft:
        return self._replace(notes=(*self.notes, *notes))

    def numbered(self, **numbers: Any) -> Draft:
        return self._replace(numbers=dataclasses.replace(self.numbers, **numbers))

    def blocks(self, **changes: Any) -> Draft:
        """Return it with other values in the row's block."""
        return self._replace(decoder=self.decoder._replace(block=self.decoder.block._replace(**changes)))


Rule = Callable[[Keys, Draft], Draft]
