"""MPI's own collectives: data moved is the same to the bit, sums within the rounding of their own order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerosim.backends.numpy.ops import array_over
from zerosim.comm.runtime import World, launch
from zerosim.device.events import Launch
from zerosim.dtypes import dtype
from zerosim.verbs import MESSAGES, VERBS

from .mpirun import PROGRAMS, needs_mpi, results, run
from .programs import program

pytestmark = needs_mpi


def numbers(data: bytes, fmt: str) -> Any:
    return array_over(data, dtype(fmt)).astype(np.float64)


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_native_collectives_agree_with_direct(processes: int, tmp_path: Path) -> None:
    direct = launch(program("collectives"), World(ranks=processes, record=False))
    native = results(processes, 1, "collectives", tmp_path, world={"algorithm": "native", "keep_events": True})
    for (expected, _, _), (found, history, _) in zip(direct, native, strict=True):
        assert found.keys() == expected.keys()
        for name, data in found.items():
            if not re.match(r"(all_reduce (avg|sum)|reduce|several)", name):
                assert data == expected[name], name
                continue
            fmt = (
                "bf16" if name == "several" else next(word for word in name.split() if word in ("fp32", "bf16", "fp16"))
            )
            # At most N - 1 roundings of a sum of N numbers, each below 8.
            tolerance = processes * 8 * processes * dtype(fmt).eps
            gap = np.abs(numbers(data, fmt) - numbers(expected[name], fmt))
            assert gap.size == 0 or gap.max() <= tolerance, name
        launches = [event for event in history if isinstance(event, Launch)]
        hidden = [event for event in launches if event.sent_bytes is None]
        assert {event.op for event in hidden} == set(VERBS) - {*MESSAGES, "barrier"}
        assert all(event.modelled_bytes is not None for event in hidden)


def test_works_under_way_may_be_waited_for_in_any_order(tmp_path: Path) -> None:
    direct = launch(program("out_of_order"), World(ranks=4, record=False))
    native = results(4, 1, "out_of_order", tmp_path, world={"algorithm": "native"})
    for (expected, _, _), (found, _, _) in zip(direct, native, strict=True):
        assert [len(data) for data in found] == [len(data) for data in expected]
        assert found[::2] == expected[::2]  # all_gather; the last one first


def test_ranks_that_share_a_process_have_no_native_collective(tmp_path: Path) -> None:
    (tmp_path / "settings").write_bytes(b"\x80\x04}\x94\x8c\x05world\x94}\x94\x8c\talgorithm\x94\x8c\x06native\x94ss.")
    job = run(2, str(PROGRAMS), "out_of_order", "2", str(tmp_path / "settings"), str(tmp_path / "left"))
    assert job.returncode == 2
    assert "InputError: collective native with 2 ranks per process" in job.stderr
