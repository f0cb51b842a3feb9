"""A run that ends in the middle of a copy, of each kind that a policy makes: nothing is live, and nothing is left."""

from __future__ import annotations

import errno
import gc
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from zerosim.config import RunConfig
from zerosim.device import copies
from zerosim.device.device import Storage
from zerosim.device.events import Copy
from zerosim.errors import OutputError, RankFailed
from zerosim.train.plan import plan
from zerosim.train.run import run

SIZES: dict[str, Any] = dict(
    stage=3, layers=2, hidden=32, heads=2, seq=16, micro_batch=1, accumulate=2, ranks=3, steps=3, prefetch=1
)
POLICIES: dict[str, dict[str, Any]] = {
    "nvme": dict(offload="optimizer=nvme,params=nvme"),
    "the device steps": dict(offload="params=nvme"),
    "delayed": dict(stage=2, prefetch=0, offload="optimizer=host", delayed_update=1),
    "activations": dict(offload_activations=True, stash_window=1),
    "inputs": dict(recompute="full", cpu_checkpointing=True, stash_window=1),
    "inputs inline": dict(recompute="full", cpu_checkpointing=True),
}
Kind = tuple[str, str, str, str]


def kind_of(copy: Copy) -> Kind:
    return copy.scope.phase, copy.source, copy.target, copy.purpose


def kinds() -> list[tuple[str, Kind]]:
    found = []
    for name, fields in POLICIES.items():
        events = plan(RunConfig(**SIZES | fields), keep_events=True).events[0]
        found += [(name, kind) for kind in dict.fromkeys(kind_of(e) for e in events if isinstance(e, Copy))]
    return found


def full_drive() -> None:
    raise OutputError(f"a drive is full: {errno.errorcode[errno.ENOSPC]}")


def fail() -> None:
    raise ZeroDivisionError  # the other ranks are aborted, wherever they are


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


ENDS: dict[str, tuple[Callable[[], None], type[BaseException]]] = {
    "a full drive": (full_drive, OutputError),
    "Ctrl-C": (ctrl_c, KeyboardInterrupt),
    "an abort": (fail, RankFailed),
}


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> WeakSet[Storage]:
    """The storages made in a test that are alive."""
    found, init = WeakSet[Storage](), Storage.__init__

    def noted(self: Storage, *args: Any, **how: Any) -> None:
        init(self, *args, **how)
        found.add(self)

    monkeypatch.setattr(Storage, "__init__", noted)
    return found


@pytest.mark.quick(4)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("policy", "kind"), kinds(), ids=str)
def test_a_run_that_ends_in_a_copy_leaves_nothing(
    policy: str, kind: Kind, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: WeakSet[Storage]
) -> None:
    left, (stop, error) = [2], ENDS[end]  # the second copy of this kind, of whichever rank

    def copying(*fields: Any) -> Copy:
        made = Copy(*fields)
        if kind_of(made) == kind:
            left[0] -= 1
            if left[0] == 0:
                stop()
        return made

    monkeypatch.setattr(copies, "Copy", copying)
    threads = threading.active_count()
    with pytest.raises(error):
        run(RunConfig(**SIZES | POLICIES[policy], nvme=str(tmp_path)))
    gc.collect()
    assert left[0] <= 0
    assert not list(tmp_path.iterdir())
    assert threading.active_count() == threads
    assert not live
