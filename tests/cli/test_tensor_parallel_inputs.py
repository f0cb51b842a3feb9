"""What is no tensor-parallel mesh is refused in one line that names the nearest right choice, exit code 2."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.errors import InputError

GPT: dict[str, Any] = dict(layers=1, hidden=48, heads=6, seq=8, vocab=256, ranks=4)
BAD: list[tuple[dict[str, Any], list[str]]] = [
    (dict(tp=3), ["tp 3 does not divide ranks 4", "choose tp 2 or 4, or ranks 3 or 6"]),
    (dict(tp=4, ranks=6), ["tp 4 does not divide ranks 6", "choose tp 3 or 6, or ranks 4 or 8"]),
    (
        dict(tp=2, dp_replicate=2, ranks=6, stage=1),
        ["tp 2 x dp_replicate 2 does not divide ranks 6", "choose tp 1 or 3, or dp_replicate 1 or 3, or ranks 4 or 8"],
    ),
    (dict(tp=8), ["tp 8 does not divide ranks 4", "choose tp 4, or ranks 8"]),
    (dict(tp=0), ["tp 0: expected at least 1"]),
    (dict(tp=-2), ["tp -2: expected at least 1"]),
    (dict(tp=4), ["tp 4 does not divide heads 6: choose tp 2"]),
    (dict(tp=4, ranks=12, vocab=258, ffn=48), ["tp 4 does not divide heads 6: choose tp 3 or 6"]),
    (dict(tp=2, heads=4, ffn=27), ["tp 2 does not divide ffn 27: choose tp 1"]),
    (dict(tp=2, vocab=257), ["tp 2 does not divide vocab 257: pass --pad-vocab", "or choose tp 1"]),
    (dict(tp=2, vocab=261, ranks=6), ["tp 2 does not divide vocab 261: pass --pad-vocab", "or choose tp 1 or 3"]),
    (dict(tp=2, seq=9, sequence_parallel=True), ["sequence_parallel: tp 2 does not divide seq 9: choose seq 8"]),
    (
        dict(tp=4, heads=4, seq=11, sequence_parallel=True),
        ["sequence_parallel: tp 4 does not divide seq 11: choose seq 12"],
    ),
    (
        dict(tp=4, model="llama", heads=12, kv_heads=3, ranks=12, vocab=258, ffn=48),
        ["tp 4 neither divides kv_heads 3 nor is a multiple of it: choose tp 3 or 6"],
    ),
    (
        dict(tp=4, model="llama", heads=12, kv_heads=6),
        ["tp 4 neither divides kv_heads 6 nor is a multiple of it: choose tp 2"],
    ),
    (dict(tp=2, model="mlp", heads=None, layers=None), ["tp 2: model mlp is not cut", "choose gpt, llama or flat"]),
    (
        dict(tp=2, model="flat", heads=None, layers=None, hidden=None, sequence_parallel=True),
        ["sequence_parallel: model flat has no rows to cut", "choose gpt or llama"],
    ),
    (dict(sequence_parallel=True), ["sequence_parallel: without tp there is nothing to cut", "pass --tp 2"]),
    (dict(keep_gathered=True), ["keep_gathered: without tp"]),
    (dict(pad_vocab=True), ["pad_vocab: without tp"]),
    (dict(tp=2, keep_gathered=True), ["keep_gathered: without sequence_parallel", "pass --sequence-parallel too"]),
    (
        dict(partition_activations=True, recompute="full"),
        ["partition_activations: without tp no other rank has the same inputs", "pass --tp 2 or more"],
    ),
    (
        dict(tp=2, partition_activations=True),
        ["partition_activations: recompute 'none' keeps no block's input", "pass --recompute full too"],
    ),
    (
        dict(cpu_checkpointing=True, recompute="selective"),
        ["cpu_checkpointing: recompute 'selective' keeps no block's input", "pass --recompute full too"],
    ),
]


def flags(fields: dict[str, Any]) -> list[str]:
    words = []
    for name, value in fields.items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return words


@pytest.mark.parametrize(("fields", "said"), BAD, ids=[str(fields) for fields, _ in BAD])
def test_it_is_one_line_and_exit_2(
    fields: dict[str, Any], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = {**GPT, **fields}
    for verb in ("run", "plan"):
        assert main([verb, *flags(chosen)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("zerosim: error: ")
        assert err.count("\n") == 1
        field, rest = said[0].split(maxsplit=1)
        assert err.startswith(f"zerosim: error: --{field.rstrip(':').replace('_', '-')}")
        assert all(part in err for part in (rest, *said[1:]))
    with pytest.raises(InputError) as raised:
        RunConfig(**{name: value for name, value in chosen.items() if value is not None})
    for part in said:
        assert part in str(raised.value)


@pytest.mark.parametrize(("fields", "said"), BAD, ids=[str(fields) for fields, _ in BAD])
def test_what_is_advised_is_accepted(fields: dict[str, Any], said: list[str]) -> None:
    """'choose tp 3 or 6', 'choose ranks 8, for one': as it stands, the rest unchanged."""
    chosen = {name: value for name, value in {**GPT, **fields}.items() if value is not None}
    meshes = "does not divide ranks" in said[0]
    advised = said[-1].partition("choose ")[2]
    for name, numbers in re.findall(r"(tp|dp_replicate|ranks|seq) ([\d or]+)", advised):
        for number in re.findall(r"\d+", numbers):
            changed = {**chosen, name: int(number)}
            if meshes:
                changed |= {"heads": changed["tp"], "vocab": 256 * changed["tp"]}  # a mesh knows no model
                changed |= {"hidden": 8 * changed["tp"]}
            RunConfig(**changed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--tp", "two"], "--tp: 'two': expected a whole number"),
        (["run", "--tpp", "2"], "unknown flag --tpp: did you mean --tp?"),
        (["run", "mesh.toml"], "unknown key 'sequence_paralel'; did you mean 'sequence_parallel'?"),
        (["run", "three.toml"], "scenario three.toml: tp 3 does not divide ranks 4"),
        (["compare", "--ranks", "4", "--tp", "3"], "tp 3 does not divide ranks 4"),
        (["fit", "--find", "ranks", "--tp", "0", "--limit", "1MB"], "--tp 0: expected at least 1"),
        (["fit", "--find", "mesh", "--cpu-checkpointing"], "--cpu-checkpointing: recompute is what is looked for"),
    ],
)
def test_so_it_is_in_files_and_other_verbs(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mesh.toml").write_text("ranks = 4\ntp = 2\nsequence_paralel = true\n", "utf-8")
    Path("three.toml").write_text("ranks = 4\ntp = 3\n", "utf-8")
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_names_that_people_type_are_known() -> None:
    assert main(["plan", "--tensor-model-parallel-size", "2", "--ranks", "2", "--sp", "--quiet", "--layers", "1"]) == 0


def test_fit_tries_what_tensor_parallelism_divides(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of ranks, of which there is none below tp, and lengths of rows where these are cut."""
    small = ["--hidden", "64", "--heads", "8", "--layers", "2", "--quiet", "--json", "-"]
    for words, step in (
        ("--find ranks --tp 8 --limit 300KB", 8),
        ("--find ranks --tp 2 --dp-replicate 2 --limit 600KB", 4),
        ("--find seq --tp 4 --ranks 4 --sp --limit 1MB", 4),
    ):
        assert main(["fit", *words.split(), *small]) == 0
        values = json.loads(capsys.readouterr().out)
        assert values["best"] is not None
        assert all(tried["value"] % step == 0 for tried in values["tried"])


def test_what_would_fit_keeps_the_global_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """More ranks are tensor-parallel groups more: rows are dealt to half as many as there are ranks."""
    words = "plan --ranks 4 --tp 2 --stage 3 --layers 2 --hidden 64 --heads 4 --seq 64 --micro-batch 1 --accumulate 16"
    assert main([*words.split(), "--limit", "400KB"]) in (0, 3)
    found = re.search(r"--accumulate (\d+) --ranks (\d+)", " ".join(capsys.readouterr().out.split()))
    assert found is not None
    assert int(found[1]) * int(found[2]) // 2 == 32
