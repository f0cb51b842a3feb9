"""No answer leaves a thread behind, whatever it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from processes import SECONDS


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    deadline = time.monotonic() + SECONDS
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before  # fewer, where one of a test before has ended meanwhile
