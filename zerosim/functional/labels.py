"""Labels drawn from the model itself: y ~ softmax(logits), for estimates of curvature (`optim/sophia.py`)."""

from __future__ import annotations

from zerosim.device.device import Buffer
from zerosim.functional.common import rows_of


def sample_labels(logits: Buffer, key: tuple[int, int], first: int, labels: Buffer) -> None:
    """Fill `labels` with one column for each row of logits, from numbers `first` and on of the stream of `key`.

    Shapes: logits (..., V); labels, int64, any of as many elements as there are rows.
    """
    device, rows = logits.device, rows_of(logits.array)
    device.kernel(4 * rows.size, device.backend.sample_labels, rows, key, first, labels.array.reshape(-1))
