"""Every family beside transformers, from one config.json: logits, the loss and every gradient, eager and flash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers  # a family that it lacks fails here
from built import builder, place
from family_configs import CONFIGS, TOKENS, VOCAB, written

from zerosim.config import RunConfig
from zerosim.dtypes import fp32
from zerosim.functional.policy import ATTENTIONS, ActivationPolicy
from zerosim.models.decoder import build_decoder
from zerosim.models.released import read_released
from zerosim.placement.block import BALANCE
from zerosim.tensor.tensor import Tensor, cpu
from zerosim.train.run import run
from zerosim.train.uploads import upload

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
ROWS, CLOSE = 2, 1e-5
QUICK = "qwen2", "gemma2", "gpt_neox"
DECODERS = [name for name in CONFIGS if not name.startswith("t5")]  # which is in test_encoders.py
NAMES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in DECODERS]


def theirs(config: str, folder: Path) -> Any:
    """transformers' model of a file, whose every weight and bias is drawn, saved in a folder. Falcon's eager attention
    adds ALiBi's slopes twice (`findings/falcon_alibi_eager.sh`)."""
    kind = "sdpa" if json.loads(Path(config).read_text("utf-8")).get("alibi") else "eager"
    values = transformers.AutoConfig.from_pretrained(Path(config).parent, attn_implementation=kind)
    torch.manual_seed(3)  # what transformers draws
    model = transformers.AutoModelForCausalLM.from_config(values)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
        for name, buffer in model.named_buffers():
            if name.endswith(BALANCE):
                buffer += 0.1 * torch.randn(buffer.shape, generator=draw)
    model.eval().save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_every_gradient_are_transformers(name: str, tmp_path: Path) -> None:
    """A step of SGD with a rate of 1 takes the gradient off each weight."""
    path = written(name, tmp_path)
    model = theirs(path, tmp_path / "first")
    tokens = np.random.default_rng(5).integers(3, VOCAB, (1, ROWS, TOKENS + 1))
    np.savez(tmp_path / "tokens.npz", tokens=tokens)
    ids, labels = (torch.from_numpy(np.array(part)) for part in (tokens[0, :, :-1], tokens[0, :, 1:]))
    logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    model.save_pretrained(tmp_path / "second")
    base = dict(
        model=path, seq=TOKENS, precision="fp32", optimizer="sgd", lr=1.0, momentum=0.0, steps=1, ranks=1,
        micro_batch=ROWS, dropout=0.0, weights=str(tmp_path / "first"), tokens=str(tmp_path / "tokens.npz"),
    )  # fmt: skip
    for attention in ATTENTIONS[1:] if name.endswith("chunks") else ATTENTIONS:  # eager reads whole rows
        result = run(RunConfig(**base, attention=attention))
        assert result.losses[0][0] == pytest.approx(loss.item(), abs=CLOSE)
        shapes = {weight: values.shape for weight, values in result.weights.items()}
        biases = {weight: values for weight, values in result.weights.items() if weight.endswith(BALANCE)}
        stepped = read_released(str(tmp_path / "second"), result.config.model, shapes)
        apart = {weight: np.abs(read() - result.weights[weight]).max() for weight, read in stepped.items()}
        assert max(apart.values()) <= CLOSE, max(apart, key=lambda weight: apart[weight])
        first = read_released(str(tmp_path / "first"), result.config.model, shapes)
        before = {weight: read() for weight, read in first.items()}
        assert max(np.abs(result.weights[weight] - values).max() for weight, values in before.items()) > 1e-3
        if name.endswith("chunks"):
            continue  # the strategy's group has their attention
        if biases:  # only a run has them
            assert all((before[weight] == bias).all() and bias.any() for weight, bias in biases.items())
            continue
        new = builder(cpu(), fp32, policy=ActivationPolicy(attention=attention), name=path, seq=TOKENS, **_NO_SIZES)
        built = place(build_decoder(new))
        built.load_state_dict(before)
        x = Tensor(upload(tokens[0, :, :-1], built.flats[0].device))
        for unit in built.units:
            x = unit.forward(x)
        assert np.abs(np.array(built.whole_logits(x).array) - logits.detach().numpy()).max() <= CLOSE


_NO_SIZES: dict[str, Any] = dict.fromkeys(("layers", "hidden", "heads", "vocab"))
