"""Encoders beside transformers: logits, and every gradient of the masked tokens' mean loss, eager and flash; T5, its
two texts of different lengths, its biases' distances beyond the largest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from family_configs import CONFIGS, VOCAB, written

from oracle.test_released import logits_of, made
from zerosim.config import RunConfig
from zerosim.models.released import read_released, stored_names
from zerosim.train.data import shift_right
from zerosim.train.masked import UNREAD, mask_tokens
from zerosim.train.run import run

TOLERANCE = 1e-5


def theirs_of(model: Any, inputs: Any, labels: Any) -> dict[str, Any]:
    """The gradients of the mean over predicted tokens, by transformers' names."""
    logits = model(torch.from_numpy(inputs)).logits.flatten(0, 1)
    targets = torch.from_numpy(labels).flatten()
    torch.nn.functional.cross_entropy(logits, targets, ignore_index=UNREAD).backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_logits_and_every_gradient_are_theirs(family: str, attention: str, tmp_path: Path) -> None:
    task = made(family, {}, tmp_path)
    config = task.config.replace(steps=1, lr=1.0, attention=attention, ranks=2, micro_batch=1, stage=3)
    vocab, data = config.model.vocab, config.data
    inputs, labels = np.split(mask_tokens(task.tokens[0][:, :-1], data.seed, 0, vocab, vocab - 1), 2, axis=1)
    result = run(config)
    shapes = {name: values.shape for name, values in result.weights.items()}
    before = {name: read() for name, read in read_released(str(tmp_path), config.model, shapes).items()}
    with torch.no_grad():
        logits = task.model(torch.from_numpy(inputs)).logits.numpy()
    assert np.abs(logits_of(config, before, inputs) - logits).max() <= TOLERANCE
    expected, names = theirs_of(task.model, inputs, labels), stored_names(config.model, shapes)
    assert set(names.values()) == expected.keys()
    for name, values in result.weights.items():  # SGD with a rate of 1 subtracts the gradient
        found = before[name].astype(np.float64) - values
        assert np.abs(found - expected[names[name]]).max() <= TOLERANCE, name
        assert name.endswith("token_type_embeddings.weight") or np.abs(found).max() > 0, name


def t5_of(path: str, folder: Path, is_tied: bool) -> Any:
    """transformers' T5 of a file, every weight drawn, and saved in a folder. Version 5.24 ties every head: a head of
    its own is put in by hand, as in T5 v1.1's checkpoints. Its first weights give logits of 15 and more, too large for
    the tolerance in fp32, so they are halved."""
    model = transformers.T5ForConditionalGeneration(transformers.AutoConfig.from_pretrained(Path(path).parent)).eval()
    if not is_tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.5 if parameter.ndim > 1 else 1.0
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    folder.mkdir()
    kept = {name: values for name, values in model.state_dict().items() if "embed_tokens" not in name}
    kept = {name: values for name, values in kept.items() if not is_tied or name != "lm_head.weight"}
    safetensors.torch.save_file(kept, folder / "model.safetensors")
    return model


@pytest.mark.parametrize("name", ["t5", pytest.param("t5, v1.1", marks=pytest.mark.slow)])
def test_t5s_logits_and_every_gradient_are_theirs(name: str, tmp_path: Path) -> None:
    path, first, is_tied = written(name, tmp_path), tmp_path / "first", "tie_word_embeddings" not in CONFIGS[name]
    seq, own, rows = 20, 13, 2
    tokens = np.random.default_rng(5).integers(3, VOCAB, (1, rows, seq + own))
    np.savez(tmp_path / "tokens.npz", tokens=tokens)
    model = t5_of(path, first, is_tied)
    ids, decoded, labels = np.split(shift_right(tokens[0], seq, 0), [seq, seq + own], axis=1)
    logits = model(torch.from_numpy(ids), decoder_input_ids=torch.from_numpy(decoded)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten())
    loss.backward()
    config = RunConfig(
        model=path, seq=seq, decoder_seq_length=own, precision="fp32", optimizer="sgd", lr=1.0, steps=1, ranks=1,
        micro_batch=rows, weights=str(first), tokens=str(tmp_path / "tokens.npz"),
    )  # fmt: skip
    result = run(config)
    assert result.losses[0][0] == pytest.approx(loss.item(), abs=TOLERANCE)
    shapes = {weight: values.shape for weight, values in result.weights.items()}
    before = {weight: read() for weight, read in read_released(str(first), config.model, shapes).items()}
    ours = logits_of(config, before, np.concatenate([ids, decoded], axis=1))
    assert np.abs(ours - logits.detach().numpy()).max() <= TOLERANCE
    expected = {weight: parameter.grad.numpy() for weight, parameter in model.named_parameters()}
    assert expected.keys() == result.weights.keys()
    for weight, values in result.weights.items():
        found = before[weight].astype(np.float64) - values
        assert np.abs(found - expected[weight]).max() <= TOLERANCE, weight
        assert np.abs(found).max() > 0, weight
