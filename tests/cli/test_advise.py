"""zerosim advise: plans that differ in kind, each planned again by the command that is printed under it; files that are
read back as the same run; and what happens where nothing fits, where somebody interrupts, and where a word is wrong."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from page_jobs import ADVICE, assert_shown, fits

import zerosim.analysis.advise as analysis
import zerosim.cli.advise as verb
from zerosim.cli.main import main
from zerosim.config import OPTIONS, PLAN_DEFAULTS, RunConfig
from zerosim.dialects import Context, document_of_text, read_documents
from zerosim.dialects.kinds import DIALECTS
from zerosim.dialects.shell import document_of_script
from zerosim.dialects.writing import NOT_SAID
from zerosim.errors import INTERRUPTED, OutputError

SIZES = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384,
}  # fmt: skip
GPUS = "--gpus 2xa100-80"
CASES = [
    GPUS,
    "--gpus 4xv100-32 --seq 512 --precision fp16 --loss torch",
    "--gpus 4xa100-40 --finetune lora --global-batch 32",
    "--gpus 1xrtx4090 --finetune qlora --lora-rank 8",
    "--node 4xrtx4090 --host-memory 100GB --recipe usual",
    f"{GPUS} --recipe fsdp2",
    f"{GPUS} --recipe megatron",
    "--node dgx-h100 --nodes 2 --recipe fsdp2",
    f"{GPUS} --recipe deepspeed --optimizer adamw",
]
LARGE = [words for words, text in ADVICE.items() if fits(text)]
each_case = pytest.mark.parametrize("words", [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in LARGE)])
TOO_SMALL = [words for words, text in ADVICE.items() if not fits(text)]
FAR_TOO_SMALL = "--model llama3-8b --gpus 1xrtx4090"
"""A model that does not fit."""
assert FAR_TOO_SMALL in TOO_SMALL


def in_a_folder(words: str, *more: str) -> tuple[int, dict[str, Any], dict[str, dict[str, str]]]:
    """Advise on the small model, or another that the words name. Return the exit code, the figures with the page, and
    the text of each file by folder."""
    with TemporaryDirectory() as place:
        figures, folder = Path(place) / "advice.json", Path(place) / "plans"
        (config := Path(place) / "my model" / "config.json").parent.mkdir()
        config.write_text(json.dumps(SIZES), encoding="utf-8")
        own = [] if "--model" in words else ["--model", str(config)]
        with contextlib.redirect_stdout(io.StringIO()) as page:
            code = main(["advise", *own, *words.split(), "--json", str(figures), "--write", str(folder), *more])
        values = {**json.loads(figures.read_text("utf-8")), "page": page.getvalue()}
        for plan in [*values["plans"], *values["changes"]]:
            plan["again"] = planned(plan["command"])
            plan["cached"] = planned(plan["command"], "--allocator", "caching")
        files = {
            inner.name: {path.name: path.read_text("utf-8") for path in inner.iterdir()} for inner in folder.iterdir()
        }
        for plan in values["plans"]:
            plan["unequal"] = unequal(plan, files)
    return code, values, files


advised = cache(in_a_folder)


def planned(command: str, *more: str) -> dict[str, Any]:
    """Return what `zerosim plan` says, without the files that it is asked for."""
    words = shlex.split(command.split(" --write ")[0])
    assert words[:2] == ["zerosim", "plan"]
    with TemporaryDirectory() as place:
        figures = Path(place) / "plan.json"
        code = main([*words[1:], *more, "--json", str(figures), "-q"])
        values: dict[str, Any] = json.loads(figures.read_text("utf-8"))
    assert code == (0 if values["fits"] else 3)
    return values


def unequal(plan: dict[str, Any], files: dict[str, dict[str, str]]) -> set[str]:
    """Return the options in which a plan and its files differ, if it has any, without those of this machine."""
    if " --write " not in plan["command"]:
        return set()
    kind, name = plan["command"].split(" --write ")[1].split()
    texts, script = files[plan["kind"].split()[0]], f"{name.removesuffix(DIALECTS[kind].suffix)}.launch.sh"
    assert set(texts) == {name, script}
    documents = [document_of_text(name, DIALECTS[kind].reader, texts[name])]
    documents.append(document_of_script(script, "launch", texts[script]))
    read = read_documents(documents, Context(launcher="deepspeed" if kind == "deepspeed" else ""))
    again = RunConfig(**{**PLAN_DEFAULTS, **read.values})
    own = RunConfig(**{**PLAN_DEFAULTS, **{name: given for name, given in plan["config"].items() if given is not None}})
    return {name for name in OPTIONS if name not in NOT_SAID and own.value(name) != again.value(name)}


@each_case
def test_plans_differ_in_kind(words: str) -> None:
    code, values, _ = advised(words)
    assert code == 0
    assert values["fits"]
    assert values["ended"]
    plans = values["plans"]
    kinds = [plan["kind"] for plan in plans]
    assert 1 < len(plans) <= 3
    assert kinds == [kind for kind in ("simplest", "fastest", "longest rows", "largest batch") if kind in kinds]
    assert all(one["config"] != other["config"] for one, other in itertools.combinations(plans, 2))
    simplest = plans[0]
    assert simplest["kind"] == "simplest"
    assert simplest["tp"] == simplest["pp"] == simplest["cp"] == 1
    assert simplest["offload"] is None
    rest = [plan for plan in plans if plan["kind"] in ("simplest", "fastest")]
    assert len({plan["global_batch"] for plan in rest}) == 1
    assert min(rest, key=lambda plan: float(plan["time"]["step_s"])) is rest[-1]


@each_case
def test_a_given_length_gives_the_largest_batch_in_place_of_the_longest_rows(words: str) -> None:
    for plan in advised(words)[1]["plans"]:
        model = plan["config"]["model"]
        positions = SIZES["max_position_embeddings"] if "/" in model else RunConfig(model=model).model.positions
        assert plan["seq"] <= positions
        if "--seq" in words:
            assert plan["seq"] == int(words.split("--seq ")[1].split()[0])
            assert plan["kind"] != "longest rows"
        elif plan["kind"] == "longest rows":
            assert plan["seq"] > advised(words)[1]["config"]["seq"]
        if plan["kind"] == "largest batch":
            assert plan["accumulate"] == 1


@each_case
def test_every_command_plans_what_is_said_of_it(words: str) -> None:
    for plan in advised(words)[1]["plans"]:
        assert plan["again"]["fits"]
        for name in ("peak_bytes", "reserve_bytes", "certainty", "time"):
            assert plan["again"][name] == plan[name], name


@each_case
def test_what_fits_does_so_under_the_caching_allocator(words: str) -> None:
    for plan in advised(words)[1]["plans"]:
        assert plan["cached"]["fits"], plan["command"]


@each_case
def test_nobody_is_advised_to_run_the_paper(words: str) -> None:
    values = advised(words)[1]
    recipes = {plan["recipe"] for plan in [*values["plans"], *values["tried"]]}
    assert "paper" not in recipes
    asked = words.partition("--recipe ")[2].split(" ")[0]
    assert asked in ("", "usual") or recipes == {asked}


@each_case
def test_files_are_those_of_the_command_and_are_read_back(words: str) -> None:
    _, values, files = advised(words)
    assert set(files) == {plan["kind"].split()[0] for plan in values["plans"] if " --write " in plan["command"]}
    assert files
    for plan in values["plans"]:
        assert plan["unequal"] == set()


@pytest.mark.slow
@pytest.mark.parametrize("words", ADVICE)
def test_a_page_of_docs_shows_what_is_printed(words: str) -> None:
    code, values, _ = advised(words)
    assert_shown(ADVICE[words], values["page"], code)


def test_costs_are_tokens_over_speed_times_gpus_times_price(capsys: pytest.CaptureFixture[str]) -> None:
    plans = in_a_folder(f"{GPUS} --tokens 1.5B", "--price", "2.5 EUR")[1]["plans"]
    for plan in plans:
        hours = 1.5e9 / plan["time"]["tokens_per_s"] / 3600
        assert plan["hours"] == pytest.approx(hours)
        assert plan["gpu_hours"] == pytest.approx(2 * hours)
        assert plan["cost"] == pytest.approx(5 * hours)
        assert plan["currency"] == "EUR"


@pytest.mark.parametrize(("price", "said"), [("$2", "$ tokens"), ("2.5 EUR", "EUR"), ("3€", "€"), ("4", "")])
def test_prices(price: str, said: str) -> None:
    assert verb._price(price) == (float(price.strip("$€ EUR")), said.split(" ")[0])


@pytest.mark.parametrize(("text", "tokens"), [("15B", 15e9), ("2.5t", 2.5e12), ("300 M", 3e8), ("7", 7), ("1G", 1e9)])
def test_tokens(text: str, tokens: float) -> None:
    assert verb._count(text) == tokens


def test_the_page_has_the_answer_first(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    assert main(["advise", "--model", tiny, *GPUS.split(), "--tokens", "1B", "--price", "2 EUR"]) == 0
    page = " ".join((captured := capsys.readouterr()).out.split())
    assert captured.err == ""
    assert page.startswith("It fits: 3 plans, at up to ")
    for words in ("Simplest: data parallelism alone", "Longest rows: 16,384 tokens", "1.00B tokens take", " EUR.",
                  "It forces a global batch of 8 rows", "If it is a little short: ", "Its price: ", "What was tried",
                  "for 8 of 10 measured steps like this one", "--write "):  # fmt: skip
        assert words in page
    assert "recipe paper" not in page


@pytest.mark.parametrize(
    "words", [FAR_TOO_SMALL, *(pytest.param(one, marks=pytest.mark.slow) for one in (
        f"{FAR_TOO_SMALL} --host-memory 500GB", "--model llama3.1-8b --gpus 1xrtx4090 --seq 65536 --finetune lora",
        *(words for words in TOO_SMALL if words != FAR_TOO_SMALL),
    ))]
)  # fmt: skip
def test_where_nothing_fits_the_changes_do(words: str) -> None:
    code, values, files = advised(words)
    assert code == 3
    assert not values["fits"]
    assert values["plans"] == []
    assert files == {}
    assert values["changes"]
    assert len({change["name"] for change in values["changes"]}) == len(values["changes"])
    for change in values["changes"]:
        assert change["again"]["fits"], change["command"]
        assert change["again"]["peak_bytes"] == change["peak_bytes"]
        assert change["cached"]["fits"], change["command"]


def test_the_page_says_that_nothing_fits() -> None:
    code, values, _ = advised(FAR_TOO_SMALL)
    page = " ".join(values["page"].split())
    assert code == 3
    assert page.startswith("Nothing fits. llama3-8b on 1 GPU of rtx4090.")
    assert "Smallest changes that fit" in page
    assert "--base nf4" in page


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A small model's config.json."""
    (path := tmp_path / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
    return str(path)


@pytest.fixture
def outputs(tmp_path: Path) -> list[str]:
    return ["--json", str(tmp_path / "advice.json"), "--write", str(tmp_path / "plans")]


def pressed(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"config.json"}


def test_an_interrupt_before_the_first_plan_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: str, outputs: list[str]
) -> None:
    monkeypatch.setattr(analysis, "Known", pressed)
    assert main(["advise", "--model", tiny, *GPUS.split(), *outputs]) == INTERRUPTED
    assert capsys.readouterr() == ("", "zerosim: interrupted\n")
    assert left(tmp_path) == set()


@pytest.mark.parametrize(
    ("at", "kinds"),
    [
        ("best_meshes", ["simplest"]),
        ("_longest", ["simplest", "fastest"]),
        ("_relief", ["simplest", "fastest", "longest rows"]),
    ],
)
def test_an_interrupt_keeps_what_was_found(
    at: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    tiny: str, outputs: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(analysis, at, the_second(getattr(analysis, at)) if at == "best_meshes" else pressed)
    assert main(["advise", "--model", tiny, *GPUS.split(), *outputs]) == INTERRUPTED
    page, error = capsys.readouterr()
    assert error == "zerosim: interrupted\n"
    assert "Stopped: there may be better plans." in page
    values = json.loads((tmp_path / "advice.json").read_text("utf-8"))
    assert [plan["kind"] for plan in values["plans"]] == kinds
    assert not values["ended"]
    assert left(tmp_path) == {"advice.json", "plans"}
    assert left(tmp_path / "plans") == {kind.split()[0] for kind in kinds}


def the_second(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, whose second call is interrupted."""
    calls = itertools.count()
    return lambda *args, **named: (function if next(calls) == 0 else pressed)(*args, **named)


def test_an_interrupt_keeps_the_changes_that_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = analysis._kinds

    def two(*given: Any) -> Any:
        yield from itertools.islice((way for way in ways(*given) if "LoRA" in way[0]), 1)
        pressed()

    monkeypatch.setattr(analysis, "_kinds", two)
    assert main(["advise", *FAR_TOO_SMALL.split(), "--json", "-"]) == INTERRUPTED
    out, page = capsys.readouterr()
    assert [change["name"] for change in json.loads(out)["changes"]] == ["adapters alone (LoRA)"]
    assert "Stopped: other changes may fit too." in page


def test_a_time_limit_ends_the_search_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny: str
) -> None:
    def slow(*args: Any, **named: Any) -> Any:
        clock.append(clock[-1] + 100)
        return longest(*args, **named)

    clock, longest = [0.0], analysis._longest
    monkeypatch.setattr("time.monotonic", lambda: clock[-1])
    monkeypatch.setattr(analysis, "_longest", slow)
    assert main(["advise", "--model", tiny, *GPUS.split(), "--time-limit", "50"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("It fits: 3 plans")
    assert "Stopped: there may be better plans." in page
    assert "If it is a little short" not in page


def test_a_full_disk_leaves_no_folder_and_costs_no_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: str, outputs: list[str]
) -> None:
    writes, write = itertools.count(), Path.write_text

    def third(path: Path, *args: Any, **named: Any) -> int:
        if next(writes) == 2:
            raise OSError(28, "No space left on device")
        return write(path, *args, **named)

    monkeypatch.setattr(Path, "write_text", third)
    assert main(["advise", "--model", tiny, *GPUS.split(), *outputs]) == OutputError.exit_code
    page, error = capsys.readouterr()
    assert page.startswith("It fits: 3 plans")
    assert error.endswith("plans: cannot be written: No space left on device; choose another folder\n")
    assert error.count("\n") == 1
    assert left(tmp_path) == {"advice.json"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full to write to")
def test_figures_that_cannot_be_written_cost_no_launch_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: str
) -> None:
    words = ["advise", "--model", tiny, *GPUS.split(), "--json", "/dev/full", "--write", str(tmp_path / "plans")]
    assert main(words) == OutputError.exit_code
    assert left(tmp_path) == {"plans"}


def test_a_folder_that_somebody_makes_meanwhile_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny: str, outputs: list[str]
) -> None:
    longest = analysis._longest

    def meanwhile(*args: Any) -> Any:
        (tmp_path / "plans").mkdir()
        return longest(*args)

    monkeypatch.setattr(analysis, "_longest", meanwhile)
    assert main(["advise", "--model", tiny, *GPUS.split(), *outputs]) == OutputError.exit_code
    assert "plans: cannot be written: it is there already" in capsys.readouterr().err
    assert left(tmp_path / "plans") == set()
    assert left(tmp_path) == {"advice.json", "plans"}


BAD = [
    ("--gpus 0xa100-80", "--gpus 0xa100-80: expected at least 1 GPU and at most 65,536"),
    ("--gpus 8x", "--gpus '8x': expected a number and a GPU, such as 8xa100-80"),
    ("--gpus a100-80", "--gpus 'a100-80': expected a number and a GPU, such as 8xa100-80"),
    ("--gpus 8xa100-8", "unknown hardware 'a100-8': did you mean a100-80?"),
    ("--node dgx-h10", "unknown --node 'dgx-h10': did you mean dgx-h100?"),
    ("--node dgx-h100 --nodes 0", "--nodes 0: expected at least 1 node"),
    ("--gpus 8xa100-80 --nodes 2", "--nodes 2: works only with --node; --gpus already says how many"),
    ("--gpus 8xa100-80 --node dgx-h100", "--gpus and --node are both given: choose one"),
    ("", "no GPUs: pass --gpus 8xh100-80, or --node dgx-h100 --nodes 4"),
    *((f"{GPUS} --price {price}", f"--price '{price}': expected the price of one GPU for an hour, such as '2.5 EUR'")
      for price in ("-1", "0", "nan", "inf", "cheap", "1e3")),
    *((f"{GPUS} --tokens {tokens}", f"--tokens {tokens}: expected at least 1 token, such as 15B")
      for tokens in ("0", "-5", "nan", "some")),
    (f"{GPUS} --seq 16385", "--seq 16385: config.json has 16,384 positions; choose at most 16384"),
    (f"{GPUS} --global-batch 7", "--global-batch 7: 2 GPUs do not divide so many rows; choose 8"),
    (f"{GPUS} --global-batch 0", "--global-batch 0: expected at least 1 row"),
    (f"{GPUS} --finetune lra", "--finetune lra: did you mean 'lora'?"),
    (f"{GPUS} --recipe fsd2", "--recipe 'fsd2' is not known; did you mean fsdp2 or fsdp1?"),
    *((f"{GPUS} --time-limit {limit}", f"--time-limit {limit}: expected more than 0 seconds")
      for limit in ("0", "-1", "nan")),
    (f"{GPUS} --time-limit 1e-9", "--time-limit 1e-09: no plan was found in so short a time; allow more seconds"),
    (f"{GPUS} --model flat", "--model flat: has no blocks to time; choose another model"),
    (f"{GPUS} --model gpt2-xll", "--model 'gpt2-xll' is not known; did you mean gpt2-xl or gpt2-large or gpt2?"),
    (f"{GPUS} --write config.json", "--write config.json: is already there; choose a new folder"),
    (f"{GPUS} --write no/plans", "--write no/plans: there is no folder {}/no; make it first"),
    (f"{GPUS} --write plans --json plans", "--write plans: --json names the same path; choose another"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), BAD, ids=[words or "nothing" for words, _ in BAD])
def test_bad_input_is_one_line(
    words: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["advise", "--model", "config.json", *words.split()]) == 2
    assert capsys.readouterr() == ("", f"zerosim: error: {said.format(os.getcwd())}\n")
    assert left(tmp_path) == set()


def test_a_model_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *GPUS.split()]) == 2
    assert capsys.readouterr().err.startswith("zerosim: error: no model: pass --model llama3-8b")
