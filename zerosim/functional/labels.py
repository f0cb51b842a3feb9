"""Labels drawn from the model itself: y ~ softmax(logits), for estimates of curvature (`optim/sophia.py`). And how many
tokens an encoder predicts."""

from __future__ import annotations

from zerosim.backends.forms import PLAIN, LogitForm
from zerosim.device.device import Buffer
from zerosim.functional.common import rows_of

MASKED = 0.15
"""The share of a row's tokens that an encoder predicts, BERT's."""

UNREAD = -1
"""The target of a token that is not predicted: it has no loss and no gradient."""


def predicted(tokens: int) -> int:
    """Return how many tokens of a row of so many an encoder predicts: of every row as many."""
    return max(1, round(MASKED * tokens))


def sample_labels(logits: Buffer, key: tuple[int, int], first: int, labels: Buffer, form: LogitForm = PLAIN) -> None:
    """Fill `labels` with one column for each row of logits, from numbers `first` and on of the stream of `key`.

    `form` changes the logits first, as in the loss.

    Shapes: logits (..., V); labels, int64, any of as many elements as there are rows.
    """
    device, rows = logits.device, rows_of(logits.array)
    flops = (4 + form.flops) * rows.size
    device.kernel(flops, device.backend.sample_labels, rows, key, first, labels.array.reshape(-1), form)
