"""Documents packed into rows (`nn/documents.py`): apart in attention, and losses averaged over all labels."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from same import assert_close
from test_shapes import assert_same_record

from zerosim.analysis.checks import checks
from zerosim.backends.forms import Scores
from zerosim.backends.kernels import Met
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.functional import attention
from zerosim.functional.policy import ActivationPolicy
from zerosim.nn.documents import Documents
from zerosim.parallel.ring_attention import OwnKeys
from zerosim.placement.context import WHOLE_ROWS
from zerosim.placement.documents import Packing, packing_of
from zerosim.tensor.tensor import tensor
from zerosim.train.plan import plan
from zerosim.train.run import run

SIZES: dict[str, Any] = dict(
    model="llama", layers=2, hidden=16, heads=4, kv_heads=2, seq=24, vocab=32, steps=2, precision="fp64",
    optimizer="sgd", lr=0.5, attention="flash",
)  # fmt: skip
EOD = 3


def config(**fields: Any) -> RunConfig:
    return RunConfig(**{**SIZES, **fields})


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of 8 rows of 24 tokens and a label, whose documents end unevenly: none of some rows, one at an edge."""
    drawn = np.random.default_rng(7)
    rows = drawn.integers(4, 32, (2, 8, 25))
    rows[drawn.random(rows.shape) < 0.12] = EOD
    rows[:, 1] = drawn.integers(4, 32, (2, 25))
    rows[:, 2, 23], rows[:, 3, 11:13], rows[:, 4, 0] = EOD, EOD, EOD
    path = tmp_path_factory.mktemp("tokens") / "tokens.npz"
    np.savez(path, tokens=rows)
    return path


def test_documents_in_a_row_train_as_rows_of_their_own(tmp_path: Path) -> None:
    """Three documents of 8 in a row, of which each predicts 7, against 24 rows of 7. Rotary positions run on in a row,
    and only their differences matter. Shown to fail if attention crosses a border, or a first token is predicted."""
    rows = np.random.default_rng(1).integers(0, 32, (2, 8, 25))
    np.savez(tmp_path / "packed.npz", tokens=rows)
    np.savez(tmp_path / "own.npz", tokens=rows[:, :, :24].reshape(2, 24, 8))
    packed = run(config(ranks=1, micro_batch=8, documents="8", tokens=str(tmp_path / "packed.npz")))
    own = run(config(ranks=1, micro_batch=24, seq=7, tokens=str(tmp_path / "own.npz")))
    assert_close(packed, own, 1e-13)


@pytest.mark.parametrize("window", [0, 5])
def test_attention_in_a_row_is_that_of_each_document(window: int) -> None:
    drawn = np.random.default_rng(2).standard_normal((3, 20, 32))
    starts = [(3, 4, 11), (), (19, 20)]
    documents = Documents(Packing(end=0))
    documents.starts = starts
    policy, form = ActivationPolicy(attention="flash"), Scores(window=window)

    def of(part: Any, **core: Any) -> tuple[Any, Any]:
        x = tensor(part, dtype="fp64", requires_grad=True)
        y = attention(x, 4, num_kv_heads=2, policy=policy, form=form, **core)
        (y * y).sum().backward()
        assert x.grad is not None
        return y.numpy(), x.grad.numpy()

    whole = of(drawn, run=OwnKeys(WHOLE_ROWS, 0, None, documents))
    for row, of_row in enumerate(starts):
        edges = [0, *(start for start in of_row if start < 20), 20]
        for first, stop in pairwise(edges):
            for ours, alone in zip(whole, of(drawn[row : row + 1, first:stop]), strict=True):
                np.testing.assert_allclose(ours[row : row + 1, first:stop], alone, rtol=0, atol=1e-13)


MESHES: list[dict[str, Any]] = [
    dict(ranks=4, stage=2, accumulate=2),
    dict(ranks=4, cp=4, stage=3, context="ring"),
    dict(ranks=2, cp=2, context="ring", context_order="contiguous", loss="chunked", loss_tile=5, mlp_tile=7),
    dict(ranks=8, cp=2, tp=2, sequence_parallel=True, context="allgather", recompute="full", stage=3),
    dict(ranks=4, cp=2, pp=2, accumulate=4, context="ulysses", stage=1),
    dict(ranks=8, cp=4, ranks_per_node=2, context="ulysses+ring", recompute="selective", loss="liger"),
    dict(ranks=4, pp=2, accumulate=2, pipeline="zb-h1", model="gpt", kv_heads=4),
    dict(ranks=4, cp=2, dp_replicate=2, model="gpt", kv_heads=4, stage=3, clip_norm=0.1),
    dict(ranks=4, cp=2, tp=2, model="gpt", kv_heads=4, dropout=0.2, stage=3),
]


@pytest.mark.quick(3)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_any_mesh_averages_over_the_labels_of_the_whole_batch(mesh: dict[str, Any], tokens: Path) -> None:
    """Ranks have unlike numbers of labels: a mean of their means would weigh labels by where they lie."""
    how = {name: mesh[name] for name in ("model", "kv_heads", "dropout", "clip_norm", "loss") if name in mesh}
    common = dict(documents=f"eod:{EOD}", tokens=str(tokens))
    cuts = mesh.get("cp", 1) * mesh.get("tp", 1) * mesh.get("pp", 1)
    rows = 8 * cuts // mesh["ranks"] // mesh.get("accumulate", 1)
    one = run(config(**common, **how, ranks=1, micro_batch=8))
    many = run(config(**common, **mesh, micro_batch=rows))
    assert_close(many, one, 1e-13)


@pytest.mark.bits
def test_one_document_in_a_row_has_the_loss_of_none(tokens: Path) -> None:
    """No token ends a document: labels are all there, and so are the bits of a rank's count."""
    how = dict(ranks=2, cp=2, micro_batch=8, tokens=str(tokens))
    none, one = run(config(**how)), run(config(**how, documents="eod:0"))
    assert none.losses == one.losses
    for name, values in none.weights.items():
        assert one.weights[name].tobytes() == values.tobytes(), name


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "fields",
    [
        dict(ranks=4, cp=4, stage=3, context="ring"),
        dict(ranks=4, cp=2, tp=2, context="allgather", recompute="full"),
        dict(ranks=2, stage=2, accumulate=2, micro_batch=2),
        dict(ranks=4, cp=4, context="ulysses", kv_heads=4),
    ],
    ids=str,
)
def test_a_plan_of_documents_of_a_length_leaves_the_record_of_a_run(fields: dict[str, Any]) -> None:
    asked = config(**{"documents": "5", "vocab": 256, "micro_batch": 2, **fields})
    assert_same_record(asked)
    assert all(check.agrees for check in checks(plan(asked), 1)[0].sent)


def test_flops_of_attention_are_those_of_its_documents() -> None:
    """4 documents of 6 of 24 tokens: a quarter of the scores."""
    whole, documents = (Met((range(24),), (range(24),), 24, starts) for starts in ((), (6, 12, 18)))
    assert (whole.counted(Scores()), documents.counted(Scores())) == (24 * 24, 4 * 6 * 6)
    assert documents.pairs(Scores()) == 4 * 21


def test_documents_of_other_ranks_cost_nothing() -> None:
    """A row of 10^12 tokens in documents of 2, of which these queries and keys share 8."""
    starts = Packing(2).starts((), 10**12)
    assert len(starts) == 5 * 10**11
    far, near = (Met((range(16),), (range(at, 10**9 + at),), 10**12, starts) for at in (10**10, 0))
    assert (far.pairs(Scores()), near.pairs(Scores())) == (0, 8 * 3)


@pytest.mark.parametrize(
    ("text", "packing"),
    [("8", Packing(8)), ("eod:10", Packing(end=10)), *((text, None) for text in ("1", "eod:", "eod:-1", "end:3", ""))],
)
def test_documents_are_a_length_or_a_token(text: str, packing: Packing | None) -> None:
    assert packing_of(text) == packing


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (dict(documents="8", attention="eager"), ["documents", "--attention flash"]),
        (dict(documents="25"), ["documents", "24"]),
        (dict(documents="eod:32"), ["documents", "vocabulary"]),
        (dict(documents="eod"), ["documents", "eod:ID"]),
        (dict(documents="8", optimizer="sophia"), ["documents", "sophia"]),
    ],
)
def test_what_does_not_keep_documents_apart_is_refused(fields: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        config(**fields)
    assert all(name in str(refused.value) for name in names), refused.value
    assert "\n" not in str(refused.value)


def test_a_plan_says_what_it_assumes_of_documents(capsys: pytest.CaptureFixture[str]) -> None:
    """Its attention reads whole rows where only tokens would say where documents end."""
    for documents, said in (("eod:10", "as a plan reads no tokens"), ("16", "documents of 16 tokens")):
        assert main(["plan", "--model", "llama", "--attention", "flash", "--documents", documents]) == 0
        assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.standin
@pytest.mark.parametrize("more", [{}, dict(ranks=2, cp=2), dict(dropout=0.2, model="gpt", kv_heads=4)], ids=str)
def test_backend_cuda_keeps_them_apart_too(more: dict[str, Any], tokens: Path) -> None:
    asked = config(**{"ranks": 1, "micro_batch": 8, "documents": f"eod:{EOD}", "tokens": str(tokens), **more})
    assert_close(run(asked.replace(backend="cuda")), run(asked), 1e-12)
