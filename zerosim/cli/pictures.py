"""Pictures as files: the format follows the file's name, and matplotlib opens no window."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from zerosim.errors import InputError


def form_of(flag: str, out: str) -> str:
    """Return 'png' or 'svg'. Raises: InputError for a name that ends in neither."""
    form = out.rpartition(".")[2].lower()
    if form not in ("png", "svg"):
        raise InputError(f"{flag} {out}: expected a name that ends in .png or .svg")
    return form


@contextmanager
def no_backend() -> Iterator[None]:
    """Keep matplotlib from reading MPLBACKEND: a picture goes into a file, so a wrong backend name must not matter."""
    named = os.environ.pop("MPLBACKEND", None)
    try:
        yield
    finally:
        if named is not None:
            os.environ["MPLBACKEND"] = named
