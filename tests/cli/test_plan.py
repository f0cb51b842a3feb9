"""`zerosim plan`, `fit` and `zoo`: what they print was counted, and bad input is refused in words."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from config_files import file
from processes import finished

from zerosim.analysis.checks import checks
from zerosim.cli.main import main
from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.config.known import known_models
from zerosim.train import plan as planning
from zerosim.train.plan import plan

ROOT = Path(__file__).parents[2]


def planned(**fields: Any) -> RunConfig:
    return RunConfig.from_dict({**PLAN_DEFAULTS, **fields})


def assert_agrees(config: RunConfig) -> None:
    """Every count of states and traffic equals its closed form."""
    result = plan(config)
    for state in checks(result)[0].states:
        assert state.agrees, state
    for traffic in checks(result, 0)[0].sent:
        assert traffic.agrees, traffic


@pytest.mark.quick(2)
@pytest.mark.parametrize("recipe", ["paper", "ddp", "deepspeed", "fsdp2", "megatron"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 3, 1000])
def test_counts_equal_the_closed_forms(stage: int, ranks: int, recipe: str) -> None:
    sizes = dict(layers=3, hidden=96, heads=4, seq=32, vocab=1000)
    for tied in (True, False):
        assert_agrees(planned(stage=stage, ranks=ranks, recipe=recipe, tie_embeddings=tied, accumulate=2, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["gpt2-xl", "gpt3-175b", "llama3-8b", "llama3.1-405b", "1t"])
def test_published_models_agree_too(model: str, stage: int) -> None:
    assert_agrees(planned(model=model, stage=stage, ranks=1024, recompute="full"))


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_awkward_worlds(stage: int) -> None:
    """N = 3 with padding, a unit smaller than N, tied embeddings, one unit only."""
    tiny = dict(layers=1, hidden=5, heads=1, seq=3, vocab=7)
    for config in (
        planned(stage=stage, ranks=3, **tiny),
        planned(stage=stage, ranks=64, **tiny),
        planned(stage=stage, ranks=64, partition="owner", **tiny),
        planned(stage=stage, ranks=3, model="flat", params=10, units=1),
        planned(stage=stage, ranks=16, model="flat", params=10, units=1),
    ):
        assert_agrees(config)
        result, every = plan(config), plan(config, every_rank=True)
        assert result.memory == every.memory
        assert result.traffic == every.traffic


def run_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main([*words, "--json", "-", "--quiet"]) == code
    return dict(json.loads(capsys.readouterr().out))


def test_a_plan_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "gpt2-xl", "--ranks", "64", "--attention", "flash"]
    peak = run_json(capsys, *words)["peak_bytes"]
    exactly = run_json(capsys, *words, "--limit", str(peak))
    assert exactly["fits"] is True
    assert exactly["advice"] is None
    short = run_json(capsys, *words, "--limit", str(peak - 1), code=3)
    assert short["fits"] is False
    assert main([*words, "--limit", str(peak - 1)]) == 3
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Does not fit: peak ")
    assert "(1 B short). Cheapest change: " in text
    assert all(change in text for change in short["advice"].rstrip(".").split("; "))


def test_the_verdict_is_of_the_peak_and_the_reserve_together(capsys: pytest.CaptureFixture[str]) -> None:
    """To the byte; what is outside is in no peak, and a flat model and --limit alone keep nothing."""
    words = ["plan", "--model", "gpt2", "--ranks", "64", "--gpu", "a100-40", "--stage", "3"]
    whole = run_json(capsys, *words)
    peak, outside = whole["peak_bytes"], whole["outside"]
    assert whole["reserve_bytes"] == sum(outside.values()) == 1_176_764_416
    assert peak == run_json(capsys, *words, "--reserve", "0")["peak_bytes"]
    room = whole["limit"]["bytes"] - peak
    assert run_json(capsys, *words, "--reserve", str(room))["fits"] is True
    assert run_json(capsys, *words, "--reserve", str(room + 1), code=3)["fits"] is False
    capsys.readouterr()
    main([*words, "--reserve", str(room + 1)])
    text = " ".join(capsys.readouterr().out.split())
    assert re.match(r"Does not fit: peak .* \+ .* reserved = 42\.3 GB, on a 42\.3 GB A100 \(1 B short\)\.", text)
    assert text.count("No single item is too big by itself. The largest: ") == 1
    flat = run_json(capsys, "plan", "--model", "flat", "--params", "1M", "--gpu", "a100-40")
    assert (flat["outside"], flat["reserve_bytes"]) == ({}, 0)
    limit = run_json(capsys, "plan", "--model", "gpt2", "--limit", "40GB")
    assert (limit["outside"], limit["reserve_bytes"]) == ({}, 0)


_BY_530B = ("gpt", 105, 20480, 128, 2048, "51200")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "stage", "ranks", "rows", "sizes", "more"),
    [
        ("v100-32", 2, 128, 24, ("gpt", 34, 1920, 16, 1024, "50257"), ["--precision", "fp16"]),
        ("v100-32", 2, 128, 2, ("gpt", 62, 4096, 32, 1024, "50257"), ["--precision", "fp16"]),
        ("a100-80", 3, 384, 4, ("gpt", 96, 12288, 96, 2048, "51200"), ["--recipe", "deepspeed"]),
        ("a100-80", 3, 640, 4, _BY_530B, ["--recipe", "deepspeed"]),
        ("a100-80", 3, 640, 4, _BY_530B, ["--recipe", "deepspeed", "--attention", "eager"]),
    ],
)
def test_what_is_known_to_have_run_fits(
    gpu: str,
    stage: int,
    ranks: int,
    rows: int,
    sizes: tuple[str, int, int, int, int, str],
    more: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """ZeRO paper, Table 10 (1.5B and 13B); 2104.04473, Table 2 (175B and 530B, ZeRO-3); all with full recompute.
    The last fits into the 85.0 GB that an A100 of "80 GB" has, and would not into 80."""
    names = ("--model", "--layers", "--hidden", "--heads", "--seq", "--vocab")
    words = [str(word) for pair in zip(names, sizes, strict=True) for word in pair]
    words += ["--positions", str(sizes[4]), "--recompute", "full", "--gpu", gpu, *more]
    words += ["--stage", str(stage), "--ranks", str(ranks), "--micro-batch", str(rows)]
    assert run_json(capsys, "plan", *words)["fits"] is True


def test_what_alone_is_too_much_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """DDP's 16 B of 1.56B parameters; and logits of 8 x 8,192 tokens of 128,256 in bf16, with their gradients."""
    sizes = ["plan", "--model", "gpt2-xl", "--limit", "20GB"]
    assert main([*sizes, "--stage", "0"]) == 3
    text = " ".join(capsys.readouterr().out.split())
    assert "Too big by itself: model states (24.9 GB)." in text
    assert "Cheapest change: --stage 1 would fit" in text
    words = ["plan", "--model", "llama3-8b", "--ranks", "8", "--micro-batch", "8", "--attention", "flash"]
    assert main([*words, "--recompute", "full", "--limit", "30GB"]) == 3
    text = " ".join(capsys.readouterr().out.split())
    assert "Too big by itself: logits and their gradients (33.6 GB)." in text


def test_what_would_fit_keeps_the_global_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """More ranks are tensor-parallel groups more: rows are dealt to half as many as there are ranks."""
    words = "plan --ranks 4 --tp 2 --stage 3 --layers 2 --hidden 64 --heads 4 --seq 64 --micro-batch 1 --accumulate 16"
    assert main([*words.split(), "--limit", "400KB"]) in (0, 3)
    found = re.search(r"--accumulate (\d+) --ranks (\d+)", " ".join(capsys.readouterr().out.split()))
    assert found is not None
    assert int(found[1]) * int(found[2]) // 2 == 32


def test_every_rank_gives_what_one_of_each_class_gives(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--ranks", "7", "--layers", "2"]
    few, every = run_json(capsys, *words), run_json(capsys, *words, "--every-rank")
    assert len(few["ranks"]) < len(every["ranks"]) == 7
    assert sum(rank["stands_for"] for rank in few["ranks"]) == 7
    assert [rank["stands_for"] for rank in every["ranks"]] == [1] * 7
    known = [(rank["memory"], rank["traffic"]) for rank in few["ranks"]]
    seen = [(rank["memory"], rank["traffic"]) for rank in every["ranks"]]
    assert [seen.count(one) for one in known] == [rank["stands_for"] for rank in few["ranks"]]


@pytest.mark.quick(1)
@pytest.mark.parametrize("what", ["micro-batch", "layers", "seq", "ranks"])
def test_fit_finds_an_edge(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "gpt2", "--stage", "3", "--limit", "6GB", *([] if what == "ranks" else ["--ranks", "8"])]
    found = run_json(capsys, "fit", *words, "--find", what)
    best, beyond = found["best"], found["beyond"]
    assert best["peak_bytes"] <= 6 * 10**9
    again = run_json(capsys, "plan", *words, *_flags(what, best["value"]))
    assert again["peak_bytes"] == best["peak_bytes"]
    if beyond is not None:
        assert abs(beyond["value"] - best["value"]) == 1
        assert beyond["peak_bytes"] > 6 * 10**9


def test_fit_lengthens_every_table_of_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32}
    values = file("opt-30b", **sizes, num_attention_heads=2, vocab_size=256, max_position_embeddings=8)
    (tmp_path / "config.json").write_text(json.dumps(values), "utf-8")
    found = run_json(capsys, "fit", "--model", str(tmp_path), "--ranks", "1", "--limit", "500KB", "--find", "seq")
    assert found["best"]["value"] > 8
    assert found["beyond"]["value"] == found["best"]["value"] + 1


def _flags(what: str, value: int) -> list[str]:
    positions = ["--positions", str(max(value, 1024))] if what == "seq" else []
    return [f"--{what}", str(value), *positions]


@pytest.mark.slow
def test_fit_finds_table_2s_largest_flat_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Stage 1 on 64 devices of 32 GB: 7.6B in the paper, by model states alone; activations take a little."""
    words = ["--model", "flat", "--stage", "1", "--ranks", "64", "--gpu", "v100-32", "--units", "16"]
    best = run_json(capsys, "fit", *words, "--find", "params")["best"]
    assert 7.0e9 < best["value"] < 7.65e9


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--model", "gpt2-xl", "--limit", "1GB", "--stage", "0"]) == 3
    assert "Nothing fits" in capsys.readouterr().out


def test_ranks_are_looked_for_where_a_file_names_replicas_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No number of ranks is given that replicas would have to divide: numbers that they divide are tried."""
    (tmp_path / "hsdp.toml").write_text("dp_replicate = 6\nlayers = 1\n", "utf-8")
    words = ["--find", "ranks", "--limit", "1GB", "--attention", "flash"]
    from_file = run_json(capsys, "fit", str(tmp_path / "hsdp.toml"), *words)
    assert from_file["best"]["value"] == 6
    assert from_file["tried"] == run_json(capsys, "fit", "--dp-replicate", "6", "--layers", "1", *words)["tried"]


@pytest.mark.slow
@pytest.mark.parametrize("width", ["60", "80", "120"])
def test_a_plan_fits_into_any_width(
    width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    for more in ([], ["--all"]):
        main(["plan", "--model", "1t", "--ranks", "1024", "--recompute", "full", "--gpu", "v100-32", *more])
        main(["fit", "--model", "gpt2", "--gpu", "v100-32", *more])
        main(["plan", "--model", "gpt2", "--gpu", "h100", *more])
    main(["zoo", "gpus"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(width)
    assert not any("…" in line for line in lines)


@pytest.mark.slow
def test_the_zoo_names_every_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["zoo"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60
    assert all(name in out for name in known_models())
    assert "1,557,611,200" in out


def test_models_are_chosen_by_a_word(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["zoo", "models", "Llama3.2-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "Llama 3.1, 3.2"
    sizes = ["16", "2,048", "32", "8", "8,192", "131,072", "128,256"]
    assert lines[4].split() == ["llama3.2-1b", *sizes, "1,235,814,400", "1.24B", "l4"]
    assert main(["zoo", "models", "Llama3.2-1", "--json", "-"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["models"]] == ["llama3.2-1b"]
    assert main(["zoo", "fine-tuning", "smollm2-135m"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    for words, said in (
        ("zoo models nosuch", "'nosuch': no model's name or family has it; zerosim zoo models lists them"),
        ("zoo gpus h100", "zoo gpus h100: only models and fine-tuning are chosen by a word"),
    ):
        assert main(words.split()) == 2
        assert said in capsys.readouterr().err


def test_the_tables_show_the_moments_they_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell of the table of live bytes, read back from the words printed."""
    monkeypatch.setenv("COLUMNS", "200")
    config = planned(model="gpt2", stage=2, ranks=8, recipe="deepspeed", attention="flash")
    words = "plan --model gpt2 --stage 2 --ranks 8 --recipe deepspeed --limit 4GB --all"
    assert main(words.split()) == 0
    memory = plan(config).memory[0]
    lines = capsys.readouterr().out.splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("Live bytes"))
    columns = lines[top + 1].split()[1:]
    assert columns == ["start", "forward", "backward", "upcast", "step", "peak"]
    marks = ["after_init", "end_of_forward", "end_of_backward", "gradients_upcast", "after_step"]
    expected = [memory.marks[mark] for mark in marks] + [memory.peak]
    for kind in ("param", "optim", "total"):
        row = next(line for line in lines[top:] if line.startswith(f"{kind} "))
        cells = [int(cell.replace(",", "")) for cell in row.split()[1:]]
        assert cells == [snap.total_bytes if kind == "total" else snap.by_kind[kind] for snap in expected]
    left = 4 * 10**9 - memory.peak.total_bytes
    assert f"({100 * left / (4 * 10**9):.3g} %) free" in " ".join(lines)
    held = sum(nbytes for (unit, kind), nbytes in memory.peak.by_unit.items() if kind == "param" and unit[:2] == "h.")
    assert any(line.startswith("h.* (12)") and f"{held:,}" in line for line in lines)


def test_a_run_that_this_machine_cannot_hold_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", "1t", "--steps", "1"]) == 2
    assert "zerosim plan" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the high-water mark is read from /proc")
@pytest.mark.parametrize("model", ["gpt3-175b", "1t"])
def test_a_plan_takes_little_memory_of_this_machine(model: str) -> None:
    code = (
        "from zerosim.cli.main import main;"
        f"main(['plan', '--model', '{model}', '--ranks', '1024', '--recompute', 'full']);"
        "print(open('/proc/self/status').read())"
    )
    done = finished([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    kilobytes = next(int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("VmHWM"))
    assert kilobytes < 250_000


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("words", "ranks"), [("--dp-replicas 3", [3, 12, 48]), ("--dp-replicas 3 --tp 2", [6, 24, 96])]
)
def test_scaling_by_a_mesh_that_divides_no_usual_number(tmp_path: Path, words: str, ranks: list[int]) -> None:
    figures = tmp_path / "out.json"
    asked = f"plot scaling --stages 3 -q -o {tmp_path / 'out.svg'} --json {figures} {words}"
    assert main(asked.split()) == 0
    (line,) = json.loads(figures.read_text("utf-8"))["lines"].values()
    assert [point[0] for point in line][:3] == ranks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plot memory --model gpt2 --bucket-bytes 100", "error: --bucket-bytes 100: a plan would record about"),
        ("plot scaling --model gpt2 --bucket-bytes 100", "error: --bucket-bytes 100: a plan would record about"),
        ("plot schedule --pp 4 --grad-acc-steps 1000000", "error: --grad-acc-steps 1000000: 8,000,000 forwards"),
        ("plot streams --gpu a100-80 --accumulate 10000000", "error: --accumulate 10000000: a plan would record"),
    ],
)
def test_a_picture_that_would_take_hours_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.setattr(planning, "_plan", lambda *_: pytest.fail("a stage was run first"))
    assert main([*words.split(), "-o", str(tmp_path / "out.svg")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.quick(1)
@pytest.mark.parametrize("verb", ["run --steps 1", "plan", "fit --find seq --limit 1MB", "compare --steps 1"])
def test_every_report_says_what_is_left_out_of_a_recipe(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--layers 1 --hidden 8 --heads 2 --ranks 2 --recipe deepspeed --partition owner --precision fp32"
    assert main([*verb.split(), *words.split()]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Left out: recipe deepspeed's" in told
    assert "reduce_bucket 500000000, not with partition 'owner': the owner reduces gradients in place" in told


@pytest.mark.parametrize("verb", ["plan", "run --steps 1", "explain --stage 3 --ranks 4", "fit --limit 1GB"])
def test_a_left_out_tower_is_named(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 16, "intermediate_size": 32, "vocab_size": 256, "max_position_embeddings": 16}  # fmt: skip
    values = {"model_type": "gemma3", "text_config": sizes, "vision_config": {"hidden_size": 4}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), "utf-8")
    assert main([*verb.split(), "--model", str(path), "--json", str(tmp_path / "out.json")]) == 0
    note = f"Model {path}: planned without its vision tower."
    assert note in " ".join(capsys.readouterr().out.split()) or verb.startswith("run")
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["notes"][0] == "planned without its vision tower"
