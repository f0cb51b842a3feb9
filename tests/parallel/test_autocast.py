"""Full training under autocast over fp32 weights: the same bits at every stage, and how long casts live."""

from __future__ import annotations

from typing import Any

import pytest
from same import assert_same_weights

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.run import run

SIZES: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, vocab=256, steps=2, micro_batch=1, ranks=2)
CAST = SIZES | dict(model="llama", precision="fp32", autocast="bf16", attention="flash", saves="eager")
MAPS = 2 * (2 * 16 * 16 + 2 * 16 * 16 + 3 * 16 * 48)


@pytest.mark.parametrize("more", [dict(), dict(recompute="full"), dict(model="gemma2", tie_embeddings=True)], ids=str)
def test_stages_have_the_same_bits_and_a_plan_the_same_bytes(more: dict[str, Any]) -> None:
    results = [run(RunConfig(**CAST | more, stage=stage)) for stage in (0, 1, 2, 3)]
    for result in results:
        assert_same_weights(result, results[0])
        assert formulas_agree(checks(result))
        assert result.live_bytes_after == [0, 0]
        planned = plan(result.config, every_rank=True)
        assert [one.to_dict() for one in planned.memory] == [one.to_dict() for one in result.memory]
    assert results[0].losses[-1] != run(RunConfig(**SIZES | dict(more, model="llama", precision="fp32"))).losses[-1]


@pytest.mark.parametrize(("stage", "recompute", "held"), [(0, "none", 2), (3, "none", 2), (3, "full", 0)])
def test_casts_of_all_maps_live_from_forward_to_backward(stage: int, recompute: str, held: int) -> None:
    """2 bytes a parameter of the whole model, at stage 3 too, where the fp32 weights are freed after their forward.

    A recomputed block has them in its backward alone, and the head always."""
    result = plan(RunConfig(**CAST | dict(ffn=48, kv_heads=2, tie_embeddings=False), stage=stage, recompute=recompute))
    rows = [row.nbytes for unit, each in result.saved.items() for row in each if row.what == "weight cast"]
    assert sum(rows) == held * MAPS + 2 * 256 * 16


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(precision="bf16"), "without adapters it casts whole fp32 weights; choose precision fp32"),
        (dict(tp=2), "without adapters it casts whole fp32 weights; leave out tp"),
        (dict(pp=2), "without adapters it casts whole fp32 weights; leave out pp"),
        (dict(model="mlp", attention=None, saves=None), "model mlp is no stack of blocks alone; leave it out"),
    ],
    ids=str,
)
def test_what_it_does_not_cast_is_refused(more: dict[str, Any], message: str) -> None:
    given = {name: value for name, value in (CAST | more).items() if value is not None}
    if given["model"] == "mlp":
        given = {name: value for name, value in given.items() if name not in ("heads", "seq")}
    with pytest.raises(InputError, match=message):
        RunConfig(**given)
