"""A device to test on, the ledger of what is live there, and hypothesis held to the same examples each time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings

from zerosim.backends.numpy import NumpyBackend
from zerosim.device import Device
from zerosim.ledger import MemoryLedger
from zerosim.record import Recorder

settings.register_profile("zerosim", deadline=None, derandomize=True, database=None)
settings.load_profile("zerosim")


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed does not depend on the width and colours that happen to be set where the tests run."""
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger()


@pytest.fixture
def device(ledger: MemoryLedger) -> Device:
    """A NumPy device whose events go to `ledger` and stay in `device.recorder.history`."""
    return Device(0, NumpyBackend(), recorder=Recorder((ledger,), keep=True))


@pytest.fixture
def live(device: Device, ledger: MemoryLedger) -> Callable[[], int]:
    """How many bytes are live on `device` now."""

    def count() -> int:
        device.recorder.drain()
        return ledger.live_bytes

    return count
