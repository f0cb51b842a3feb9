"""The garbage collector rests while a plan runs, and is as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from zerosim.train.collection import paused


@pytest.fixture
def as_it_was() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    gc.enable() if was_on else gc.disable()


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_as_it_was(is_on: bool) -> None:
    gc.enable() if is_on else gc.disable()
    seen = []

    @paused()
    def inner(fails: bool) -> None:
        seen.append(gc.isenabled())
        if fails:
            raise KeyboardInterrupt

    for _ in range(2):
        inner(False)
        assert gc.isenabled() == is_on
        with pytest.raises(KeyboardInterrupt):
            inner(True)
        assert gc.isenabled() == is_on
    assert seen == [False] * 4
