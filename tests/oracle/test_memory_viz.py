"""Memory snapshots, read by PyTorch's own torch.cuda._memory_viz."""

from __future__ import annotations

import base64
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from zerosim.cli.main import main
from zerosim.config.run import plan_config
from zerosim.train.plan import plan

SMALL: dict[str, Any] = dict(layers=4, hidden=64, heads=4, seq=64, ranks=4, stage=1, pp=2, accumulate=2)
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module", params=["caching", "expandable"])
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("snapshot") / "a.pickle"
    knobs = ["--allocator", "caching", "--allocator-conf", "expandable_segments:True"]
    flags = knobs if request.param == "expandable" else []
    assert main(["export", "memory", "-o", str(path), *FLAGS, *flags]) == 0
    return pickle.loads(path.read_bytes())


def test_its_sums_are_the_ledgers(snapshot: Any) -> None:
    """PyTorch asserts that what is active and free adds up to what is reserved, segment by segment."""
    assert re.search(r"^segments: \d+$", _memory_viz.segsum(snapshot), re.MULTILINE)
    result = plan(plan_config(**SMALL))
    kept = {rank: sum(result.memory[rank].marks["after_step"].by_kind.values()) for rank in result.ran}
    found = dict.fromkeys(kept, 0)
    for line in _memory_viz.memory(snapshot, format_flamegraph=str).splitlines():
        stack, _, nbytes = line.rpartition(" ")
        match = re.search(r"active_allocated;rank:\d+:rank (\d+);step:", stack)
        if match:
            found[int(match[1])] += int(nbytes)
    assert found == kept


def test_its_trace_names_every_buffer_that_is_freed(snapshot: Any) -> None:
    entries = [entry["action"] for trace in snapshot["device_traces"] for entry in trace]
    lines = _memory_viz.trace(snapshot).splitlines()
    assert sum(" = " in line for line in lines) == entries.count("alloc") + entries.count("segment_alloc")
    freed = [line for line in lines if line.startswith("del ")]
    assert len(freed) == entries.count("free_requested")
    assert all(re.match(r"del [a-z]\d* # ", line) for line in freed)  # an unknown one would be an address


def test_its_page_holds_the_file(snapshot: Any) -> None:
    page = _memory_viz.trace_plot(snapshot)
    files = json.loads(re.findall(r"const local_files = (.*)", page)[0])
    assert pickle.loads(base64.b64decode(files[0]["base64"])) == snapshot
