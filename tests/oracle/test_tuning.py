"""Frozen weights beside `requires_grad`, LoRA beside peft, a QLoRA step beside PyTorch on the same codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zerosim.config import RunConfig
from zerosim.config.parts.tuning import is_adapter
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
