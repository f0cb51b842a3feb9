"""Files of other frameworks on the command line: what a plan, an explanation and a check of one print, and refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from zerosim.cli.files import WRITTEN
from zerosim.cli.main import main
from zerosim.dialects.kinds import DIALECTS

GIVEN = Path(__file__).parent.parent / "dialects" / "given"
Z3 = str(GIVEN / "llamafactory_z3.json")
SIZES = (
    *("--model", "llama", "--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "256", "--seq", "32"),
    *("--ranks", "4"),
)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """Return stdout on one line."""
    return " ".join(capsys.readouterr().out.split())


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line of an error, after exit code 2."""
    assert main(list(words)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error.removeprefix("zerosim: error: ").strip()


def test_a_plan_says_who_read_the_file_and_where_each_value_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", Z3, *SIZES, "--micro-batch", "1", "--all"]) == 0
    page = printed(capsys)
    assert f"Read {Z3} as deepspeed 0.19.8, filled by transformers 5.24's Trainer: 5 understood, 8 filled in" in page
    assert "reduce_bucket 4,096 zero_optimization.reduce_bucket_size" in page
    assert "micro_batch 1 a flag, over train_micro_batch_size_per_gpu" in page


def test_flags_are_over_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", Z3, *SIZES, "--stage", "2", "--json", "-", "-q"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["config"]["stage"] == 2
    assert values["file"]["values"]["stage"] == 3
    assert values["file"]["dialect"] == "deepspeed"
    assert {one["how"] for one in values["file"]["keys"]} == {"understood", "auto", "ignored", "lacking"}


def test_a_run_trains_with_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "bf16": {"enabled": 1}}', "utf-8"
    )
    assert main(["run", str(path), *SIZES, "--steps", "1", "--json", "-", "-q"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["stage"], config["micro_batch"], config["recipe"]) == (1, 2, "deepspeed")


def test_explain_plans_each_key_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", Z3, *SIZES, "--json", "-"]) == 0
    knobs = {one["key"]: one for one in json.loads(capsys.readouterr().out)["knobs"]}
    stage = knobs["zero_optimization.stage"]
    assert stage["with_minus_without"]["peak_bytes"] < 0 < stage["with_minus_without"]["sent_bytes"]
    assert stage["peak_by_kind"]["optim"]["without"] > stage["peak_by_kind"]["optim"]["with"]
    assert knobs["zero_optimization.contiguous_gradients"]["with_minus_without"] is None
    assert knobs["fp16.hysteresis"]["how"] == "ignored"
    assert "opposite" in knobs["zero_optimization.sub_group_size"]["myth"]


def test_explain_has_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(GIVEN / "zenflow_z2.json"), *SIZES, "--without", "zero_optimization.zenflow"]) == 0
    page = printed(capsys)
    for title in ("What each key changes", "this plan is the same without them", "Which value came from where"):
        assert title in page


def test_doctor_checks_a_file_without_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", Z3, "--model", "llama3-8b", "--ranks", "8"]) == 0
    assert "can be planned." in printed(capsys)
    assert main(["doctor", str(GIVEN / "axolotl_zero1_compile.json"), "--model", "llama3-8b"]) == 2
    page = printed(capsys)
    assert "cannot be planned as it is." in page
    assert "compile.backend" in page


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["plan", Z3, "--ranks", "4"], "reduce_bucket_size: zerosim: \"auto\" is a function of the model"),
        (["plan", str(GIVEN / "zenflow_z2.json"), "--ranks", "4"], "zero_optimization.zenflow: zerosim: ZenFlow is"),
        (["plan", str(GIVEN / "plain_z3_explicit.json"), "--ranks", "4"], "does not say a model, such as --model"),
        (["plan", str(GIVEN / "plain_z3_explicit.json"), "--model", "gpt"], "does not say the GPUs: --ranks N"),
        (["plan", Z3, "--without", "zero_optimisation"], "has no such key; did you mean"),
        (["plan", Z3, "--read-as", "deepspeed"], "expected a version, such as deepspeed==0.19.6"),
        (["plan", Z3, "--read-as", "deepspede==1"], "--read-as deepspede: did you mean 'deepspeed'?"),
        (["plan", "--without", "fp16", "--model", "gpt"], "--without: needs a file of another framework"),
        (["plan", Z3, Z3], "cannot be read together; pass one of them"),
        (["plan", "--model", "gpt", "--write", "deepspeed", "x.yaml"], "expected a name that ends with .json"),
        (["plan", "--model", "gpt", "--write", "fsdp3", "x.py"], "--write fsdp3: did you mean 'fsdp2'?"),
        (["doctor", "--model", "gpt"], "--model: works only with a file of another framework"),
    ],
)  # fmt: skip
def test_bad_words_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], error: str) -> None:
    assert error in refused(capsys, *words)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.json", '{"zero_optimization": {"stage": 1}', "is not JSON: Expecting ',' delimiter"),
        ("a.json", '{"zero_optimization": {"stage": NaN}}', "zero_optimization.stage: NaN is no number"),
        ("a.json", '{"fp16": {}, "fp16": {}}', "'fp16' appears twice"),
        ("a.json", '{"model_type": "llama"}', "is a model's config.json; pass it as --model"),
        ("a.json", '{"a": 1}', "not a file that is read here"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: &a {}\nb: *a\n", "line 3: an alias (*name)"),
        ("a.yaml", "distributed_type: FSDP\ndistributed_type: NO\n", "line 2: 'distributed_type' appears twice"),
        ("a.yaml", "distributed_type: [\n", "is not YAML"),
        ("a.txt", "hello", "not a file that is read here"),
    ],
)
def test_a_bad_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, error: str
) -> None:
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    path = tmp_path / name
    path.write_text(text, "utf-8")
    assert error in refused(capsys, "plan", str(path), "--model", "llama3-8b", "--ranks", "4")


def test_the_flag_names_every_kind_that_is_written() -> None:
    assert tuple(DIALECTS) == WRITTEN


def test_each_key_of_two_files_has_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = tmp_path / "args.json"
    arguments.write_text('{"output_dir": "out", "gradient_accumulation_steps": 2, "bf16": true}', "utf-8")
    assert main(["plan", str(arguments), Z3, *SIZES, "--all"]) == 0
    numbers = re.search(r"(\d+) understood, (\d+) filled in, (\d+) without effect and (\d+) not modelled of (\d+)", (
        page := printed(capsys)
    ))  # fmt: skip
    assert numbers is not None, page
    *parts, whole = map(int, numbers.groups())
    assert sum(parts) == whole
    without = ["--without", "gradient_accumulation_steps"]  # out of both
    assert main(["plan", str(arguments), Z3, *SIZES, *without, "--json", "-", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["accumulate"] == 1


def test_a_plan_is_written_with_its_launch_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    words = [*SIZES, "--recipe", "deepspeed", "--recompute", "full", "--write", "deepspeed", str(path)]
    assert main(["plan", *words]) == 0
    assert "The file cannot say" in printed(capsys)
    script = tmp_path / "ds_config.launch.sh"
    assert json.loads(path.read_text("utf-8"))["zero_optimization"]["stage"] == 3
    assert "--recompute full" in script.read_text("utf-8")
    both = []
    for given in (words[:-3], [str(path), str(script)]):
        assert main(["plan", *given, "--json", "-", "-q"]) == 0
        both.append(json.loads(capsys.readouterr().out))
    assert both[0]["peak_bytes"] == both[1]["peak_bytes"]
    assert refused(capsys, "plan", str(path), *SIZES, "--write", "deepspeed", str(path)).endswith("choose another file")


def test_a_page_of_python_is_read_by_its_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    words = [*SIZES, "--recipe", "fsdp2", "--write", "fsdp2", str(path)]
    plans = []
    for given in (words, [str(tmp_path / "train.launch.sh")]):
        assert main(["plan", *given, "--json", "-", "-q"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0]["peak_bytes"] == plans[1]["peak_bytes"]
    assert "pass the .launch.sh beside it alone" in refused(capsys, "plan", str(path))


def test_nodes_that_the_mesh_has_not_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    two_nodes = str(GIVEN / "llamafactory_fsdp_two_nodes.yaml")
    assert main(["plan", two_nodes, *SIZES, "--micro-batch", "1"]) == 0
    assert "8 ranks a node are left out" in printed(capsys)


def test_a_stage_over_the_files_leaves_what_it_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(GIVEN / "llamafactory_z3_offload.json")
    assert main(["plan", path, *SIZES, "--stage", "2", "--json", "-", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["offload"] == "optimizer=host"
    assert main(["plan", path, *SIZES, "--stage", "0", "-q"]) == 0
