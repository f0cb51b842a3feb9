"""Feed-forwards and losses in tiles of tokens (`functional/by_rows.py`, `functional/chunked_loss.py`): the same model
within rounding, and widths between maps, or logits, that a longer sequence does not raise."""

from __future__ import annotations

from typing import Any

import pytest
from same import assert_close
from test_shapes import assert_same_record

from zerosim.analysis.checks import checks
from zerosim.config import RunConfig
from zerosim.device.events import Alloc
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.run import run

SIZES: dict[str, Any] = dict(
    layers=2, hidden=16, heads=4, seq=16, vocab=256, micro_batch=2, steps=2, ranks=2, precision="fp64", optimizer="sgd",
    lr=0.5,
)  # fmt: skip
CASES: list[dict[str, Any]] = [
    dict(dropout=0.1, stage=3, recompute="full", cpu_checkpointing=True),
    dict(model="llama", kv_heads=2, tp=2, accumulate=2, recompute="selective:layernorm,attn_proj"),
    dict(tp=2, sequence_parallel=True, recompute="full", dropout=0.1),
    dict(model="llama", tp=2, sequence_parallel=True, keep_gathered=True, stage=0),
    dict(model="gpt_neox", tp=2, ranks=4, stage=2, clip_norm=0.1),
    dict(model="llama", cp=2, attention="flash", stage=3, loss="chunked", loss_tile=3),
    dict(ranks=4, cp=2, pp=2, accumulate=2, attention="flash", pipeline="1f1b", saves="megatron"),
    dict(model="llama", offload_activations=True, stage=1, recipe="megatron"),
]


def config(**fields: Any) -> RunConfig:
    return RunConfig(**{**SIZES, **fields})


@pytest.mark.quick(3)
@pytest.mark.parametrize("tile", [5, 16, 1000])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_are_the_feed_forward_within_rounding_and_send_what_their_forms_say(
    case: dict[str, Any], tile: int
) -> None:
    """By SGD, whose step is the gradient: Adam would turn the rounding of a gradient of zero into a step of 1."""
    whole, tiled = run(config(**case)), run(config(**case, mlp_tile=tile))
    assert_close(tiled, whole, 1e-13)
    for stage in range(tiled.config.mesh.pp):
        assert all(check.agrees for check in [*checks(tiled)[stage].states, *checks(tiled, 1)[stage].sent])


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_leave_the_record_of_a_real_run(case: dict[str, Any]) -> None:
    assert_same_record(config(**case, mlp_tile=5))


@pytest.mark.bits
def test_one_tile_of_all_tokens_has_the_bits_of_none() -> None:
    whole, tiled = (run(config(precision="fp32", mlp_tile=tile)) for tile in (0, 32))
    assert tiled.losses == whole.losses
    for name, values in whole.weights.items():
        assert tiled.weights[name].tobytes() == values.tobytes(), name


def widest(**fields: Any) -> int:
    """The largest activation, or its gradient, that a plan allocates."""
    events = plan(config(layers=1, ranks=1, stage=0, precision="bf16", **fields), keep_events=True).events[0]
    return max(event.nbytes for event in events if isinstance(event, Alloc) and "activation" in event.kind)


def test_a_longer_sequence_has_no_larger_logits_and_no_wider_feed_forward() -> None:
    """What is left is as wide as the model's q, k and v, 2 rows of 3 x 16 numbers a token in 2 bytes. Without tiles the
    logits are 256, of which an eighth is 32, and the feed-forward has 64."""
    tiles = dict(loss="chunked", loss_tile=64, mlp_tile=64, attention="flash")
    for seq in (256, 1024):
        assert widest(seq=seq, **tiles) == 2 * 3 * 16 * 2 * seq
        assert widest(seq=seq, **{**tiles, "mlp_tile": 0}) == 2 * 4 * 16 * 2 * seq
        assert widest(seq=seq, **{**tiles, "loss_tile": 0}) == max(2 * 3 * 16, 2 * 32) * 2 * seq


def test_time_of_a_plan_grows_with_tiles_and_not_with_tokens() -> None:
    """As many events for tiles of a thousand times as many tokens."""
    few, many = (
        len(plan(config(seq=4 * tile, mlp_tile=tile, loss="chunked", loss_tile=tile), keep_events=True).events[0])
        for tile in (8, 8000)
    )
    assert few == many


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (dict(mlp_tile=4, gather="module", stage=3), ["mlp_tile", "gather unit"]),
        (dict(mlp_tile=4, recompute="selective:mlp"), ["mlp_tile", "fc1", "recompute"]),
        (dict(mlp_tile=4, pp=2, accumulate=2, pipeline="zb-h1"), ["mlp_tile", "zb-h1", "1f1b"]),
        (dict(mlp_tile=4, lora_rank=2), ["mlp_tile", "LoRA"]),
        (dict(mlp_tile=4, model="mlp"), ["mlp_tile", "mlp"]),
        (dict(loss_tile=4), ["loss_tile", "--loss chunked"]),
        (dict(loss_tile=4, loss="liger"), ["loss_tile", "liger"]),
    ],
)
def test_what_tiles_do_not_go_with_is_refused(fields: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        config(**fields)
    assert all(name in str(refused.value) for name in names), refused.value
    assert "\n" not in str(refused.value)
