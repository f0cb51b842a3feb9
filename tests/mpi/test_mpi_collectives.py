"""Between processes as between threads: the same bits, the same record, and as many bytes sent as were counted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from zerosim.comm.runtime import World, launch
from zerosim.device.events import Copy, Launch

from .mpirun import needs_mpi, results
from .programs import program

pytestmark = needs_mpi


def counted(history: list[Any]) -> int:
    return sum(event.sent_bytes for event in history if isinstance(event, Launch))


SHAPES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 1, {}),
    (2, 1, {}),
    (3, 1, {"algorithm": "ring"}),
    (4, 1, {"bucket_bytes": 20_000}),
    (2, 2, {"algorithm": "pairs", "bucket_bytes": 20_000}),
    (4, 1, {"algorithm": "ring", "bucket_bytes": 20_000}),
    (2, 2, {"max_running": 2}),
    (2, 3, {"algorithm": "ring"}),
    (1, 3, {}),
]


@pytest.mark.parametrize(
    ("processes", "per_process", "settings", "name"),
    [*((*shape, "collectives") for shape in SHAPES), *((*shape, "out_of_order") for shape in SHAPES[1::2])],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_processes_do_what_threads_do(
    processes: int, per_process: int, settings: dict[str, Any], name: str, tmp_path: Path
) -> None:
    world = {"keep_events": True, **settings}
    threads = launch(program(name), World(ranks=processes * per_process, **world))
    found = results(processes, per_process, name, tmp_path, world=world)
    assert len(found) == len(threads)
    for (values, history, sent), (expected, expected_history, _) in zip(found, threads, strict=True):
        assert values == expected
        assert history == expected_history
        # Between ranks of one process nothing is sent.
        assert sent == counted(expected_history) if per_process == 1 else sent <= counted(expected_history)
    assert (sum(sent for _, _, sent in found) > 0) == (processes > 1)


@pytest.mark.parametrize(("processes", "per_process"), [(2, 1), (1, 2)])
def test_what_a_rank_frees_after_a_collective_is_free(processes: int, per_process: int, tmp_path: Path) -> None:
    assert results(processes, per_process, "freed", tmp_path) == [[True, True]] * processes * per_process


@pytest.mark.parametrize(("processes", "per_process"), [(3, 1), (2, 2)])
def test_arrays_that_mpi_must_not_touch_pass_through_the_host(processes: int, per_process: int, tmp_path: Path) -> None:
    world = {"keep_events": True}
    threads = launch(program("collectives"), World(ranks=processes * per_process, keep_events=True))
    found = results(processes, per_process, "collectives", tmp_path, world=world, staged=True)
    for (values, history, sent), (expected, expected_history, _) in zip(found, threads, strict=True):
        assert values == expected
        assert [event for event in history if not isinstance(event, Copy)] == expected_history
        copies = [event for event in history if isinstance(event, Copy)]
        down = sum(event.nbytes for event in copies if (event.source, event.target) == ("device", "host"))
        up = sum(event.nbytes for event in copies if (event.source, event.target) == ("host", "device"))
        received = sum(event.received_bytes for event in history if isinstance(event, Launch))
        assert down + up == sum(event.nbytes for event in copies)
        assert 0 < down <= sent  # what everybody gets is copied once
        assert up == received if per_process == 1 else 0 < up < received


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(_memory_bytes() < 12 * 10**9, reason="needs 12 GB of memory")
def test_more_bytes_than_31_bits_count(tmp_path: Path) -> None:
    numel = 2**31 + 12_345
    found = results(2, 1, "large", tmp_path, own={"numel": numel}, world={"timeout_s": 60.0})
    assert found == [[], [3, 3, 7, 3 * numel + 4]]
