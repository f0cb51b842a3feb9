"""What `test_state_*.py` share: processes that frameworks run in, and checkpoints compared bit by bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.processes import SECONDS, ended, started
from zerosim.state.formats import Tensor, WholeState

ROOT = Path(__file__).parent.parent.parent


def torchrun(ranks: int, module: str, *words: str | Path) -> None:
    """Run a module of this folder in so many processes. They meet by torchrun's own port."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), str(ROOT), env.get("PYTHONPATH", "")])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    line = [sys.executable, *launcher, "-m", f"oracle.{module}", *map(str, words)]
    with ended(started(line, env=env, stdout=-1, stderr=-2)) as process:
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output[-4000:]


def same_bits(one: Any, other: Any) -> bool:
    ours, theirs = np.ascontiguousarray(one), np.ascontiguousarray(other)
    return (ours.shape, ours.dtype, ours.tobytes()) == (theirs.shape, theirs.dtype, theirs.tobytes())


def check_tensors(ours: Mapping[str, Tensor], theirs: Mapping[str, Any], what: str) -> None:
    """Check that names, dtypes, shapes and bits are the same; `theirs` are tensors of PyTorch."""
    assert ours.keys() == theirs.keys(), what
    for name, one in ours.items():
        values, expected = one.read(), theirs[name]
        assert (str(values.dtype), values.shape) == (one.dtype, one.shape)
        assert str(expected.dtype) == f"torch.{one.dtype}", (what, name)
        if one.dtype == "bfloat16":
            values, expected = values.astype(np.float32), expected.float()
        assert same_bits(values, expected.detach().numpy()), (what, name)


def check_same(one: WholeState, other: WholeState) -> None:
    """Check that two checkpoints have the same weights, states, step, frozen and tied names."""
    assert (one.step, one.frozen, dict(one.aliases)) == (other.step, other.frozen, dict(other.aliases))
    assert one.weights.keys() == other.weights.keys()
    assert one.states.keys() == other.states.keys()
    for name in one.weights:
        assert same_bits(one.weights[name].read(), other.weights[name].read()), name
    for name, states in one.states.items():
        assert states.keys() == other.states[name].keys()
        assert all(same_bits(of.read(), other.states[name][key].read()) for key, of in states.items()), name
