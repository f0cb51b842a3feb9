"""A training run over MPI leaves what it leaves on threads: weights, losses, ledgers and every event, with ==."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from config_files import NORM_PLACES, small

from .mpirun import ENVIRONMENT, ROOT, finished, needs_mpi, run, start_mixed

pytestmark = needs_mpi

SCRIPT = Path(__file__).parent / "runs.py"
# No N below divides every unit's size, so slices are padded.
TINY: dict[str, Any] = dict(layers=2, hidden=10, heads=2, seq=5, steps=2, micro_batch=1, seed=3, lr=1e-2)
STAGES: list[dict[str, Any]] = [
    dict(stage=stage, precision=precision, collective=collective)
    for collective in ("direct", "ring")
    for precision in ("fp32", "bf16")
    for stage in (0, 1, 2, 3)
]
MORE: list[dict[str, Any]] = [
    dict(stage=3, precision="fp16", loss_scale=2.0**40, initial_scale_power=4),  # every step overflows and is skipped
    dict(stage=2, precision="fp64", accumulate=2, clip_norm=0.1),
    dict(stage=3, precision="bf16", partition="owner", bucket_bytes=64),
    dict(stage=1, precision="fp32", partition="owner", dropout=0.2, recompute="full"),
    dict(stage=3, precision="fp32", model="llama", hidden=12, kv_heads=1, sample="ab", sample_tokens=3),
    dict(stage=3, precision="bf16", hidden=96, collective="ring", bucket_bytes=20_000),  # larger than a note
]
MESHES: list[dict[str, Any]] = [
    dict(stage=3, precision="bf16", dp_replicate=2),
    dict(stage=3, precision="fp32", dp_replicate=2, collective="ring", bucket_bytes=64, clip_norm=0.1),
    dict(stage=2, precision="bf16", dp_replicate=2, accumulate=2, replica_reduction="micro_batch"),
    dict(stage=1, precision="fp32", dp_replicate=2, partition="owner", dropout=0.2),
    dict(stage=3, precision="fp32", dp_replicate=4, collective="ring"),
]
NODES: list[dict[str, Any]] = [
    dict(stage=3, precision="bf16", secondary_shard=2, hierarchical_gather=True, prefetch=1),
    dict(
        stage=3, precision="fp32", hidden=32, seq=8, quantized_weights=True, quantized_gradients=True, secondary_shard=2
    ),
]
OFFLOADED: list[dict[str, Any]] = [
    dict(stage=1, precision="bf16", offload="optimizer=host"),
    dict(stage=2, precision="fp32", offload="optimizer=host", accumulate=2),
    dict(stage=3, precision="fp16", offload="optimizer=host,params=host", prefetch=1),
    dict(stage=3, precision="bf16", offload="optimizer=nvme,params=nvme", accumulate=2, collective="ring"),
]
TENSORS: list[dict[str, Any]] = [
    dict(tp=2, stage=3, precision="bf16", dropout=0.2, clip_norm=0.1, sample="abc", sample_tokens=2),
    dict(tp=2, stage=1, precision="fp32", sequence_parallel=True, seq=6, vocab=257, pad_vocab=True, recompute="full"),
    dict(tp=4, stage=0, precision="fp32", model="llama", heads=4, hidden=16, kv_heads=2, seq=4, collective="ring"),
    dict(tp=2, stage=3, precision="bf16", recompute="full", partition_activations=True, cpu_checkpointing=True),
]
PIPELINES: list[dict[str, Any]] = [
    dict(stage=0, pp=2, precision="bf16", accumulate=3, sample="ab", sample_tokens=2),
    dict(stage=1, pp=2, precision="fp32", accumulate=4, pipeline="interleaved", layers=4, tie_embeddings=False),
    dict(stage=3, pp=2, precision="fp64", accumulate=2, pipeline="gpipe", clip_norm=0.1, recompute="full"),
    dict(stage=2, pp=2, precision="bf16", accumulate=3, pipeline="zb-h1", sample="ab", sample_tokens=2),
    dict(stage=3, pp=2, precision="fp32", accumulate=5, pipeline="zb-v", layers=4, sample="ab", sample_tokens=2),
]
LLAMA: dict[str, Any] = dict(model="llama", heads=4, hidden=16, kv_heads=2, seq=8)
CONTEXTS: list[dict[str, Any]] = [  # ranks that share rows
    dict(cp=2, stage=3, precision="bf16", seq=8, dropout=0.2, clip_norm=0.1, sample="abc", sample_tokens=3),
    dict(cp=2, stage=1, precision="fp32", context="allgather", context_order="contiguous", recompute="full", **LLAMA),
    dict(cp=2, stage=2, precision="bf16", context="ulysses", sample="abc", sample_tokens=3, **LLAMA),
    dict(LLAMA, cp=4, stage=3, precision="fp32", context="ulysses+ring", ranks_per_node=2, sample="abc"),
    dict(LLAMA, cp=4, stage=2, precision="bf16", seq=16, collective="ring", context="allgather", bucket_bytes=64),
    dict(LLAMA, cp=2, tp=2, stage=3, precision="bf16", sequence_parallel=True, lora_rank=2, lora_dropout=0.2),
    dict(LLAMA, cp=2, pp=2, stage=2, precision="bf16", accumulate=3, pipeline="zb-h1"),
    dict(LLAMA, cp=2, dp_replicate=2, stage=3, precision="fp64", gather="module"),
]
EXPERTS: list[dict[str, Any]] = [  # ranks that share a block's experts, and choose unevenly
    dict(LLAMA, ep=2, stage=3, precision="bf16", experts=4, top_k=2, clip_norm=0.1, sample="abc", sample_tokens=3),
    dict(LLAMA, ep=4, stage=1, precision="fp32", experts=8, top_k=2, dispatcher="allgather"),
    dict(LLAMA, ep=2, pp=2, stage=1, precision="bf16", experts=4, top_k=1, accumulate=3, pipeline="zb-h1"),
    dict(LLAMA, ep=4, etp=1, tp=2, stage=2, precision="fp32", experts=4, top_k=2, sequence_parallel=True),
    dict(LLAMA, ep=2, dp_replicate=2, stage=3, precision="fp64", experts=4, top_k=2, collective="ring"),
    dict(
        LLAMA,
        ep=2,
        stage=3,
        precision="bf16",
        experts=4,
        top_k=2,
        shared_experts=1,
        shared_expert_overlap=True,
        mtp_layers=1,
        recompute="full",
        keep_router=True,
    ),
    dict(LLAMA, pp=2, stage=1, precision="fp32", mtp_layers=2, accumulate=3),
]

FP32: dict[str, Any] = dict(precision="bf16", grad_dtype="fp32")
PARTS: list[dict[str, Any]] = [  # of the model is trained, of the gradients sent
    dict(stage=3, precision="bf16", lora_rank=2, lora_target="all-linear", base="nf4"),
    dict(stage=2, precision="fp32", freeze="h.0,wte"),
    dict(stage=1, compress="int8", compress_block=8, **FP32),
    dict(stage=2, compress="int4", compress_block=8, **FP32),
    dict(stage=3, compress="top-k", compress_ratio=0.1, **FP32),
    dict(stage=2, compress="random-k", compress_ratio=0.1, **FP32),
    dict(stage=0, compress="powersgd", **FP32),
    dict(stage=0, compress="onebit-adam", compress_warmup=1, **FP32),
    dict(stage=1, compress="dgc", compress_ratio=0.1, optimizer="sgd", momentum=0.9, **FP32),
]


def compared(processes: int, per_process: int, runs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    asked, left = folder / "runs.json", folder / "found.json"
    asked.write_text(json.dumps([{**TINY, **fields} for fields in runs]), "utf-8")
    job = run(processes, str(SCRIPT), str(per_process), str(asked), str(left), timeout=240)
    assert job.returncode == 0, job.stdout + job.stderr
    found = json.loads(left.read_text("utf-8"))
    assert len(found) == len(runs)
    return list(found)


@pytest.mark.parametrize(
    ("processes", "per_process", "runs"),
    [(1, 1, STAGES[::3]), (2, 1, STAGES + MORE), (3, 1, STAGES[::3]), (4, 1, STAGES + MORE), (2, 2, STAGES + MORE)],
    ids=["1", "2", "3", "4", "2x2"],
)
def test_all_stages_leave_what_threads_leave(
    processes: int, per_process: int, runs: list[dict[str, Any]], tmp_path: Path
) -> None:
    for fields, found in zip(runs, compared(processes, per_process, runs, tmp_path), strict=True):
        assert found["differences"] == [], fields


@pytest.mark.parametrize(("processes", "per_process"), [(4, 1), (2, 2)], ids=["4", "2x2"])
def test_replicas_leave_what_threads_leave(processes: int, per_process: int, tmp_path: Path) -> None:
    for fields, found in zip(MESHES, compared(processes, per_process, MESHES, tmp_path), strict=True):
        assert found["differences"] == [], fields


def test_runs_that_train_or_send_a_part_leave_what_threads_leave(tmp_path: Path) -> None:
    for fields, found in zip(PARTS, compared(2, 1, PARTS, tmp_path), strict=True):
        assert found["differences"] == [], fields


@pytest.mark.slow
def test_each_place_of_norms_leaves_what_threads_leave(tmp_path: Path) -> None:
    """Of published files, with their windows and caps: sharded, and with heads divided."""
    runs = []
    for family in NORM_PLACES:
        (tmp_path / family).mkdir()
        model = dict(model=small(family, tmp_path / family), hidden=16, precision="bf16")
        runs += [dict(model, stage=3, clip_norm=0.1), dict(model, stage=0, tp=2, kv_heads=2, seq=6)]
    for fields, found in zip(runs, compared(2, 1, runs, tmp_path), strict=True):
        assert found["differences"] == [], fields


@pytest.mark.parametrize(("processes", "per_process"), [(4, 1), (2, 2)], ids=["4", "2x2"])
def test_nodes_leave_what_threads_leave(processes: int, per_process: int, tmp_path: Path) -> None:
    """ZeRO++: a second shard, codes in two hops."""
    for fields, found in zip(NODES, compared(processes, per_process, NODES, tmp_path), strict=True):
        assert found["differences"] == [], fields


def test_offloaded_runs_leave_what_threads_leave(tmp_path: Path) -> None:
    """In memory and in files, which each process makes in a folder of its own."""
    drive = tmp_path / "drive"
    drive.mkdir()
    runs = [dict(fields, nvme=str(drive)) for fields in OFFLOADED]
    for fields, found in zip(runs, compared(2, 1, runs, tmp_path), strict=True):
        assert found["differences"] == [], fields
    assert not list(drive.iterdir())


def test_a_node_s_memory_is_shared_out_evenly_among_processes() -> None:
    """They do not see what the others take: a rank that asks for more than its part is refused, on all of them."""
    words = (
        "-m zerosim run --world mpi --ranks 2 --steps 1 -q --stage 3 --offload optimizer=host --layers 2 --hidden 16"
    )
    job = run(2, *words.split(), "--heads", "2", "--host-memory", "20KB")
    assert job.returncode == 3, job.stdout + job.stderr
    assert "equal part of node 0 is out of host memory" in job.stderr
    assert job.stderr.count("zerosim: error") == 1


def test_pipelines_leave_what_threads_leave(tmp_path: Path) -> None:
    for fields, found in zip(PIPELINES, compared(2, 1, PIPELINES, tmp_path), strict=True):
        assert found["differences"] == [], fields


@pytest.mark.parametrize(("processes", "per_process"), [(4, 1), (2, 2)], ids=["4", "2x2"])
def test_tensor_parallel_ranks_leave_what_threads_leave(processes: int, per_process: int, tmp_path: Path) -> None:
    for fields, found in zip(TENSORS, compared(processes, per_process, TENSORS, tmp_path), strict=True):
        assert found["differences"] == [], fields


@pytest.mark.parametrize(
    ("processes", "per_process", "runs"), [(4, 1, CONTEXTS), (2, 2, CONTEXTS[::2])], ids=["4", "2x2"]
)
def test_ranks_that_share_rows_leave_what_threads_leave(
    processes: int, per_process: int, runs: list[dict[str, Any]], tmp_path: Path
) -> None:
    for fields, found in zip(runs, compared(processes, per_process, runs, tmp_path), strict=True):
        assert found["differences"] == [], fields


@pytest.mark.parametrize(("processes", "per_process"), [(4, 1), (2, 2)], ids=["4", "2x2"])
def test_ranks_that_share_experts_leave_what_threads_leave(processes: int, per_process: int, tmp_path: Path) -> None:
    for fields, found in zip(EXPERTS, compared(processes, per_process, EXPERTS, tmp_path), strict=True):
        assert found["differences"] == [], fields


CLOSE = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3, "fp64": 1e-14}
"""Two steps' losses: sums in MPI's own order, half types rounded at each of its hops."""


@pytest.mark.parametrize("processes", [2, 4])
def test_native_collectives_are_close_and_their_wire_is_not_seen(processes: int, tmp_path: Path) -> None:
    runs = [
        dict(stage=stage, precision=precision, collective="native", bucket_bytes=None)
        for precision in ("fp32", "bf16", "fp16", "fp64")
        for stage in (0, 1, 2, 3)
    ]
    runs.append(dict(stage=3, precision="fp32", collective="native", partition="owner"))
    if processes == 4:  # a group of one has no wire to hide
        runs += [
            dict(stage=stage, precision="fp32", collective="native", partition=partition, dp_replicate=2)
            for stage, partition in ((1, "owner"), (2, "slices"), (3, "slices"))
        ]
        runs.append(dict(stage=3, precision="fp32", collective="native", tp=2, sequence_parallel=True, seq=6))
        shared = dict(LLAMA, cp=4, stage=3, precision="fp32", collective="native", ranks_per_node=2)
        runs += [dict(shared, context=how) for how in ("ring", "allgather", "ulysses", "ulysses+ring")]
    for fields, found in zip(runs, compared(processes, 1, runs, tmp_path), strict=True):
        assert found["distance"] < CLOSE[fields["precision"]], fields
        assert found["sent"] == ["None"]
        assert all(isinstance(nbytes, int) for nbytes in found["modelled"])
        assert sum(found["modelled"]) > 0
        assert found["payload"] == found["direct"]


def test_native_groups_that_share_members_are_kept_apart(tmp_path: Path) -> None:
    """Two ranks to each head of keys, four to a row: groups of 2 and of 4 along tp, in turns."""
    sizes = dict(model="llama", heads=4, hidden=16, kv_heads=2, seq=4)
    runs = [dict(stage=0, precision="fp32", collective="native", tp=4, sequence_parallel=True, **sizes)]
    [found] = compared(4, 1, runs, tmp_path)
    assert found["distance"] < CLOSE["fp32"]


SMALL = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "8", "--micro-batch", "1", "--steps", "2"]


def test_the_command_line_says_and_writes_what_it_does_on_threads(tmp_path: Path) -> None:
    folders = {}
    for world in ("mpi", "threads"):
        folder = folders[world] = tmp_path / world
        folder.mkdir()
        words = ["-m", "zerosim", "run", "--stage", "3", "--world", world, *SMALL, "--sample", "ab"]
        words += ["--json", str(folder / "run.json"), "--save-weights", str(folder / "weights.npz")]
        if world == "mpi":
            job = run(2, *words)
        else:
            environment = {**os.environ, **ENVIRONMENT}
            words = [sys.executable, *words, "--ranks", "2"]
            job = subprocess.run(words, capture_output=True, encoding="utf-8", env=environment, cwd=ROOT, timeout=120)
        assert job.returncode == 0, job.stderr
        (folder / "out").write_text(job.stdout.replace("\r", ""), "utf-8")
    assert (folders["mpi"] / "weights.npz").read_bytes() == (folders["threads"] / "weights.npz").read_bytes()
    there, here = (json.loads((folder / "run.json").read_text("utf-8")) for folder in folders.values())
    assert (there["config"].pop("world"), here["config"].pop("world")) == ("mpi", "threads")
    assert there == here
    out = (folders["mpi"] / "out").read_text("utf-8")
    assert out.count("ZeRO-3 on 2 ranks") == 1  # one process speaks
    assert "2 processes" in out


@pytest.mark.parametrize(
    ("processes", "words", "code", "said"),
    [
        (2, ["--ranks", "4", "--world", "mpi"], 2, "--ranks 4: mpirun started 2 processes, a world of 2"),
        (2, ["--ranks", "4"], 2, "mpirun started 2 processes, and each would train all 4 ranks: add --world mpi"),
        (2, ["--world", "mpi", "--data", "nowhere.txt"], 2, "cannot read data file nowhere.txt"),
        (2, ["--world", "mpi", "--json", "/nowhere/x.json"], 2, "--json"),
        (2, ["--world", "mpi", "--capacity", "60kB"], 3, "out of memory"),
        (2, ["--world", "mpi", "--ranks-per-process", "2", "--collective", "native"], 2, "one rank per process"),
        (2, ["--world", "mpi", "--stage", "7"], 2, "--stage 7"),
    ],
    ids=["ranks", "no world", "file", "output", "memory", "native", "flag"],
)
def test_bad_input_is_said_once(processes: int, words: list[str], code: int, said: str) -> None:
    job = run(processes, "-m", "zerosim", "run", *SMALL, *words)
    assert job.returncode == code
    assert job.stderr.count("zerosim: error:") == 1
    assert said in " ".join(job.stderr.split())
    assert "Traceback" not in job.stderr
    assert len((job.stdout + job.stderr).splitlines()) < 40  # one screen


@pytest.mark.parametrize(
    ("first", "others", "said"),
    [
        (["run", *SMALL, "--world", "mpi"], ["run", "--badflag"], "unknown flag --badflag"),
        (["run", *SMALL, "--world", "mpi"], ["run", *SMALL], "mpirun started 3 processes, and each would train"),
        (["run", *SMALL, "--world", "mpi"], ["plan", "--stage", "7"], "--stage 7"),
        (["run", *SMALL, "--world", "mpi"], ["compare", *SMALL, "--world", "mpi"], "all processes of a world must be"),
        (["run", *SMALL, "--world", "mpi"], ["step", *SMALL, "--world", "mpi"], "stepping needs threads"),
        (["run", *SMALL, "--world=mpi"], ["run", *SMALL, "--world=mpi", "--badflag"], "unknown flag --badflag"),
        (["run", "--badflag"], ["run", "--badflag"], "unknown flag --badflag"),
    ],
    ids=["flag", "no world", "verb", "stages", "step", "flag and world", "all"],
)
def test_an_error_of_other_processes_than_the_first_is_said_once(
    first: list[str], others: list[str], said: str
) -> None:
    job = finished(start_mixed((1, ["-m", "zerosim", *first]), (2, ["-m", "zerosim", *others])))
    assert job.returncode == 2
    assert job.stderr.count("zerosim: error:") == 1, job.stderr
    assert said in " ".join(job.stderr.split())
    assert "Traceback" not in job.stderr


def test_a_verb_without_a_world_is_itself_in_every_process(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    job = run(3, "-m", "zerosim", "explain", "--stage", "2", "--params", "7.5B", "--ranks", "64", "--json", str(out))
    assert job.returncode == 0
    assert job.stdout.count("ZeRO-2 on 64 ranks") == 3  # as of any program that mpirun starts
    assert json.loads(out.read_text("utf-8"))["schema"] == 2
    assert os.listdir(tmp_path) == ["out.json"]


def test_without_mpirun_it_says_how_to_start() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    words = [sys.executable, "-m", "zerosim", "run", *SMALL, "--world", "mpi"]
    job = subprocess.run(words, capture_output=True, encoding="utf-8", env=environment, cwd=ROOT, timeout=120)
    assert (job.returncode, len(job.stderr.splitlines())) == (2, 1)
    assert "mpirun" in job.stderr
    assert "-n 4 zerosim run" in job.stderr


def test_stages_are_compared_over_mpi() -> None:
    job = run(2, "-m", "zerosim", "compare", *SMALL, "--world", "mpi", "--quiet")
    assert (job.returncode, job.stdout) == (0, "")
