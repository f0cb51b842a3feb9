"""What ops keep for backward, op by op: recorded events and live bytes against closed forms written out here, `==`.

s tokens, b rows, h width, a heads, e bytes of an element, c bytes of its compute dtype.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from built import gpt, place

from zerosim import functional as F
from zerosim.comm.runtime import make_backend
from zerosim.device.device import Device, Phase
from zerosim.device.events import Alloc, Save, Scope
from zerosim.device.recorder import Recorder
from zerosim.dtypes import DType, fp16, fp32, fp64
from zerosim.errors import InputError
from zerosim.ledger.activations import ActivationLedger, SavedRow
from zerosim.ledger.memory import MemoryLedger
from zerosim.models.model import Model
from zerosim.nn import ActivationPolicy
from zerosim.tensor.tensor import Tensor, cpu, tensor

s, b, h, a, L = 6, 3, 8, 2, 3
SAVES, ATTENTIONS, RECOMPUTES = ("lean", "megatron"), ("eager", "flash"), ("none", "selective", "full")


def build(policy: ActivationPolicy, *, dtype: DType = fp16, dropout: float = 0.1, ffn: int | None = None) -> Any:
    memory, activations = MemoryLedger(), ActivationLedger()
    device = Device(0, make_backend("numpy"), recorder=Recorder((memory, activations), keep=True))
    model = gpt(device, dtype, policy=policy, layers=L, hidden=h, heads=a, seq=s, dropout=dropout, ffn=ffn)
    return place(model), device, memory, activations


def run_forward(model: Model, device: Device) -> tuple[Any, Any]:
    """As the engine does; marks the end of forward. Returns the ids and the logits' gradient."""
    ids = tensor(np.random.default_rng(0).integers(0, 11, (b, s)), device, dtype="int64").buffer
    with device.phase(Phase.FORWARD):
        x = Tensor(ids)
        for unit in model.units:
            with device.scope(unit=unit.name):
                x = unit.forward(x)
        with device.scope(unit="loss"):
            logits = [x.buffer]
            del x
            loss, make_grad = model.loss(logits, ids, scale=1.0, count=b * s)
        grads = [make_grad()]
        del loss, make_grad
        device.mark("end_of_forward")
    return ids, grads


def run_backward(model: Model, device: Device, grads: Any) -> None:
    with device.phase(Phase.BACKWARD):
        for unit in reversed(model.units):
            with device.scope(unit=unit.name):
                unit.backward(grads)


def block_bytes(policy: ActivationPolicy, e: int, c: int, dropout: bool, ffn: int) -> int:
    """What one block keeps, tensor by tensor, in words of s, b, h, a."""
    sb, score = s * b, a * s * s * b
    if policy.recompute == "full":
        return e * sb * h
    norms = 2 * (e * sb * h) + (2 * 2 * c * sb if policy.saves == "lean" else 0)
    linears = e * sb * h + e * sb * h + e * sb * h + e * sb * ffn  # c_attn, attn.c_proj, c_fc, mlp.c_proj
    gelu = e * sb * ffn
    masks = 2 * sb * h if dropout else 0
    core = 3 * e * sb * h
    if policy.recompute == "none":
        if policy.attention == "flash":
            core += c * a * s * b  # the log-sum-exp; its output is attn.c_proj's input
        else:
            core += e * score + (score if dropout else 0)
            core += e * score if dropout and policy.saves == "megatron" else 0
    return norms + linears + gelu + masks + core


EVERY_POLICY = [ActivationPolicy(*names) for names in itertools.product(SAVES, ATTENTIONS, RECOMPUTES)]


@pytest.mark.quick(4)
@pytest.mark.parametrize("policy", EVERY_POLICY, ids=lambda p: f"{p.saves}-{p.attention}-{p.recompute}")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [fp16, fp32, fp64], ids=str)
@pytest.mark.parametrize("ffn", [32, 20])
def test_a_block_keeps_its_closed_form(policy: ActivationPolicy, dropout: float, dtype: DType, ffn: int) -> None:
    """Twice: by what ops declared, and by what was live when forward had ended, whoever allocated it."""
    model, device, memory, activations = build(policy, dtype=dtype, dropout=dropout, ffn=ffn)
    _, grads = run_forward(model, device)
    device.recorder.drain()
    expected = block_bytes(policy, dtype.itemsize, max(4, dtype.itemsize), dropout > 0, ffn)
    blocks = [f"h.{i}" for i in range(L)]
    saved = activations.saved()
    for name in blocks:
        assert sum(row.nbytes for row in saved[name]) == expected
    kinds = memory.marks["end_of_forward"].by_unit
    # A block's input was allocated by the unit before it, its output is the next one's input and of the same size.
    held = [kinds.get((name, "activation"), 0) + kinds.get((name, "kept"), 0) for name in blocks]
    assert held == [expected] * L
    assert [kinds.get((name, "temp"), 0) for name in blocks] == [0] * L
    everything = sum(row.nbytes for rows in saved.values() for row in rows)
    by_kind = memory.marks["end_of_forward"].by_kind
    ids = 8 * b * s
    assert everything == by_kind["activation"] + by_kind.get("kept", 0)
    assert sum(row.nbytes for row in saved["wte"]) == ids
    run_backward(model, device, grads)


def test_every_op_of_a_block_stands_with_its_bytes() -> None:
    model, device, _, activations = build(ActivationPolicy("megatron"))
    run_forward(model, device)
    device.recorder.drain()
    sbh, score = s * b * h, a * s * s * b
    assert activations.saved()["h.1"] == (
        SavedRow("ln_1", "input", 2 * sbh),
        SavedRow("attn.c_attn", "input", 2 * sbh),
        SavedRow("attention", "q, k, v", 6 * sbh),
        SavedRow("attention", "softmax", 2 * score),
        SavedRow("attention", "mask", score),
        SavedRow("attention", "dropped softmax", 2 * score),
        SavedRow("attn.c_proj", "input", 2 * sbh),
        SavedRow("resid_1", "mask", sbh),
        SavedRow("ln_2", "input", 2 * sbh),
        SavedRow("mlp.c_fc", "input", 2 * sbh),
        SavedRow("gelu", "input", 8 * sbh),
        SavedRow("mlp.c_proj", "input", 8 * sbh),
        SavedRow("resid_2", "mask", sbh),
    )


def test_parts_that_run_again_are_not_kept_and_say_what_they_made() -> None:
    """torchtitan's policy: results of attention and of every second matmul stay, here with dropout and eager scores."""
    sbh = s * b * h
    model, device, _, activations = build(ActivationPolicy("megatron", "eager", "selective:op"))
    _, grads = run_forward(model, device)
    run_backward(model, device, grads)
    device.recorder.drain()
    assert activations.saved()["h.1"] == (
        SavedRow("ln_1", "input", 2 * sbh),
        SavedRow("attention", "q, k, v", 6 * sbh),
        SavedRow("attn.c_proj", "input", 2 * sbh),
        SavedRow("gelu", "input", 8 * sbh),
    )
    again = activations.saved_again()["h.1"]
    assert [(row.op, row.nbytes // sbh) for row in again] == [
        ("mlp_act", 8), ("attn_proj", 2), ("attn_proj", 2), ("attn_proj", 2), ("layernorm", 2), ("layernorm", 2),
    ]  # fmt: skip


def test_every_second_block_keeps_its_input_and_the_others_all() -> None:
    model, device, memory, activations = build(ActivationPolicy("megatron", "eager", "full:2"))
    run_forward(model, device)
    device.recorder.drain()
    whole, one_input = 34 * s * b * h + 5 * a * s * s * b, 2 * s * b * h
    assert [sum(r.nbytes for r in activations.saved()[f"h.{i}"]) for i in range(L)] == [whole, one_input, whole]
    kinds = memory.marks["end_of_forward"].by_unit
    assert sum(n for (unit, _), n in kinds.items() if unit in ("h.0", "h.1", "h.2")) == 2 * whole + one_input


def test_a_buffer_is_charged_to_who_saves_it_first() -> None:
    """Flash saves its output, which is the next map's input: once. A reshaped or shared storage counts once."""
    model, device, _, activations = build(ActivationPolicy("lean", "flash"))
    run_forward(model, device)
    device.recorder.drain()
    rows = activations.saved()["h.0"]
    assert SavedRow("attention", "output", 2 * s * b * h) in rows
    assert "attn.c_proj" not in {row.op for row in rows}
    events = [event for event in device.recorder.history if isinstance(event, Save)]
    assert "attn.c_proj" in {event.op for event in events}  # it did say so
    assert max(Counter(row[:2] for row in rows).values()) == 1


def test_what_a_full_recompute_saves_again_is_a_block_less_its_kept_input() -> None:
    model, device, _, activations = build(ActivationPolicy("megatron", "eager", "full"))
    _, grads = run_forward(model, device)
    run_backward(model, device, grads)
    device.recorder.drain()
    assert activations.saved()["h.2"] == (SavedRow("recompute", "input", 2 * s * b * h),)
    again = activations.saved_again()
    assert list(again) == ["h.2", "h.1", "h.0"]
    for rows in again.values():
        assert sum(row.nbytes for row in rows) == 32 * s * b * h + 5 * a * s * s * b


def test_the_last_micro_batch_is_shown_and_evaluation_saves_nothing() -> None:
    model, device, _, activations = build(ActivationPolicy())
    for step in range(2):
        with device.scope(step=step):
            _, grads = run_forward(model, device)
            run_backward(model, device, grads)
    device.recorder.drain()
    before = activations.saved()
    with device.phase(Phase.EVALUATE), device.no_grad():
        x = tensor(np.zeros((1, 2)), device, dtype="int64")
        for unit in model.units:
            x = unit.forward(x)
    device.recorder.drain()
    assert activations.saved() == before
    assert sum(row.nbytes for row in before["h.0"]) == block_bytes(ActivationPolicy(), 2, 4, True, 4 * h)


def test_what_is_dropped_before_a_forward_ends_is_not_charged() -> None:
    device = cpu(Recorder((ledger := ActivationLedger(),)))
    with device.scope(unit="h.0", phase=Phase.FORWARD):
        x = tensor(np.ones((2, 2)), device, requires_grad=True)
        kept = F.gelu(x)
        F.gelu(kept * 2.0)  # nobody wants the result: its node and what it saved are gone
    device.recorder.drain()
    assert [(row.op, row.what) for row in ledger.saved()["h.0"]] == [("gelu", "input")]


def test_nothing_is_recorded_where_nothing_is_asked() -> None:
    recorder = Recorder(enabled=False, keep=True)
    device = cpu(recorder)
    F.gelu(tensor(np.ones((2, 2)), device, requires_grad=True))
    recorder.drain()
    assert recorder.history == []
    on = cpu(recorder := Recorder(keep=True))
    F.gelu(tensor(np.ones((2, 2)), on))  # no gradient is wanted
    with on.no_grad():
        F.gelu(tensor(np.ones((2, 2)), on, requires_grad=True))
    recorder.drain()
    assert not [event for event in recorder.history if isinstance(event, Save)]


def test_megatrons_forward_scores_are_declared_as_temp() -> None:
    """Beside the saved softmax an eager kernel that keeps it apart holds the scores; lean writes one over the other."""
    for saves, count in (("lean", 0), ("megatron", 1)):
        device = cpu(recorder := Recorder(keep=True))
        policy = ActivationPolicy(saves)
        F.attention(tensor(np.ones((1, 4, 12)), device, requires_grad=True), 2, policy=policy)
        recorder.drain()
        temps = [e for e in recorder.history if isinstance(e, Alloc) and e.kind == "temp"]
        assert [e.nbytes for e in temps] == [4 * 2 * 4 * 4] * count


def test_flash_declares_no_buffer_of_scores() -> None:
    """Not in forward, not in backward, of no kind."""
    device = cpu(recorder := Recorder(keep=True))
    x = tensor(np.ones((1, 64, 6)), device, requires_grad=True)
    out = F.attention(x, 1, dropout=0.5, policy=ActivationPolicy("megatron", "flash"))
    out.sum().backward()
    recorder.drain()
    assert max(e.nbytes for e in recorder.history if isinstance(e, Alloc)) == 4 * 64 * 6 < 64 * 64


def test_a_policy_is_checked() -> None:
    with pytest.raises(
        InputError,
        match="saves 'megatorn': expected one of lean, megatron, eager, liger, foak, litgpt; did you mean 'megatron'",
    ):
        ActivationPolicy(saves="megatorn")
    with pytest.raises(InputError, match="attention 'slow': expected one of eager, flash"):
        ActivationPolicy(attention="slow")
    with pytest.raises(InputError, match=r"recompute 'ful'.*did you mean 'full'"):
        ActivationPolicy(recompute="ful")


def test_a_save_says_where_it_happened() -> None:
    device = cpu(recorder := Recorder(keep=True))
    with device.scope(step=4, unit="h.0", slot=2, phase=Phase.FORWARD):
        F.dropout(tensor(np.ones((2, 3)), device, requires_grad=True), 0.5, (1, 2), op="resid_1")
    recorder.drain()
    (save,) = [event for event in recorder.history if isinstance(event, Save)]
    assert save[:3] == (Scope(4, "forward", "h.0", 2), "resid_1", "mask")
    assert save.nbytes == 6
