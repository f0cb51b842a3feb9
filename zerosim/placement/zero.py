"""The stages of ZeRO as data: the model states that each stage cuts over the ranks.

                optim         grad          param
    stage 0     Whole         Whole         Whole
    stage 1     cut           Whole         Whole
    stage 2     cut           cut           Whole
    stage 3     cut           cut           cut

Source: ZeRO paper, section 5 (P_os, P_os+g, P_os+g+p).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from zerosim.placement.memories import DEVICE
from zerosim.placement.partition import EvenSlices, Partition, Whole
from zerosim.placement.rows import Lives, Row, Rows

CUT_FROM = (("grad", 2), ("param", 3), ("optim", 1))
"""Each model state and the first ZeRO stage that cuts it, in the order of allocation."""


def zero_rows(
    stage: int,
    partition: Partition = EvenSlices(),  # noqa: B008  frozen
    *,
    casts: bool = False,
    grad: Lives = "step",
    memories: Mapping[str, str] = MappingProxyType({}),
) -> Rows:
    """Return a trained buffer's rows at a ZeRO stage: whole, or cut by `partition` over dp_shard; the lifetime of its
    gradients; whether stage 3 stores no parameters, but `casts` them from the masters for each use; and the `memories`
    of local slices, if not the device's."""
    lives: dict[str, Lives] = {"param": "use" if casts and stage == 3 else "always", "grad": grad, "optim": "always"}
    return {
        state: Row(partition if stage >= first else Whole(), lives=lives[state], memory=memories.get(state, DEVICE))
        for state, first in CUT_FROM
    }


def frozen(rows: Rows, *, casts: bool = False) -> Rows:
    """Return the rows of a frozen buffer: it has no gradient and no optimizer state. Without `casts` it has no fp32
    shard either from which parameters could be cast for a use."""
    return {"param": rows["param"] if casts else replace(rows["param"], lives="always")}


def rows_said(rows: Rows, *, keeps_params: bool | None, keeps_grads: bool | None) -> Rows:
    """Return a trained buffer's rows for a strategy with its own settings: True is Whole, False is cut like the
    optimizer states, None leaves the row unchanged. The settings are applied and counted at every ZeRO stage."""
    said, cut = {"param": keeps_params, "grad": keeps_grads}, rows["optim"].partition
    return {
        state: row if (keeps := said.get(state)) is None else replace(row, partition=Whole() if keeps else cut)
        for state, row in rows.items()
    }
