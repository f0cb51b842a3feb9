"""A headless Chromium for the pages' tests, one for a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """At rest: the size of a projector, a light page, no error so far; after the test there is none either."""
    chromium.errors.clear()
    chromium.size(1280, 720)
    chromium.media(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    yield chromium
    assert not chromium.errors
