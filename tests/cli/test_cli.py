"""The command line: every bad input is one line and exit 2, every good path leaves what it promises."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctrl_c import pressed
from parsing import parsed
from processes import SECONDS, ended, finished, posix, started

import zerosim
from zerosim.cli import options, outputs
from zerosim.cli.main import main
from zerosim.cli.outputs import Output
from zerosim.cli.parser import Parser
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.parts.clock import CLOCK
from zerosim.train import run as experiment

SIZES = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "8", "--ranks", "2", "--micro-batch", "1"]
SMALL = [*SIZES, "--steps", "2"]
START = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from zerosim.cli.main import main; sys.exit(main())"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a bad file of each kind that `--save-weights` and the like meet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    np.savez("rows.npz", tokens=np.zeros((2, 3, 9), np.int64))
    Path("empty.txt").write_bytes(b"")
    Path("short.txt").write_bytes(b"12345678")
    Path("experts.toml").write_text("expert_model_parallel_size = 2\n", "utf-8")
    Path("context.toml").write_text("context_parallel_degree = 2\n", "utf-8")
    Path("malformed.toml").write_text("ranks = = 2\n", "utf-8")
    Path("unknown.toml").write_text("rank = 2\n", "utf-8")
    Path("types.toml").write_text('ranks = "two"\n', "utf-8")
    Path("mesh.toml").write_text("ranks = 4\ntp = 3\n", "utf-8")
    Path("a_folder").mkdir()
    return tmp_path


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{**dict(layers=1, hidden=16, heads=2, seq=8, steps=2, ranks=2, micro_batch=1), **changes})


BAD = [  # what a configuration may not say: tests/config/test_refused.py
    ("-z 7", "-z 7: expected at least 0 and at most 3"),
    ("--tokens rows.npz", "the global batch is 3 rows, expected ranks x accumulate x micro-batch = 2"),
    ("--tokens rows.npz --data short.txt", "choose one"),
    ("--data missing.txt", "cannot read data file missing.txt: No such file"),
    ("malformed.toml", "malformed.toml is not valid TOML"),
    ("unknown.toml", "scenario unknown.toml: unknown key 'rank'; did you mean 'ranks'?"),
    ("--json missing_folder/out.json", "does not exist"),
    ("--json a_folder", "is a folder"),
    ("--json empty.txt/out.json", "cannot be written: Not a directory"),
    (f"--json {'x' * 300}", "cannot be written: File name too long"),
    ("--save-weights .", "exists and is not empty; choose another folder"),
    ("--json out.npz", "names the same file"),
    ("--grad-acc-steps 0", "--grad-acc-steps 0: expected at least 1"),
    ("--world-size=0", "--world-size 0: expected at least 1"),
    ("--nproc-per-node two", "--nproc-per-node: 'two': expected a whole number"),
    ("--pytorch-cuda-alloc-conf x:1", "--pytorch-cuda-alloc-conf"),
    ("--no-scale-parameter", "--no-scale-parameter: adam does not use it"),
    ("--cp 3", "--cp 3 does not divide ranks"),
    ("--async-tp", "--async-tp: here it is --tp-comm-overlap, with --sequence-parallel (zerosim plan has"),
    ("--enable-cuda-graph", "--enable-cuda-graph: here it is --cuda-graphs (zerosim plan has --cuda-graphs)"),
    ("--sliding-window 4096", "--sliding-window: zerosim does not model attention in windows yet."),
    ("--vpp 2", "--vpp: here it is --pipeline interleaved --virtual-stages V"),
    ("--use-distributed-optimizer", "--use-distributed-optimizer: here it is --stage 1 --recipe megatron"),
    (
        "--use-flash-attn false",
        "--use-flash-attn 'false': expected nothing or true; leave it out, or choose --attention",
    ),
    ("--ep=2", "--ep 2: model gpt has no experts; pass --experts 8 --top-k 2, or leave it out"),
    ("--expert-model-parallel-size 2", "2: model gpt has no experts"),
    ("--lora-rank 0 --lora-alpha 8", "--lora-alpha 8.0: no adapters without a lora_rank; choose one"),
    ("--freeze wtex", "--freeze 'wtex': matches no parameter of gpt; did you mean 'wte'?"),
    ("--lora-rank 8 --lora-target qq", "--lora-target 'qq': matches no linear map of gpt's blocks"),
    ("--freeze *", "everything is frozen"),
    ("--base nf4", "--base 'nf4': nothing is frozen"),
    ("--offload-optimizer cpu", "--offload-optimizer: here it is --offload optimizer=host, or optimizer=nvme"),
    ("experts.toml", "scenario experts.toml: 'expert_model_parallel_size': zerosim does not model this option of"),
    ("context.toml", "scenario context.toml: 'context_parallel_degree': here it is --cp"),
    (
        "--model meta-llama/Llama-3.1-8B",
        "--model 'meta-llama/Llama-3.1-8B': zerosim downloads nothing from a hub; "
        "choose llama3.1-8b, the nearest model here, or download config.json of meta-llama/Llama-3.1-8B and "
        "give its path, such as ./config.json",
    ),
    (
        "--model Qwen/Qwen2.5-7B",
        "choose qwen2.5-7b, the nearest model here, or download config.json of Qwen/Qwen2.5-7B",
    ),
    (
        "--model deepseek-ai/DeepSeek-V3",
        "choose deepseek-v3, the nearest model here, or download config.json of deepseek-ai/DeepSeek-V3",
    ),
    (
        "--model databricks/dbrx-base",
        "from a hub; download config.json of databricks/dbrx-base and give its path",
    ),
    ("--weights empty.txt", "cannot read empty.txt: it is empty"),
    ("--tokens empty.txt", "cannot read empty.txt: it is empty"),
    ("--model ./empty.txt", "cannot read ./empty.txt: it is empty"),
    ("empty.txt", "cannot read scenario empty.txt: it is empty"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[words for words, _ in BAD])
def test_bad_input_is_one_line_and_exit_2(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    before = sorted(os.listdir())
    assert main(["run", *SMALL, "--save-weights", "out.npz", "--json", "out.json", *words.split(" ")]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("zerosim: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert said in err
    assert "Traceback" not in out + err
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu"], "unknown command 'rnu': did you mean run?"),
        (["--stage", "3"], "unknown flag '--stage': see zerosim --help"),
        (["plan", "--capacity", "0"], "error: --capacity 0: expected at least 1 byte"),
        (["plot", "memory", "--capacity", "0", "-o", "x.svg"], "error: --capacity 0: expected at least 1 byte"),
        (["plot", "scaling", "--dp-replicas", "3", "--ranks-list", "4", "-o", "x.svg"], "--dp-replicas 3 does not"),
        (["plan", "--gpu", "./empty.txt"], "cannot read hardware ./empty.txt: it is empty"),
        (["check", "empty.txt"], "cannot read scenario empty.txt: it is empty"),
        (["run", "types.toml"], "scenario types.toml: ranks 'two': expected int"),
        (["run", "mesh.toml"], "scenario mesh.toml: tp 3 does not divide ranks 4"),
        (["compare", "--stages", "0,5"], "--stages: '0,5': expected stages 0 to 3"),
        (["compare", "--stages", ""], "--stages: ''"),
        (["compare", "--stage", "2"], "--stage 2: compare takes --stages 0,1,2,3"),
        (["compare", *SMALL, "--json", "missing_folder/x"], "does not exist"),
    ],
)
def test_bad_verbs_scenarios_and_comparisons(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_file_that_may_not_be_written_is_found_before_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("locked.json").write_text("{}", "utf-8")
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path))
    monkeypatch.setattr(experiment, "run", lambda *_, **__: pytest.fail("trained"))
    assert main(["run", *SMALL, "--json", "locked.json"]) == 2
    assert "is not writable" in capsys.readouterr().err


# -- flags ------------------------------------------------------------------------------------------


def test_without_flags_a_run_is_the_default() -> None:
    assert parsed() == RunConfig()


def test_every_field_has_a_flag() -> None:
    parser = Parser("zerosim run", "")
    options.add_run_flags(parser)
    help = parser.format_help()
    for name in OPTIONS:
        assert bool(re.search(rf"--{name.replace('_', '-')}[ ,\n]", help)) == (name not in CLOCK), name
    groups = {title: [one.flat for one in group] for title, group in options.options_by_group().items()}
    assert sorted(OPTIONS) == sorted([*(name for names in groups.values() for name in names), *CLOCK])
    assert list(groups) == list(options.GROUPS)
    for title, names in groups.items():
        assert {OPTIONS[name].after for name in names} <= {"", title, *names}, title


def test_flags_set_their_fields() -> None:
    words = (
        "--stage 1 --ranks 8 --steps 9 --precision fp16 --layers 2 --hidden 24 --heads 3 --seq 7 --vocab 99 "
        "--no-tie-embeddings --dropout 0.1 --micro-batch 3 --accumulate 2 --optimizer adamw --lr 0.5 --betas 0.8 0.7 "
        "--eps 1e-6 --weight-decay 0.2 --decay matrices --schedule cosine --warmup 4 --min-lr 0.1 "
        "--clip-norm 2 --grad-dtype fp32 --loss-scale 128 --initial-scale-power 8 --loss-scale-window 5 --hysteresis 1 "
        "--min-loss-scale 2 --seed 7 --data x.txt --partition owner --collective ring --bucket-bytes 1KB "
        "--capacity 32GB --parallel 2 --sample ab --sample-tokens 5 --master-init exact --keep-last-unit "
        "--no-reshard-after-forward --skip-nonfinite --weights w.npz --tokens t.npz --model gpt"
    )
    assert parsed(*words.split()) == RunConfig(
        stage=1, ranks=8, steps=9, precision="fp16", layers=2, hidden=24, heads=3, seq=7, vocab=99,
        tie_embeddings=False, dropout=0.1, micro_batch=3, accumulate=2, optimizer="adamw", lr=0.5, betas=(0.8, 0.7),
        eps=1e-6, weight_decay=0.2, decay="matrices", schedule="cosine", warmup=4, min_lr=0.1,
        clip_norm=2.0, grad_dtype="fp32", loss_scale=128.0, initial_scale_power=8, loss_scale_window=5, hysteresis=1,
        min_loss_scale=2.0, seed=7, data="x.txt", partition="owner", collective="ring", bucket_bytes=1000,
        capacity=32 * 10**9, parallel=2, sample="ab", sample_tokens=5, master_init="exact", keep_last_unit=True,
        reshard_after_forward=False, skip_nonfinite=True, weights="w.npz", tokens="t.npz", model="gpt",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--zero-stage 1", "stage", 1),
        ("--optimizer sgd --momentum 0.9 --nesterov", "nesterov", True),
        ("-z 2", "stage", 2),
        ("-z1", "stage", 1),
        ("--world-size 2", "ranks", 2),
        ("--num-gpus 2", "ranks", 2),
        ("--nproc-per-node 2", "ranks", 2),
        ("--mbs 2", "micro_batch", 2),
        ("--grad-acc-steps 2", "accumulate", 2),
        ("--gradient-accumulation-steps 2", "accumulate", 2),
        ("--seq-len 9", "seq", 9),
        ("--dtype fp16", "precision", "fp16"),
        ("--bucket-bytes none", "bucket_bytes", None),
        ("--loss-scale dynamic", "loss_scale", "dynamic"),
        ("--loss-scale Dynamic", "loss_scale", "dynamic"),
        ("--bucket-bytes None", "bucket_bytes", None),
        ("--optimizer AdamW", "optimizer", "adamw"),
        ("--precision BF16", "precision", "bf16"),
        ("--grad-reduction all-reduce --stage 2", "grad_reduction", "all_reduce"),
        ("--recompute Full:2", "recompute", "full:2"),
        ("--model GPT", "model", "gpt"),
        ("--tensor-model-parallel-size 2 --ranks 2", "tp", 2),
        ("--sp --tp 2 --ranks 2", "sequence_parallel", True),
    ],
)
def test_names_that_people_type(words: str, field: str, value: object) -> None:
    assert parsed(*words.split()).to_dict()[field] == value


def test_flags_override_a_scenario(folder: Path) -> None:
    Path("lesson.toml").write_text(
        'ranks = 8\nmicro-batch = 2\ncapacity = "1GB"\nclip_norm = 1.0\nbetas = [0.5, 0.6]\nkeep_last_unit = true\n',
        "utf-8",
    )
    plain = parsed("lesson.toml")
    assert (plain.mesh.ranks, plain.data.micro_batch, plain.memory.capacity, plain.optim.betas) == (
        8,
        2,
        10**9,
        (0.5, 0.6),
    )
    over = parsed("lesson.toml", "--ranks", "2", "--clip-norm", "none", "--capacity", "none", "--no-keep-last-unit")
    assert over == RunConfig(ranks=2, micro_batch=2, betas=(0.5, 0.6))


# -- good paths -------------------------------------------------------------------------------------
def test_a_run_leaves_weights_figures_and_a_summary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, "--save-weights", "out.npz", "--json", "out.json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for part in ("step 1 of 2", "ZeRO-3 on 2 ranks", "7,536", "16Ψ/N", "3Ψ + 2VD", "Peak:", "ln 256 = 5.545", "✓"):
        assert part in out
    assert "≠" not in out
    assert "\x1b" not in out

    expected = experiment.run(config())
    figures = json.loads(Path("out.json").read_text("utf-8"), parse_constant=lambda name: pytest.fail(name))
    assert figures == json.loads(json.dumps(expected.to_dict()))
    assert figures["schema"] == 2
    with np.load("out.npz") as weights:
        assert sorted(weights.files) == sorted(expected.weights)
        assert all(np.array_equal(weights[name], expected.weights[name]) for name in weights.files)
    assert not list(folder.glob(".zerosim*"))


def test_json_on_stdout_is_alone_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["num_parameters"] == 7536
    assert "step 1 of 2" in err
    assert "16Ψ/N" in err


def test_quiet_says_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_sample_continues_the_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, "--sample", "ZeRO is", "--sample-tokens", "5", "--quiet"]) == 0
    assert "ZeRO is" in capsys.readouterr().out


def test_tokens_decide_the_number_of_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("tokens.npz", tokens=np.random.default_rng(0).integers(0, 256, (3, 2, 9)))
    assert main(["run", *SIZES, "--tokens", "tokens.npz", "--json", "out.json"]) == 0
    assert "trained for 3 steps" in capsys.readouterr().out
    assert len(json.loads(Path("out.json").read_text("utf-8"))["losses"]) == 3


def test_compare_shows_stages_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["compare", *SMALL, "--stages", "0,3", "--json", "out.json", "--gpu", "a100-80", "--recipe", "paper"]) == 0
    )
    out, err = capsys.readouterr()
    assert err == ""
    assert "Final weights of stages 0 and 3: bit-identical ✓" in out
    assert "≠" not in out
    figures = json.loads(Path("out.json").read_text("utf-8"))
    assert list(figures["columns"]) == ["0", "3"]
    assert figures["weights"] == {"bit_identical": [["0", "3"]], "differences": []}
    for stage, column in figures["columns"].items():
        modelled = column["time"]
        assert f"{1e3 * modelled['step_s']:.4g}" in out, stage
        assert modelled["step_s_low"] is None or modelled["step_s_low"] < modelled["step_s_high"]
        names = "compute_s", "slowed_s", "bubble_s", "host_s", "copies_s"
        parts = [*(modelled[name] for name in names), *modelled["exposed_s"].values()]
        assert sum(parts) == pytest.approx(modelled["step_s"])


@pytest.mark.parametrize("words", [["--accumulate", "2"], ["--collective", "ring", "--ranks", "3"]])
def test_compare_measures_what_is_not_identical(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["compare", *SMALL, "--stages", "0,2", *words]) == 0
    out = capsys.readouterr().out
    assert "Final weights of stages 0 and 2: largest difference" in out
    assert ("other way round" if words[0] == "--accumulate" else "A ring rounds at every hop") in " ".join(out.split())


def test_compare_keeps_the_column_of_a_stage_that_does_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peaks = {stage: experiment.run(config(stage=stage)).memory[0].peak.total_bytes for stage in (0, 3)}
    assert main(["compare", *SMALL, "--stages", "0,3", "--capacity", str(peaks[3] + 1000)]) == 3
    out = capsys.readouterr().out
    assert "no memory" in out
    assert "Stage 0: rank" in out
    assert f"{peaks[3]:,}" in out


# -- bad ends ---------------------------------------------------------------------------------------
def test_out_of_memory_tells_what_was_live_and_exits_3(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, "--stage", "0", "--capacity", "125KB", "--json", "out.json"]) == 3
    err = capsys.readouterr().err
    assert err.startswith("zerosim: error: rank ")
    assert "optimizer state" in err
    assert "125,000 B" in err
    assert "Tried for you" in err
    assert not Path("out.json").exists()


def test_a_failed_rank_exits_4_and_leaves_old_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out.json").write_text("old", "utf-8")
    huge = ["--lr", "1e30", "--steps", "5", "--optimizer", "sgd"]
    assert main(["run", *SMALL, *huge, "--json", "out.json", "--save-weights", "out.npz"]) == 4
    err = capsys.readouterr().err
    assert "not finite" in err
    assert err.count("\n") == 1
    assert Path("out.json").read_text("utf-8") == "old"
    assert not Path("out.npz").exists()


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(experiment, "run", run)


def test_more_interrupts_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write to the screen is interrupted again."""

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            signal.raise_signal(signal.SIGINT)
            return super().write(text)

    fail_with(monkeypatch, KeyboardInterrupt())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(sys, "stderr", screen := Screen())
        assert main(["run", *SMALL]) == 130
        assert screen.getvalue() == "zerosim: interrupted\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_in_a_destructor_of_a_verb_is_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("zerosim.cli.run.main", lambda args: Interrupted() is None)
    assert main(["run", *SMALL]) == 130
    assert capsys.readouterr().err == "zerosim: interrupted\n"


def test_an_interrupt_that_python_makes_another_error_of_is_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python 3.11 raises a RuntimeError for what a `__set_name__` raises: in a dataclass, for instance."""

    class Interrupted:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("zerosim.cli.run.main", lambda args: type("Owner", (), {"name": Interrupted()}))
    assert main(["run", *SMALL]) == 130
    assert capsys.readouterr().err == "zerosim: interrupted\n"


def test_a_bug_is_one_line_unless_debug(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, TypeError("oh"))
    assert main(["run", *SMALL]) == 6
    assert capsys.readouterr().err == "zerosim: internal error: TypeError: oh (--debug shows where)\n"
    assert main(["run", *SMALL, "--debug"]) == 6
    assert "Traceback" in capsys.readouterr().err


# -- outputs ----------------------------------------------------------------------------------------
def written(path: str, fill: Callable[[Any], object]) -> None:
    output = Output("--json", path)
    output.check()
    output.write(lambda file: fill(file) and None)


@posix
def test_a_file_is_replaced_only_when_it_is_whole(folder: Path) -> None:
    Path("out").write_text("old", "utf-8")
    Path("out").chmod(0o640)

    def half(file: Any) -> None:
        file.write(b"new, but ")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written("out", half)
    assert Path("out").read_text("utf-8") == "old"
    assert not list(folder.glob(".zerosim*"))
    written("out", lambda file: file.write(b"new"))
    assert Path("out").read_text("utf-8") == "new"
    assert Path("out").stat().st_mode & 0o777 == 0o640


def test_a_new_file_has_the_modes_of_new_files(folder: Path) -> None:
    written("out", lambda file: file.write(b"x"))
    Path("other").write_text("x", "utf-8")
    assert Path("out").stat().st_mode == Path("other").stat().st_mode


@posix
def test_links_stay_and_devices_are_written_to(folder: Path) -> None:
    Path("target").write_text("old", "utf-8")
    Path("link").symlink_to("target")
    written("link", lambda file: file.write(b"new"))
    assert Path("link").is_symlink()
    assert Path("target").read_text("utf-8") == "new"
    written("/dev/null", lambda file: file.write(b"gone"))
    assert not Path("/dev/null").is_file()


@posix
def test_ctrl_c_at_any_line_leaves_the_old_file_or_the_new_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # it takes long
    first, lines, found = 0, [0], set()
    while lines[0] >= first:
        first += 1
        Path("out").write_text("old", "utf-8")
        with pressed(range(first, first + 1), outputs) as (lines, trace):
            sys.settrace(trace)
            written("out", lambda file: file.write(b"new"))
            sys.settrace(None)
        assert list(folder.glob(".zerosim*")) == []
        found.add(Path("out").read_text("utf-8"))
    assert found == {"old", "new"}
    assert first > 100


# -- as a program -----------------------------------------------------------------------------------
def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(zerosim.__file__).parents[1]), "PYTHONUTF8": "1"}
    environment.pop("COLUMNS", None)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return started([sys.executable, "-c", START, *words], env=environment, **pipes, **options)


@pytest.mark.slow
def test_a_pipe_gets_plain_wide_text() -> None:
    with ended(start("run", *SMALL, "--ranks", "8", "--partition", "owner")) as process:
        out, err = process.communicate(timeout=2 * SECONDS)
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert not set(out) & set("─━│…")
    assert "×(N-1)/N, bytes  agree" in out
    assert all(line == line.rstrip() for line in out.splitlines())


@pytest.mark.slow
@posix
def test_a_reader_that_goes_away_is_no_error() -> None:
    with ended(start("run", *SMALL, "--steps", "500")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(SECONDS) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""


@posix
def test_ctrl_c_ends_all_ranks_at_once(tmp_path: Path) -> None:
    words = ["--steps", "100000", "--json", "out.json", "--save-weights", "out.npz"]
    with ended(start("run", *SMALL, *words, cwd=tmp_path)) as process:
        assert process.stdout is not None
        assert "step" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=2 * SECONDS)
        assert process.returncode == 130
    assert err == "zerosim: interrupted\n"
    assert list(tmp_path.iterdir()) == []


HEAVY = ["numpy", "rich", "matplotlib", "ml_dtypes", "threadpoolctl", "torch"]
PICTURES = ["matplotlib", "ml_dtypes", "torch"]
MAIN = "from zerosim.cli.main import main; assert main(sys.argv[1:]) == 0"


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("words", "code", "unloaded"),
    [
        *((words, MAIN, HEAVY) for words in ("--help", "run --help", "compare --help", "explain --help", "--version")),
        ("plot memory --help", MAIN, PICTURES),
        ("plan --ranks 1024", MAIN, PICTURES),
        ("", "import zerosim.report.plots", ["matplotlib"]),
        pytest.param("", "import zerosim.report.plots.draw", ["matplotlib.pyplot"], marks=pytest.mark.slow),
        ("", "import zerosim.cli.bench, zerosim.bench.suite", ["cupy"]),
    ],
)
def test_what_is_not_asked_for_is_not_imported(words: str, code: str, unloaded: list[str]) -> None:
    code = f"import sys; {code}; seen = set({unloaded}) & set(sys.modules); assert not seen, seen"
    environment = {**os.environ, "PYTHONPATH": str(Path(zerosim.__file__).parents[1])}
    command = [sys.executable, "-c", code, *words.split()]
    done = finished(command, env=environment)
    assert done.returncode == 0, done.stderr
    if words == "--version":
        assert done.stdout == f"zerosim {zerosim.__version__}\n"


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "compare" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="it takes a kernel with /proc")
@pytest.mark.parametrize("words", ["run --weights", "run --data", "run --tokens", "run --model", "plan --gpu", "run"])
def test_a_file_of_the_kernels_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert main([*words.split(), "/proc/self/mem"]) == 2
    err = capsys.readouterr().err
    assert "/proc/self/mem: it is empty (0 bytes)" in err
    assert err.count("\n") == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "words",
    [
        ["plot", "Memory", "--mark", "PEAK", "--theme", "Dark", "-o", "out.svg", "-q"],
        ["export", "Trace", "--gpu", "A100-80", "-o", "out.json"],
        ["explain", "--stage", "3", "--params", "1B", "--ranks", "4", "--optimizer", "AdamW", "--precision", "FP16"],
        ["plot", "descent", "--surface", "Bowl", "--optimizers", "SGD", "--steps", "2", "-o", "out.svg"],
        ["zoo", "Recipes"],
    ],
    ids=lambda words: words[0],
)
def test_choices_are_taken_in_any_case(folder: Path, words: list[str]) -> None:
    assert main(words) == 0
