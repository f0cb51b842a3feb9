"""A checkpoint of megatron-core's dist_checkpointing is read bit for bit. megatron-core is not among the extras."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from zerosim.state.formats import read_whole

from .state_files import torchrun

pytest.importorskip("megatron.core", reason="pip install --no-deps megatron-core==0.16.1")


def test_layers_are_taken_apart_and_states_found(tmp_path: Path) -> None:
    torchrun(2, "state_megatron_worker", tmp_path)
    whole = torch.load(tmp_path / "whole.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7", encoding="utf-8")
    state = read_whole(str(tmp_path))
    expected = {f"decoder.layers.{at}.mlp.linear_fc1.weight": one for at, one in enumerate(whole["layers"])}
    expected["embedding.word_embeddings.weight"] = whole["table"]
    assert (state.kind, state.step) == ("megatron torch_dist 1", 7)
    assert state.weights.keys() == state.stored.keys() == state.states.keys() == expected.keys()
    for name, one in expected.items():
        assert np.array_equal(state.weights[name].read(), one.numpy())
        assert np.array_equal(state.stored[name].read().astype(np.float32), one.bfloat16().float().numpy())
        assert np.array_equal(state.states[name]["exp_avg"].read(), (one * 2.0).numpy())
        assert np.array_equal(state.states[name]["exp_avg_sq"].read(), (one * 3.0).numpy())
    assert {"rng_state", "common.pt", "decoder.layers.mlp._extra_state"} <= state.others.keys()
