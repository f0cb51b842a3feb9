"""FSDP1 as Hugging Face's Trainer sets it up: the paper's weights to the bit, other bytes and other lifetimes."""

from __future__ import annotations

from typing import Any

import pytest
from same import assert_same_weights

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig
from zerosim.device.events import Alloc, Event, Free
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.run import run

GPT: dict[str, Any] = dict(layers=4, hidden=16, heads=2, seq=8, vocab=256, steps=2, micro_batch=1, ranks=2, stage=3)
LORA = GPT | dict(lora_rank=4, adapter_dtype="fp32", recompute="full", recipe="fsdp1")
TOKEN_BYTES = 8 * 16 * 2
"""Of a block's input: 8 tokens, 16 wide, of 2 bytes."""


def events(config: RunConfig) -> list[Event]:
    return list(plan(config, keep_events=True).events[0])


def most(config: RunConfig, phase: str, unit: str) -> int:
    """Return the most bytes that are live while a unit computes in a phase of the last step."""
    live, highest, sizes = 0, 0, dict[int, int]()
    for event in events(config):
        if isinstance(event, Alloc):
            sizes[event.id] = event.nbytes
            live += event.nbytes
            if (event.scope.phase, event.scope.unit) == (phase, unit):
                highest = max(highest, live)
        elif isinstance(event, Free):
            live -= sizes.pop(event.id)
    return highest


def test_weights_are_the_papers() -> None:
    """Whatever is reduced in bf16 there has bf16 gradients here; Adam's masters are the same fp32."""
    for more in (dict(precision="fp32"), dict(precision="bf16-pure"), dict(lora_rank=4, adapter_dtype="fp32")):
        config = RunConfig(**GPT, **more)
        assert_same_weights(run(config), run(config.replace(recipe="fsdp1")))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_formulas_agree_at_stages_that_fsdp1_has_not(precision: str) -> None:
    for stage in (0, 1, 2):
        assert formulas_agree(checks(plan(RunConfig(**{**GPT, "stage": stage}, recipe="fsdp1", precision=precision))))


@pytest.mark.parametrize(
    ("more", "held"),
    [(dict(), 16), (dict(precision="bf16-pure"), 8), (dict(precision="fp32"), 16)],
)
def test_shards_of_gradients_stay_until_the_next_step(more: dict[str, Any], held: int) -> None:
    result = run(RunConfig(**GPT, recipe="fsdp1", **more))
    marks = result.memory[0].marks["after_step"]
    kept = sum(marks.by_kind.get(kind, 0) - marks.padding.get(kind, 0) for kind in ("param", "grad", "optim"))
    assert 2 * kept == held * result.num_parameters
    assert formulas_agree(checks(result))
    assert result.live_bytes_after == [0] * 2
    again = run(result.config.replace(keep_grads=False))
    assert_same_weights(result, again)
    assert again.memory[0].peak.total_bytes == result.memory[0].peak.total_bytes  # no step begins with them


def test_full_gradients_are_computed_and_sent_in_2_bytes_and_kept_in_4() -> None:
    """So on two ranks a block's whole gradient has as many bytes as its shard, and what arrives has half of them."""
    found = [e for e in events(RunConfig(**GPT, recipe="fsdp1")) if isinstance(e, Alloc) and e.scope.unit == "h.1"]
    found = [e for e in found if (e.scope.step, e.scope.phase) == (0, "backward")]
    by_kind = {kind: [e.nbytes for e in found if e.kind == kind] for kind in ("unsharded_grad", "grad", "comm")}
    [whole] = by_kind["unsharded_grad"]
    assert by_kind["grad"] == [whole]
    assert by_kind["comm"] == [whole // 2]


def test_only_backward_prefetches() -> None:
    config = RunConfig(**GPT, recipe="fsdp1")
    early = [e.scope.phase for e in events(config) if isinstance(e, Alloc) and e.kind == "prefetched_param"]
    assert set(early) == {"backward"}
    early = [
        e.scope.phase
        for e in events(config.replace(forward_prefetch=True))
        if isinstance(e, Alloc) and e.kind == "prefetched_param"
    ]
    assert set(early) == {"forward", "backward"}


@pytest.mark.parametrize(
    ("loss", "reentrant", "early"), [("hf-5", False, 1), ("hf-4.48", True, 0), ("torch", False, 0)]
)
def test_the_loss_in_the_model_prefetches_the_last_block(loss: str, reentrant: bool, early: int) -> None:
    """In its backward, with which the root's begins; but a block in reentrant checkpoints takes no part in it. So with
    trained blocks too."""
    for more in (LORA, GPT | dict(recipe="fsdp1", recompute="full")):
        config = RunConfig(**more, loss=loss, use_reentrant=reentrant)
        found = most(config, "backward", "loss") - most(
            config.replace(prefetch=0, use_reentrant=False), "backward", "loss"
        )
        adapters = 4 * 2 * 2 * 4 * 16 if more is LORA else 0
        assert found == early * (2 * (12 * 16 * 16 + 13 * 16) + adapters)


def test_a_frozen_table_stays_with_the_root() -> None:
    """The root is one unit, which backward comes through; a table alone would be freed after its forward."""
    config = RunConfig(**LORA, tie_embeddings=False)
    table = next(
        e.id for e in events(config) if isinstance(e, Alloc) and e.kind == "unsharded_param" and e.scope.unit == "wte"
    )
    freed = next(e for e in events(config) if isinstance(e, Free) and e.id == table)
    assert (freed.scope.phase, freed.scope.unit) == ("backward", "h.0")


def test_each_tensor_of_an_adapter_is_a_unit() -> None:
    result = run(RunConfig(**LORA))
    trained = [name for name in result.layout.flats if result.layout.is_trained(name)]
    assert trained[:2] == ["h.0.attn.q.lora_A.weight", "h.0.attn.q.lora_B.weight"]


def test_reentrant_checkpoints_of_frozen_blocks_keep_inputs_and_gradients() -> None:
    """At the first block's backward there are the inputs of all blocks, and the gradients of all but the first one's
    input. At the last one's there is nothing more than without."""
    config, layers = RunConfig(**LORA, prefetch=0), 4
    without = config.replace(use_reentrant=False)
    found = [
        most(config, "backward", f"h.{block}") - most(without, "backward", f"h.{block}") for block in range(layers)
    ]
    assert found == sorted(found, reverse=True)
    norms = 2 * 4 * 8  # what the first block's first norm saves: without, its input has no gradient
    assert found[0] == 2 * (layers - 1) * TOKEN_BYTES + norms
    assert found[-1] == 0


def test_the_first_block_of_reentrant_checkpoints_has_an_input_with_a_gradient() -> None:
    """PEFT asks for it; so its backward holds as much more than the second's as the second's more than the third's. No
    gradient comes to the frozen table."""
    config = RunConfig(**LORA, prefetch=0)
    third, second, first = (most(config, "backward", f"h.{block}") for block in (2, 1, 0))
    assert first - second == second - third > TOKEN_BYTES
    for more in (dict(), dict(accumulate=2), dict(tp=2, ranks=4, adapter_dtype=None), dict(pp=2, ranks=4)):
        assert formulas_agree(checks(run(config.replace(**more))))


def test_reentrant_checkpoints_change_no_weight_and_end_with_backward() -> None:
    config = RunConfig(**LORA, accumulate=2)
    result = run(config)
    assert_same_weights(result, run(config.replace(use_reentrant=False)))
    assert result.live_bytes_after == [0] * 2
    assert plan(config, every_rank=True).memory[0].to_dict() == result.memory[0].to_dict()


@pytest.mark.parametrize(
    "more",
    [
        dict(lora_rank=None, adapter_dtype=None),
        dict(recompute="none"),
        dict(recipe="fsdp2"),
        dict(freeze="!h.*.ln_1", adapter_dtype=None),
    ],
)
def test_nothing_is_kept_of_trained_blocks_without_recompute_and_by_fsdp2(more: dict[str, Any]) -> None:
    config = RunConfig(**LORA).replace(**more)
    assert most(config, "backward", "h.0") == most(config.replace(use_reentrant=False), "backward", "h.0")


def test_gradients_of_2_bytes_need_no_cast() -> None:
    config = RunConfig(**GPT, recipe="fsdp1", grad_dtype="bf16")
    assert config.reduction.compress == "none"
    assert "gradients are no wider" in config.set_aside["compress"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(recipe="paper", recompute=None), "no blocks are recomputed; pass --recompute full too"),
        (dict(recipe="paper", lora_rank=None, adapter_dtype=None), "trained blocks keep no more than their inputs"),
        (dict(recipe="fsdp2"), "FSDP2 frees what FSDP1 keeps; choose recipe fsdp1"),
        (dict(stage=0), "stage 0 does not use it"),
    ],
)
def test_reentrant_checkpoints_that_keep_nothing_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RunConfig(**{**LORA, "use_reentrant": True, **more})
