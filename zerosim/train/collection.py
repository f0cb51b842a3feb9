"""Python's garbage collector, paused while a plan runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Stop the collector for a while. A record is millions of small tuples, none in a cycle: it would look through all
    of them again and again, and find nothing."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
