"""Masked tokens for encoders: which tokens of a row are predicted, and what stands in their place.

As BERT's data were made (create_pretraining_data.py): 15 % of each row's tokens, the same number in every row. So a
mean over microbatches and ranks is the mean over all tokens that are predicted. Of these 80 % become the mask, 10 % a
random token, and 10 % stay. Draws belong to (seed, step) and an element's place in the global batch, not to ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.functional.labels import UNREAD as UNREAD
from zerosim.functional.labels import predicted
from zerosim.tensor.rng import generator


def mask_tokens(rows: Any, seed: int, step: int, vocab: int, mask: int) -> Any:
    """Return rows (R, 2T), int64, of a global batch of text (R, T): the input, then the targets."""
    drawn = generator("masked", seed, step)
    order, how, other = drawn.random(rows.shape), drawn.random(rows.shape), drawn.integers(0, vocab, size=rows.shape)
    chosen = np.zeros(rows.shape, bool)
    np.put_along_axis(chosen, np.argsort(order, axis=1, kind="stable")[:, : predicted(rows.shape[1])], True, axis=1)
    replaced = np.where(how < 0.8, mask, np.where(how < 0.9, other, rows))
    return np.concatenate([np.where(chosen, replaced, rows), np.where(chosen, rows, UNREAD)], axis=1).astype(np.int64)
