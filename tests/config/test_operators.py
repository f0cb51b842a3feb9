"""The table of what frameworks launch: its reader, and what it refuses. `tests/oracle` counts its numbers again."""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.backends.kernels import Backend
from zerosim.config.parts.clock import KERNELS
from zerosim.config.parts.memory import LOSSES
from zerosim.config.presets import operators as table
from zerosim.config.presets.operators import ALONE, TABLES, Operator, checked, operators
from zerosim.device.work import (
    ACCUMULATE,
    ADD_BIAS,
    ADD_NORM,
    BY_ROWS,
    DGRAD,
    EAGER_PARTS,
    FILLS,
    LINEAR,
    UPDATES,
    WGRAD,
)
from zerosim.errors import InputError

PROGRAM = {*FILLS, *UPDATES, *BY_ROWS, *EAGER_PARTS, LINEAR, DGRAD, WGRAD, ACCUMULATE, ADD_BIAS, ADD_NORM}
PROGRAM |= {"fp8_amax", "fp8_cast", "fp8_scale"}
PROGRAM |= {Backend.weigh_rows.__name__, Backend.weigh_rows_backward.__name__}


@pytest.mark.parametrize("loss", ["", *LOSSES])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_name_is_one_that_the_program_records(kernels: str, foreach: bool, loss: str) -> None:
    rows = operators(kernels, loss=loss, foreach=foreach)
    assert rows.keys() <= PROGRAM
    assert rows["matmul"] == rows["flash_attention"] == rows["copy"] == ALONE == Operator(1, 1.0)
    assert (rows["adam"] != ALONE) == foreach


def test_eager_kernels_are_the_most_and_move_the_most() -> None:
    eager, compiled, fused = (operators(kernels) for kernels in KERNELS)
    for name in (eager.keys() | compiled.keys() | fused.keys()) - {"finite_probe"}:
        assert eager[name].launches >= compiled[name].launches
        assert eager[name].traffic >= max(compiled[name].traffic, fused[name].traffic)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_librarys_own_casts_are_the_same_beside_all_kernels(kernels: str) -> None:
    """Transformer Engine's casts are one kernel each, in PyTorch without torch.compile too."""
    rows, fused = operators(kernels, own_casts=True), operators("fused")
    for name in ("fp8_amax", "fp8_cast", "fp8_scale"):
        assert rows[name] == fused[name]
    assert rows["rms_norm"] == operators(kernels)["rms_norm"]


def test_losses_that_have_kernels_of_their_own() -> None:
    assert table.LOSSES.keys() <= set(LOSSES)
    assert operators("eager", loss="lean") == operators("eager")
    assert operators("fused", loss="megatron")["cross_entropy"].launches > 10
    assert operators("fused", loss="torch-kept") == operators("fused", loss="torch")


@pytest.mark.parametrize(("kernels", "says"), [("egaer", "did you mean 'eager'?"), ("x", "eager, compiled, fused")])
def test_an_unknown_choice(kernels: str, says: str) -> None:
    with pytest.raises(InputError, match=r"kernels .* is not known") as caught:
        operators(kernels)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"eeger": {}}, "unknown table [eeger]; did you mean [eager]?"),
        ({"eager": None}, "missing [eager]"),
        ({"eager": {"gelu": {"launches": 1}}}, "[eager] gelu = {'launches': 1}: expected {launches = ..., traffic"),
        ({"eager": {"gelu": {"launches": 1, "traffic": 1, "x": 2}}}, "expected {launches = ..., traffic = ...}"),
        ({"eager": {"gelu": 3}}, "[eager] gelu = 3: expected {launches"),
        ({"eager": 3}, "[eager] = 3: expected a table"),
        ({"eager": {"gelu": {"launches": -1, "traffic": 1}}}, "launches -1: expected a whole number of at least 0"),
        ({"eager": {"gelu": {"launches": 1.5, "traffic": 1}}}, "launches 1.5: expected a whole number"),
        ({"eager": {"gelu": {"launches": True, "traffic": 1}}}, "launches True: expected a whole number"),
        ({"eager": {"gelu": {"launches": 1, "traffic": -2.0}}}, "traffic -2.0: expected a number of at least 0"),
        ({"eager": {"gelu": {"launches": 1, "traffic": float("nan")}}}, "traffic nan: expected a number"),
        ({"eager": {"gelu": {"launches": 2, "traffic": 0}}}, "2 launches move 0 bytes: expected traffic more than 0"),
    ],
)
def test_a_bad_table(changed: dict[str, Any], says: str) -> None:
    values = {name: rows for name, rows in {**{name: {} for name in TABLES}, **changed}.items() if rows is not None}
    with pytest.raises(InputError) as caught:
        checked(values, "a.toml")
    assert says in str(caught.value)
    assert str(caught.value).startswith("a.toml: ")
    assert "\n" not in str(caught.value)
