"""Context parallelism beside a GPT whose rows torch.distributed shares among two and four processes on gloo."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from .compare import compared, weights_within, within
from .runs import first_gradients, tiny, train_zerosim
from .test_distributed import in_processes

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this build of PyTorch has no gloo", allow_module_level=True)
from . import context_worker as worker

TASK = dataclasses.replace(tiny(True), tokens=tiny(True).tokens[: worker.STEPS])
EACH = [(ranks, *way) for ranks in (2, 4) for way in worker.WAYS]
Results = dict[tuple[int, str, bool], list[dict[str, Any]]]
"""By (ranks, way, is zig-zag), what each rank left."""


@pytest.fixture(scope="module")
def pytorch(tmp_path_factory: pytest.TempPathFactory) -> Results:
    found: Results = {}
    for ranks in (2, 4):
        folder = tmp_path_factory.mktemp("context")
        (folder / "tasks.pickle").write_bytes(pickle.dumps({True: TASK}))
        left = in_processes(ranks, worker.__name__, folder, str(ranks))
        found |= {(ranks, *key): [results[key] for results in left] for key in left[0]}
    return found


@pytest.mark.parametrize(("ranks", "way", "zigzag"), EACH)
def test_same_training(pytorch: Results, ranks: int, way: str, zigzag: bool, tmp_path: Any) -> None:
    """First gradients, losses and weights after four steps of Adam, and the bytes that a rank sends for attention."""
    order = None if way == "ulysses" else "zigzag" if zigzag else "contiguous"
    how: dict[str, Any] = dict(ranks=ranks, cp=ranks, stage=2, context=way, context_order=order)
    ours = train_zerosim(TASK, tmp_path, lr=worker.LR, **how)
    first = compared(first_gradients(TASK, tmp_path, **how))
    for rank, theirs in enumerate(pytorch[ranks, way, zigzag]):
        within("losses", ours.mean_losses, theirs["losses"], atol=2e-6)
        weights_within("weights", dict(ours.weights), theirs["weights"], 2e-6)
        for name, expected in compared(theirs["first"]).items():
            within(name, first[name], expected, atol=2e-7)
        sent = Counter[str]()
        for row in ours.traffic[rank]:
            sent[row.op] += row.wire_bytes if row.purpose == "activations" else 0
        assert +sent == theirs["sent"]
