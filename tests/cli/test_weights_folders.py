"""Real weights as a user reads, trains and saves them: folders in, folders out, and refusals in one line."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerosim.cli.main import main
from zerosim.config.safetensors import read_header
from zerosim.models import save

TINY = ["--seq", "8", "--micro-batch", "1", "--ranks", "2", "--stage", "3", "--steps", "1", "--precision", "fp32", "-q"]
SIZES = ["--layers", "1", "--hidden", "16", "--heads", "2", "--vocab", "256"]
LLAMA = ["run", "--model", "llama", *SIZES, *TINY]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a saved llama in `in`."""
    monkeypatch.chdir(tmp_path)
    assert main([*LLAMA, "--save-weights", "in"]) == 0
    return tmp_path


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str, code: int = 2) -> str:
        before = sorted(str(path) for path in folder.rglob("*"))
        assert main(list(words)) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("zerosim: error: ")
        assert err.count("\n") == 1
        assert sorted(str(path) for path in folder.rglob("*")) == before
        return err

    return run


def same(one: str, other: str) -> bool:
    ours, theirs = read_header(f"{one}/model.safetensors"), read_header(f"{other}/model.safetensors")
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name].read(), theirs[name].read()) for name in ours)


def test_a_folder_is_a_model_and_its_weights(folder: Path) -> None:
    assert sorted(os.listdir("in")) == ["config.json", "model.safetensors"]
    still = ["--optimizer", "sgd", "--lr", "1e-30"]
    for model in ("in", "./in", "in/", "in/config.json"):
        assert main(["run", "--model", model, "--weights", "in", *TINY, *still, "--save-weights", "out/"]) == 0
        assert same("in", "out")
        for name in ("config.json", "model.safetensors"):
            (folder / "out" / name).unlink()
    assert main([*LLAMA, "--weights", "in/model.safetensors", *still, "--save-weights", "one.safetensors"]) == 0
    assert main([*LLAMA, "--weights", "one.safetensors", *still, "--save-weights", "two.npz"]) == 0
    with np.load("two.npz") as arrays:
        assert np.array_equal(
            arrays["model.norm.weight"], read_header("in/model.safetensors")["model.norm.weight"].read()
        )


def test_a_config_json_stays_what_it_was_but_for_changed_sizes(folder: Path) -> None:
    values = json.loads(Path("in/config.json").read_text("utf-8"))
    Path("in/config.json").write_text(json.dumps({**values, "dtype": "bfloat16", "mine": [1, {"a": None}]}), "utf-8")
    assert main(["run", "--model", "in", "--layers", "2", *TINY, "--save-weights", "out"]) == 0
    kept = {**values, "num_hidden_layers": 2, "mine": [1, {"a": None}]}
    assert json.loads(Path("out/config.json").read_text("utf-8")) == kept


def test_folders_are_complete_or_absent(folder: Path, refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, tensors: Any) -> None:
        file.write(b"the beginning")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(save, "write_tensors", full)
    said = refused(*LLAMA, "--save-weights", "out", code=5)
    assert said == "zerosim: error: --save-weights out: cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--save-weights in", "--save-weights in: exists and is not empty; choose another folder"),
        ("--save-weights missing/out", "folder .*missing does not exist; create it first"),
        ("--save-weights out --json out", "--save-weights out: --json names the same file"),
        ("--json in/config.json", "would overwrite the input file"),
        ("--json in/model.safetensors", "would overwrite the input file"),
        ("--save-weights out --lora-rank 2", "transformers keeps adapters apart; pass --save-adapters"),
        ("--save-weights out.pt", "--save-weights out.pt: zerosim writes no pickles; choose OUT.npz, or a folder"),
        ("--save-adapters out", "no adapters are trained"),
        ("--lora-rank 2 --save-adapters out.safetensors", "PEFT reads a folder"),
        ("--lora-rank 2 --adapters in", "cannot read in/adapter_config.json: No such file"),
        ("--weights in --vocab 300", r"lm_head.weight has shape \(256, 16\), expected \(300, 16\)|has shape"),
        ("--weights in --layers 2", "missing model.layers.1.input_layernorm.weight, .* and 6 more"),
        ("--model in --weights missing", "cannot read missing: No such file"),
        (
            "--weights in/config.json",
            "in/config.json describes a model and has no weights: pass it as --model, and in as",
        ),
        ("--model in/model.safetensors", "a file of weights; pass it as --weights, and in/config.json as --model"),
        ("--model new.safetensors", "'new.safetensors': a file of weights; pass it as --weights, and ./config.json"),
        ("--model ./nothing", "cannot read ./nothing: No such file"),
        ("--tokenizer missing.json", "tokenizer missing.json"),
        ("--tokenizer in --tokens x.npz", "--tokenizer 'in': tokens are numbers already"),
    ],
)
def test_bad_input_is_one_line(refused: Any, words: str, said: str) -> None:
    given = words.split()
    weights = [] if "--weights" in given else ["--weights", "in"]
    error = refused(*LLAMA, *weights, *given)
    assert re.search(said, error), error


def test_a_tied_folder_has_no_other_head(refused: Any) -> None:
    gemma = ["run", "--model", "gemma", *SIZES, *TINY]
    assert main([*gemma, "--save-weights", "tied"]) == 0
    said = refused("run", "--model", "tied", "--weights", "tied", *TINY, "--no-tie-embeddings")
    assert "of tied do not fit" in said
    assert "their head is tied to the token table (tie_word_embeddings): leave out --no-tie-embeddings" in said


def test_a_model_that_transformers_lacks_is_no_folder(refused: Any) -> None:
    said = refused("run", "--model", "mlp", *SIZES[:4], *TINY, "--save-weights", "out")
    assert "--save-weights: transformers has no model mlp; choose a file, OUT.npz" in said


def test_a_fused_maps_part_is_no_adapter_of_pefts(refused: Any) -> None:
    words = [*SIZES, *TINY, "--lora-rank", "2", "--save-adapters", "out"]
    assert "PEFT has no adapters for a part of a fused map (h.0.attn.q)" in refused("run", "--model", "gpt", *words)


LORA = ["--lora-rank", "2", "--lora-alpha", "6", "--lora-target", "q,down"]


def test_adapters_go_to_a_folder_and_back(folder: Path) -> None:
    assert main([*LLAMA, *LORA, "--save-adapters", "adapters", "--save-merged", "merged"]) == 0
    assert sorted(os.listdir("adapters")) == ["adapter_config.json", "adapter_model.safetensors"]
    still = ["--adapters", "adapters", "--optimizer", "sgd", "--lr", "1e-30", "--save-merged", "again"]
    assert main([*LLAMA, *LORA, *still]) == 0
    assert same("merged", "again")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora_alpha": 4}, "adapter_config.json scales by 4 / 2, the run by 3: set --lora-alpha 4"),
        ({"peft_type": "IA3"}, "adapter_config.json: peft_type 'IA3' is not modelled: expected LORA"),
        ({"r": "2"}, "adapter_config.json: r '2', lora_alpha 6.0: expected two numbers, as PEFT writes for LoRA"),
        ({"r": 0}, "adapter_config.json: r 0, lora_alpha 6.0: expected two numbers"),
        ({"use_dora": True}, "adapter_config.json: use_dora True is not modelled: expected plain LoRA"),
    ],
)
def test_other_adapters_are_refused(values: dict[str, Any], said: str, refused: Any) -> None:
    assert main([*LLAMA, *LORA, "--save-adapters", "adapters"]) == 0
    path = Path("adapters/adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")
    assert said in refused(*LLAMA, *LORA, "--adapters", "adapters")


def test_adapters_of_other_maps_are_named(refused: Any) -> None:
    assert main([*LLAMA, *LORA, "--save-adapters", "adapters"]) == 0
    said = refused(*LLAMA, *LORA[:4], "--adapters", "adapters")
    assert (
        "the adapters of adapters do not fit the model: missing base_model.model.model.layers.0.self_attn.v_proj"
        in said
    )


def test_the_library_of_tokenizers_is_named_if_it_lacks(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    said = refused(*LLAMA, "--tokenizer", "in/config.json")
    assert "the library tokenizers is not installed: pip install tokenizers" in said
