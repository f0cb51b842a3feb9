"""Adapters of experts' stacks beside PEFT's `target_parameters`: the loss and every gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_configs import HIDDEN, TOKENS, VOCAB, written

from zerosim.config import RunConfig
from zerosim.train.run import run

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
CLOSE = 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # PEFT's use of transformers
def test_adapters_of_stacks_are_pefts(tmp_path: Path) -> None:
    """PEFT nests the two adapters of a module; the width of A tells which is which."""
    path = written("qwen3_moe", tmp_path)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(tmp_path, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "first")
    stacks = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    how = peft.LoraConfig(r=2, lora_alpha=4, target_modules=[], target_parameters=stacks)
    adapted, theirs = peft.get_peft_model(model, how), dict[str, Any]()
    trained = {name: one for name, one in adapted.named_parameters() if one.requires_grad}
    for name, a in trained.items():
        if ".lora_A." in name:
            stack = stacks[a.shape[1] != HIDDEN]
            at = f"model.layers.{name.partition('.layers.')[2].partition('.')[0]}.{stack}"
            theirs |= {f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": trained[name.replace("lora_A", "lora_B")]}
    with torch.no_grad():
        for parameter in theirs.values():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    np.savez(tmp_path / "adapters.npz", **{name: one.detach().numpy() for name, one in theirs.items()})
    tokens = np.random.default_rng(5).integers(3, VOCAB, (1, 2, TOKENS + 1))
    np.savez(tmp_path / "tokens.npz", tokens=tokens)
    ids, labels = (torch.from_numpy(np.array(part)) for part in (tokens[0, :, :-1], tokens[0, :, 1:]))
    loss = torch.nn.functional.cross_entropy(adapted(ids).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    fields: dict[str, Any] = dict(
        model=path, seq=TOKENS, precision="fp32", optimizer="sgd", lr=1.0, momentum=0.0, steps=1, ranks=1,
        micro_batch=2, dropout=0.0, lora_rank=2, lora_alpha=4.0, lora_target="experts",
    )  # fmt: skip
    names = dict(weights="first", tokens="tokens.npz", adapters="adapters.npz")
    result = run(RunConfig(**fields, **{name: str(tmp_path / file) for name, file in names.items()}))
    assert result.losses[0][0] == pytest.approx(loss.item(), abs=CLOSE)
    for name, one in theirs.items():
        assert np.abs(result.weights[name] - (one - one.grad).detach().numpy()).max() <= CLOSE, name
