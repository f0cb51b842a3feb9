"""Adapters of models with experts beside PEFT's: the loss and every gradient."""

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


STACKS = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
ADAPTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "stacks": ("qwen3_moe", dict(target_modules=[], target_parameters=STACKS), "experts"),
    "all": ("qwen3_moe", dict(target_modules="all-linear"), "all-linear"),
    "names of one expert's maps": ("mixtral", dict(target_modules=["q_proj", "w1", "w2", "w3"]), "q,gate,up,down"),
    "beside dense blocks and shared experts": ("deepseek_v3", dict(target_modules="all-linear"), "all-linear"),
    "beside biases that choose": ("ernie4_5_moe", dict(target_modules="all-linear"), "all-linear"),
    "beside a router that is a module": ("hunyuan_v1_moe", dict(target_modules="all-linear"), "all-linear"),
    "a family whose names PEFT leaves": ("qwen2_moe", dict(target_modules=["v_proj", "down_proj"]), "v,down"),
    "another one": ("granitemoe", dict(target_modules="all-linear"), "all-linear"),
    "routers": ("olmoe", dict(target_modules=["gate", "o_proj"]), "router,o"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # PEFT's use of transformers
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # they did
@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_are_pefts(case: str, tmp_path: Path) -> None:
    """Their names, shapes, loss and gradients. PEFT nests the two adapters of a module; the width of A tells which is
    which."""
    family, targets, words = ADAPTED[case]
    path = written(family, tmp_path)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(tmp_path, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "first")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, **targets))
    theirs = dict[str, Any]()
    for name, one in adapted.named_parameters():
        if one.requires_grad and ".lora_A." in name:
            at = name.removeprefix("base_model.model.").partition(".lora_A.")[0].removesuffix(".base_layer")
            if at.endswith(".experts"):
                at += (".gate_up_proj", ".down_proj")[one.shape[1] != HIDDEN]
            theirs[f"{at}.lora_A.weight"] = one
            theirs[f"{at}.lora_B.weight"] = adapted.get_parameter(name.replace("lora_A", "lora_B"))
    with torch.no_grad():
        for parameter in theirs.values():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    np.savez(tmp_path / "adapters.npz", **{name: one.detach().numpy() for name, one in theirs.items()})
    tokens = np.random.default_rng(5).integers(3, VOCAB, (1, 2, TOKENS + 1))
    np.savez(tmp_path / "tokens.npz", tokens=tokens)
    ids, labels = (torch.from_numpy(np.array(part)) for part in (tokens[0, :, :-1], tokens[0, :, 1:]))
    loss = torch.nn.functional.cross_entropy(adapted(ids).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    fields: dict[str, Any] = dict(
        model=path, seq=TOKENS, precision="fp32", optimizer="sgd", lr=1.0, momentum=0.0, steps=1, ranks=1,
        micro_batch=2, dropout=0.0, lora_rank=2, lora_alpha=4.0, lora_target=words,
    )  # fmt: skip
    names = dict(weights="first", tokens="tokens.npz", adapters="adapters.npz")
    result = run(RunConfig(**fields, **{name: str(tmp_path / file) for name, file in names.items()}))
    assert result.losses[0][0] == pytest.approx(loss.item(), abs=CLOSE)
    assert {name for name in result.weights if ".lora_" in name} == set(theirs)
    for name, one in theirs.items():
        assert np.abs(result.weights[name] - (one - one.grad).detach().numpy()).max() <= CLOSE, name
