"""A claim of a lesson: a sentence that a cell has just tested. A false one stops the notebook."""

from __future__ import annotations


def claim(text: str, holds: object) -> None:
    """Print a true sentence. Raises: AssertionError with the sentence if it is false."""
    if not bool(holds):
        raise AssertionError(f"claim does not hold: {text}")
    print(f"✓ {text}")
