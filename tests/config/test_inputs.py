"""Files from outside: only regular ones of a size that makes sense are read; what they hold is judged in one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import finished

import zerosim
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.config.inputs import LARGEST_TEXT, read_json, read_toml
from zerosim.errors import InputError
from zerosim.ledger import ranks

SMALL = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "8", "--ranks", "2", "--micro-batch", "1"]
GPT2 = '{"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 8, "vocab_size": 256'
EXPECT = '[expect]\nsource = "paper"\nquantity = "model_states_bytes"\nrounding = "half-up"\nunit = "GB"\n'


@pytest.fixture(autouse=True)
def no_endless_waiting() -> Iterator[None]:
    """What waits for a pipe's writer fails, and does not hang."""

    def late(*_: object) -> None:
        raise AssertionError("still waiting")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(zerosim.__file__).parents[1]))  # of programs that are started here
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Any:
    """refused(*words): what the command line says of them, in one line on stderr, with exit 2."""

    def refused(*words: str) -> str:
        assert main(words) == 2, words
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("zerosim: error: ")
        assert err.count("\n") == 1
        assert len(err) < InputError.LONGEST + 100
        return err

    return refused


READERS = {
    "data": lambda path: ("run", *SMALL, "--data", path),
    "weights": lambda path: ("run", *SMALL, "--weights", path),
    "tokens": lambda path: ("run", *SMALL, "--tokens", path),
    "scenario": lambda path: ("run", path),
    "check": lambda path: ("check", path),
    "model": lambda path: ("plan", "--model", path),
    "device": lambda path: ("plan", "--gpu", path if "/" in path else f"./{path}"),
}
SPECIAL = (
    "pipe.json",
    "socket.json",
    "folder.json",
    "/dev/zero",
    "/dev/null",
    "none.json",
    "\0/x.json",
    "x" * 300 + "/",
)


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_not_read(folder: Path, refused: Any, reader: str) -> None:
    os.mkfifo("pipe.json")
    Path("folder.json").mkdir()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind("socket.json")
        said = {path: refused(*READERS[reader](path)) for path in SPECIAL}
    assert "pipe.json: it is a pipe, expected a file" in said["pipe.json"]
    assert "socket.json: it is a socket, expected a file" in said["socket.json"]
    assert "folder" in said["folder.json"] or "directory" in said["folder.json"]
    assert "/dev/zero: it is a device, expected a file" in said["/dev/zero"]
    assert "none.json: No such file or directory" in said["none.json"]
    assert "this cannot be a file name" in said["\0/x.json"]
    assert "name too long" in said["x" * 300 + "/"]


@pytest.mark.parametrize(
    ("reader", "limit"), [("data", "4.00 GB"), ("scenario", "1.00 MB"), ("model", "1.00 MB"), ("device", "1.00 MB")]
)
def test_a_file_too_large_to_be_meant_is_not_read(folder: Path, refused: Any, reader: str, limit: str) -> None:
    with Path("large.json").open("wb") as file:
        file.truncate(10**12)  # of holes: nothing is on the disk
    said = refused(*READERS[reader]("large.json"))
    assert f"large.json: it has 1.00 TB, expected at most {limit}; is this the right file?" in said


def test_a_text_that_memory_does_not_hold_is_one_line(folder: Path) -> None:
    with Path("corpus").open("wb") as file:
        file.truncate(3 * 10**9)
    code = (
        f"import resource, sys, numpy; from zerosim.cli.main import main; "
        f"resource.setrlimit(resource.RLIMIT_AS, (2 * 10**9,) * 2); sys.exit(main({READERS['data']('corpus')!r}))"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = finished([sys.executable, "-c", code], env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "zerosim: error: cannot read data file corpus: its 3.00 GB do not fit into memory\n"


def test_the_largest_text_is_read(folder: Path) -> None:
    text = b"stage = 1\n"
    Path("full.toml").write_bytes(text + b"#" * (LARGEST_TEXT - len(text)))
    assert read_toml("full.toml", "scenario") == {"stage": 1}


def test_processes_that_compare_their_files_do_not_wait_for_pipes(folder: Path) -> None:
    os.mkfifo("pipe")
    Path("text").write_text("x", "utf-8")
    assert ranks._digest("pipe") is ranks._digest("/dev/zero") is None
    assert ranks._digest("text") is not None


# -- TOML and JSON ----------------------------------------------------------------------------------
BAD_TOML = {
    "digits": (b"steps = " + b"9" * 5000, "a whole number of more than 100 digits"),
    "hex digits": (b"steps = 0x" + b"f" * 5000, "steps is a whole number of more than 100 digits"),
    "digits inside": (b"betas = [1, 0x" + b"f" * 5000 + b"]", "betas is a whole number of more than 100 digits"),
    "large": (b"steps = 99999999999999999999", "steps 99999999999999999999: expected at least 1 and at most"),
    "arrays": (b"steps = " + b"[" * 5000, "more than 32 deep"),
    "tables": (b"x = " + b"{a = " * 5000, "more than 32 deep"),
    "closed arrays": (b"steps = " + b"[" * 100 + b"]" * 100, "more than 32 deep"),
    "dots": (b"a" + b".a" * 200 + b" = 1", "more than 32 deep"),
    "many dots": (b"a" + b".a" * 100_000 + b" = 1", "a line of it has 100,000 dots"),
    "latin-1": (b'data = "caf\xe9"', "is not UTF-8, byte 11 is 0xe9"),
    "UTF-16": ("stage = 1".encode("utf-16"), "is not UTF-8, byte 0 is 0xff"),
    "BOM": (b"\xef\xbb\xbfstage = 1", "begins with a byte order mark: save it as UTF-8 without one"),
    "NUL": (b"stage = 1\n\x00", "is not valid TOML"),
    "NUL in data": (b'data = "a\\u0000b"\nsteps = 1', "cannot read data file a\\x00b: this cannot be a file name"),
    "NUL in weights": (b'weights = "a\\u0000b"', "cannot read a\\x00b: this cannot be a file name"),
    "NUL in model": (b'model = "\\u0000/config.json"', "this cannot be a file name"),
    "both spellings": (b"micro-batch = 1\nmicro_batch = 2", "micro_batch appears twice, with - and with _"),
    "inf": (b"lr = inf", "lr inf: expected a finite number"),
    "date": (b"lr = 1979-05-27", "expected float"),
    "long": (b'precision = "' + b"x" * 100_000 + b'"', "xxx [...] xxx"),
}


@pytest.mark.parametrize("name", BAD_TOML)
def test_toml_that_is_refused(folder: Path, refused: Any, name: str) -> None:
    raw, message = BAD_TOML[name]
    Path("bad.toml").write_bytes(raw)
    assert message in refused("run", "bad.toml")


BAD_JSON = {
    "digits": (', "n_inner": ' + "9" * 5000 + "}", "n_inner Infinity: expected a whole number"),
    "200 digits": (', "n_inner": 1' + "0" * 200 + "}", "n_inner 1e+200: expected a whole number"),
    "100 digits": (', "n_inner": 1' + "0" * 98 + "}", "expected at least 1 and at most 100000000"),
    "exponent": (', "layer_norm_epsilon": 1e999}', "layer_norm_epsilon Infinity: expected a number more than 0"),
    "NaN": (', "layer_norm_epsilon": NaN}', "layer_norm_epsilon NaN: expected a number more than 0"),
    "NaN chance": (', "resid_pdrop": NaN}', "resid_pdrop NaN: expected a chance"),
    "twice": (', "n_layer": 2}', "'n_layer' appears twice; keep one"),
    "twice inside": (', "task": {"a": 1, "a": 1}}', "'a' appears twice; keep one"),
    "deep": (', "task": ' + "[" * 100_000, "more than 32 deep"),
    "closed": (', "task": ' + "[" * 100 + "]" * 100 + "}", "more than 32 deep"),
    "long": (', "n_inner": "' + "x" * 100_000 + '"}', 'n_inner "xxx'),
    "surrogate": (', "activation_function": "\\ud800"}', 'activation_function "\\ud800" is not modelled'),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_is_refused(folder: Path, refused: Any, name: str) -> None:
    rest, message = BAD_JSON[name]
    Path("config.json").write_text(GPT2 + rest, "utf-8")
    said = refused("plan", "--model", "./config.json")
    assert "config.json" in said
    assert message in said


def test_json_of_other_encodings_is_refused(folder: Path, refused: Any) -> None:
    for raw, message in (
        (f"{GPT2}}}".encode("utf-8-sig"), "config.json begins with a byte order mark"),
        (f"{GPT2}}}".encode("utf-16"), "config.json is not UTF-8"),
    ):
        Path("config.json").write_bytes(raw)
        assert message in refused("plan", "--model", "./config.json")


def test_what_nothing_reads_may_be_any_number(folder: Path) -> None:
    Path("config.json").write_text(
        f'{GPT2}, "task": {{"max": {10**30}, "limit": [Infinity, NaN, {"9" * 5000}]}}}}', "utf-8"
    )
    assert RunConfig(model="./config.json").model.hidden == 32
    assert read_json("config.json")["task"]["limit"][0] == float("inf")


def test_a_sweep_is_no_larger_than_there_is_time_for(folder: Path, refused: Any) -> None:
    axes = "".join(f"{name} = {list(range(1, 101))}\n" for name in ("ranks", "layers", "heads", "vocab", "seq", "ffn"))
    Path("wide.toml").write_text(f'{EXPECT}printed = "1"\n[sweep]\n{axes}', "utf-8")
    assert "sweep: 1,000,000,000,000 runs, expected at most 10,000" in refused("check", "wide.toml")
    Path("long.toml").write_text(f'{EXPECT}printed = "1"\n[sweep]\nranks = {[1] * 100_000}\n', "utf-8")
    assert "sweep: ranks has 100,000 values" in refused("check", "long.toml")


def test_figures_are_no_longer_than_numbers_are(folder: Path, refused: Any) -> None:
    for figure in ("9" * 5000, "1." + "0" * 100_000, "1" + " " * 100_000):
        Path("long.toml").write_text(f'{EXPECT}printed = "{figure}"\n', "utf-8")
        assert "characters is not a printed figure" in refused("check", "long.toml")


# -- flags ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "--steps", "9" * 5000), "--steps: '99999999999999999999'... of 5,000 characters: expected a whole"),
        (("run", "--steps", "9" * 90), f"--steps {'9' * 90}: expected at least 1 and at most 100000000"),
        (("run", "--lr", "9" * 5000), "--lr inf: expected a finite number"),
        (("run", "--lr", "x" * 5000), "of 5,000 characters: expected a number"),
        (("run", "--capacity", "9" * 5000), "of 5,000 characters is not a size in bytes"),
        (("run", "--capacity", "1GB\0"), "'1GB\\x00' is not a size in bytes"),
        (("run", "--capacity", "1" + " " * 100_000 + "!"), "is not a size in bytes"),
        (("run", "--loss-scale", "x" * 5000), "expected 'dynamic' or a number"),
        (("run", "--warmup", "9" * 200), "--warmup: "),
        (("plan", "--model", "flat", "--params", "1e999"), "--params: '1e999' is too large"),
        (("plan", "--model", "flat", "--params", "9" * 5000), "--params: '9999"),
        (("plan", "--model", "x" * 100_000), "is not known"),
        (("plan", "--" + "x" * 100_000), "unknown flag --xxx"),
        (("compare", "--stages", "0," * 5000), "--stages: '0,0,0,0,0,0,0,0,0,0,'... of 10,000 characters"),
        (("explain", "--stage", "1", "--params", "9" * 5000, "--ranks", "2"), "--params: '9999"),
        (("plot", "scaling", "-o", "x.svg", "--ranks-list", "1," + "9" * 5000), "--ranks-list: '9999"),
        (("plot", "memory", "-o", "x.svg", "--size", "9" * 5000 + "x4"), "--size"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_flags_of_any_length_are_one_line(refused: Any, words: tuple[str, ...], message: str) -> None:
    said = refused(*words)
    assert message in said or (message == "--size" and "size inf" in said)


@pytest.mark.parametrize("name", ["steps", "seed", "warmup", "lr", "bucket_bytes", "betas", "params"])
def test_from_python_too(name: str) -> None:
    huge = 10**5000
    with pytest.raises(InputError, match=f"{name}: a whole number of more than 100 digits is too large"):
        RunConfig(model="flat", **{name: (huge, 0.9) if name == "betas" else huge})


# -- outputs ----------------------------------------------------------------------------------------
def test_two_outputs_are_two_files(folder: Path, refused: Any) -> None:
    Path("one").write_text("old", "utf-8")
    os.link("one", "hard")
    os.symlink("one", "soft")
    os.symlink("none", "dangling")
    Path("inner").mkdir()
    for other in ("one", "./one", "inner/../one", f"{folder}/one", "hard", "soft"):
        assert "names the same file" in refused("run", *SMALL, "--save-weights", "one", "--json", other)
    assert "names the same file" in refused("run", *SMALL, "--save-weights", "dangling", "--json", "./inner/../none")
    os.symlink("one", "soft.svg")
    assert "names the same file" in refused("plot", "memory", "-o", "soft.svg", "--json", "hard")
    assert Path("one").read_text("utf-8") == "old"


def test_nothing_that_is_read_is_written_over(folder: Path, refused: Any) -> None:
    """Files that a scenario names, the scenarios of a check, and other names of either."""
    text = "ranks = 2\n" * 100
    Path("corpus").write_text(text, "utf-8")
    os.link("corpus", "hard")
    np.savez("tokens.npz", tokens=np.zeros((1, 2, 9), np.int64))
    Path("config.json").write_text(f"{GPT2}}}", "utf-8")
    Path("run.toml").write_text('data = "corpus"\n', "utf-8")
    Path("tokens.toml").write_text('tokens = "tokens.npz"\n', "utf-8")
    Path("model.toml").write_text('model = "./config.json"\n', "utf-8")
    Path("scenarios").mkdir()
    Path("scenarios/a.toml").write_text(f'model = "./config.json"\n{EXPECT}printed = "1"\n', "utf-8")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for words in (
        ("run", "run.toml", *SMALL, "--json", "corpus"),
        ("run", "run.toml", *SMALL, "--save-weights", "hard"),
        ("run", "run.toml", *SMALL, "--json", "run.toml"),
        ("compare", "tokens.toml", *SMALL, "--json", "tokens.npz"),
        ("plan", "model.toml", "--json", "config.json"),
        ("fit", "model.toml", "--limit", "1GB", "--json", "config.json"),
        ("plot", "memory", "model.toml", "-o", "a.svg", "--json", "config.json"),
        ("check", "scenarios", "--json", "scenarios/a.toml"),
        ("check", "scenarios/a.toml", "--json", "./scenarios/a.toml"),
        ("check", "scenarios/a.toml", "--json", "config.json"),
    ):
        assert "would overwrite the input file" in refused(*words)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_what_cannot_be_replaced_is_not_written(folder: Path, refused: Any) -> None:
    os.mkfifo("pipe")
    Path("inner").mkdir()
    explained = ("explain", "--stage", "1", "--params", "1B", "--ranks", "2")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind("socket")
        for path, message in (
            ("pipe", "is a pipe and would wait for a reader"),
            ("socket", "is a socket; pass the name of a file"),
            ("inner", "is a folder; pass the name of a file"),
            ("inner/", "is a folder; pass the name of a file"),
            ("none/", "is a folder; pass the name of a file"),
            ("none/out.json", "does not exist; create it first"),
            ("a\0b", "cannot be written: this cannot be a file name"),
            ("/proc/out.json", "cannot be written"),
        ):
            for words in (
                ("run", *SMALL),
                ("plan",),
                ("doctor",),
                explained,
            ):
                assert message in refused(*words, "--json", path)
    assert sorted(os.listdir()) == ["inner", "pipe", "socket"]


def test_names_that_are_no_text_can_be_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stdout that takes UTF-8 and nothing else, as a terminal's is."""
    stdout = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["plot", "memory", "--stages", "3", "--ranks", "2", "-o", "\udcff.svg"]) == 0
    assert stdout.buffer.getvalue() == b"wrote \\udcff.svg\n"  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_what_is_open_already_is_written_to(folder: Path) -> None:
    command = f"{sys.executable} -m zerosim explain --stage 1 --params 1B --ranks 2 --json"
    for shell in (f"{command} /dev/stdout > out", f"{command} /dev/stderr 2>&1 >/dev/null | cat > out"):
        assert os.system(f"bash -c '{shell}'") == 0
        with Path("out").open() as file:
            assert json.loads(file.readline())["schema"] == 2
    assert os.system(f"bash -c '{command} >(cat > sub) > /dev/null; wait'") == 0
