"""Every pair of policies about bytes that live elsewhere: it runs with the bits of all on the device, or a rule refuses
it. The table in docs/offload.md lists the refused pairs."""

from __future__ import annotations

import re
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from same import assert_same_bits
from test_shapes import assert_same_record

from zerosim.analysis.checks import checks
from zerosim.config import RunConfig
from zerosim.device.copies import PAGES
from zerosim.errors import InputError
from zerosim.optim import paging
from zerosim.train.result import RunResult
from zerosim.train.run import run

PAGE = Path(__file__).parent.parent.parent / "docs" / "offload.md"
SIZES: dict[str, Any] = dict(
    stage=3, layers=3, hidden=32, heads=2, seq=16, micro_batch=1, accumulate=2, ranks=2, steps=3, prefetch=1
)
SAVES, INPUTS = dict(offload_activations=True), dict(recompute="full", cpu_checkpointing=True)
CAPACITY = 450_000  # which moves states out, beside every policy that leaves them on the device
POLICIES: dict[str, dict[str, Any]] = {
    "optimizer=host": dict(offload="optimizer=host"),
    "optimizer=nvme": dict(offload="optimizer=nvme"),
    "params=host": dict(offload="params=host"),
    "params=nvme": dict(offload="params=nvme"),
    "delayed update": dict(delayed_update=2),
    "optimizer in backward": dict(optimizer_in_backward=True, accumulate=1),
    "fsdp2": dict(offload="optimizer=host,params=host", offload_policy="fsdp2"),
    "paged states": dict(paged_states=True, capacity=CAPACITY),
    "step in groups": dict(sub_group=500),
    "activations": SAVES,
    "activations in a window": SAVES | dict(stash_window=2),
    "inputs": INPUTS,
    "inputs in a window": INPUTS | dict(stash_window=2),
}
"""Each with what it needs; a delayed update alone has its states on the host."""
PAIRS = list(combinations(POLICIES, 2))


def refused() -> dict[tuple[str, str], str]:
    """The pairs of the page's table, and the words of the rule."""
    page = PAGE.read_text("utf-8")
    table = page[page.index("## Which go together") :]
    rows = re.findall(r"^\| `?([^|`]+?)`? \| `?([^|`]+?)`? \| `([^|]+)` \|", table, re.M)
    return {(one, other): said for one, other, said in rows}


def joined(one: str, other: str, place: Path) -> RunConfig:
    fields = SIZES | POLICIES[one] | POLICIES[other]
    moved = [where for name in (one, other) for where in POLICIES[name].get("offload", "").split(",") if where]
    offload = ",".join(dict.fromkeys(moved))
    if offload or "delayed update" in (one, other):
        fields |= dict(offload=offload or "optimizer=host", nvme=str(place))
    return RunConfig(**fields)


@cache
def on_the_device(**fields: Any) -> RunResult:
    return run(RunConfig(**SIZES | fields))


def test_the_page_names_only_policies() -> None:
    assert refused()
    assert refused().keys() <= set(PAIRS)


@pytest.mark.bits
@pytest.mark.quick(3)
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=str)
def test_a_pair_runs_or_a_rule_refuses_it(
    one: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "PAGED_NUMEL", 100)
    said = refused().get((one, other))
    if said is not None:
        with pytest.raises(InputError, match=re.escape(said)):
            joined(one, other, tmp_path)
        return
    config = joined(one, other, tmp_path)
    result, is_late = run(config, keep_events=True), config.grads.late > 0
    late = dict(delayed_update=2, offload="optimizer=host") if is_late else {}
    assert_same_bits(result, on_the_device(accumulate=config.data.accumulate, **late))
    assert result.live_bytes_after == [0] * config.mesh.ranks
    assert not list(tmp_path.iterdir())
    if config.memory.paged_states:
        assert any(row.purpose == PAGES for row in result.traffic[0])
    assert_same_record(config, result)
    assert all(check.agrees is not False for check in checks(result)[0].memories)
