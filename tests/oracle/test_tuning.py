"""Frozen weights beside `requires_grad`, LoRA beside peft, a QLoRA step beside PyTorch on the same codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zerosim.config import RunConfig
from zerosim.config.parts.tuning import is_adapter
from zerosim.device.events import Save
from zerosim.functional.linear import Linear, linear_result
from zerosim.functional.lora import PEFT, Adapted, Adapter, add_adapters
from zerosim.tensor import cpu, tensor
from zerosim.tensor.tensor import outline
from zerosim.train.plan import plan
from zerosim.train.run import run

from .runs import tiny, train_zerosim

FROZEN = "wte,wpe,h.0,h.1.attn"


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_weights_are_pytorchs_requires_grad_off(stage: int, tmp_path: Path) -> None:
    """Ten steps of Adam in float64, within 1e-12; what is frozen stays, to the bit."""
    task = tiny(False)
    result = train_zerosim(task, tmp_path, ranks=2, stage=stage, precision="fp64", steps=10, lr=1e-3, freeze=FROZEN)
    model = task.gpt().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(("wte.", "wpe.", "h.0.", "h.1.attn."))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-3)
    for batch in torch.from_numpy(task.tokens[:10]):
        optimizer.zero_grad()
        model.token_losses(batch).mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        theirs = parameter.detach().numpy()
        if parameter.requires_grad:
            np.testing.assert_allclose(result.weights[name], theirs, rtol=0, atol=1e-12, err_msg=name)
        else:
            np.testing.assert_array_equal(result.weights[name], theirs)


SIZES: dict[str, Any] = dict(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, seq=12, vocab=64)
LORA: dict[str, Any] = dict(lora_rank=4, lora_alpha=8.0, lora_target="q,v,down")


def started(folder: Path, **more: Any) -> tuple[RunConfig, dict[str, Any]]:
    """A Llama with adapters whose B is not 0, on two rows; and its weights."""
    tokens = np.random.default_rng(3).integers(0, 64, (1, 2, 13))
    np.savez(folder / "tokens.npz", tokens=tokens)
    config = RunConfig(
        model="llama", **SIZES, **LORA, **more, precision="fp32", ranks=2, stage=3, micro_batch=1, steps=1,
        optimizer="sgd", lr=1e-30, tokens=str(folder / "tokens.npz"),
    )  # fmt: skip
    weights = run(config).weights
    random = np.random.default_rng(4)
    for name in weights:
        if is_adapter(name):
            weights[name] = (0.1 * random.standard_normal(weights[name].shape)).astype(np.float32)
    np.savez(folder / "adapters.npz", **{name: w for name, w in weights.items() if is_adapter(name)})
    return config.replace(adapters=str(folder / "adapters.npz")), weights


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of transformers and peft
@pytest.mark.parametrize("base", [None, "nf4"])
def test_loss_and_first_gradients_are_pefts(base: str | None, tmp_path: Path) -> None:
    """Within 1e-6; with a base in NF4 within 1e-5, peft's base being the values of the same codes."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config, weights = started(tmp_path, base=base)
    sizes = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=config.model.norm_eps, max_position_embeddings=64,
        tie_word_embeddings=config.model.tie_embeddings, attn_implementation="eager",
        rope_theta=config.model.rope_base,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(sizes)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(model, lora)
    own = dict(model.named_parameters())
    for name, values in weights.items():
        owner = name.partition(".lora_")[0].removesuffix(".weight")
        theirs = f"base_model.model.{name}".replace("lora_A.weight", "lora_A.default.weight")
        theirs = theirs.replace("lora_B.weight", "lora_B.default.weight")
        if theirs not in own:
            theirs = f"base_model.model.{owner}.base_layer.weight"
        own[theirs].data = torch.from_numpy(np.asarray(values, np.float32)).reshape(own[theirs].shape)
    tokens = torch.from_numpy(np.load(tmp_path / "tokens.npz")["tokens"][0])
    logits = model(input_ids=tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 64), tokens[:, 1:].reshape(-1))
    loss.backward()
    within = 1e-6 if base is None else 1e-5
    before, after = run(config), run(config.replace(lr=1.0))
    assert abs(before.mean_losses[0] - float(loss)) < within
    compared = 0
    for name, parameter in own.items():
        if parameter.requires_grad:
            mine = name.removeprefix("base_model.model.").replace(".default", "")
            gradient = before.weights[mine].astype(np.float64) - after.weights[mine]
            np.testing.assert_allclose(gradient, parameter.grad.numpy(), rtol=0, atol=within, err_msg=name)
            compared += 1
    assert compared == sum(map(is_adapter, weights)) == 12


TARGETS = {"qkv": "q,k,v", "o": "o", "gate_up": "gate,up", "down": "down"}
"""Maps that read one input, in the words of `lora_target`."""


def group_of(name: str) -> str:
    """Return which of `TARGETS` a layer of ours or theirs belongs to."""
    word = name.rpartition(".")[2].removesuffix("_proj")
    return next(group for group, words in TARGETS.items() if word in words.split(","))


def saved_by_peft(dtype: str, dropout: float, tokens: int, autocast: bool) -> dict[str, int]:
    """Return the bytes that adapters of one block of a bf16 Llama save beside what others have saved."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(sizes).to(torch.bfloat16)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout)
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=dtype == "fp32").train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen, found, inside = dict[int, Any](), dict.fromkeys(TARGETS, 0), list[str]()

    def pack(tensor: Any) -> Any:
        at = tensor.untyped_storage()
        if at.data_ptr() not in weights and at.data_ptr() not in seen:
            seen[at.data_ptr()] = at
            if inside:
                found[group_of(inside[-1])] += at.nbytes()
        return tensor

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):  # as on a GPU, with a mask of bytes; on a CPU it is as wide as x
            module.forward = lambda x, p=module.p: torch.native_dropout(x, p, True)[0]
        if hasattr(module, "lora_A") and ".layers.1." in name:
            module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
            module.register_forward_hook(lambda *_: inside.pop() and None)
    cast = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast:
        model(input_ids=torch.zeros((1, tokens), dtype=torch.int64)).logits.sum()
    return found


def saved_here(dtype: str, dropout: float, tokens: int, autocast: bool) -> dict[str, int]:
    """Return the same of ours."""
    config = RunConfig(
        model="llama", **SIZES | dict(seq=tokens), lora_rank=4, lora_target="q,k,v,o,gate,up,down", micro_batch=1,
        lora_dropout=dropout, adapter_dtype=dtype, attention="flash", ranks=1, autocast="bf16" if autocast else None,
    )  # fmt: skip
    seen, found = set[int](), dict.fromkeys(TARGETS, 0)
    for event in plan(config, keep_events=True).events[0]:
        if isinstance(event, Save) and event.id not in seen:
            seen.add(event.id)
            if event.scope.unit == "layers.1" and event.op.endswith("_proj"):
                found[group_of(event.op)] += event.nbytes
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("dtype", "dropout", "expected"),
    [
        ("fp32", 0.1, dict(qkv=3 * (5 * 32 + 16), o=5 * 32 + 16, gate_up=2 * (5 * 32 + 16), down=5 * 48 + 16)),
        ("fp32", 0.0, dict(qkv=3 * (4 * 32 + 16), o=4 * 32 + 16, gate_up=2 * (4 * 32 + 16), down=4 * 48 + 16)),
        ("bf16", 0.1, dict(qkv=3 * (3 * 32 + 8), o=3 * 32 + 8, gate_up=2 * (3 * 32 + 8), down=3 * 48 + 8)),
        ("cast", 0.1, dict(qkv=3 * (3 * 32 + 8), o=3 * 32 + 8, gate_up=2 * (3 * 32 + 8), down=3 * 48 + 8)),
        ("cast", 0.0, dict(qkv=3 * (2 * 32 + 8), o=2 * 32 + 8, gate_up=2 * (2 * 32 + 8), down=2 * 48 + 8)),
        ("bf16", 0.0, dict(qkv=2 * 32 + 3 * 8, o=8, gate_up=2 * 32 + 2 * 8, down=2 * 48 + 8)),
    ],
)
def test_what_adapters_save_is_what_pefts_save(dtype: str, dropout: float, expected: dict[str, int]) -> None:
    """Bytes a token and block, by the maps that share an input; under autocast ("cast") also those of A's and B's
    casts."""
    tokens, autocast, stored = 16, dtype == "cast", dtype.replace("cast", "fp32")
    ours, theirs = (of(stored, dropout, tokens, autocast) for of in (saved_here, saved_by_peft))
    casts = dict(qkv=8 * (64 + 48 + 48), o=8 * 64, gate_up=8 * 2 * 80, down=8 * 80) if autocast else {}
    assert ours == theirs == {group: tokens * each + casts.get(group, 0) for group, each in expected.items()}


def test_fp32_adapters_of_a_bf16_map_compute_as_pefts() -> None:
    """Result and gradients to the bit, on small whole numbers, which no order of adding rounds."""
    peft = pytest.importorskip("peft")
    draw = np.random.default_rng(7)
    x, w, a, b, dy = (draw.integers(-3, 4, shape) / 1.0 for shape in ((5, 8), (6, 8), (2, 8), (6, 2), (5, 6)))
    base = torch.nn.Linear(8, 6, bias=False, dtype=torch.bfloat16)
    base.weight.data = torch.from_numpy(w).bfloat16()
    layer = peft.tuners.lora.layer.Linear(base, "default", peft.LoraConfig(r=2, lora_alpha=1), r=2, lora_alpha=1)
    base.weight.requires_grad = False
    for part, values in ((layer.lora_A, a), (layer.lora_B, b)):
        part["default"].weight.data = torch.from_numpy(values).float()
    theirs = torch.from_numpy(x).bfloat16().requires_grad_()
    result = layer(theirs)
    result.backward(torch.from_numpy(dy).bfloat16())

    device = cpu()
    mine, grad = (tensor(one, device, dtype="bf16", requires_grad=True) for one in (x, dy))
    weight = tensor(w, device, dtype="bf16")
    a_, b_ = (tensor(one, device, dtype="fp32", requires_grad=True) for one in (a, b))
    out = linear_result(mine, weight, transposed=True)
    downs = add_adapters(mine, out, [Adapter(a_, b_, 0, 0.5)], [None], PEFT)
    dx, _, da, db = Adapted(Linear(outline(mine), weight, None, True), outline(mine), downs).backward(grad.buffer)
    others = (result, theirs.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad)
    for own, other in zip((out, dx, da, db), others, strict=True):
        assert own.dtype.itemsize == other.dtype.itemsize
        np.testing.assert_array_equal(device.backend.to_host(own.array), other.detach().float().numpy())
