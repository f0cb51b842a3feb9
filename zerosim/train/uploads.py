"""From the host to the device: the tokens of a microbatch, and those that blocks of further tokens read."""

from __future__ import annotations

from functools import partial
from typing import Any

from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import int64
from zerosim.functional.labels import UNREAD
from zerosim.models.model import Model
from zerosim.nn.rows import ALL_ROWS, OwnRows


def upload(tokens: Any, device: Device, own: OwnRows = ALL_ROWS) -> Buffer:
    """Copy this rank's token ids to the device. Shapes: tokens (B, T), result (B, own T)."""
    rows, columns = tokens.shape
    runs, at = own.tokens(columns), 0
    ids = device.alloc((rows, sum(map(len, runs))), int64, Kind.ACTIVATION)
    for run in runs:
        device.backend.from_host(tokens[:, run.start : run.stop], ids.array[:, at : at + len(run)])
        at += len(run)
    return ids


def ahead(tokens: Any, places: int, rest: int) -> Any:
    """Return host rows of tokens so many places on; `rest` where a row has ended. Shapes: (B, T), the same."""
    import numpy as np

    found = np.full(tokens.shape, rest, np.int64)
    found[:, : tokens.shape[1] - places] = tokens[:, places:]
    return found


def open_further(model: Model, batch: Any, device: Device, scale: float, count: float) -> None:
    """Give blocks that predict further tokens a microbatch's ids and targets, if there are some, before its forward."""
    if model.further is None:
        return
    put, depths = partial(upload, device=device, own=model.group.rows), range(1, model.further.depths + 1)
    ids, targets = model.parted(batch)
    model.further.open(
        [put(ahead(ids, depth, 0)) for depth in depths],
        [put(ahead(targets, depth, UNREAD)) for depth in depths],
        ids.shape[1],
        partial(model.further_loss, scale=scale, count=count),
    )
