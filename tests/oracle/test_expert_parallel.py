"""Expert parallelism beside a Llama whose experts torch.distributed shares among two and four processes on gloo."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from zerosim.config import RunConfig
from zerosim.models.save import save_folder
from zerosim.train.result import RunResult
from zerosim.train.run import run

from .compare import within
from .test_distributed import in_processes
from .test_llama import SIZES

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this build of PyTorch has no gloo", allow_module_level=True)
try:
    from . import expert_worker as worker
except ImportError as error:
    pytest.skip(f"this build of PyTorch has no FSDP2: {error}", allow_module_level=True)

ROWS = 8
CLOSE = {"fp32": (2e-6, 2e-7), "fp64": (2e-12, 1e-15)}
"""Losses and weights, and gradients."""
WAYS = [
    worker.Way(ep, stage, shared, dtype)
    for ep in (2, 4)
    for stage in (0, 3)
    for shared, dtype in ((False, "fp64"), (True, "fp32"))
]
EACH = [(ranks, way) for ranks in (2, 4) for way in WAYS if ranks % way.ep == 0]
Results = dict[tuple[int, worker.Way], list[dict[str, Any]]]
"""By (ranks, way), what each rank left."""


def config(way: worker.Way, ranks: int, **changes: Any) -> RunConfig:
    sizes = SIZES | dict(experts=worker.EXPERTS, top_k=worker.TOP_K, expert_ffn=worker.WIDE)
    fields = dict(model="llama", kv_heads=SIZES["heads"], tie_embeddings=False, shared_experts=int(way.shared))
    how = dict(ranks=ranks, ep=way.ep, stage=way.stage, precision=way.dtype, micro_batch=ROWS // ranks)
    return RunConfig(**{**sizes, **fields, **how, "optimizer": "sgd", "lr": worker.LR, **changes})


def drawn(shared: bool) -> dict[str, Any]:
    """Weights of a size that makes every part matter; a router's are large enough that some experts are rare."""
    random = np.random.default_rng(3)
    found = dict[str, Any]()
    for name, parameter in worker.mixture(shared).named_parameters():
        values = 0.15 * random.standard_normal(tuple(parameter.shape)) * (2 if ".gate." in name else 1)
        found[name] = (values + ("norm" in name)).astype(np.float32)
    return found


@pytest.fixture(scope="module")
def task() -> dict[str, Any]:
    sizes = worker.STEPS, ROWS, SIZES["seq"] + 1
    tokens = np.random.default_rng(4).integers(0, SIZES["vocab"], sizes)
    return {"ways": WAYS, "weights": {shared: drawn(shared) for shared in (False, True)}, "tokens": tokens}


@pytest.fixture(scope="module")
def pytorch(task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Results:
    found: Results = {}
    for ranks in (2, 4):
        folder = tmp_path_factory.mktemp("experts")
        (folder / "tasks.pickle").write_bytes(pickle.dumps(task))
        left = in_processes(ranks, worker.__name__, folder, str(ranks))
        found |= {(ranks, way): [results[way] for results in left] for way in left[0]}
    return found


def trained(task: dict[str, Any], folder: Path, way: worker.Way, ranks: int, **changes: Any) -> RunResult:
    files = {"weights": folder / "in.npz", "tokens": folder / "tokens.npz"}
    np.savez(files["weights"], **task["weights"][way.shared])
    np.savez(files["tokens"], tokens=task["tokens"])
    return run(config(way, ranks, **{name: str(file) for name, file in files.items()}, **changes))


def joined(way: worker.Way, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Whole tensors of what each rank has of its experts, and of everything else."""
    of_experts = {name: np.concatenate([part[name] for part in parts[: way.ep]]) for name in parts[0]}
    return {name: whole if ".experts." in name else parts[0][name] for name, whole in of_experts.items()}


@pytest.mark.parametrize(("ranks", "way"), EACH, ids=str)
def test_same_training(pytorch: Results, task: dict[str, Any], ranks: int, way: worker.Way, tmp_path: Path) -> None:
    """Losses of every rank, all first gradients, and weights after three steps of SGD."""
    theirs, (close, near) = pytorch[ranks, way], CLOSE[way.dtype]
    ours = trained(task, tmp_path, way, ranks)
    within("losses", ours.losses, np.transpose([rank["losses"] for rank in theirs]), atol=close)
    weights = joined(way, [rank["weights"] for rank in theirs])
    assert weights.keys() == ours.weights.keys()
    for name, expected in weights.items():
        within(name, ours.weights[name], expected, atol=close)
    lr = 2.0**12  # as `runs.first_gradients`
    after = trained(task, tmp_path, way, ranks, lr=lr, steps=1).weights
    for name, expected in joined(way, [rank["first"] for rank in theirs]).items():
        found = (np.float64(task["weights"][way.shared][name]) - np.float64(after[name])) / lr
        within(f"gradient of {name}", found, expected, atol=near)
    assert_same_bytes(ours, way.dtype, theirs)


def assert_same_bytes(ours: RunResult, dtype: str, theirs: list[dict[str, Any]]) -> None:
    """What each rank sends for its rows, and the tensors that each group gathers and reduces, in every step."""
    sizes, ep = {"dp_shard": ours.config.mesh.ranks, "edp": ours.config.mesh.axes.edp}, ours.config.mesh.ep
    for rank, results in enumerate(theirs):
        for step in range(worker.STEPS):
            sent, moved = Counter[tuple[str, str]](), Counter[tuple[str, int]]()
            for row in ours.traffic[rank]:
                if row.step != step:
                    continue
                if row.op == "all_to_all":
                    sent[row.phase, row.purpose] += row.sent_bytes or 0
                elif row.purpose == "states" and sizes[row.axis] > 1:
                    moved[row.op, sizes[row.axis]] += row.payload_bytes
            assert sent == results["sent"][step]
            assert moved == results["moved"][step]
    rows = ours.config.data.micro_batch * SIZES["seq"] * worker.TOP_K * (ep - 1) // ep
    even = 2 * SIZES["layers"] * rows * SIZES["hidden"] * (8 if dtype == "fp64" else 4)
    assert all(results["sent"][0]["forward", "activations"] != even for results in theirs), "tokens spread evenly"


@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, 4])
def test_transformers_own_expert_parallelism(ep: int, tmp_path: Path) -> None:
    """A released Mixtral over four processes: FSDP2 over all, experts over ep and then over efsdp."""
    sizes: dict[str, Any] = dict(model="mixtral", layers=2, hidden=32, heads=4, kv_heads=2, vocab=64, seq=16)
    sizes |= dict(experts=8, top_k=2, expert_ffn=24, precision="fp32", optimizer="sgd", steps=1)
    np.savez(tmp_path / "tokens.npz", tokens=np.random.default_rng(1).integers(0, 64, (1, ROWS, 17)))
    files = dict(weights=str(tmp_path / "first"), tokens=str(tmp_path / "tokens.npz"))
    new = RunConfig(**sizes, ranks=1, stage=0, micro_batch=ROWS, tokens=files["tokens"])
    start = run(new)
    (tmp_path / "first").mkdir()
    save_folder(tmp_path / "first", new.model, start.weights)
    (tmp_path / "tasks.pickle").write_bytes(pickle.dumps(None))
    left = in_processes(4, f"{__package__}.released_worker", tmp_path, "4", str(ep))
    lr = 2.0**12
    ours = run(RunConfig(**sizes, **files, ranks=4, ep=ep, stage=3, micro_batch=ROWS // 4, lr=lr))
    within("losses", ours.losses[0], [loss for loss, _ in left], atol=2e-6)
    for name, gradient in left[0][1].items():
        found = (np.float64(start.weights[name]) - np.float64(ours.weights[name])) / lr
        within(name, found, gradient, atol=2e-7)
