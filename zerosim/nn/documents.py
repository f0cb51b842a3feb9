"""Where documents begin in the rows that a rank works on: what attention and the loss read beside tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from zerosim.functional.labels import UNREAD
from zerosim.placement.documents import Packing


class Documents:
    """The documents of one rank's rows. The engine sets them for each microbatch, before its forward and its backward.

    starts    the starts of each row's documents; None while a text is generated, which is one document
    share     the number of labels of the step's global batch, divided by its ranks
    """

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.starts: Sequence[Sequence[int]] | None = []
        self.share = 1.0

    def expect(self, whole: Any, ranks: int) -> None:
        """Count the labels of a step's global batch, which is over so many ranks. Frameworks add up their ranks'
        numbers in one more message; here every rank's host reads the whole batch."""
        tokens = whole.shape[1] - 1
        self.share = sum(tokens - len(self.packing.starts(row, tokens)) for row in whole) / ranks

    def see(self, batch: Any) -> None:
        """Find where documents begin in a microbatch (B, T + 1), the rows of ranks that share it whole."""
        tokens = batch.shape[1] - 1
        self.starts = [self.packing.starts(row, tokens) for row in batch]

    def targets(self, batch: Any) -> Any:
        """Return the labels (B, T) of that microbatch, `UNREAD` where the next token is another document's."""
        targets = batch[:, 1:].copy()
        for row, starts in zip(targets, self.starts or (), strict=True):
            for start in starts:
                row[start - 1] = UNREAD
        return targets

    def alike(self, rows: int, tokens: int) -> list[tuple[slice, Sequence[int]]]:
        """Return runs of the `rows` of so many tokens with the same documents, and where these begin."""
        if self.starts is None or self.packing.length:
            return [(slice(0, rows), () if self.starts is None else self.packing.starts((), tokens))]
        found, at = list[tuple[slice, Sequence[int]]](), 0
        for starts, run in groupby(self.starts):
            stop = at + len(list(run))
            found.append((slice(at, stop), starts))
            at = stop
        return found
