"""Encoders beside transformers: logits, and every gradient of the masked tokens' mean loss, eager and flash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle.test_released import logits_of, made
from zerosim.models.released import read_released, stored_names
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
