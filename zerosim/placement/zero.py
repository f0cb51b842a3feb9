"""The stages of ZeRO as data: which model state is cut over the ranks, and from which stage on.

                optim         grad          param
    stage 0     Whole         Whole         Whole
    stage 1     cut           Whole         Whole
    stage 2     cut           cut           Whole
    stage 3     cut           cut           cut

Source: ZeRO paper, section 5 (P_os, P_os+g, P_os+g+p).
"""

from __future__ import annotations

from dataclasses import replace

from zerosim.placement.layout import Lives, Row, Rows
from zerosim.placement.partition import EvenSlices, Partition, Whole

CUT_FROM = (("grad", 2), ("param", 3), ("optim", 1))
"""Each model state and the first stage that cuts it, in the order in which their memory is taken."""


def zero_rows(
    stage: int,
    partition: Partition = EvenSlices(),  # noqa: B008  frozen
    *,
    param: Lives = "always",
    grad: Lives = "step",
) -> Rows:
    """A trained buffer's rows in a stage: whole, or cut by `partition` over dp_shard; how long its parameters and
    gradients live."""
    lives: dict[str, Lives] = {"param": param, "grad": grad, "optim": "always"}
    return {state: Row(partition if stage >= first else Whole(), lives=lives[state]) for state, first in CUT_FROM}


def frozen(rows: Rows) -> Rows:
    """The rows of a buffer that is not trained: it has no gradient and no optimizer state, so no master either, of
    which parameters could be made for a use."""
    return {"param": replace(rows["param"], lives="always")}


def rows_said(rows: Rows, *, keeps_params: bool | None, keeps_grads: bool | None) -> Rows:
    """A trained buffer's rows where a strategy says what it keeps: True is Whole, False is cut as the optimizer states
    are, None leaves the row as it is. What is said is done and counted, whatever the stage has."""
    said, cut = {"param": keeps_params, "grad": keeps_grads}, rows["optim"].partition
    return {
        state: row if (keeps := said.get(state)) is None else replace(row, partition=Whole() if keeps else cut)
        for state, row in rows.items()
    }
