"""Operands of a run in 8 bits: each number has one fate under each scaling, and delayed scaling looks back a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zerosim.backends.numpy.narrow import Fates
from zerosim.config import RunConfig
from zerosim.config.parts.fp8 import SCALINGS
from zerosim.device.device import Phase
from zerosim.device.recorder import Scope
from zerosim.device.work import DGRAD, LINEAR
from zerosim.errors import InputError
from zerosim.parallel.fp8 import products_of
from zerosim.tensor import float8
from zerosim.train.operands import FORMATS, OPERANDS, Cast, Operands, _Watch, casting_of, count_operands
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(layers=1, hidden=32, heads=2, seq=16, micro_batch=2, vocab=256, ranks=1, stage=0)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_every_operand_of_every_step_has_one_fate_in_each_cast(family: str) -> None:
    config = RunConfig(**SMALL, model=family, ffn=64, steps=2, accumulate=2, recompute="full", tie_embeddings=False)
    found = count_operands(config)
    rows = 2 * 16 * 2 * 2  # sequences, tokens, microbatches, steps
    wide = (32, 32, 32, 64) if family == "gpt" else (32, 32, 32, 32, 32, 32, 64)
    out = (96, 32, 64, 32) if family == "gpt" else (32, 16, 16, 32, 64, 64, 32)  # keys and values: half of a block
    assert found.steps == 2
    assert found.num["inputs"] == rows * sum(wide)
    assert found.num["gradients"] == rows * sum(out)
    assert found.num["weights"] == 4 * sum(a * b for a, b in zip(wide, out, strict=True))
    assert set(found.fates) == {Cast(*each) for each in _every()}
    for cast, counts in found.fates.items():
        assert sum(counts) == found.num[cast.operand] - found.zeros[cast.operand]
        assert min(counts) >= 0
    for scaling in ("tensorwise", "rowwise", "blockwise", "mxfp8"):  # their own amax: nothing saturates
        assert all(
            found.fates[Cast(operand, scaling, form)].overflowed == 0 for operand in OPERANDS for form in FORMATS
        )
    assert count_operands(config.replace(ranks=4, stage=3, fp8="tensorwise")).to_dict() == found.to_dict()


def _every() -> list[tuple[str, str, str]]:
    return [(operand, scaling, form) for operand in OPERANDS for scaling in SCALINGS for form in FORMATS]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_castings_are_those_of_the_recipe(scaling: str) -> None:
    products = products_of(RunConfig(fp8=scaling, hidden=128, seq=128, ffn=128, model="gpt"))
    for name, theirs in zip(OPERANDS, (*products.forward, products.dgrad.left), strict=True):
        assert casting_of(Cast(name, scaling, theirs.kind.name)) == theirs


def test_delayed_scaling_takes_the_largest_number_of_the_step_before() -> None:
    device: Any = SimpleNamespace(where=Scope(), product=lambda *_: None)
    found = Operands()
    watch = _Watch(device, found)
    counted = []
    for step, largest in enumerate((1.0, 1000.0, 2.0)):
        for slot, size in enumerate((largest, largest / 2)):
            device.where = Scope(step, Phase.FORWARD.value, "h.0", slot)
            before = found.fates.get(Cast("inputs", "delayed", "e4m3"), Fates(0, 0, 0, 0))
            watch(LINEAR, print, np.array([[size, 0.0, 2.0**-12]], np.float32), np.ones((3, 3), np.float32))
            after = found.fates[Cast("inputs", "delayed", "e4m3")]
            counted.append(Fates(*(b - a for a, b in zip(before, after, strict=True))))
    first, _, second, again, third, _ = counted
    assert first == Fates(1, 0, 1, 0)  # the factor is 1: 2^-12 becomes 0
    assert second == Fates(1, 0, 0, 1)  # 448 times a thousand saturates, 448 times 2^-12 is held
    assert again == second  # the second microbatch has the step's scale too
    assert third == Fates(1, 0, 1, 0)  # 448 / 1000 times 2^-12 becomes 0
    assert found.num["inputs"] == 18
    assert found.zeros["inputs"] == 6


def test_heads_recomputed_products_and_weights_gradients_are_left_out() -> None:
    device: Any = SimpleNamespace(where=Scope(0, Phase.FORWARD.value, "lm_head", 0), product=lambda *_: None)
    found, ones = Operands(), np.ones((4, 4), np.float32)
    watch = _Watch(device, found)
    watch(LINEAR, print, ones, ones)
    device.where = Scope(0, Phase.BACKWARD.value, "h.0", 0)
    watch(LINEAR, print, ones, ones)
    watch("linear_wgrad", print, ones, ones)
    assert sum(found.num.values()) == 0
    watch(DGRAD, print, ones, ones)
    assert found.num == {"inputs": 0, "weights": 0, "gradients": 16}


def test_tensorwise_fates_are_those_of_the_weights_of_a_run() -> None:
    """The first step's weights are the run's initial ones."""
    config = RunConfig(**SMALL, model="gpt", steps=1, precision="fp32", optimizer="sgd", lr=1e-30, clip_norm=None)
    found, weights = count_operands(config), run(config).weights
    mine = [values.T for name, values in weights.items() if name.startswith("h.0.") and values.ndim == 2]
    assert sum(values.size for values in mine) == found.num["weights"]
    for form in FORMATS:
        cast = Cast("weights", "tensorwise", form)
        each = [float8.fates(casting_of(cast), np.ascontiguousarray(values)) for values in mine]
        assert found.fates[cast] == Fates(*(sum(counts) for counts in zip(*each, strict=True)))


def test_counting_changes_no_number_of_the_run() -> None:
    config, losses = RunConfig(**SMALL, steps=3), list[float]()
    count_operands(config, progress=lambda rank, step, loss: losses.append(loss))
    assert losses == run(config).mean_losses


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(InputError, match="has no blocks with linear maps; choose gpt or llama"):
        count_operands(RunConfig(model="flat", params=1000, units=1, ranks=1, stage=0, steps=1))
