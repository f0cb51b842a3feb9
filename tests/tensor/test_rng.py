"""Random numbers are a function of where they are used."""

from __future__ import annotations

import numpy as np

from zerosim.tensor import rng
from zerosim.tensor.rng import DropoutKeys
from zerosim.tensor.tensor import cpu


def test_keys_do_not_change_between_versions() -> None:
    """A saved run goes on with the same numbers only if these stay."""
    assert rng.key("weight", 0, "wte.weight") == (15128127011963343335, 15351807614253282472)
    drawn = rng.normal((3,), 1.0, "weight", 0, "wte.weight")
    assert drawn.tolist() == [-1.4165431261062622, 2.2222988605499268, 0.7099633812904358]


def test_every_word_of_a_key_counts() -> None:
    places = [
        ("a",), ("b",), ("a", 1), ("a", "1"), (1, "a"), ("a1",), (1,), ("1",), (-1,), (11,), (1, 1), (),
    ]  # fmt: skip
    assert len({rng.key(*words) for words in places}) == len(places)
    assert rng.key("a", np.int64(1)) == rng.key("a", 1)
    assert all(0 <= word < 2**64 for words in places for word in rng.key(*words))


def test_a_generator_begins_anew() -> None:
    first = rng.generator("here").standard_normal(5)
    assert (rng.generator("here").standard_normal(5) == first).all()
    assert (rng.generator("there").standard_normal(5) != first).all()


def test_normals_are_fp32_of_that_spread() -> None:
    values = rng.normal((200, 200), 0.02, "weight", 1, "x")
    assert values.dtype == np.float32
    assert values.shape == (200, 200)
    assert abs(values.std() / 0.02 - 1) < 0.02
    assert (rng.normal((200, 200), 0.04, "weight", 1, "x") == 2 * values).all()


def test_dropout_keys_read_the_scope() -> None:
    """(seed, attempted step, global microbatch, unit, op); not the phase, so that recompute draws the same."""
    device = cpu()
    keys = DropoutKeys(device, 7, 4)
    with device.scope(step=3, unit="h.0", slot=2):
        assert keys("attn") == rng.key("dropout", 7, 3, 6, "h.0", "attn")
